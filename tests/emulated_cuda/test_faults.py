"""Faults of the worker on a CUDA device that once were there, and waits that are left out on purpose: the emulated device
shows each."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.attention import flashinfer_backend
from services.worker.executor import executor as executor_module
from services.worker.executor.profiler import _block_copy_s
from services.worker.kv import kv_copies
from services.worker.kv.transfer import beside_steps
from services.worker.models import decode_graphs
from services.worker.models.decode_graphs import DecodeGraphs
from services.worker.models.experts import Experts
from services.worker.models.llama import LlamaModel
from tests.emulated_cuda.runtime import Event, Stream
from tests.emulated_cuda.tensors import device
from tests.worker.checkpoints import write_checkpoint
from tests.worker.step_driver import Driver
from tests.worker.test_on_cuda import (
    BF16,
    SIZES,
    checkpoint_and_restore,
    executor_of,
    generated,
    graphs_of,
    load,
    meanwhile,
    plan_of,
    prefilled,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def found(kind: str) -> list[str]:
    """Reports of one kind, which are forgotten; others stay."""
    texts = [report.text for report in device.reports if report.kind == kind]
    device.reports[:] = [report for report in device.reports if report.kind != kind]
    return texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def small(folder: Path) -> Path:
    """With heads that FlashInfer has kernels for: in graphs."""
    return write_checkpoint(folder / "small", "qwen3", head_dim=64, **BF16)


def test_attention_with_capped_scores_is_captured(folder: Path) -> None:
    outputs = []
    path = write_checkpoint(folder / "capped", "gemma2", head_dim=64, **BF16)
    for with_graphs in (True, False):
        executor = executor_of()
        shape = load(executor, path)
        assert graphs_of(executor) == SIZES
        if not with_graphs:
            executor._models["m"].graphs = None
        outputs.append([row.output for row in generated(Driver(executor, shape, range(16)))])
    assert outputs[0] == outputs[1]


def test_loading_waits_for_nothing_but_itself(folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for the whole device would end captures of other threads, an empty cache would hold steps up."""
    other = write_checkpoint(folder / "beside", "llama", head_dim=64, **BF16)
    executor = executor_of()
    driver, rows = prefilled(executor, load(executor, small), range(8), 0)
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    device.syncs.clear()
    meanwhile(executor, other, lambda: driver.decode(rows, 1))
    assert len(emptied) <= 1, "once its weights are there, not before each capture"
    assert "the whole device" not in [what for what, _ in device.syncs]
    executor.close()


def test_captures_have_a_stream_that_nobody_else_is_given(small: Path) -> None:
    """torch has 32 of each priority, and many others ask for new ones."""
    executor = executor_of()
    for _ in range(40):
        with beside_steps(CUDA):
            pass
    taken = {Stream().agent.number for _ in range(64)}
    used: set[int] = set()
    begin = device.begin_capture

    def noted(pool: Any, mode: str) -> None:
        used.add(device.stream().number)
        begin(pool, mode)

    device.begin_capture = noted  # type: ignore[method-assign]
    try:
        load(executor, small)
    finally:
        device.begin_capture = begin  # type: ignore[method-assign]
    assert used and not used & taken


def test_a_profile_leaves_captures_alone(small: Path) -> None:
    """It times copies while another thread may be loading a model."""
    executor, stop = executor_of(), threading.Event()

    def profile() -> None:
        while not stop.is_set():
            _block_copy_s(CUDA, 1 << 12, lambda: 0.0)

    thread = threading.Thread(target=profile)
    thread.start()
    try:
        load(executor, small)
    finally:
        stop.set()
        thread.join()
    assert graphs_of(executor) == SIZES


# ------------------------------------------------------------------------------------------------- failed captures


def shares_of_pools() -> int:
    """Shares that graphs have, those that have ended without giving theirs back included."""
    gc.collect()
    torch.cuda.empty_cache()
    return sum(pool.num_graphs for pool in device._pools.values())


