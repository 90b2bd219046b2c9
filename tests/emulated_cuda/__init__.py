"""A CUDA device that is not there, so that code for one runs, and is checked, on any machine.

Tensors on it say `cuda:0` and are held in the host's memory. Each operation is computed when it is launched, and noted on
its stream (tensors.py). Streams and host threads have vector clocks (clocks.py), so that two accesses of the same memory
which nothing orders are reported, though here they never meet (device.py). Page-locked memory, streams' and graphs' pools,
failed captures and device-wide waits behave as CUDA's and torch's do (runtime.py). FlashInfer's calls are kernels of the
device (flashinfer.py), NCCL's meet in one process (nccl.py).

    python -m pytest -p tests.emulated_cuda.plugin -m gpu tests/worker tests/emulated_cuda

runs what is marked `gpu` on it. What it cannot show: how fast anything is; what a kernel does wrong inside, or what UCX and
the driver make of real device memory; what the host reads through an array of numpy that it asked for before; what is
forked and joined within a capture. Whoever takes from a queue, or sees an event set, counts as knowing all that was put or
set before, and of what one agent did to a storage the latest few thousand accesses are remembered.
"""
