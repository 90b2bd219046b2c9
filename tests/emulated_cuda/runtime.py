"""torch.cuda over the emulated device: streams, events, graphs, memory, and what orders the threads of the host."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import itertools
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from tests.emulated_cuda.clocks import Agent, Clock
from tests.emulated_cuda.device import TOTAL_BYTES, CudaError, place
from tests.emulated_cuda.tensors import DispatchMode, FunctionMode, device

SOURCE = Path(__file__).with_name("guard.cpp")
_handles = itertools.count(1)


class Unavailable(Exception):
    """The device cannot be emulated on this machine."""


class Stream:
    def __init__(self, device_index: Any = None, priority: int = 0, *, agent: Agent | None = None, **_: Any) -> None:
        self.agent = device.pool_stream(priority) if agent is None else agent

    def synchronize(self) -> None:
        if self.agent.number in device.captures:
            device.captures[self.agent.number].broken = "its stream was waited for"
            raise CudaError("CUDA error: operation not permitted when stream is capturing (stream synchronize)")
        device.wait("a stream", self.agent.clock)

    def wait_event(self, event: Event) -> None:
        self.agent.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        with device.lock:
            host = device.host()
            host.tick()
            self.agent.learn(host.clock)
            self.agent.learn(other.agent.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", device.index)

    @property
    def cuda_stream(self) -> int:
        return self.agent.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.agent is self.agent

    def __hash__(self) -> int:
        return hash(self.agent.number)


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}
        self._at_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        with device.lock:
            agent = device.stream() if stream is None else stream.agent
            if agent.number in device.captures:
                return
            device.order(agent)
            self.clock = dict(agent.clock)
            self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        device.wait("an event", self.clock)

    def query(self) -> bool:
        device.host().learn(self.clock)
        return True

    def wait(self, stream: Stream | None = None) -> None:
        (device.stream() if stream is None else stream.agent).learn(self.clock)

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._at_s - self._at_s)


class Graph:
    def __init__(self, *_: Any, **__: Any) -> None:
        self._kernels: list[Any] | None = None
        self._handle: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        self._handle = graph_pool_handle() if pool is None else pool
        device.begin_capture(device.pool(self._handle), capture_error_mode)

    def capture_end(self) -> None:
        self._stream = device.stream()
        if device.releases_failed:
            weakref.finalize(self, _released, self._handle).atexit = False
        self._kernels = device.end_capture()
        if not device.releases_failed:
            weakref.finalize(self, _released, self._handle).atexit = False
        # Libraries' working memory of the stream goes with any graph that was captured there.
        self._num_ended = device.ended_graphs[self._stream.number]
        weakref.finalize(self, device.graph_ended, self._stream.number).atexit = False

    def replay(self) -> None:
        if self._kernels is None:
            raise CudaError("Called CUDAGraph::replay without a preceding successful capture.")
        if device.ended_graphs[self._stream.number] > self._num_ended:
            device.report(
                "workspace", f"a graph is replayed after another of its capture's stream ended ({self._stream.name})"
            )
        device.replay(device.pool(self._handle), self._kernels)

    def pool(self) -> Any:
        return self._handle

    def reset(self) -> None:
        self._kernels = None


def _released(handle: Any) -> None:
    with device.lock:
        device.pool(handle).num_graphs -= 1


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_handles)


def end_allocate_to_pool(index: int, handle: Any) -> None:
    pool = device.pool(handle)
    if not pool.is_recording:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    pool.is_recording = False


@contextmanager
def current_stream(stream: Stream | None) -> Iterator[None]:
    before = getattr(device._local, "stream", None)
    if stream is not None:
        device.set_stream(stream.agent)
    try:
        yield
    finally:
        device.set_stream(before)


def set_device(index: Any) -> None:
    index = torch.device(index).index if not isinstance(index, int) else index
    device.index = index or 0
    _guard().set_current_device(device.index)


def mem_get_info(_: Any = None) -> tuple[int, int]:
    return TOTAL_BYTES - device.reserved_bytes, TOTAL_BYTES


def properties(_: Any = None) -> Any:
    return SimpleNamespace(
        name="emulated", major=9, minor=0, multi_processor_count=132, total_memory=TOTAL_BYTES, L2_cache_size=50 << 20
    )


class Runtime:
    """Stands for `torch.cuda.cudart()`."""

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
        device.registered[address] = num_bytes
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        device.unregister(address)
        return 0

    @staticmethod
    def cudaGetErrorString(code: int) -> str:
        return f"error {code}"


def _set_sync_debug_mode(mode: str | int) -> None:
    device.sync_debug_mode = str(mode)


REPLACED: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": Graph,
    "stream": current_stream,
    "current_stream": lambda _=None: Stream(agent=device.stream()),
    "default_stream": lambda _=None: Stream(agent=device.default_stream()),
    "graph_pool_handle": graph_pool_handle,
    "is_current_stream_capturing": lambda: device.stream().number in device.captures,
    "synchronize": lambda _=None: device.synchronize(),
    "empty_cache": lambda: device.empty_cache(),
    "mem_get_info": mem_get_info,
    "memory_allocated": lambda _=None: device.live_bytes,
    "max_memory_allocated": lambda _=None: device.peak_bytes,
    "memory_reserved": lambda _=None: device.reserved_bytes,
    "reset_peak_memory_stats": lambda _=None: setattr(device, "peak_bytes", device.live_bytes),
    "get_device_capability": lambda _=None: (9, 0),
    "get_device_name": lambda _=None: "emulated",
    "get_device_properties": properties,
    "current_device": lambda: device.index,
    "set_device": set_device,
    "device_count": lambda: 1,
    "cudart": Runtime,
    "set_sync_debug_mode": _set_sync_debug_mode,
}


# ------------------------------------------------------------------------------------------------- threads


def _orders_threads() -> None:
    """What one thread has done before it sets an event, puts into a queue, ends, or ends a task, happened before what
    another does after it has seen that."""

    def tell(thing: Any) -> None:
        if threading.get_ident() in threading._active:  # type: ignore[attr-defined]
            with device.lock:
                host = device.host()
                host.tick()
                clock: Clock = thing.__dict__.setdefault("_emulated_clock", {})
                for number, moment in host.clock.items():
                    clock[number] = max(clock.get(number, 0), moment)

    def hear(thing: Any) -> None:
        if threading.get_ident() in threading._active:  # type: ignore[attr-defined]
            with device.lock:
                device.host().learn(thing.__dict__.get("_emulated_clock", {}))

    def before(kind: Any, name: str) -> None:
        original = getattr(kind, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            tell(self)
            return original(self, *args, **kwargs)

        setattr(kind, name, method)

    def after(kind: Any, name: str) -> None:
        original = getattr(kind, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            hear(self)
            return result

        setattr(kind, name, method)

    before(threading.Event, "set")
    after(threading.Event, "wait")
    after(threading.Event, "is_set")
    before(queue.Queue, "put")
    after(queue.Queue, "get")
    before(concurrent.futures.Future, "set_result")
    before(concurrent.futures.Future, "set_exception")
    after(concurrent.futures.Future, "result")
    after(concurrent.futures.Future, "exception")

    call_soon = asyncio.BaseEventLoop.call_soon_threadsafe

    def called_soon(self: Any, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        task = SimpleNamespace()
        tell(task)

        def run(*args: Any) -> Any:
            hear(task)
            return callback(*args)

        return call_soon(self, run, *args, **kwargs)

    asyncio.BaseEventLoop.call_soon_threadsafe = called_soon  # type: ignore[method-assign]

    submit, start, join = concurrent.futures.ThreadPoolExecutor.submit, threading.Thread.start, threading.Thread.join
    is_alive = threading.Thread.is_alive

    def submitted(self: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        task = SimpleNamespace()
        tell(task)

        def run(*args: Any, **kwargs: Any) -> Any:
            hear(task)
            return function(*args, **kwargs)

        return submit(self, run, *args, **kwargs)

    def started(self: threading.Thread) -> None:
        with device.lock:
            host = device.host()
            host.tick()
            self.clock_at_start = dict(host.clock)  # type: ignore[attr-defined]
        run = self.run

        def with_modes() -> None:
            with FunctionMode(), DispatchMode():
                run()

        self.run = with_modes  # type: ignore[method-assign]
        start(self)

    def ended(thread: threading.Thread) -> None:
        agent: Agent | None = getattr(thread, "emulated_agent", None)
        if agent is not None and not is_alive(thread):
            with device.lock:
                device.host().learn(agent.clock)

    def joined(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        ended(self)

    def seen_alive(self: threading.Thread) -> bool:
        alive = is_alive(self)
        ended(self)
        return alive

    concurrent.futures.ThreadPoolExecutor.submit = submitted  # type: ignore[method-assign]
    threading.Thread.start, threading.Thread.join = started, joined  # type: ignore[method-assign]
    threading.Thread.is_alive = seen_alive  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------- installing

_library: Any = None


@contextmanager
def host_alone() -> Iterator[None]:
    """Within, this thread computes as without the device. Afterwards its modes are as they were, whatever was done to
    them."""
    before = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for _ in range(_len_torch_function_stack()):
            _pop_mode()
        for mode in reversed(before):
            _push_mode(mode)


def _guard() -> Any:
    return _library


def build_guard() -> Path:
    """The compiled guard.cpp. Raises `Unavailable` where it cannot be compiled."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise Unavailable("the emulated CUDA device needs g++")
    torch_folder = Path(torch.__file__).parent
    version = torch.__version__.replace("+", "-")
    target = (
        Path(tempfile.gettempdir()) / f"tideway-emulated-cuda-{os.getuid()}-{version}-{SOURCE.stat().st_mtime_ns}.so"
    )
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}")
        command = [
            compiler, "-shared", "-fPIC", "-O1", "-std=c++20", f"-I{torch_folder / 'include'}", str(SOURCE),
            f"-L{torch_folder / 'lib'}", "-lc10", "-o", str(part),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise Unavailable(f"the emulated CUDA device cannot be compiled: {done.stderr[-500:]}")
        part.replace(target)
    return target


def install() -> None:
    """Installs the device for the rest of this process, before the project's modules are imported. Raises `Unavailable`."""
    global _library
    if torch.cuda.is_available():
        raise Unavailable("there is a real CUDA device")
    _library = ctypes.CDLL(str(build_guard()))
    # Wrapped tensors cannot be made in inference mode.
    torch.inference_mode = torch.no_grad  # type: ignore[misc, assignment]
    for name, value in REPLACED.items():
        setattr(torch.cuda, name, value)
    # A parameter that is moved becomes another tensor: its storage cannot be put into the old one.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch._C._cuda_endAllocateToPool = end_allocate_to_pool  # type: ignore[attr-defined]
    torch._C._cuda_releasePool = lambda index, handle: _released(handle)  # type: ignore[attr-defined]
    torch._C._host_emptyCache = lambda: None  # type: ignore[attr-defined]
    _orders_threads()
    FunctionMode().__enter__()
    DispatchMode().__enter__()


__all__ = ["Event", "Graph", "Stream", "Unavailable", "install", "place"]
