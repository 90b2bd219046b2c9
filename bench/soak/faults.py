"""What dies or hangs during a soak, and comes back: processes by kill -9, and NATS."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from bench.soak.operations import BATCH_LINES, WAIT_S, Operation, Operations
from bench.soak.traffic import FaultError
from bench.soak.usage import server_of

AWAY_S = 1.0
NATS_HANGS_S = 3.0
SECOND_GATEWAY = "gateway-1"


class Faults:
    """`operations`: of the same system, by whose means a fault is prepared and what it leaves is awaited."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._stack, self._traffic = operations.stack, operations.traffic
        self.all: tuple[Operation, ...] = (
            self.kill_instance,
            self.kill_gateway,
            self.kill_scheduler,
            self.pause_nats,
            self.kill_worker,
            self.kill_nats,
            self.kill_placement,
        )
        self._num_gateways_killed = 0

    async def kill_instance(self) -> None:
        os.kill((await self._operations.some_instance())["pid"], signal.SIGKILL)
        await asyncio.sleep(AWAY_S)
        await self._operations.whole()

    async def kill_scheduler(self) -> None:
        await self._restart("scheduler-0")

    async def kill_worker(self) -> None:
        await self._operations.whole()
        await self._restart("worker-0")
        await self._operations.whole()

    async def kill_placement(self) -> None:
        await self._restart("placement")
        await self._operations.whole()

    async def kill_gateway(self) -> None:
        """One after the other, in the middle of a batch."""
        names = ("gateway", SECOND_GATEWAY)
        name, url = list(zip(names, self._traffic.urls, strict=True))[self._num_gateways_killed % 2]
        self._num_gateways_killed += 1
        batch = await self._operations.begin_batch(BATCH_LINES)
        with self._traffic.window(url):
            await self._restart(name)
            await self._until_ready(url)
        await self._operations.check_batch(*batch)

    async def pause_nats(self) -> None:
        """The server hangs, in the middle of a batch."""
        batch = await self._operations.begin_batch(BATCH_LINES)
        with self._traffic.window():
            pid = server_of(self._stack).pid
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(NATS_HANGS_S)
            finally:
                os.kill(pid, signal.SIGCONT)
            await self._all_ready()
        await self._operations.check_batch(*batch)

    async def kill_nats(self) -> None:
        """kill -9 of the only server, and a new one on its store, in the middle of a batch."""
        batch = await self._operations.begin_batch(BATCH_LINES)
        server = server_of(self._stack)
        with self._traffic.window():
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(AWAY_S)
            await asyncio.to_thread(server.start)
            await self._all_ready()
        await self._operations.check_batch(*batch)
        await self._operations.whole()

    async def _restart(self, name: str) -> None:
        """kill -9, and a new one."""
        await asyncio.to_thread(self._stack.kill, name)
        await asyncio.sleep(AWAY_S)
        self._stack.start(name)

    async def _all_ready(self) -> None:
        for url in self._traffic.urls:
            await self._until_ready(url)

    async def _until_ready(self, url: str) -> None:
        """Until a completion is answered there."""
        deadline_s = time.monotonic() + WAIT_S
        body = {"model": "opt", "prompt": "a", "max_tokens": 1}
        while not await self._operations.is_answered(url, body):
            if time.monotonic() > deadline_s:
                raise FaultError(f"{url} answers no request {WAIT_S:g} s after a fault")
            await asyncio.sleep(0.3)


def in_turn(operations: Operations, faults: Faults) -> list[Operation]:
    """All operations and faults, a fault after each one or two operations."""
    mixed: list[Operation] = []
    for index, operation in enumerate(operations.all):
        mixed += [operation, *faults.all[index : index + 1]]
    return mixed + list(faults.all[len(operations.all) :])
