"""bench/steps and bench/gateway run, and tell parts from each other."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch

from bench import gateway
from bench.coserving.testbed import SHAPES as SMALL_SHAPES
from bench.peers import checkpoints
from bench.steps import GATEWAY, LAYERS, Alone, Floors, Parts, Session, decode, prefill, rows


def test_a_part_does_not_have_the_time_of_those_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0

    def passes(us: int) -> None:
        nonlocal now_ns
        now_ns += 1000 * us

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns)
    parts = Parts()
    inner = parts.of("inner", lambda: passes(20))
    outer = parts.of("outer", lambda: (inner(), passes(10), inner()))
    outer()
    assert not parts.us, "off"
    parts.is_on = True
    outer()
    assert parts.us == {"inner": 40, "outer": 10}


@pytest.mark.long
def test_parts_of_steps_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {**SMALL_SHAPES["tiny"], "vocab_size": 2000}
    monkeypatch.setitem(checkpoints.SHAPES, "tiny", shape)
    session = Session(checkpoints.make_checkpoint(tmp_path, "tiny"), 1)
    alone, floors = Alone(session.model, shape), Floors(session.model, shape)
    with torch.inference_mode():
        steps = [decode(session, alone, floors, 4, 64, 8), prefill(session, alone, floors, 64, 2)]
    for step in steps:
        assert step.parts_us[LAYERS] > 0 and step.parts_us[GATEWAY] > 0 and step.floor_us > 0
        assert sum(step.parts_us.values()) <= 2 * step.total_us  # medians of each
    assert all(len(row) == 3 for row in rows(steps))


@pytest.mark.long
def test_a_gateway_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "LOADS", (gateway.Load(4, 100.0, 40),))
    turns = asyncio.run(gateway.Bench(tmp_path).run({"own": gateway.REPOSITORY}, list(gateway.KINDS), 1))
    assert len(turns) == 2 * len(gateway.KINDS)
    # The kernel counts processor time by the hundredth of a second, which is more than some turns take.
    assert sum(turn.gateway_us for turn in turns) > 0
    for turn in turns:
        assert turn.p99_ms > 0 and 0.2 < turn.chunks_per_token < 1.2
