"""What the emulated device must find, each planted on purpose, and what it must not."""

from __future__ import annotations

import concurrent.futures
import gc
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.emulated_cuda.device import CudaError
from tests.emulated_cuda.runtime import Graph, Stream
from tests.emulated_cuda.tensors import DeviceTensor, device

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def found(kind: str = "") -> list[str]:
    """Reports so far, which then are forgotten."""
    texts = [report.text for report in device.reports if kind in ("", report.kind)]
    device.reports.clear()
    return texts


def ones(n: int = 8) -> torch.Tensor:
    return torch.ones(n, device=CUDA)


# ------------------------------------------------------------------------------------------------- order


def test_streams_that_nothing_orders_race() -> None:
    one, other, x = Stream(), Stream(), ones()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        x.add_(1)
    with torch.cuda.stream(other):
        x.sum()
    assert len(found("race")) == 1
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        x.add_(1)
    other.wait_stream(one)
    with torch.cuda.stream(other):
        x.sum()
    assert not found()
    torch.cuda.synchronize()


def test_an_event_orders_what_was_before_it_alone() -> None:
    one, other, x = Stream(), Stream(), ones()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        x.add_(1)
        event = torch.cuda.Event()
        event.record()
        x.add_(1)
    other.wait_event(event)
    with torch.cuda.stream(other):
        x.sum()
    assert len(found("race")) == 1
    torch.cuda.synchronize()


