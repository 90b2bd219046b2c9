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
- Loading the library, looking for devices, closing an endpoint and stopping the threads block; all are done off the event
  loop. What the context starts belongs to the loop that runs where it is started, so that is done on it.
- Endpoints report a peer's death only in the error handling mode that is ucxx's default. In it UCX does without shared
  memory and without zero copies over tcp, and sends tcp segments of 8 KiB, which costs half of the bandwidth.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from services.worker.kv_transport.errors import LinkError, TransferError, TransferReason
from services.worker.kv_transport.links import Buffer, Link, Network

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 3.0
PROBE_TIMEOUT_S = 5.0
PROBE_BYTES = 64 << 10
"""Enough to take the way of large messages."""
ABORT_PERIOD_NS = 1_000_000_000
"""What closing an endpoint may take when its peer does not answer, per phase."""
ENVIRONMENT = {
    "UCX_LOG_FILE": "stderr",  # it would print to standard output
    "UCX_WARN_UNUSED_ENV_VARS": "n",  # or it warns of a variable that ucxx sets itself
    "UCX_TCP_TX_SEG_SIZE": "64k",
}
"""Read when the library is loaded; what is set already stays."""


class _Runtime:
    """The UCX context of an event loop, for as long as a network uses it."""

    _by_loop: dict[asyncio.AbstractEventLoop, _Runtime] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.context: Any = None
        self._users = 0
        self._opening = asyncio.Lock()

    @classmethod
    async def acquire(cls) -> _Runtime:
        runtime = cls._by_loop.setdefault(asyncio.get_running_loop(), cls())
        runtime._users += 1
        try:
            async with runtime._opening:
                if runtime.context is None:
                    context = await asyncio.to_thread(_new_context)
                    context.begin()
                    runtime.context = context
        except BaseException as error:
            await runtime.release()
            if not isinstance(error, Exception):
                raise
            # a missing or unloadable library, a transport that does not exist, no memory: all mean the same here
            raise _unusable(error) from error
        return runtime

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


def _new_context() -> Any:
    """Blocks; `begin` is to be called on the event loop."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from ucxx.core import ApplicationContext

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
            if self._has_begun:
                super().continuous_ucx_progress(event_loop)

    # Before UCX looks for devices: where there is a context, it also learns how far they are from each other.
    cuda_error = _make_cuda_context()
    context = Context(progress_mode="thread", enable_python_future=True, connect_timeout=CONNECT_TIMEOUT_S)
    if uses_cuda(context.context.cuda_support, context.context.info):
        context.reads_device = cuda_error is None
        if cuda_error is not None:
            logger.warning("UCX is not given CUDA memory: its thread would have no CUDA context: %r", cuda_error)
    return context


def _make_cuda_context() -> Exception | None:
    """For this thread, as ucxx does for its own."""
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


def _unusable(error: BaseException) -> TransferError:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("ucxx"):
        return TransferError(TransferReason.UNUSABLE, "the package ucxx is not installed")
    return TransferError(TransferReason.UNUSABLE, f"UCX: {type(error).__name__}: {error}")


class UcxLink(Link):
    def __init__(self, endpoint: Any, peer: str) -> None:
        self.peer = peer
        self._endpoint = endpoint
        self._broken = False
        self._kept: list[Buffer] = []
        self._aborting: asyncio.Future[None] | None = None

    async def send(self, tag: int, buffer: Buffer) -> None:
        await self._run(self._endpoint.send, tag, buffer)

    async def receive(self, tag: int, buffer: Buffer) -> None:
        await self._run(self._endpoint.recv, tag, buffer)

    async def _run(self, call: Callable[..., Any], tag: int, buffer: Buffer) -> None:
        if self._broken:
            raise LinkError("the link is closed")
        try:
            await call(buffer, tag=tag)
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
        if self._aborting is None:
            abort = self._endpoint.abort
            self._aborting = asyncio.ensure_future(asyncio.to_thread(abort, period=ABORT_PERIOD_NS))
        await asyncio.shield(self._aborting)
        self._kept.clear()


class UcxNetwork(Network):
    def __init__(self, host: str, port: int = 0, *, uses_device: bool = True) -> None:
        """`host`: the name or address under which peers reach this machine. `port` 0: any free one. `uses_device` False:
        CUDA memory goes through the host's, even where UCX could read it."""
        self._host = host
        self._port = port
        self._uses_device = uses_device
        self._runtime: _Runtime | None = None
        self._listener: Any = None

    async def open(self, on_link: Callable[[Link], None]) -> str:
        probed: asyncio.Future[Link] | None = asyncio.get_running_loop().create_future()

        async def accept(endpoint: Any) -> None:
            link = UcxLink(endpoint, "dialled in")
            if probed is not None and not probed.done():
                probed.set_result(link)  # nobody else knows the address yet
            else:
                on_link(link)

        self._runtime = await _Runtime.acquire()
        try:
            self._listener = self._runtime.context.create_listener(accept, port=self._port)
            address = f"{self._host}:{self._listener.port}"
            assert probed is not None
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._probe(address, probed)
        except TimeoutError as error:
            await self.close()
            detail = f"UCX: {address} does not answer its own process within {PROBE_TIMEOUT_S:g} s"
            raise TransferError(TransferReason.UNUSABLE, detail) from error
        except BaseException as error:
            await self.close()
            if not isinstance(error, Exception):
                raise
            raise _unusable(error) from error
        probed = None
        self.reads_device = self._uses_device and self._runtime.context.reads_device
        logger.info("UCX %s CUDA memory", "reads" if self.reads_device else "does not read")
        return address

    async def _probe(self, address: str, accepted: asyncio.Future[Link]) -> None:
        """Sends a message to this very process, as peers will: whether the transports work shows only then."""
        near = await self.connect(address)
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

    async def connect(self, address: str) -> Link:
        if self._runtime is None:
            raise LinkError("the network is closed")
        host, _, port = address.rpartition(":")
        try:
            # UCX would look the name up on the event loop
            found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            endpoint = await self._runtime.context.create_endpoint(
                found[0][4][0], int(port), connect_timeout=CONNECT_TIMEOUT_S
            )
        except Exception as error:
            raise LinkError(f"{address}: {type(error).__name__}: {error}") from error
        return UcxLink(endpoint, address)

    async def close(self) -> None:
        runtime, self._runtime = self._runtime, None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if runtime is not None:
            await runtime.release()
