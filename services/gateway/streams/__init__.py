"""Open streams: where a sequence is placed, which tokens it has, and how it is found again after a failure.

Called by `requests` for each sequence and by the bus for each frame of tokens. Knows no HTTP.
"""
