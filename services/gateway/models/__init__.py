"""Which models a client can name: the catalogue, and routes from one name to several models.

Called when a request names its model. Reads the registry's buckets and decides nothing about instances.
"""
