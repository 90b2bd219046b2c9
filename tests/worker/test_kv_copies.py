"""Copies between the slab and host memory: whole blocks, bit for bit, beside whatever the steps do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.executor.executor import Executor
from services.worker.kv import kv_copies
from services.worker.kv.kv_copies import KvCopies
from services.worker.kv.kv_store import KvShape, KvStore, KvViews
from shared.engine.memory import slab
from shared.engine.plan import CopyKind, KvCopy
from shared.messages.cluster import ModelSpec
from tests.worker.checkpoints import prompt_of, write_checkpoint
from tests.worker.step_driver import Driver

MERGED_BYTES = 3 * 64 * 1024
NARROW = KvShape(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
WIDE = KvShape(num_layers=2, block_size=4, num_kv_heads=5, head_dim=16, dtype=torch.bfloat16)


class Copier:
    """A store with two models, and its copies."""

    def __init__(self, num_host_merged: int = 3, **options: Any) -> None:
        self.store = KvStore(5, MERGED_BYTES, torch.device("cpu"))
        self.views = [self.store.attach(s, slab.blocks_per_merged(MERGED_BYTES, s.block_bytes)) for s in (NARROW, WIDE)]
        self.copies = KvCopies(self.store, num_host_merged, **options)
        self.copies.pool.fill_(0xEE)
        self._changed = threading.Event()
        self.copies.on_finished = self._changed.set
        self.results: dict[int, bool] = {}

    def wait(self, *copy_ids: int) -> list[bool]:
        deadline = time.monotonic() + 10
        while not self.results.keys() >= set(copy_ids):
            assert self._changed.wait(deadline - time.monotonic()), "a copy did not end"
            self._changed.clear()
            self.results |= dict(ended[:2] for ended in self.copies.finished())
        return [self.results[copy_id] for copy_id in copy_ids]

    def rows(self, views: KvViews) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks' bytes on the device and on the host."""
        return self.store.block_rows(views), self.store.block_rows(views, self.copies.pool)


@contextmanager
def copier(**options: Any) -> Iterator[Copier]:
    one = Copier(**options)
    yield one
    one.copies.close()
    assert one.copies._thread is None or not one.copies._thread.is_alive()


@pytest.mark.parametrize("which", [0, 1])
def test_blocks_go_out_and_come_back_bit_for_bit_and_nothing_else_is_touched(which: int) -> None:
    with copier() as it:
        views = it.views[which]
        it.store.slab.random_(0, 256)
        device, host = it.rows(views)
        num_device, num_host = 5 * views.blocks_per_merged, 3 * views.blocks_per_merged
        assert (len(device), len(host)) == (num_device, num_host)
        chance = np.random.default_rng(which)
        out, at = chance.permutation(num_device)[:9].tolist(), chance.permutation(num_host)[:9].tolist()
        it.copies.start(KvCopy(1, CopyKind.CHECKPOINT, "m", out, at), views)
        assert it.wait(1) == [True]
        assert torch.equal(host[at], device[out])
        untouched = torch.ones(it.copies.pool.numel(), dtype=torch.bool)
        for block in at:
            untouched[block * views.stride_bytes : block * views.stride_bytes + views.shape.block_bytes] = False
        assert (it.copies.pool[untouched] == 0xEE).all()

        kept, before = device[out].clone(), it.store.slab.clone()
        back = chance.permutation(num_device)[:9].tolist()
        it.copies.start(KvCopy(2, CopyKind.RESTORE, "m", back, at), views)
        assert it.wait(2) == [True]
        assert torch.equal(device[back], kept)
        changed = it.store.slab != before
        for block in back:
            changed[block * views.stride_bytes : block * views.stride_bytes + views.shape.block_bytes] = False
        assert not changed.any()


@pytest.mark.parametrize(("device", "host"), [([1, 2], [0]), ([-1], [0]), ([10**6], [0]), ([0], [10**6]), ([0], [-1])])
def test_blocks_that_do_not_exist_fail_the_copy_alone(device: list[int], host: list[int]) -> None:
    with copier() as it:
        it.copies.start(KvCopy(1, CopyKind.CHECKPOINT, "m", device, host), it.views[0])
        it.copies.start(KvCopy(2, CopyKind.CHECKPOINT, "m", [1], [1]), it.views[0])
        it.copies.start(KvCopy(3, CopyKind.RESTORE, "nobody", [1], [1]), None)
        assert it.wait(1, 2, 3) == [False, True, False]


