"""The bus as services see it: typed messages over channels of `shared.messages`.

Two implementations pass one contract suite (bus_contract.py and storage_contract.py in tests/shared):
`shared.bus.nats_bus.NatsBus` on nats-py, and `tests.memory_bus.MemoryBus` on a hub with virtual time and fault
injection.

Rules every implementation keeps:
- A call that waits has a deadline and ends by it with a reply or a `BusError`; nothing fails in silence.
- A served handler that raises `ServiceError` answers with its typed error; any other exception answers `INTERNAL` and is
  logged. At most `max_concurrency` handlers of one endpoint run at once; a request beyond that is answered `BUSY` at once.
- `subscribe` handlers are plain functions called in order of arrival on the event loop and must not block; a handler that
  raises is logged and the next message is still delivered.
- The current trace context travels in headers of `request` (and of `publish` with `traced=True`); a served handler runs
  inside it.
- After a lost connection the bus reconnects by itself for ever, subscribes and declares everything again, and then, or
  after most of a second, calls the `on_reconnect` callbacks. Publishing while disconnected is dropped or buffered, never an
  exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from shared.messages.channels import Bucket, Endpoint, ObjectBucket, Topic
from shared.messages.requests import ErrorCode, ErrorInfo

if TYPE_CHECKING:  # some processes want its errors alone, and have no event loop
    import asyncio

M = TypeVar("M")
Q = TypeVar("Q")
R = TypeVar("R")


class BusError(Exception):
    """A bus call failed. `info.code` says how: UNAVAILABLE (nobody serves the subject, or no connection), DEADLINE,
    BUSY, or what the peer's handler answered."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(f"{info.code}: {info.message}")
        self.info = info

    @property
    def code(self) -> ErrorCode:
        return self.info.code


class ServiceError(BusError):
    """Raised by a served handler to answer with a typed error, and by `request` where the peer did."""

    @classmethod
    def of(cls, code: ErrorCode, message: str, param: str = "", retry_after_s: float = 0.0) -> ServiceError:
        return cls(ErrorInfo(code, message, param, retry_after_s))


class RevisionConflict(BusError):
    """A `create` or `update` found another revision than expected."""


class UnreadableEntry(BusError):
    """A `get` found what is not of the bucket's type; it can be overwritten at `revision`."""

    def __init__(self, info: ErrorInfo, revision: int) -> None:
        super().__init__(info)
        self.revision = revision


class Subscription(Protocol):
    async def stop(self) -> None:
        """Take no more messages; running handlers end by themselves. May be called twice."""


class KvEntry(msgspec.Struct, Generic[M], frozen=True):
    value: M
    revision: int


class Room(NamedTuple):
    """What a bucket holds and may hold, in bytes with the server's own overhead. A full one answers OVERLOADED."""

    used_bytes: int
    max_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(0, self.max_bytes - self.used_bytes)


class StreamUse(NamedTuple):
    """What one stream of the server holds: a bucket or an object store."""

    num_messages: int
    used_bytes: int
    max_bytes: int
    """0: no bound."""
    num_consumers: int
    num_copies: int
    """Copies that it should have: by its configuration on the server, or TIDEWAY_NATS_REPLICAS if that is more."""
    num_current: int
    """Copies on servers that are there, with all that is stored."""


class Watch(Protocol[M]):
    """A live view of a bucket. Entries of a bucket with a TTL leave it when they were not written for the TTL, measured on
    this side's monotonic clock and paused while disconnected. After a reconnect a key is held for one grace period
    (the TTL, or 3 s) to appear again before it counts as deleted. None leaves it while the bucket cannot be seen, or could
    not be written."""

    entries: dict[str, M]

    @property
    def problem(self) -> str:
        """Why the entries may not be what the bucket has now, as a sentence: what is not among them may be there all the
        same. Empty: they are."""

    async def stop(self) -> None: ...


class KeyValue(ABC, Generic[M]):
    """One bucket. Every call has a deadline of a few seconds and raises `BusError`."""

    @abstractmethod
    async def get(self, key: str) -> KvEntry[M] | None:
        """`UnreadableEntry` for one that cannot be read."""

    async def get_from_any_copy(self, key: str) -> KvEntry[M] | None:
        """Entry of a key, like `get`. While the leader of the copies does not answer, what another one has is taken: it
        may have been written over a moment ago. Only the leader says that there is nothing. For buckets with
        `is_read_from_copies`."""
        return await self.get(key)

    @abstractmethod
    async def put(self, key: str, value: M) -> int:
        """Returns the new revision."""

    @abstractmethod
    async def create(self, key: str, value: M) -> int:
        """`RevisionConflict` if the key exists."""

    @abstractmethod
    async def update(self, key: str, value: M, revision: int) -> int:
        """`RevisionConflict` if the key's last revision is another."""

    @abstractmethod
    async def delete(self, key: str) -> None: ...

    @abstractmethod
    async def is_deleted(self, key: str) -> bool:
        """Whether `delete` was the last that was done to it. False for one that was never there, was purged, or is lost."""

    @abstractmethod
    async def purge(self, prefix: str) -> None:
        """Removes the entry `prefix` and all whose key begins with `prefix` and a dot, without leaving markers. Watches
        are not told."""

    @abstractmethod
    async def purge_revision(self, key: str, revision: int) -> bool:
        """Removes the entry as `purge` does, if that is its revision; False: it has another one, or is not there."""

    @abstractmethod
    async def purge_markers(self, seen: Set[str]) -> set[str]:
        """Removes the markers that `delete` left under the keys in `seen`. Returns the other keys with a marker: the `seen`
        of the next call, when every watch has been told."""

    @abstractmethod
    async def entries(self) -> dict[str, KvEntry[M]]: ...

    @abstractmethod
    async def room(self) -> Room: ...

    @abstractmethod
    async def watch(self, on_change: Callable[[str, M | None], None] | None = None) -> Watch[M]:
        """Returns when the present entries are in `Watch.entries` (for those `on_change` was called too); afterwards
        `on_change(key, value)` is called for each change, with None for a deletion or expiry."""


