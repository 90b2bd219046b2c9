"""Parts of `bench.gpu`, run with small shapes: what they say of kernels that were chosen, and what a second try measures."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu import between, equality, parts, sanitizer, shapes
from bench.gpu.fallbacks import FALLBACKS
from bench.gpu.stepping import LeftOut, Setup, chosen, make_executor
from services.worker.attention.flashinfer_backend import FlashInferBackend
from services.worker.attention.interface import Heads
from services.worker.attention.torch_backend import TorchBackend
from tests.worker import fake_flashinfer

CPU = torch.device("cpu")


@pytest.fixture
def setup_of(tmp_path: Path) -> Callable[..., Setup]:
    """Setup of a part, with rows that an earlier try or another part has left."""

    def make(part: str, **rows: list[dict[str, Any]]) -> Setup:
        for name, found in rows.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        return Setup(CPU, tmp_path, tmp_path / f"{part}.jsonl", True, time.monotonic() + 60)

    return make


class Broken:
    """FlashInfer where nothing can be compiled."""

    @staticmethod
    def BatchDecodeWithPagedKVCacheWrapper(*_: Any, **__: Any) -> None:
        raise RuntimeError("no nvcc here")

    BatchPrefillWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper


def fallbacks_of(row: dict[str, Any]) -> set[str]:
    return {fallback.of for fallback in FALLBACKS if fallback.is_seen(row)}


def test_which_kernels_compute_is_read_off_what_a_back_end_prepares(setup_of: Callable[..., Setup]) -> None:
    setup = setup_of("kernels")
    backend = FlashInferBackend(CPU, TorchBackend(CPU), fake_flashinfer)
    found = chosen(backend, Heads(8, 2, 64), torch.bfloat16, CPU)
    assert found["decodes"] == "flashinfer" and "attention of decodes" not in fallbacks_of(found)
    assert "no nvcc here" not in setup.why


def test_a_fallback_is_read_off_too_with_what_the_log_said(setup_of: Callable[..., Setup]) -> None:
    setup = setup_of("kernels")
    found = chosen(FlashInferBackend(CPU, TorchBackend(CPU), Broken()), Heads(8, 2, 64), torch.bfloat16, CPU)
    assert found == {"decodes": "torch", "prompts": "torch"}
    assert fallbacks_of(found) == {"attention of prompts", "attention of decodes"}
    assert "no nvcc here" in setup.why


def test_a_row_tells_what_was_said_since_the_last_one_that_told_why(setup_of: Callable[..., Setup]) -> None:
    setup, log = setup_of("kernels"), logging.getLogger("services.worker")
    log.warning("no nvcc here")
    setup.emit(batch=1)
    setup.emit(what="ops", why=setup.why)
    log.warning("no libucp here")
    setup.emit(what="attention", why=setup.why)
    assert [row.get("why") for row in setup.rows_of("kernels")] == [None, "no nvcc here", "no libucp here"]


@pytest.mark.parametrize("kind", ["_float32", "_deterministic"])
def test_a_wrong_token_is_a_failure(kind: str, setup_of: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are emitted all the same."""
    setup = setup_of("equality")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    for name in ("_float32", "_deterministic"):
        found = [[3, 4], [5, 6 if name == kind else 7]]
        emit = functools.partial(equality._emit, setup, name, found, [[3, 4], [5, 7]], 1, 0.0)
        monkeypatch.setattr(equality, name, lambda *_, emit=emit: emit())
    with pytest.raises(RuntimeError, match=f"tokens are not the same: .*{kind}"):
        equality.equality(setup)
    assert {row["what"]: row["equal"] for row in setup.rows_of("equality")} == {
        "_float32": 2, "_deterministic": 2, kind: 1,
    }  # fmt: skip


RATES = [{"what": "copy", "value": 10.0, "unit": "GB/s"}, {"what": "product", "value": 0.1, "unit": "TFLOP/s"}]


@pytest.mark.slow
def test_a_second_try_of_decode_measures_what_is_missing(setup_of: Callable[..., Setup]) -> None:
    parts.checkpoint(setup_of("checkpoint"))
    known = [{"batch": batch, "sampling": "greedy", "step_ms": 1.0} for batch in (1, 4)]
    setup = setup_of("decode", rates=RATES, decode=known)
    parts.decode(setup)
    rows = setup.rows_of("decode")
    assert rows[:2] == known
    measured = [(row["batch"], row["sampling"]) for row in rows[2:] if "batch" in row]
    assert measured == [(8, "greedy"), (1, "top_p 0.95"), (8, "top_p 0.95")]
    assert all(row["step_ms"] > 0 for row in rows if "batch" in row)
    before = len(rows)
    parts.decode(setup)
    assert len(setup.rows_of("decode")) == before, "nothing is left to measure"


@pytest.mark.slow
def test_prefill_tells_the_first_use_from_later_ones(setup_of: Callable[..., Setup]) -> None:
    parts.checkpoint(setup_of("checkpoint"))
    setup = setup_of("prefill", rates=RATES)
    parts.prefill(setup)
    rows = [row for row in setup.rows_of("prefill") if "tokens" in row]
    assert [row["tokens"] for row in rows] == [128, 256]
    assert all(row["first_ms"] > 0 and row["step_ms"] > 0 for row in rows)