def test_a_capture_that_fails_costs_only_itself(
    folder: Path, small: Path, torch_version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With either behaviour of torch: later captures succeed, and what a removed model had is given back."""
    before_all = shares_of_pools()
    executor = executor_of()
    moe = write_checkpoint(folder / "experts", "qwen3-moe", head_dim=64, **BF16)
    monkeypatch.setattr(Experts, "can_be_captured", True)
    load(executor, moe, "experts", quantization="int8")
    assert graphs_of(executor, "experts") == 0
    assert not device.is_recording
    load(executor, small, "small")
    assert graphs_of(executor, "small") == SIZES
    before = torch.cuda.mem_get_info()[0]
    weights = weakref.ref(executor._models["experts"].model)
    assert isinstance(weights(), LlamaModel)
    executor.remove_model("experts")
    assert weights() is None, "nothing keeps the weights: no log record, no failed capture"
    assert torch.cuda.mem_get_info()[0] > before
    assert shares_of_pools() == before_all + 2 * SIZES, "of layers and head of each size of the model that is left"
    driver, rows = prefilled(executor, load(executor, small, "again"), range(8), 0)
    driver.decode(rows, 2)
    assert graphs_of(executor, "again") == SIZES
    executor.close()


def test_without_the_mend_a_failed_capture_would_take_all_others_with_it(
    folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "torch_version", "2.11")
    monkeypatch.setattr(decode_graphs, "_end_recording", lambda *_, **__: None)
    monkeypatch.setattr(Experts, "can_be_captured", True)
    executor = executor_of()
    load(executor, write_checkpoint(folder / "experts2", "qwen3-moe", head_dim=64, **BF16), "e", quantization="int8")
    before = torch.cuda.mem_get_info()[0]
    executor.remove_model("e")
    gc.collect()
    torch.cuda.empty_cache()
    assert device.is_recording and torch.cuda.mem_get_info()[0] <= before, "the emulated allocator is as torch's was"
    for pool in device._pools.values():
        pool.is_recording = False


def test_sizes_that_fit_are_captured_where_the_largest_does_not(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_of()
    allocated = DecodeGraphs._allocated

    def refusing(self: DecodeGraphs, size: int) -> Any:
        if size > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocated(self, size)

    monkeypatch.setattr(DecodeGraphs, "_allocated", refusing)
    driver, rows = prefilled(executor, load(executor, small), range(8), 0)
    assert graphs_of(executor) == SIZES - 1
    driver.decode(rows, 2)


def test_graphs_outlive_those_of_models_that_go(small: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries' working memory belongs to the stream of a capture, and goes with any graph of it."""
    other = write_checkpoint(folder / "goes", "llama", head_dim=64, **BF16)
    shared = Stream(priority=-1)
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(decode_graphs, "_take_stream", lambda _: (shared, (0, -1)))
        executor = executor_of()
        load(executor, other, "goes")
        driver, rows = prefilled(executor, load(executor, small), range(8), 0)
        executor.remove_model("goes")
        gc.collect()
        driver.decode(rows, 2)
        assert bool(found("workspace")) == planted
        executor.close()


def test_streams_of_captures_are_given_back_with_their_model(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "_NUM_STREAMS", 1)
    gc.collect()
    before = len(decode_graphs._taken)
    executor = executor_of()
    for _ in range(2):
        load(executor, small)
        assert graphs_of(executor) == SIZES and len(decode_graphs._taken) == before + 1
        executor.remove_model("m")
        gc.collect()
    assert len(decode_graphs._taken) == before


# ------------------------------------------------------------------------------------------------- planted


class Forgetful(Event):
    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(
    ("where", "name", "kind"),
    [
        (flashinfer_backend, "cuda_event", "race"),
        (executor_module, "cuda_event", "race"),
        (kv_copies.KvCopies, "start", "race"),
        (flashinfer_backend, "_let_go", "freed"),
    ],
    ids=["plan memory", "collect", "restore behind zeroing", "a wrapper's end"],
)
def test_a_wait_that_is_left_out_is_found(
    small: Path, where: Any, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = kv_copies.KvCopies.start
    planted: dict[str, Any] = {
        "cuda_event": Forgetful,
        "start": lambda self, copy, views, *, after=None: start(self, copy, views),
        "_let_go": lambda *_: None,
    }
    monkeypatch.setattr(where, name, planted[name])
    executor = executor_of(num_host_merged=4)
    if name == "_let_go":
        shape = load(executor, small)
        # another step is on the device while the executor, and with it its wrappers, goes
        driver, rows = prefilled(executor, shape, range(8), 0)
        executor.launch(plan_of(900, "m", rows, 0))
        del driver, rows
        executor._launched.clear()
        del executor
        gc.collect()
    else:
        checkpoint_and_restore(executor, load(executor, small))
    assert found(kind)
    torch.cuda.synchronize()  # nobody waited for the last step, and the executor goes now
    device.reports.clear()


def test_launching_a_step_waits_for_nothing_but_plans(small: Path) -> None:
    """A step that waits for the one before it leaves the device idle, and a wait for all of it ends others' captures."""
    executor = executor_of()
    shape = load(executor, small)
    _, rows = prefilled(executor, shape, range(8), 0)
    executor.launch(plan_of(900, "m", rows, 0))
    device.syncs.clear()
    executor.launch(plan_of(901, "m", rows, 1))
    assert all(what == "an event" and "flashinfer_backend" in where for what, where in device.syncs)
    while executor.num_in_flight:
        executor.collect()
    eager = executor._models["m"]
    eager.graphs = None
    executor.launch(plan_of(902, "m", rows, 2))
    device.syncs.clear()
    executor.launch(plan_of(903, "m", rows, 3))
    assert all(what == "an event" and "flashinfer_backend" in where for what, where in device.syncs)
    while executor.num_in_flight:
        assert executor.collect().error == ""
