"""Compiled kernels of the CPU path (kernels.c), and how they are built, loaded and called."""
