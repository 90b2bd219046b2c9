"""Links over UCX. Which transport carries them (tcp, shared memory, RDMA, cuda_ipc) is UCX's choice.

What of ucxx this file works around:

- Without Python futures a pending receive is a loop of `sleep(0)` that keeps a core busy; hence `enable_python_future`.
- The progress of a worker is tied to an event loop, and a second context on the same loop would never make progress;
  hence one context per event loop, shared by the transports on it.
- A cancelled send can return as if it had worked; so every completion is checked against the endpoint's state, and the
  protocol above believes the peer's acknowledgement only.
- A request does not keep its buffer alive when the task that waits for it is cancelled; the link keeps it until `abort`.
- That a context supports CUDA is said wherever `UCX_TLS` does not forbid it, also of a UCX without CUDA, which would copy
  from and to device memory as if it were the host's. Hence `reads_device` looks for the transport that every use of
  device memory needs.
- The progress thread needs a CUDA context of its own; ucxx makes one, of the process's first device (an instance sees one
  device only), and says nothing where it cannot. Hence it is tried before, with the same call.
- The progress thread wakes every millisecond, which interrupts a CPU that computes five times a token; hence `WAKE_MS`.
- Loading the library, looking for devices, closing an endpoint and stopping the threads block; all are done off the event
  loop. What the context starts belongs to the loop that runs where it is started, so that is done on it.
- Its listener takes whoever connects for a peer, on all addresses, and noise makes it spin for ever; hence there is none.
  Endpoints are made from addresses of workers, which the bus carries, and a first message to a random tag says who dials.
- An endpoint that was made from a worker's address does not learn that its peer closed the other end; so links say goodbye.
- Endpoints report a peer's death only in the error handling mode that is ucxx's default. In it UCX does without shared
  memory and without zero copies over tcp, and sends tcp segments of 8 KiB, which costs half of the bandwidth.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import secrets
import socket
import struct
import tempfile
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from services.worker.kv_transport.doors import KV_PORTS, Doors, PortRange, devices_at
from services.worker.kv_transport.errors import LinkError, TransferError, TransferReason
from services.worker.kv_transport.links import Buffer, Link, Network, Refusal, name_of
from shared.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
STOP_TIMEOUT_S = 3.0
PROBE_TIMEOUT_S = 5.0
PROBE_BYTES = 64 << 10
"""Enough to take the way of large messages."""
WAKE_MS = 20
"""How often the progress thread looks by itself. What comes, and what is sent, wakes it; what is cancelled does not."""
ABORT_PERIOD_NS = 1_000_000_000
"""What closing an endpoint may take when its peer does not answer, per phase."""
ENVIRONMENT = {
    "UCX_LOG_FILE": "stderr",  # it would print to standard output
    "UCX_WARN_UNUSED_ENV_VARS": "n",  # or it warns of a variable that ucxx sets itself
    "UCX_TCP_TX_SEG_SIZE": "64k",
    "UCX_TCP_CONN_NB": "y",  # or its thread stands still while a peer's machine does not answer
}
"""Read when the library is loaded; what is set already stays."""
GOODBYE_TIMEOUT_S = 0.2
SWEEP_S = 0.5
DOOR_PAUSE_S = 0.01
"""After what could not be read, so that an error that stays does not keep the event loop busy."""
NUM_TAGS = 1 << 64
GOODBYE_TAG = -1
WELCOME_TAG = -2
"""Beside those of wire.py."""
HELLO_BYTES = 4096
_LENGTH = struct.Struct("<H")
_DOOR = struct.Struct("<Q")
_GOODBYE = np.ones(1, dtype=np.uint8)


class _Runtime:
    """The UCX context of an event loop, for as long as a network uses it."""

    _by_loop: dict[asyncio.AbstractEventLoop, _Runtime] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.context: Any = None
        self._users = 0
        self._kept: list[Buffer] = []
        self._opening = asyncio.Lock()

    @classmethod
    async def acquire(cls, options: Mapping[str, str]) -> _Runtime:
        """`options`: of UCX, for the first who uses it."""
        runtime = cls._by_loop.setdefault(asyncio.get_running_loop(), cls())
        runtime._users += 1
        try:
            async with runtime._opening:
                if runtime.context is None:
                    context = await asyncio.to_thread(_new_context, options)
                    context.begin()
                    runtime.context = context
        except BaseException as error:
            await runtime.release()
            if not isinstance(error, Exception):
                raise
            # a missing or unloadable library, a transport that does not exist, no memory: all mean the same here
            raise _unusable(error) from error
        return runtime

    @property
    def worker_address(self) -> bytes:
        return bytes(self.context.worker_address.tobytes())

    async def endpoint(self, worker_address: bytes) -> Any:
        from ucxx._lib.libucxx import UCXAddress

        address = UCXAddress.create_from_buffer(worker_address)
        return await self.context.create_endpoint_from_worker_address(address)

    @contextlib.asynccontextmanager
    async def new_endpoint(self, worker_address: bytes) -> AsyncIterator[Any]:
        """Opens an endpoint for what begins a conversation, within `CONNECT_TIMEOUT_S`. Where that fails, the endpoint is
        closed before the block's buffers go."""
        endpoint = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                endpoint = await self.endpoint(worker_address)
                yield endpoint
        except BaseException:
            if endpoint is not None:
                await asyncio.shield(asyncio.to_thread(endpoint.abort, period=ABORT_PERIOD_NS))
            raise

    async def receive(self, tag: int, buffer: np.ndarray) -> None:
        """Receives from whoever sends to this tag of the worker."""
        from ucxx._lib.arr import Array
        from ucxx.types import Tag, TagMaskFull

        try:
            await self.context.worker.tag_recv(Array(buffer), Tag(tag), TagMaskFull).wait()
        except asyncio.CancelledError:
            self._kept.append(buffer)  # the request goes on
            raise

    async def release(self) -> None:
        self._users -= 1
        if self._users:
            return
        loop = asyncio.get_running_loop()
        del self._by_loop[loop]
        context, self.context = self.context, None
        if context is None:
            return
        from ucxx._lib_async import application_context

        await asyncio.to_thread(context.worker.stop_request_notifier_thread)  # or it waits for a second
        await asyncio.to_thread(context.notifier_thread.join, STOP_TIMEOUT_S)
        if context.notifier_thread.is_alive():
            logger.error("the notifier thread of UCX did not end within %.0f s", STOP_TIMEOUT_S)
        application_context.ProgressTasks.pop(loop, None)
        await asyncio.to_thread(context.worker.stop_progress_thread)


