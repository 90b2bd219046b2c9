"""Models as torch modules: families, their layers and weights, LoRA adapters, and CUDA graphs of decode steps.

Called by the executor, which gives them a step's tokens and takes hidden states. Knows no request.
"""
