"""Streams through little memory, kill -9 and a drain, in deterministic mode: tokens and log-probabilities are as alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.determinism import trial
from tests.e2e.checkpoints import make_llama


@pytest.mark.long
def test_all_streams_are_what_they_are_alone(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "llama", hidden=256, layers=8, dtype=torch.bfloat16)
    results = trial(source, 16, 60, deterministic=True)
    assert len(results) == 3
    for name, result in results.items():
        assert (result.greedy, result.seeded) == (8, 8), name
