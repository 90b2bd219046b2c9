"""No process of vLLM's outlives the one that started it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal


def die_with_parent() -> None:
    """Has the kernel kill this process, which multiprocessing started, when its parent dies, however that happens."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent.pid:
        os._exit(1)
