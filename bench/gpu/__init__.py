"""Everything that only a CUDA machine can show, in one command of nine minutes: `make gpu` (`python -m bench.gpu`).

Such a machine may be lent for minutes, reach nothing and have little but torch. So what is missing there is brought along
(`make gpu-wheels`, wheels.py); each part is a process of its own with a limit of its own (parts.py), so that one that fails
costs only itself; what it has found so far is written as it comes. It runs to its end on a CPU too, with small shapes.
"""