class ObjectWriter(Protocol):
    """An object that is written piece by piece. Nobody sees it before `commit`."""

    async def write(self, data: bytes) -> None: ...

    async def commit(self) -> None:
        """The object is there, whole; one that had its name is gone."""

    async def abort(self) -> None:
        """What was written is removed. Without effect after `commit`."""


class ObjectStore(ABC):
    @abstractmethod
    async def put(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    async def get(self, name: str) -> bytes | None: ...

    @abstractmethod
    async def writer(self, name: str) -> ObjectWriter: ...

    @abstractmethod
    async def read(self, name: str) -> AsyncIterator[bytes] | None:
        """The object's chunks in order, each fetched when it is asked for; None if there is no such object. The iterator
        raises `BusError` where the object is deleted meanwhile, or is damaged (known at its end)."""

    @abstractmethod
    async def delete(self, name: str) -> None: ...

    @abstractmethod
    async def names(self) -> list[str]: ...

    @abstractmethod
    async def room(self) -> Room: ...

    @abstractmethod
    async def check_storage(self) -> None:
        """Writes a few KiB in place of those of the last check. Raises `BusError`, STORAGE_FULL where the server's disk is
        full; `Bus.storage_problem` tells it too, and is empty again when this succeeds."""

    @abstractmethod
    async def purge_unfinished(self, seen: Set[str]) -> set[str]:
        """Removes what writers left behind that were neither committed nor aborted, as far as it is in `seen`. Returns
        marks of what is being written now or was left behind: the `seen` of the next call, when no writer that works
        now can be at it still."""


class Bus(ABC):
    """One connection of one process."""

    @property
    @abstractmethod
    def is_connected(self) -> bool: ...

    @property
    @abstractmethod
    def away_s(self) -> float:
        """How long it has not been connected; 0 while it is."""

    @property
    @abstractmethod
    def problems(self) -> list[str]:
        """Sentences: why what is stored, watched or sent may not be so now. Empty: all is well, so far as is known."""

    @property
    def damages(self) -> list[str]:
        """Sentences: what NATS had stored and has lost, so far as was looked. It does not come back by waiting."""
        return []

    @property
    @abstractmethod
    def storage_problem(self) -> str:
        """A sentence while what is to be stored on disk cannot be, as far as writes from here have shown; else empty."""

    @property
    @abstractmethod
    def max_payload_bytes(self) -> int: ...

    @abstractmethod
    def now(self) -> float:
        """Monotonic seconds; virtual time on a memory bus."""

    @abstractmethod
    def publish(self, topic: Topic[M], message: M, *, traced: bool = False) -> None:
        """Fire and forget; never blocks, never raises for a lost connection (counted in the metrics instead)."""

    @abstractmethod
    async def request(self, endpoint: Endpoint[Q, R], query: Q, *, timeout_s: float) -> R:
        """The peer's reply. Raises `ServiceError` (the peer's typed answer) or `BusError`; `UNAVAILABLE` at once where
        nobody serves the subject."""

    @abstractmethod
    def send_request(self, endpoint: Endpoint[Q, R], query: Q, *, timeout_s: float) -> asyncio.Future[R]:
        """Sends as `request` does, for callers with too many requests under way for a task each. Whoever calls looks at the
        outcome."""

    @abstractmethod
    async def subscribe(self, topic: Topic[M], handler: Callable[[M], None]) -> Subscription: ...

    @abstractmethod
    async def serve(
        self, endpoint: Endpoint[Q, R], handler: Callable[[Q], Awaitable[R] | R], *, max_concurrency: int = 64
    ) -> Subscription:
        """Returns when the server routes requests here (subscribed and flushed). `handler`: a coroutine function, or a
        plain one, which runs at once and must not block; where it has to wait it returns a coroutine."""

    @abstractmethod
    async def key_value(self, bucket: Bucket[M], *, max_bytes: int | None = None) -> KeyValue[M]:
        """Declares the bucket if it does not exist; the first time it waits for one that cannot be had yet. `max_bytes`: all
        its entries together; None: some ten MiB. A full bucket answers OVERLOADED."""

    @abstractmethod
    async def object_store(self, bucket: ObjectBucket) -> ObjectStore: ...

    @abstractmethod
    async def stream_uses(self) -> dict[str, StreamUse]:
        """By the streams' names on the server. Raises `BusError`."""

    @abstractmethod
    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Called on the event loop after each reconnect, when subscriptions and buckets are in place again, until what
        this returns is called."""

    @abstractmethod
    async def round_trip_s(self) -> float:
        """Flush to the server and back; for health checks. Raises `BusError` when disconnected."""

    @abstractmethod
    async def close(self) -> None:
        """Drains subscriptions within seconds and closes. May be called twice."""
