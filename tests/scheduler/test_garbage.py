"""What a scheduler's process leaves to the garbage collector."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, gc, weakref
from services.scheduler.garbage import FEW, collect_few, collect_rarely


class Node:
    pass


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


async def main():
    collecting = asyncio.create_task(collect_few(0.01))
    few = cycle()
    await asyncio.sleep(0.1)
    assert few() is None
    many = [[] for _ in range(2 * FEW)]
    left = cycle()
    await asyncio.sleep(0.1)
    assert left() is not None, "a collection of much was made"
    del many
    await asyncio.sleep(0.1)
    assert left() is None
    collecting.cancel()


collect_rarely()
asyncio.run(main())
"""


def test_few_cycles_are_collected_soon_and_many_objects_are_left_alone() -> None:
    """In a process of its own: the settings of the collector are a process's."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
