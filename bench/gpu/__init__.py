"""Everything that only a CUDA machine can show, in calls of nine minutes: `make gpu` (`python -m bench.gpu`).

Such a machine may be lent for minutes, reach nothing, have little but torch, and give back one folder of few files. So
what is missing there is brought along (`make gpu-wheels`, wheels.py); each part (order.py) is a process with a limit of
its own (runner.py), so that one that fails costs only itself; what has been found is on disk as it comes, and a later
call goes on from there (results.py). A fallback on CUDA is a failure (fallbacks.py), and the page (page.py) says first
whether there was one and which targets (targets.py) are met. It runs to its end on a CPU too, with small shapes.
"""
