"""The device's state: who may touch which memory when, its allocators, its streams and captures.

Memory is named by spans of bytes of a storage. Each access is kept with its agent and time; one that overlaps another's,
where either writes and neither happened before the other, is a report. So is memory that is given back while somebody who is
not known to have ended still uses it: the next owner may be given it at once.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.emulated_cuda.clocks import Agent, Clock

NUM_POOL_STREAMS = 32
"""Streams of each priority: torch hands the same ones out again and again."""
TOTAL_BYTES = 80 << 30
POOL_BYTES = 64 << 20
"""Bytes of a graphs' pool."""
ROUNDING_BYTES = 512
MAX_WATCHED_BYTES = 1 << 20
MAX_ACCESSES = 4000
"""By an agent, that are remembered of a storage."""

RELEASES_FAILED = "2.14"
"""Releases of torch from this one on give a failed graph's share of its pool back when it ends (pull request 190348, which
some earlier builds have too)."""
LEGACY = "2.11"
"""Releases of torch up to this one leave a pool recording whose capture failed (`CUDAGraph::capture_end` checks the capture
before it ends the pool's allocation), and from then on no cached memory is given back."""


class CudaError(RuntimeError):
    """Error like those that torch raises for CUDA's runtime."""


class Span(NamedTuple):
    key: int
    begin: int
    end: int


Spans = Callable[..., tuple[Sequence[Span], Sequence[Span]]]
"""Spans of a kernel's tensors: what it reads, what it writes."""


class Access(NamedTuple):
    begin: int
    end: int
    agent: Agent
    time: int
    is_write: bool
    what: str
    is_recorded: bool
    """The allocator knows of it, and keeps the memory until it is over."""


class Report(NamedTuple):
    kind: str
    text: str


class Plain:
    """Within, torch computes without the device's modes. May be entered again within itself."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __enter__(self) -> None:
        self._enter(has_left_mode=False)

    def _enter(self, *, has_left_mode: bool) -> None:
        depth = getattr(self._local, "depth", 0)
        if depth == 0:
            self._local.left = ExitStack()
            self._local.left.enter_context(torch._C.DisableTorchFunction())
            if not has_left_mode:
                self._local.left.enter_context(torch._C._DisableTorchDispatch())
        self._local.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        self._local.depth -= 1
        if self._local.depth == 0:
            self._local.left.close()

    @contextmanager
    def in_mode(self) -> Iterator[None]:
        """Context for a mode's own handler, in which torch has left it."""
        self._enter(has_left_mode=True)
        try:
            yield
        finally:
            self.__exit__()


_plain = Plain()


def plain() -> Plain:
    """Within, torch computes without the device's modes."""
    return _plain


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the one behind the last, in the tensor's storage."""
    if tensor.numel() == 0:
        return 0, 0
    begin = tensor.storage_offset()
    end = begin + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return begin * tensor.itemsize, end * tensor.itemsize


