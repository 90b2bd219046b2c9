"""An engine that runs in an environment of its own, behind an adapter process.

    instance --Generate, Abort--> adapter --> engine core
    instance <--Step, one a step-- adapter <--

One socket, inherited by the adapter. The adapter ends when the socket does, and the kernel kills it with this process;
it stays in this process's group, so that the node agent's kill of the group reaches the engine's own processes too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

from services.worker.engines.frames import READ_LIMIT_BYTES, FrameError, FrameReader, FrameWriter
from services.worker.engines.interface import EngineFailed
from services.worker.node.processes import dies_with_parent
from shared.engines.messages import Command, EngineFacts, Failed, Moved, Ready, Report, Step

log = logging.getLogger(__name__)

SOCKET = "TIDEWAY_ADAPTER_SOCKET"
"""Environment variable of the adapter: number of its descriptor."""
STOP_TIMEOUT_S = 3.0


class HostedEngine:
    """`command`: the adapter's argument vector; `environment`: of its process, beside the socket."""

    comes_back = False
    problem = ""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: FrameReader[Report] | None = None
        self._writer: FrameWriter | None = None
        self._engine_pid = 0

    async def start(self) -> EngineFacts:
        ours, theirs = socket.socketpair()
        # On the event loop's thread, as the kernel ties the process to the life of the thread.
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self._process = subprocess.Popen(  # noqa: ASYNC220  # it takes milliseconds
                dies_with_parent(self._command),
                env={**self._environment, SOCKET: str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        stream, writer = await asyncio.open_connection(sock=ours, limit=READ_LIMIT_BYTES)
        self._reader, self._writer = FrameReader(stream, Report), FrameWriter(writer)  # type: ignore[arg-type]  # a union
        first = await self._read()
        if not isinstance(first, Ready):
            raise EngineFailed("the adapter began with something else than the engine's facts")
        self._engine_pid = first.facts.pid
        return first.facts

    def send(self, commands: Sequence[Command]) -> None:
        if self._writer is not None:
            for command in commands:
                self._writer.write(command)

    async def next_step(self) -> Step | Moved:
        message = await self._read()
        if isinstance(message, Ready):
            raise EngineFailed("the adapter said that it was ready twice")
        return message

    async def _read(self) -> Ready | Step | Moved:
        assert self._reader is not None
        try:
            message = await self._reader.read()
        except FrameError as error:
            raise EngineFailed(f"the adapter's messages cannot be read: {error}") from None
        if isinstance(message, Failed):
            raise EngineFailed(message.message, is_final=message.is_final)
        if message is None:
            raise EngineFailed("the adapter's process has ended")
        return message

    async def stop(self) -> None:
        process, self._process = self._process, None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.warning("the adapter (process %d) does not end; killing it", process.pid)
                process.kill()
                await asyncio.to_thread(process.wait)
        if self._engine_pid:
            # The adapter ends it; where it was killed itself, and the engine runs vLLM's own scheduler, nobody else does.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(self._engine_pid) == os.getpgid(0):
                    os.kill(self._engine_pid, signal.SIGKILL)
            self._engine_pid = 0