def test_without_host_memory_every_copy_fails() -> None:
    with copier(num_host_merged=0) as it:
        it.copies.start(KvCopy(1, CopyKind.CHECKPOINT, "m", [0], [0]), it.views[0])
        assert it.wait(1) == [False]


def test_a_copy_that_raises_is_reported_and_the_next_one_runs(monkeypatch: Any, caplog: Any) -> None:
    with copier() as it:
        real = kv_copies.np.copyto

        def fail(*_: Any) -> None:
            monkeypatch.setattr(kv_copies.np, "copyto", real)
            raise OSError("bus error")

        monkeypatch.setattr(kv_copies.np, "copyto", fail)
        for number in (1, 2):
            it.copies.start(KvCopy(number, CopyKind.CHECKPOINT, "m", [number], [number]), it.views[0])
        assert it.wait(1, 2) == [False, True]
        assert "bus error" in caplog.text


def test_what_waits_is_bounded_and_fails_when_closed(monkeypatch: Any) -> None:
    gate, at_work = threading.Event(), threading.Event()
    real = kv_copies.np.copyto

    def held_back(target: Any, source: Any) -> None:
        at_work.set()
        gate.wait(10)
        real(target, source)

    monkeypatch.setattr(kv_copies.np, "copyto", held_back)
    with copier(max_pending=2) as it:
        for number in range(5):
            it.copies.start(KvCopy(number, CopyKind.CHECKPOINT, "m", [number], [number]), it.views[0])
            assert at_work.wait(10)
        assert it.wait(3, 4) == [False, False]
        closing = threading.Thread(target=it.copies.close)
        closing.start()
        while not it.copies._closing:
            time.sleep(0.001)
        gate.set()
        closing.join(10)
        assert it.wait(0, 1, 2) == [True, False, False]
        it.copies.start(KvCopy(9, CopyKind.CHECKPOINT, "m", [0], [0]), it.views[0])
        assert it.wait(9) == [False]


def test_checkpoints_are_exact_while_steps_run_and_restores_go_where_another_model_was(tmp_path: Path) -> None:
    """One sequence is checkpointed while others decode, loses its blocks to another model, and continues from host memory
    in merged blocks that were the other's."""
    paths = [write_checkpoint(tmp_path, variant) for variant in ("llama", "opt")]

    def start(**options: Any) -> tuple[Executor, list[Driver]]:
        executor = Executor("cpu", 9, 1 << 18, 8, **options)
        shapes = [executor.add_model(executor.prepare_model(ModelSpec(p.name, str(p)))) for p in paths]
        return executor, [Driver(executor, shapes[0], range(4)), Driver(executor, shapes[1], range(4, 9))]

    undisturbed, (driver, _) = start()
    row = driver.add(0, prompt_of(100))
    driver.step([(row, 100)])
    driver.decode([row], 10)
    expected = row.output
    undisturbed.close()

    executor, (driver, other) = start(num_host_merged=2)
    finished: dict[int, bool] = {}
    changed = threading.Event()
    executor.on_copy_finished(changed.set)

    def until(copy_id: int) -> None:
        while copy_id not in finished:
            assert changed.wait(10)
            changed.clear()
            finished.update(ended[:2] for ended in executor.finished_copies())

    row, busy = driver.add(0, prompt_of(100)), driver.add(1, prompt_of(40))
    driver.step([(row, 100), (busy, 40)])
    page = driver.shape.block_size
    host = [5, 1, 7]
    for index in range(3):
        copy = KvCopy(
            index, CopyKind.CHECKPOINT, driver.shape.name, row.blocks[index : index + 1], host[index : index + 1]
        )
        executor.start_copy(copy)
        driver.decode([row, busy], 3)
    for index in range(3):
        until(index)
    output = row.output
    for block in row.blocks:
        executor._store.slab[block * executor._models[driver.shape.name].views.stride_bytes :][:100] = 0xFF

    taken = other.add(3, prompt_of(90))
    other.step([(taken, 90)])
    merged = taken.blocks[0] // other.shape.blocks_per_merged
    per_merged = driver.shape.blocks_per_merged
    back = [merged * per_merged + place for place in (2, 0, 3)]
    executor.start_copy(KvCopy(7, CopyKind.RESTORE, driver.shape.name, back, host))
    driver.decode([busy], 2)
    until(7)
    assert finished == {0: True, 1: True, 2: True, 7: True}
    driver.preempt(row)
    row.blocks, row.computed = back, 3 * page
    row.tokens = row.tokens[: row.num_prompt + len(output)]
    driver.step([(row, len(row.tokens) - row.computed)])
    assert row.output == expected[: len(output) + 1]
    executor.close()
