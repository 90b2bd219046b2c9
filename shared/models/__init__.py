"""What lies in a model's folder: checkpoints, adapters, tokenizers, quantisation, and the families that can be served.

Called by placement, gateway and worker before anything is loaded. Reads JSON and headers, never a tensor.
"""