def _new_context(options: Mapping[str, str]) -> Any:
    """Blocks; `begin` is to be called on the event loop."""
    require_temporary_files()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from ucxx._lib_async.application_context import ProgressTasks
    from ucxx._lib_async.continuous_ucx_progress import ProgressTask, _create_context
    from ucxx.core import ApplicationContext

    class Progress(ProgressTask):  # type: ignore[misc]
        def __init__(self, worker: Any, event_loop: asyncio.AbstractEventLoop) -> None:
            super().__init__(worker, event_loop)
            worker.set_progress_thread_start_callback(_create_context)
            worker.start_progress_thread(polling_mode=False, epoll_timeout=WAKE_MS)
            weakref.finalize(self, worker.stop_progress_thread)

    class Context(ApplicationContext):  # type: ignore[misc]
        _has_begun = False
        reads_device = False

        def begin(self) -> None:
            self._has_begun = True
            self.start_notifier_thread()
            self.continuous_ucx_progress()

        def start_notifier_thread(self) -> None:
            if self._has_begun:
                super().start_notifier_thread()

        def continuous_ucx_progress(self, event_loop: asyncio.AbstractEventLoop | None = None) -> None:
            if not self._has_begun:
                return
            loop = event_loop or asyncio.get_running_loop()
            if loop not in ProgressTasks:
                ProgressTasks[loop] = Progress(self.worker, loop)

    # Before UCX looks for devices: where there is a context, it also learns how far they are from each other.
    cuda_error = _make_cuda_context()
    context = Context(
        config_dict=dict(options), progress_mode="thread", enable_python_future=True, connect_timeout=CONNECT_TIMEOUT_S
    )
    if uses_cuda(context.context.cuda_support, context.context.info):
        context.reads_device = cuda_error is None
        if cuda_error is not None:
            logger.warning("UCX is not given CUDA memory: its thread would have no CUDA context: %r", cuda_error)
    return context