def test_the_host_reads_a_result_that_is_not_there_yet() -> None:
    x, there = ones(), torch.empty(8, pin_memory=True)
    there.copy_(x, non_blocking=True)
    there.tolist()
    assert len(found("race")) == 1
    there.copy_(x, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert there.tolist() == [1.0] * 8
    assert not found()


def test_page_locked_memory_is_written_to_before_it_was_copied() -> None:
    x, source = ones(), torch.zeros(8, pin_memory=True)
    array = source.numpy()
    for is_waited_for in (True, False):
        x.copy_(source, non_blocking=True)
        if is_waited_for:
            torch.cuda.current_stream().synchronize()
        array += 1
        torch.cuda.synchronize()
        assert bool(found("race")) != is_waited_for


def test_parts_that_do_not_overlap_do_not_meet() -> None:
    one, other, x = Stream(), Stream(), ones(8)
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        x[:4].add_(1)
    with torch.cuda.stream(other):
        x[4:].add_(1)
    assert not found()
    torch.cuda.synchronize()


@pytest.mark.parametrize("way", ["event", "queue", "join", "future"])
def test_what_orders_threads_orders_what_they_wait_for(way: str) -> None:
    x, done, handed = ones(), threading.Event(), queue.Queue[int]()
    there = torch.empty(8, pin_memory=True)

    def copy() -> None:
        stream = Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            there.copy_(x, non_blocking=True)
        stream.synchronize()
        done.set()
        handed.put(1)

    if way == "future":
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            executor.submit(copy).result(10)
    else:
        thread = threading.Thread(target=copy)
        thread.start()
        waits: dict[str, Callable[[], Any]] = {
            "event": lambda: done.wait(10), "queue": lambda: handed.get(timeout=10), "join": lambda: thread.join(10)
        }  # fmt: skip
        waits[way]()
        there.tolist()
        assert not found()
        thread.join()
    there.tolist()
    assert not found()


# ------------------------------------------------------------------------------------------------- memory


def test_memory_that_another_stream_still_uses_is_given_back() -> None:
    other = Stream()
    for is_told in (False, True):
        x = ones()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            x.add_(1)
        if is_told:
            x.record_stream(other)  # type: ignore[arg-type]
        del x
        gc.collect()
        assert len(found("freed")) == (0 if is_told else 1)


def test_page_locked_memory_is_kept_for_copies_of_torch_but_not_for_those_of_others() -> None:
    from tests.emulated_cuda.tensors import inner_of, kernel

    x = ones()
    source = torch.zeros(8, pin_memory=True)
    x.copy_(source, non_blocking=True)
    del source
    gc.collect()
    assert not found()
    source = torch.zeros(8, pin_memory=True)
    kernel("a library's copy", lambda *_: None, [source], [inner_of(x)], has_run=True)
    del source
    gc.collect()
    assert "page-locked memory is given back" in found("freed")[0]


def test_registered_memory_is_let_go_while_it_is_copied_to() -> None:
    pool, x = torch.zeros(64), ones()
    torch.cuda.cudart().cudaHostRegister(pool.data_ptr(), pool.nbytes, 0)
    pool[:8].copy_(x, non_blocking=True)
    torch.cuda.cudart().cudaHostUnregister(pool.data_ptr())
    assert "registered memory is given back" in found("freed")[0]


def test_what_is_given_back_stays_reserved_until_the_cache_is_emptied() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    x = torch.zeros(1 << 20, dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()
    del x
    gc.collect()
    assert torch.cuda.mem_get_info()[0] == before - (1 << 20)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before


def test_pageable_memory_is_copied_by_who_should_not_wait() -> None:
    torch.zeros(8).to(CUDA, non_blocking=True)
    assert len(found("pageable")) == 1


def test_tensors_of_both_memories_do_not_mix() -> None:
    with pytest.raises(CudaError, match="same device"):
        ones() + torch.ones(8)
    with pytest.raises(TypeError, match="numpy"):
        ones().numpy()
    assert isinstance(ones() + torch.tensor(2.0), DeviceTensor)
    assert ones().device == torch.device("cuda", 0) and ones().is_cuda


# ------------------------------------------------------------------------------------------------- graphs


def captured(function: Callable[[], torch.Tensor], pool: Any = None) -> tuple[Graph, torch.Tensor]:
    graph, stream = Graph(), Stream(priority=-1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, result


def test_a_graph_computes_anew_of_what_lies_in_its_memory() -> None:
    x = ones(4)
    graph, result = captured(lambda: x * 2 + 1)
    assert result.isnan().all().item(), "a capture computes nothing"
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert result.tolist() == [2 * value + 1] * 4


def test_graphs_of_a_pool_lie_over_each_other() -> None:
    x, pool = ones(256), torch.cuda.graph_pool_handle()
    first, one = captured(lambda: (x + 1) * 2, pool)
    second, two = captured(lambda: (x + 3) * 4, pool)
    first.replay()
    assert one.tolist()[0] == 4.0
    second.replay()
    assert two.tolist()[0] == 16.0
    address = one.data_ptr()
    del one
    gc.collect()
    both = [captured(lambda: x + 5, pool) for _ in range(2)]
    assert address in [result.data_ptr() for _, result in both], "what was given back is given out again"
    for graph, result in both:
        graph.replay()
        assert result.tolist()[0] == 6.0


def test_a_graph_does_not_keep_what_it_reads() -> None:
    held = [ones(4)]
    graph, _ = captured(lambda: held[0] * 2)
    held.clear()
    gc.collect()
    graph.replay()
    assert "memory that was given back" in found("freed")[0]


@pytest.mark.parametrize("what", ["item", "blocking copy", "page-locked", "event"])
def test_what_a_capture_forbids_ends_it(what: str) -> None:
    x, event = ones(4), torch.cuda.Event()
    acts: dict[str, Callable[[], Any]] = {
        "item": lambda: x[0].item(), "blocking copy": lambda: torch.ones(4).to(CUDA),
        "page-locked": lambda: torch.empty(4, pin_memory=True), "event": event.synchronize,
    }  # fmt: skip
    with pytest.raises(CudaError, match="capture"):
        captured(lambda: acts[what]() and x)


def test_a_failed_capture_goes_on_recording_in_old_releases(torch_version: str) -> None:
    pool, x = torch.cuda.graph_pool_handle(), ones(4)
    with pytest.raises(CudaError, match="capture"):
        captured(lambda: x * x.sum().item(), pool)
    kept = torch.zeros(1 << 20, dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()
    del kept
    gc.collect()
    before = torch.cuda.mem_get_info()[0]
    torch.cuda.empty_cache()
    is_stuck = torch.cuda.mem_get_info()[0] == before
    assert is_stuck == (torch_version == "2.11")
    if is_stuck:
        with pytest.raises(CudaError, match="already recording"):
            captured(lambda: x * 2, pool)
        torch._C._cuda_endAllocateToPool(0, pool)
    graph, result = captured(lambda: x * 2, pool)
    graph.replay()
    assert result.tolist() == [2.0] * 4
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > before


def test_a_wait_for_the_device_ends_a_capture_of_another_thread() -> None:
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            torch.cuda.synchronize()
        except CudaError as error:
            failed.append(error)

    def meanwhile() -> torch.Tensor:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        return ones(4)

    with pytest.raises(CudaError, match="waited for"):
        captured(meanwhile)
    assert failed, "and the wait fails as well"


def test_a_thread_that_computes_on_a_captured_stream_is_found() -> None:
    stream = Stream()
    others = [Stream() for _ in range(32)]
    assert others[-1] == stream, "torch has no more of them"
    assert Stream(priority=-1) not in [stream, *others]
    x, graph = ones(4), Graph()
    torch.cuda.synchronize()

    def compute() -> None:
        with torch.cuda.stream(others[-1]):
            x.add_(1)

    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        graph.capture_end()
    assert len(found("capture")) == 1


def test_waits_that_torch_is_told_to_refuse() -> None:
    x = ones(4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(CudaError, match="synchronizing"):
            x.sum().item()
        x.add_(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
