"""KV blocks of ended requests on disk: the files that instances of a node may share, and the threads that copy between them
and host memory.

Called by the instance. Knows blocks and their hashes, not sequences; which blocks, is the engine's decision.
"""