def _make_cuda_context() -> Exception | None:
    """Makes a CUDA context for this thread, as ucxx does for its own."""
    try:
        from ucxx._cuda_context import ensure_cuda_context

        ensure_cuda_context()
    # no such package, no driver, no device, a device that is taken
    except Exception as error:
        return error
    return None


def uses_cuda(is_allowed: bool, info: str) -> bool:
    """Whether a context with this description (one line for each transport, `.. TRANSPORT/DEVICE`) can use CUDA memory."""
    return is_allowed and " cuda_copy/" in info


def require_temporary_files() -> None:
    """UCX describes itself in one, made by `tmpfile()`. Raises `TransferError`."""
    try:
        with tempfile.TemporaryFile(dir="/tmp"):
            pass
    except OSError as error:
        detail = f"UCX needs a temporary file, and none can be made in /tmp ({error.strerror}): mount a tmpfs there"
        raise TransferError(TransferReason.UNUSABLE, detail) from error


def _unusable(error: BaseException) -> TransferError:
    if isinstance(error, TransferError):
        return error
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("ucxx"):
        return TransferError(TransferReason.UNUSABLE, "the package ucxx is not installed")
    return TransferError(TransferReason.UNUSABLE, f"UCX: {type(error).__name__}: {error}")


class UcxLink(Link):
    """`near` and `far`: the tags of messages to here and to the peer begin there."""

    def __init__(self, endpoint: Any, peer: str, near: int, far: int) -> None:
        self.peer = peer
        self._endpoint = endpoint
        self._near = near
        self._far = far
        self._broken = False
        self._kept: list[Buffer] = []
        self._closing: asyncio.Future[None] | None = None
        self._goodbye = np.zeros(1, dtype=np.uint8)
        self._listening = asyncio.ensure_future(self._hear_goodbye())

    async def send(self, tag: int, buffer: Buffer) -> None:
        await self._run(self._endpoint.send, self._far + tag, buffer)

    async def receive(self, tag: int, buffer: Buffer) -> None:
        await self._run(self._endpoint.recv, self._near + tag, buffer)

    async def _run(self, call: Callable[..., Any], tag: int, buffer: Buffer) -> None:
        if self._broken:
            raise LinkError("the link is closed")
        try:
            await call(buffer, tag=tag % NUM_TAGS, force_tag=True)
        except asyncio.CancelledError:
            self._kept.append(buffer)
            raise
        # ucxx's exceptions have no base of their own but Exception
        except Exception as error:
            self._broken = True
            self._kept.append(buffer)
            raise LinkError(f"{type(error).__name__}: {error}") from error
        if self._broken:
            raise LinkError("the link was closed")

    async def abort(self) -> None:
        self._broken = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(says_goodbye=True))
        await asyncio.shield(self._closing)
        self._kept.clear()

    async def _hear_goodbye(self) -> None:
        with contextlib.suppress(LinkError):
            await self.receive(GOODBYE_TAG, self._goodbye)
        self._broken = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(says_goodbye=False))

    async def _close(self, *, says_goodbye: bool) -> None:
        if says_goodbye:
            # an endpoint that is broken already has nobody to tell, one that is full of a peer's silence no way to
            with contextlib.suppress(Exception):
                async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                    tag = (self._far + GOODBYE_TAG) % NUM_TAGS
                    await self._endpoint.send(_GOODBYE, tag=tag, force_tag=True)
        await asyncio.to_thread(self._endpoint.abort, period=ABORT_PERIOD_NS)
        await asyncio.wait([self._listening], timeout=STOP_TIMEOUT_S)


