"""Weights that are fetched ahead."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from services.worker.node.fetching import Fetching, fetch
from shared.models.checkpoint import CheckpointError
from tests.placement.checkpoints import write_checkpoint


def test_weights_are_read_whole(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a", weight_mib=3)
    assert fetch(source) == (tmp_path / "a" / "model.safetensors").stat().st_size
    with pytest.raises(CheckpointError, match="does not exist"):
        fetch(str(tmp_path / "nothing"))


async def test_what_is_wanted_is_there_or_says_why_not() -> None:
    changed, is_let, fetched = asyncio.Event(), threading.Event(), list[str]()

    def get(source: str) -> int:
        fetched.append(source)
        if source == "wrong":
            raise CheckpointError("no such repository")
        is_let.wait(5.0)
        return 1

    async def change() -> None:
        await asyncio.wait_for(changed.wait(), 5.0)
        changed.clear()

    fetching = Fetching(changed.set, get)
    fetching.want(["a", "wrong"])
    await change()
    assert (fetching.fetched, fetching.problems) == ((), {"wrong": "no such repository"})
    fetching.want(["a", "wrong"])
    is_let.set()
    await change()
    assert (fetching.fetched, fetching.problems) == (("a",), {"wrong": "no such repository"})
    assert sorted(fetched) == ["a", "wrong"], "neither is asked for twice"
    fetching.want([])
    assert (fetching.fetched, fetching.problems) == ((), {})
    fetching.want(["wrong"])
    await change()
    assert fetched.count("wrong") == 2, "another replacement tries again"
