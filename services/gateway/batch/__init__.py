"""The Files and Batch APIs: records and bytes in JetStream, and the runner that answers each line once.

Called by its routes and by the lease that gives this gateway a batch. Answers a line as `requests` answers a request,
and does not know where the line runs.
"""