class Hello(msgspec.Struct, array_like=True):
    """The first message of whoever dials, to the door of the one who is dialled."""

    address: str
    """Address in its own network: the answer goes there, and nowhere else."""
    first_tag: Annotated[int, msgspec.Meta(ge=0)]
    """First tag of messages to it on the new link."""

    def frame(self) -> np.ndarray:
        """`[HELLO_BYTES]` uint8"""
        body = msgspec.msgpack.encode(self)
        content = _LENGTH.pack(len(body)) + body
        return np.frombuffer(content.ljust(HELLO_BYTES, b"\0"), dtype=np.uint8)

    @classmethod
    def of_frame(cls, frame: np.ndarray) -> Hello:
        """Raises `msgspec.MsgspecError`."""
        content = frame.tobytes()
        (length,) = _LENGTH.unpack_from(content)
        return msgspec.msgpack.decode(content[_LENGTH.size : _LENGTH.size + length], type=cls)


def _pack(name: str, door_tag: int, worker_address: bytes) -> str:
    return f"{name}/{base64.urlsafe_b64encode(_DOOR.pack(door_tag) + worker_address).decode()}"


def _unpack(address: str) -> tuple[int, bytes]:
    """The tag of the door, and UCX's address of the worker. Raises `ValueError`."""
    content = base64.b64decode(address.partition("/")[2], altchars=b"-_", validate=True)
    if len(content) <= _DOOR.size:
        raise ValueError("no address of a KV transport over UCX")
    return _DOOR.unpack_from(content)[0], content[_DOOR.size :]