@pytest.mark.slow
def test_copies_go_on_while_steps_run(setup_of: Callable[..., Setup]) -> None:
    parts.checkpoint(setup_of("checkpoint"))
    setup = setup_of("copies_beside")
    parts.copies_beside(setup)
    (row,) = setup.rows_of("copies_beside")
    assert row["copied_GB_per_s"] > 0 and row["step_ms"] > 0 and row["overhead_percent"] > -100


@pytest.mark.slow
def test_shapes_are_all_measured_and_not_twice(setup_of: Callable[..., Setup]) -> None:
    setup = setup_of(
        "shapes", shapes=[{"measure": "chunks", "start": 0, "tokens": 5, "first_ms": 2.0, "second_ms": 1.0}]
    )
    shapes.shapes(setup)
    rows = setup.rows_of("shapes")
    assert {row["measure"] for row in rows if row.get("is_last")} == {"experts", "wide", "chunks", "beside_loading"}
    assert [row["model"] for row in rows if row["measure"] == "experts"] == ["int8", "bfloat16", "the next one"]
    assert sum("first_ms" in row for row in rows) == 9, "of which one was there"
    loading = {row["what"]: row for row in rows if "what" in row}
    assert loading["beside loading"]["steps"] > 0 and loading["alone"]["longest_ms"] >= loading["alone"]["median_ms"]
    before = len(rows)
    shapes.shapes(setup)
    assert len(setup.rows_of("shapes")) == before


@pytest.mark.slow
def test_equality_counts_sequences(setup_of: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of("equality")
    equality.equality(setup)
    assert [(row["what"], row["equal"], row["of"]) for row in setup.rows_of("equality")] == [
        ("tokens in float32", 4, 4), ("deterministic mode", 10, 10),
    ]  # fmt: skip
    real = equality.together

    def with_a_wrong_token(*arguments: Any, **options: Any) -> list[list[int]]:
        outputs = real(*arguments, **options)
        return outputs if len(outputs) == 1 else [[*outputs[0][:-1], -1], *outputs[1:]]

    monkeypatch.setattr(equality, "together", with_a_wrong_token)
    setup.rows.unlink()
    with pytest.raises(RuntimeError, match="tokens are not the same"):
        equality.equality(setup)
    assert [(row["equal"], row["of"]) for row in setup.rows_of("equality")] == [(3, 4), (8, 10)]


def test_the_checksum_is_of_all_bytes_of_blocks_and_of_no_gap() -> None:
    rows = between._pool(CPU, 3, 64, seed=1)
    same = torch.from_numpy(np.ascontiguousarray(rows.numpy()))
    assert between.checksum(rows) == between.checksum(same) != between.checksum(rows.flip(0))
    same[2, 63] ^= 1
    assert between.checksum(rows) != between.checksum(same)


def test_an_executor_has_room_for_the_tokens_of_any_of_its_models(setup_of: Callable[..., Setup]) -> None:
    setup = setup_of("shapes")
    checkpoints = [setup.checkpoint("a", "tiny"), setup.checkpoint("b", "tiny", num_key_value_heads=1)]
    executor = make_executor(CPU, checkpoints, 1000, 2)
    for checkpoint in checkpoints:
        runner = shapes.Runner(setup, executor, checkpoint, name=checkpoint.name)
        assert len(executor.block_rows(checkpoint.name, on_host=False)) * runner.shape.block_size >= 1000
    executor.close()


FAKE_SANITIZER = """#!/bin/sh
while [ "$1" != "--log-file" ]; do shift; done
printf '========= Invalid __global__ read of size 4\n========= ERROR SUMMARY: %s errors\n' "$NUM_ERRORS" > "$2"
"""


def test_what_a_sanitizer_says_becomes_a_row(
    setup_of: Callable[..., Setup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    setup = setup_of("sanitizer")
    with pytest.raises(LeftOut):
        sanitizer.sanitizer(setup)  # none, or no device
    program = tmp_path / "compute-sanitizer"
    program.write_text(FAKE_SANITIZER)
    program.chmod(0o755)
    with pytest.raises(LeftOut, match="needs a CUDA device"):
        sanitizer.sanitizer(setup)
    on_cuda = Setup(torch.device("cuda"), tmp_path, setup.rows, True, setup.ends_s)
    monkeypatch.setenv("NUM_ERRORS", "2")
    with pytest.raises(RuntimeError, match="memcheck"):
        sanitizer.sanitizer(on_cuda)
    (row,) = on_cuda.rows_of("sanitizer")
    assert (row["tool"], row["found"], row["first"]) == ("memcheck", 2, "Invalid __global__ read of size 4")
    setup.rows.unlink()
    monkeypatch.setenv("NUM_ERRORS", "0")
    sanitizer.sanitizer(on_cuda)
    assert [(row["tool"], row["found"]) for row in on_cuda.rows_of("sanitizer")] == [("memcheck", 0), ("racecheck", 0)]
