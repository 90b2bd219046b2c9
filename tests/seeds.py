"""How many random cases tests try: a few in each run, many by `make test-long`."""

from __future__ import annotations

import os
from typing import Any

import pytest

FACTOR = int(os.environ.get("TIDEWAY_TEST_EXAMPLES", "1"))


def seeds(num: int, *, normally: int) -> list[Any]:
    """Parameters 0 to `num` - 1, of which the first `normally` are tried in each run."""
    return [pytest.param(seed, marks=[] if seed < normally else pytest.mark.long) for seed in range(num)]


def examples(num: int) -> int:
    """Examples of a property test: `num` new ones in each run, `TIDEWAY_TEST_EXAMPLES` times as many where that is set."""
    return num * FACTOR
