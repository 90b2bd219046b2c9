"""The operator's API: models, instances, routes and tenants, the audit log, and the load of the cluster.

Called by its routes and by the console. Changes nothing itself: it asks placement, or writes the record that others
watch.
"""
