"""The memory of weights is asked for in huge pages, by glibc itself in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.node.environment import HUGE_PAGES

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SCRIPT = """
import re, threading, torch
loaded = []

def load():
    torch.zeros(20 << 20, dtype=torch.uint8)  # once it is freed, what is smaller comes from a heap
    loaded.extend(torch.zeros(9 << 20, dtype=torch.uint8) for _ in range(20))

thread = threading.Thread(target=load)
thread.start()
thread.join()
is_asked = False
for line in reversed(open("/proc/self/smaps").readlines()):
    if line.startswith("VmFlags"):
        is_asked = " hg" in line
    elif (region := re.match("([0-9a-f]+)-([0-9a-f]+) ", line)) and is_asked:
        start, end = (int(part, 16) for part in region.groups())
        loaded = [one for one in loaded if not start <= one.data_ptr() < end]
print(len(loaded))
"""


@pytest.mark.skipif(
    not MODE.exists() or "[never]" in MODE.read_text() or (os.confstr("CS_GNU_LIBC_VERSION") or "") < "glibc 2.35",
    reason="needs a kernel with huge pages and a glibc that asks for them",
)
def test_what_a_thread_loads_lies_in_huge_pages() -> None:
    environment = os.environ | {"GLIBC_TUNABLES": HUGE_PAGES}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout == "0\n", run.stderr
