"""Three real nats-servers as one cluster, each of which may be killed, paused and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import nats
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext

from tests.conftest import NatsServer, free_port

START_TIMEOUT_S = 30.0
NUM_NODES = 3
LEAST_ELECTION_S = 4.0
"""In which no copy of a stream takes the place of a leader that is gone (nats-server)."""

T = TypeVar("T")


class NatsCluster:
    """`config`: more lines for the configuration file of each node, as for `NatsServer`."""

    def __init__(self, config: str = "") -> None:
        ports = [free_port() for _ in range(NUM_NODES)]
        routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in ports)
        self.nodes = [
            NatsServer(
                # With clients' pings, routes' too: how soon a node notices that another one hangs.
                f'server_name: node-{index}\nping_interval: "2s"\nping_max: 2\n'
                f'cluster {{ name: test, listen: "127.0.0.1:{port}", routes: [{routes}] }}\n{config}'
            )
            for index, port in enumerate(ports)
        ]
        self.url = ",".join(node.url for node in self.nodes)
        self._paused: set[NatsServer] = set()
        self.wait_whole()

    def wait_whole(self) -> None:
        """Until JetStream has a leader."""

        async def is_whole(streams: JetStreamContext) -> bool:
            await streams.account_info()
            return True

        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.ask(is_whole, otherwise=False):
            if time.monotonic() > deadline:
                raise TimeoutError("the cluster has no leader")
            time.sleep(0.05)

    def ask(self, call: Callable[[JetStreamContext], Awaitable[T]], otherwise: T) -> T:
        """What `call` returns, in an event loop of its own, on any node that is there; `otherwise` where it fails."""

        async def asked() -> T:
            urls = [node.url for node in self.nodes if node.is_running and node not in self._paused]
            client = await nats.connect(urls, connect_timeout=2, max_reconnect_attempts=1)
            try:
                return await call(client.jetstream(timeout=2))
            finally:
                await client.close()

        with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, OSError):
            return run_apart(asked())
        return otherwise

    def leader_of(self, stream: str) -> NatsServer | None:
        """The node that leads the stream; None: none does now."""

        async def leader(streams: JetStreamContext) -> NatsServer | None:
            cluster = (await streams.stream_info(stream)).cluster
            name = cluster.leader if cluster is not None else None
            return self.nodes[int(name.rpartition("-")[2])] if name else None

        return self.ask(leader, otherwise=None)

    def pause(self, node: NatsServer) -> None:
        """It takes connections and answers nothing."""
        self._paused.add(node)
        os.kill(node.pid, signal.SIGSTOP)

    def resume(self, node: NatsServer) -> None:
        self._paused.discard(node)
        os.kill(node.pid, signal.SIGCONT)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, run in a thread of its own: the test's event loop must not see this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
