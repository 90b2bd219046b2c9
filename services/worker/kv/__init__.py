"""The KV slab of a device and its second tier in host memory, and how bytes get from one to the other.

Called by the executor, by attention back ends and by the transport of KV. Knows blocks, not sequences.
"""
