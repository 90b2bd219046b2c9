"""What runs in vLLM's environment: the adapter, and the scheduler that it gives to vLLM. Nothing here is imported by
Tideway's own processes but `spec.py`."""
