"""What is exempt from collections (shared/runtime/garbage.py), in a process of its own: this one has much that is."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from shared.runtime.garbage import freeze_heap, frozen_heap
with frozen_heap():
    assert gc.get_freeze_count() > 1_000
assert gc.get_freeze_count() == 0
freeze_heap()
before = gc.get_freeze_count()
made = [[] for _ in range(1_000)]
with frozen_heap():
    assert gc.get_freeze_count() > before
assert gc.get_freeze_count() > before
"""


def test_an_exemption_ends_unless_there_was_one_before() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
