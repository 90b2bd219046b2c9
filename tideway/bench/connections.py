"""As many HTTP connections as there are requests in flight, at a cost that does not grow with their number."""

from __future__ import annotations

import contextlib
import resource
import ssl
from collections.abc import AsyncGenerator
from types import TracebackType

import httpx

CONNECT_TIMEOUT_S = 10.0


class Connections:
    """One httpx client for each connection, the last used first.

    A client of its own and not httpx's pool: the pool goes through all its connections at every request, and with a few
    hundred streams the event loop does nothing else. No limit, since an open loop must never wait for a connection.
    """

    def __init__(self, num_ready: int = 0) -> None:
        """`num_ready` clients are made now rather than when they are needed, which takes half a millisecond each."""
        self._idle: list[httpx.AsyncClient] = []
        self._all: list[httpx.AsyncClient] = []
        # Made once: it takes longer than a request.
        self._ssl = ssl.create_default_context()
        self._idle += [self._make() for _ in range(num_ready)]

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncGenerator[httpx.AsyncClient, None]:
        """A client that nobody else uses until the block ends. Timeouts other than connecting are the caller's."""
        client = self._idle.pop() if self._idle else self._make()
        try:
            yield client
        finally:
            self._idle.append(client)

    def _make(self) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1),
            verify=self._ssl,
            trust_env=False,
        )
        self._all.append(client)
        return client

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for client in self._all:
            await client.aclose()


def allow_many_files() -> None:
    """Raises this process's limit of open files to what it may have: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
