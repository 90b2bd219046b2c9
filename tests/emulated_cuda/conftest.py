"""Only where the emulated device is this process's: `-p tests.emulated_cuda.plugin`."""

from __future__ import annotations

import sys

collect_ignore_glob = [] if "tests.emulated_cuda.plugin" in sys.modules else ["test_*.py"]