class Pool:
    """Memory of captured graphs. What a capture gives back is given out again, to it and to later captures: so tensors of
    graphs that share a pool lie over each other here as they do on a device."""

    def __init__(self, key: int) -> None:
        self.key = key
        with plain():
            self.arena = torch.zeros(POOL_BYTES, dtype=torch.uint8)
        self._memory = memoryview(self.arena.numpy())
        self._free: list[tuple[int, int]] = [(0, POOL_BYTES)]
        self.taken: dict[int, int] = {}
        self.num_graphs = 0
        self.is_recording = False
        self.peak_bytes = 0
        self.computes = threading.RLock()
        """A capture computes here, for the shapes of what it makes, in memory that graphs of its pool use when they are
        replayed. On a device it computes nothing, and they need not wait for each other."""

    def take(self, num_bytes: int) -> int:
        """Address at which so many bytes are from now on."""
        size = max(1, -(-num_bytes // ROUNDING_BYTES)) * ROUNDING_BYTES
        for index, (begin, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = [(begin + size, free - size)] if free > size else []
                self.taken[begin] = size
                self.peak_bytes = max(self.peak_bytes, begin + size)
                return begin
        raise torch.OutOfMemoryError("CUDA out of memory: the emulated pool of a graph is full")

    def give_back(self, begin: int) -> None:
        size = self.taken.pop(begin)
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (begin, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged

    def alias(self, begin: int, num_bytes: int) -> torch.Tensor:
        """`[num_bytes]` uint8: a storage of its own over these bytes."""
        with plain():
            return torch.frombuffer(self._memory, dtype=torch.uint8, count=max(1, num_bytes), offset=begin)


class Held:
    """A tensor as a graph has it: an address, which keeps nothing alive but the graphs' own pool."""

    def __init__(self, tensor: torch.Tensor, device: Device) -> None:
        self._geometry = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        self._dtype = tensor.dtype
        self._keeps: torch.Tensor | None = None
        storage = tensor.untyped_storage()
        place = device.places.get(device.serial(tensor))
        if place is not None:
            pool, begin = place
            self._keeps = pool.alias(begin, storage.nbytes())
        elif device.serial(tensor) not in device.owners and not device.is_page_locked(tensor):
            self._keeps = tensor  # a number that was an argument of its kernel
        self._weak = None if self._keeps is not None else StorageWeakRef(storage)

    def tensor(self) -> torch.Tensor | None:
        """None: its memory was given back."""
        if self._keeps is not None:
            storage: Any = self._keeps.untyped_storage()
        else:
            assert self._weak is not None
            storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._geometry)


@dataclass
class Kernel:
    what: str
    run: Callable[..., object]
    tensors: list[Held]
    spans: Spans
    waits_for_others: bool = False


@dataclass
class Watched:
    """Page-locked memory that a copy to the device reads."""

    held: Held
    sum: int
    """Sum of its bytes when the copy was launched."""
    stream: Agent
    time: int
    what: str


@dataclass
class Capture:
    """Capture of one graph, under way."""

    pool: Pool
    thread: int
    mode: str
    kernels: list[Kernel] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Taken of the pool."""
    broken: str = ""
    """By what it was invalidated."""


class Device:
    """One emulated machine's devices: `cuda:0` and, for ranks, more of them."""

    def __init__(self, torch_version: str = "2.13") -> None:
        self.torch_version = torch_version
        self.lock = threading.RLock()
        self.reports: list[Report] = []
        self.syncs: list[tuple[str, str]] = []
        """What made a host thread wait, and where."""
        self.num_launches = 0
        self.owners: dict[int, Agent] = {}
        """By storage: the stream on which a device's memory was taken."""
        self.places: dict[int, tuple[Pool, int]] = {}
        """Places of storages in graphs' pools."""
        self.page_locked: set[int] = set()
        self.registered: dict[int, int] = {}
        """By address: bytes of host memory that were page-locked later."""
        self.recorded_streams: dict[int, set[int]] = {}
        self.captures: dict[int, Capture] = {}
        """By the number of the stream."""
        self.ended_graphs: Counter[int] = Counter()
        """By the number of the stream on which they were captured."""
        self.streams: dict[tuple[int, int], list[Agent]] = {}
        self.live_bytes = self.cached_bytes = self.peak_bytes = 0
        self.sync_debug_mode = "default"
        self.exempt: list[tuple[int, int, int]] = []
        self._watched: list[Watched] = []
        self._accesses: dict[int, dict[int, dict[Any, Access]]] = {}
        """By storage and agent."""
        self._sizes: dict[int, int] = {}
        self._serials: dict[int, int] = {}
        self._addresses: dict[int, int] = {}
        self._next_serial = itertools.count(1)
        self._next_stream: dict[tuple[int, int], itertools.count[int]] = {}
        self._pools: dict[Any, Pool] = {}
        self._default: dict[int, Agent] = {}
        self._local = threading.local()
        self.agents: list[weakref.ref[Agent]] = []

    # ------------------------------------------------------------------------------------------------ agents

    def agent(self, name: str, *, is_host: bool = False) -> Agent:
        made = Agent(name, is_host=is_host)
        with self.lock:
            self.agents.append(weakref.ref(made))
        return made

    def host(self) -> Agent:
        """This thread."""
        found: Agent | None = getattr(self._local, "host", None)
        if found is None:
            thread = threading.current_thread()
            found = self._local.host = self.agent(f"thread {thread.name}", is_host=True)
            found.learn(getattr(thread, "clock_at_start", {}))
            thread.emulated_agent = found  # type: ignore[attr-defined]
        return found

    @property
    def index(self) -> int:
        return getattr(self._local, "index", 0)

    @index.setter
    def index(self, value: int) -> None:
        self._local.index = value

    def default_stream(self, index: int | None = None) -> Agent:
        index = self.index if index is None else index
        with self.lock:
            if index not in self._default:
                self._default[index] = self.agent(f"default stream of cuda:{index}")
            return self._default[index]

    def stream(self) -> Agent:
        """The current one of this thread."""
        found: Agent | None = getattr(self._local, "stream", None)
        return found or self.default_stream()

    def set_stream(self, stream: Agent | None) -> None:
        self._local.stream = stream

    def pool_stream(self, priority: int) -> Agent:
        """The next of those that torch hands out."""
        with self.lock:
            kind = self.index, min(priority, 0)
            streams = self.streams.setdefault(kind, [])
            number = next(self._next_stream.setdefault(kind, itertools.count())) % NUM_POOL_STREAMS
            if number == len(streams):
                urgency = f" of priority {priority}" if priority else ""
                streams.append(self.agent(f"stream {number}{urgency} ({place()})"))
            return streams[number]

    # ------------------------------------------------------------------------------------------------ memory

    def serial(self, tensor: torch.Tensor) -> int:
        """The number of its storage, which no later one has."""
        storage = tensor.untyped_storage()
        with self.lock:
            found = self._serials.get(storage._cdata)
            if found is None:
                found = self._serials[storage._cdata] = next(self._next_serial)
                self._addresses[found] = storage.data_ptr()
                weakref.finalize(storage, self._freed, storage._cdata, found).atexit = False
            return found

    def span(self, tensor: torch.Tensor) -> Span:
        serial, (begin, end) = self.serial(tensor), extent(tensor)
        if serial in self.places:
            pool, offset = self.places[serial]
            return Span(-pool.key, begin + offset, end + offset)
        return Span(serial, begin, end)

    def spans(self, tensors: Iterable[torch.Tensor]) -> list[Span]:
        return [self.span(tensor) for tensor in tensors]

    def own(self, tensor: torch.Tensor) -> None:
        """The storage of a tensor that was made on the current stream is the device's memory."""
        serial = self.serial(tensor)
        with self.lock:
            if serial not in self.owners:
                self.owners[serial] = self.stream()
                if serial not in self.places:
                    self._sizes[serial] = tensor.untyped_storage().nbytes()
                    self.live_bytes += self._sizes[serial]
                    self.cached_bytes = max(0, self.cached_bytes - self._sizes[serial])
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in the pool of the capture on the current stream; without one, itself."""
        capture = self.captures.get(self.stream().number)
        if capture is None:
            return tensor
        num_bytes = extent(tensor)[1]
        with self.lock:
            begin = capture.pool.take(num_bytes)
        whole = capture.pool.alias(begin, num_bytes)
        with plain():
            made = torch.empty(0, dtype=tensor.dtype).set_(
                whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )
            made.copy_(tensor)
        with self.lock:
            self.places[self.serial(made)] = capture.pool, begin
            capture.places.append(begin)
        return made

    def is_page_locked(self, tensor: torch.Tensor) -> bool:
        if self.serial(tensor) in self.page_locked:
            return True
        address = tensor.data_ptr()
        return any(start <= address < start + size for start, size in self.registered.items())

    def unregister(self, address: int) -> None:
        """Its accesses must be over."""
        with self.lock:
            end = address + self.registered.pop(address)
            for serial, accesses in self._accesses.items():
                if address <= self._addresses.get(serial, -1) < end:
                    self._check_free("registered memory", _flat(accesses), None, set())

    def _freed(self, cdata: int, serial: int) -> None:
        with self.lock:
            if self._serials.get(cdata) == serial:
                del self._serials[cdata]
            self._addresses.pop(serial, None)
            if serial in self.places:
                pool, begin = self.places.pop(serial)
                self.owners.pop(serial, None)
                pool.give_back(begin)
                return
            accesses = _flat(self._accesses.pop(serial, {}))
            owner = self.owners.pop(serial, None)
            if owner is not None:
                size = self._sizes.pop(serial, 0)
                self.live_bytes -= size
                self.cached_bytes += size
                recorded = self.recorded_streams.pop(serial, set())
                self._check_free(f"memory of {owner.name}", accesses, owner, recorded)
            elif serial in self.page_locked:
                self.page_locked.discard(serial)
                self._check_free("page-locked memory", accesses, None, set())

    def _check_free(self, whose: str, accesses: list[Access], owner: Agent | None, recorded: set[int]) -> None:
        """Whatever some thread has waited for is over; so is, for the stream that may be given the memory next, what that
        stream has waited for."""
        hosts = [agent for reference in self.agents if (agent := reference()) is not None and agent.is_host]
        for access in accesses:
            if access.agent.is_host or access.agent.number in recorded or (access.is_recorded and owner is None):
                continue
            if not any(agent.knows(access.agent.number, access.time) for agent in [*hosts, *filter(None, [owner])]):
                verb = "writes" if access.is_write else "reads"
                self.report("freed", f"{whose} is given back while {access.agent.name} {verb} it ({access.what})")

    def access(
        self, agent: Agent, spans: Iterable[Span], is_write: bool, what: str, *, is_recorded: bool = False
    ) -> None:
        time = agent.clock[agent.number]
        for key, begin, end in _joined(spans):
            if begin >= end or any(k == key and b <= begin and end <= e for k, b, e in self.exempt):
                continue
            by_agent = self._accesses.setdefault(key, {})
            for number, others in by_agent.items():
                if number != agent.number:
                    self._meet(agent, others, begin, end, is_write, what)
            own = by_agent.setdefault(agent.number, {})
            # A later one of the same bytes says all that the earlier said.
            own.pop((begin, end, is_write), None)
            own[begin, end, is_write] = Access(begin, end, agent, time, is_write, what, is_recorded)
            if len(own) > MAX_ACCESSES:
                del own[next(iter(own))]

    def _meet(self, agent: Agent, others: dict[Any, Access], begin: int, end: int, is_write: bool, what: str) -> None:
        """`others`: of another agent, to the same storage."""
        over = []
        for place, other in others.items():
            if other.begin >= end or begin >= other.end:
                continue
            is_known = agent.knows(other.agent.number, other.time)
            if is_known and is_write and begin <= other.begin and other.end <= end:
                over.append(place)
            elif not is_known and (is_write or other.is_write):
                first, second = ("writes" if x else "reads" for x in (is_write, other.is_write))
                self.report(
                    "race",
                    f"{agent.name} {first} ({what}) what {other.agent.name} {second} ({other.what}), in no order",
                )
        for place in over:
            del others[place]

    def is_tracked(self, tensor: torch.Tensor) -> bool:
        """Whether the device has used this memory of the host."""
        return self._serials.get(tensor.untyped_storage()._cdata) in self._accesses

    def touched_by_host(self, tensor: torch.Tensor, is_write: bool) -> None:
        """A host thread reads or writes memory that the device may be using."""
        with self.lock:
            span = self.span(tensor)
            if span.key in self._accesses:
                host = self.host()
                host.tick()
                self.access(host, [span], is_write, place())

    def report(self, kind: str, text: str) -> None:
        report = Report(kind, text)
        if report not in self.reports:
            self.reports.append(report)

    def watch(self, tensor: torch.Tensor) -> None:
        """What a copy to the device reads, in page-locked memory, must not change before the copy is over: arrays of numpy
        are written to unseen, but the bytes tell."""
        with self.lock:
            self.check_watched()
            if tensor.nbytes <= MAX_WATCHED_BYTES and self.stream().number not in self.captures:
                stream = self.stream()
                self._watched.append(
                    Watched(Held(tensor, self), sum_of(tensor), stream, stream.clock[stream.number], place())
                )

    def check_watched(self) -> None:
        """Before this thread learns what is over."""
        hosts = [agent for reference in self.agents if (agent := reference()) is not None and agent.is_host]
        going_on = []
        for watched in self._watched:
            if any(host.knows(watched.stream.number, watched.time) for host in hosts):
                continue
            with plain():
                tensor = watched.held.tensor()
            if tensor is None:
                continue
            if sum_of(tensor) == watched.sum:
                going_on.append(watched)
            else:
                self.report("race", f"page-locked memory was written to before its copy was over ({watched.what})")
        self._watched = going_on

    # ---------------------------------------------------------------------------------------------- launching

    def launch(
        self,
        what: str,
        run: Callable[..., object],
        tensors: Sequence[torch.Tensor],
        spans: Spans,
        *,
        has_run: bool = False,
        is_recorded: bool = False,
        waits_for_others: bool = False,
    ) -> None:
        """A kernel, or a copy, on the current stream. `run` computes it of `tensors`, in host memory; `has_run`: it has been
        computed, and is to be only when a graph is replayed. `is_recorded`: as of `Access`. `waits_for_others`: it ends only
        when other threads have launched theirs, and is not computed while it is captured."""
        with self.lock:
            stream = self.stream()
            capture = self.captures.get(stream.number)
            if capture is not None:
                if capture.thread != threading.get_ident():
                    self.report("capture", f"a thread launches on {stream.name}, where another captures ({what})")
                with plain():
                    held = [Held(t, self) for t in tensors]
                capture.kernels.append(Kernel(what, run, held, spans, waits_for_others))
            else:
                self.order(stream)
                with plain():
                    reads, writes = spans(*tensors)
                self.access(stream, reads, False, what, is_recorded=is_recorded)
                self.access(stream, writes, True, what, is_recorded=is_recorded)
                self.num_launches += 1
            if not has_run and not waits_for_others:
                with plain():
                    run(*tensors)
        if waits_for_others and capture is None:
            with plain():
                run(*tensors)

    def replay(self, pool: Pool, kernels: Sequence[Kernel]) -> None:
        with pool.computes:
            self._replay(kernels)

    def _replay(self, kernels: Sequence[Kernel]) -> None:
        for kernel in kernels:
            with plain():
                tensors = [held.tensor() for held in kernel.tensors]
            if any(tensor is None for tensor in tensors):
                self.report("freed", f"a replayed graph uses memory that was given back ({kernel.what})")
                continue
            found = [tensor for tensor in tensors if tensor is not None]
            what = f"replayed {kernel.what}"
            self.launch(what, kernel.run, found, kernel.spans, waits_for_others=kernel.waits_for_others)

    def order(self, stream: Agent) -> None:
        """What this thread has done happens before what it launches now."""
        host = self.host()
        host.tick()
        stream.learn(host.clock)
        stream.tick()

    def wait(self, what: str, clock: Clock, *, is_torchs: bool = False) -> None:
        """This thread waits until the device has come so far. `is_torchs`: an operator of torch does, unasked."""
        if self.captured_here():
            self.forbidden(what)
        if is_torchs and self.sync_debug_mode == "error":
            raise CudaError(f"called a synchronizing CUDA operation: {what}")
        with self.lock:
            self.check_watched()
            host = self.host()
            host.tick()
            host.learn(clock)
            self.syncs.append((what, place()))

    def synchronize(self) -> None:
        """Waits for everything. While any stream is captured that is an error, of the caller and of the capture."""
        with self.lock:
            if self.captures:
                for capture in self.captures.values():
                    capture.broken = capture.broken or f"the device was waited for at {place()}"
                raise CudaError("CUDA error: operation not permitted when stream is capturing (device synchronize)")
            self.check_watched()
            host = self.host()
            host.tick()
            for reference in list(self.agents):
                if (agent := reference()) is not None and not agent.is_host:
                    host.learn(agent.clock)
            self.syncs.append(("the whole device", place()))

    # ----------------------------------------------------------------------------------------------- captures

    def captured_here(self) -> Capture | None:
        """The capture that this thread is in."""
        return next((c for c in self.captures.values() if c.thread == threading.get_ident()), None)

    def unsafe(self, what: str) -> None:
        """A call that CUDA forbids to every thread while one captures in mode `global`. Raises `CudaError`, and breaks that
        capture."""
        for capture in self.captures.values():
            if capture.mode == "global" and capture.thread != threading.get_ident():
                capture.broken = capture.broken or f"{what} of another thread at {place()}"
                raise CudaError(f"CUDA error: operation not permitted when stream is capturing ({what} at {place()})")

    def forbidden(self, what: str) -> None:
        """Raises `CudaError`, and breaks the capture of this thread."""
        capture = self.captured_here()
        assert capture is not None
        capture.broken = capture.broken or what
        raise CudaError(f"CUDA error: operation not permitted when stream is capturing ({what} at {place()})")

    def pool(self, handle: Any) -> Pool:
        with self.lock:
            if handle not in self._pools:
                self._pools[handle] = Pool(next(self._next_serial))
            return self._pools[handle]

    def begin_capture(self, pool: Pool, mode: str) -> None:
        with self.lock:
            stream = self.stream()
            if stream in self._default.values():
                raise CudaError("CUDA graphs must be captured on a non-default stream.")
            if pool.is_recording:
                raise CudaError("beginAllocateToPool: already recording to mempool_id")
            if stream.number in self.captures:
                raise CudaError("CUDA error: operation not permitted when stream is capturing")
            pool.is_recording = True
            pool.num_graphs += 1
        pool.computes.acquire()
        with self.lock:
            self.captures[stream.number] = Capture(pool, threading.get_ident(), mode)

    def end_capture(self) -> list[Kernel]:
        capture = self.captures.get(self.stream().number)
        if capture is None:
            raise CudaError("capture_end: the current stream is not captured")
        try:
            return self._ended_capture()
        finally:
            capture.pool.computes.release()

    def _ended_capture(self) -> list[Kernel]:
        with self.lock:
            capture = self.captures.pop(self.stream().number)
            if not capture.broken or not self.is_legacy:
                capture.pool.is_recording = False
            if capture.broken:
                raise CudaError(
                    f"CUDA error: operation failed due to a previous error during capture ({capture.broken})"
                )
            # Nothing has been computed by a capture: what it made holds no values before a replay.
            for begin in capture.places:
                if begin in capture.pool.taken:
                    with plain():
                        capture.pool.arena[begin : begin + capture.pool.taken[begin]].fill_(0xFF)
            return capture.kernels

    def graph_ended(self, stream: int) -> None:
        with self.lock:
            self.ended_graphs[stream] += 1

    @property
    def releases_failed(self) -> bool:
        """Whether the end of a graph whose capture failed gives its share of the pool back."""
        return tuple(map(int, self.torch_version.split("."))) >= tuple(map(int, RELEASES_FAILED.split(".")))

    @property
    def is_legacy(self) -> bool:
        return tuple(map(int, self.torch_version.split("."))) <= tuple(map(int, LEGACY.split(".")))

    @property
    def is_recording(self) -> bool:
        """Whether the allocator takes a capture to be under way."""
        return any(pool.is_recording for pool in self._pools.values())

    def empty_cache(self) -> None:
        with self.lock:
            if self.is_recording:
                return
            self.cached_bytes = 0
            for handle, pool in list(self._pools.items()):
                if not pool.num_graphs and not pool.taken:
                    del self._pools[handle]

    @property
    def reserved_bytes(self) -> int:
        return self.live_bytes + self.cached_bytes + sum(pool.peak_bytes for pool in self._pools.values())


def sum_of(tensor: torch.Tensor) -> int:
    """Sum of its bytes, which lie in one run."""
    with plain():
        return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else 0


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """The same bytes in as few spans as they take."""
    last: Span | None = None
    for span in sorted(spans):
        if last is not None and span.key == last.key and span.begin <= last.end:
            last = Span(last.key, last.begin, max(last.end, span.end))
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def _flat(accesses: dict[int, dict[Any, Access]]) -> list[Access]:
    return [access for own in accesses.values() for access in own.values()]


def place() -> str:
    """Place in the project from which this is called: its two innermost lines."""
    found: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(found) < 2:
        name: str = frame.f_code.co_filename
        for folder in ("/services/", "/shared/", "/tests/worker/", "/bench/", "/tests/emulated_cuda/test_"):
            if folder in name and "/site-packages/" not in name:
                found.append(f"{name[name.index(folder) + 1 :]}:{frame.f_lineno}")
                break
        frame = frame.f_back
    return " < ".join(found)