class UcxNetwork(Network):
    """Addresses are `host:port/` (without tcp a random word for the port) and what UCX says of its worker with the tag of
    this network's door, which is random: who was not told the address can neither dial nor guess it, so it goes to peers,
    and what follows `/` into no log."""

    def __init__(
        self,
        host: str,
        ports: PortRange = KV_PORTS,
        *,
        uses_device: bool = True,
        on_door_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """`host`: the name or address of this machine under which peers reach it; UCX listens on tcp there only, on one of
        `ports`. `uses_device` False: CUDA memory goes through the host's, even where UCX could read it. `on_door_closed`:
        called once if UCX stops listening there, as it does for good when the process runs out of descriptors."""
        self._host = host
        self._ports = ports
        self._uses_device = uses_device
        self._on_door_closed = on_door_closed
        self._runtime: _Runtime | None = None
        self._tasks = TaskSet(told=LinkError)
        self._doors = Doors(ports)
        self._door_tag = secrets.randbits(64)
        self._address = ""
        self._on_link: Callable[[Link], None]

    async def open(self, on_link: Callable[[Link], None]) -> str:
        probed: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self._on_link = probed.set_result
        try:
            host = await resolved(self._host)
            options = {"TCP_PORT_RANGE": self._ports.text}
            if "UCX_NET_DEVICES" not in os.environ:
                options["NET_DEVICES"] = devices_at(host)
        except OSError as error:
            raise TransferError(TransferReason.UNUSABLE, f"UCX cannot listen at {self._host}: {error}") from error
        self._runtime = await _Runtime.acquire(options)
        try:
            listening = await asyncio.to_thread(self._doors.find)
            host, port = listening[0] if listening else (host, 0)
            self._address = _pack(
                f"{host}:{port or secrets.token_hex(4)}", self._door_tag, self._runtime.worker_address
            )
            self._tasks.start(self._answer_door())
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._probe(probed)
        except TimeoutError as error:
            await self.close()
            detail = f"UCX: {self._host} does not answer its own process within {PROBE_TIMEOUT_S:g} s"
            raise TransferError(TransferReason.UNUSABLE, detail) from error
        except BaseException as error:
            await self.close()
            if not isinstance(error, Exception):
                raise
            raise _unusable(error) from error
        self._on_link = on_link
        self._tasks.start(self._watch_doors())
        self.reads_device = self._uses_device and self._runtime.context.reads_device
        logger.info("UCX %s CUDA memory", "reads" if self.reads_device else "does not read")
        logger.info("UCX listens on %s", ", ".join(f"{host}:{port}" for host, port in listening) or "no tcp port")
        return self._address

    async def _probe(self, accepted: asyncio.Future[Link]) -> None:
        """Sends a message to this very process, as peers will: whether the transports work shows only then."""
        near = await self.connect(self._address)
        far: Link | None = None
        message = np.frombuffer(os.urandom(PROBE_BYTES), dtype=np.uint8)
        target = np.zeros_like(message)
        try:
            far = await accepted
            await asyncio.gather(near.send(1, message), far.receive(1, target))
            if not np.array_equal(message, target):
                raise LinkError("a message arrived changed")
        finally:
            await near.abort()
            if far is not None:
                await far.abort()

    def admit(self, address: str) -> None:
        with contextlib.suppress(OSError):  # no IPv4 address: nobody comes from there
            self._doors.admit(name_of(address).rpartition(":")[0])

    async def connect(self, address: str) -> Link:
        runtime = self._runtime
        if runtime is None:
            raise LinkError("the network is closed")
        self.admit(address)  # an answer may come on a connection of its own
        near = secrets.randbits(64)
        welcome = np.zeros(1, dtype=np.uint64)
        try:
            door, worker_address = _unpack(address)
            hello = Hello(self._address, near).frame()
            async with runtime.new_endpoint(worker_address) as endpoint:
                await endpoint.send(hello, tag=door, force_tag=True)
                await endpoint.recv(welcome.view(np.uint8), tag=(near + WELCOME_TAG) % NUM_TAGS, force_tag=True)
        # whatever ucxx makes of it
        except Exception as error:
            raise LinkError(f"{name_of(address)}: {type(error).__name__}: {error}") from error
        return UcxLink(endpoint, address, near, int(welcome[0]))

    async def _answer_door(self) -> None:
        assert self._runtime is not None
        while True:
            frame = np.zeros(HELLO_BYTES, dtype=np.uint8)
            try:
                await self._runtime.receive(self._door_tag, frame)
            # a message that is longer than the frame, and whatever else ucxx may find in one
            except Exception as error:
                logger.warning("what came to the door was not read: %s: %s", type(error).__name__, error)
                self.on_refused(Refusal.HELLO, 1)
                await asyncio.sleep(DOOR_PAUSE_S)
                continue
            self._tasks.start(self._answer(frame))

    async def _answer(self, frame: np.ndarray) -> None:
        """Answers to the address that the hello names: whoever is not there cannot know the tags of the link."""
        assert self._runtime is not None
        try:
            hello = Hello.of_frame(frame)
            _, worker_address = _unpack(hello.address)
            near = secrets.randbits(64)
            welcome = np.array([near], dtype=np.uint64).view(np.uint8)
            async with self._runtime.new_endpoint(worker_address) as endpoint:
                await endpoint.send(welcome, tag=(hello.first_tag + WELCOME_TAG) % NUM_TAGS, force_tag=True)
        # whatever a peer may send, and whatever ucxx makes of it
        except Exception as error:
            logger.warning("a peer that dialled was not answered: %s: %s", type(error).__name__, error)
            self.on_refused(Refusal.HELLO, 1)
            return
        self._on_link(UcxLink(endpoint, hello.address, near, hello.first_tag))

    async def _watch_doors(self) -> None:
        is_closed = False
        while True:
            await asyncio.sleep(SWEEP_S)
            # Whatever it is, the next look may go well.
            try:
                await self._look_at_doors()
            except Exception as error:
                logger.warning("the KV port was not looked at: %s: %s", type(error).__name__, error)
            if not is_closed and not self._doors.are_open():
                is_closed = True
                logger.error("UCX listens no more: peers cannot reach this process; had it run out of descriptors?")
                self._on_door_closed()

    async def _look_at_doors(self) -> None:
        if closed := await asyncio.to_thread(self._doors.sweep, asyncio.get_running_loop().time()):
            hosts = ", ".join(f"{host} ({count})" for host, count in Counter(closed).most_common(5))
            logger.warning("closed %d connections to the KV port that began no conversation: %s", len(closed), hosts)
            self.on_refused(Refusal.HANDSHAKE, len(closed))
        if num_dropped := self._doors.num_dropped():
            logger.warning("dropped %d attempts to reach the KV port from hosts that are no peers'", num_dropped)
            self.on_refused(Refusal.HOST, num_dropped)

    async def close(self) -> None:
        runtime, self._runtime = self._runtime, None
        await self._tasks.end_all()
        if runtime is not None:
            await runtime.release()


async def resolved(host: str) -> str:
    """The IPv4 address of a name. Raises `OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, 0, family=socket.AF_INET, type=socket.SOCK_STREAM)
    return str(found[0][4][0])
