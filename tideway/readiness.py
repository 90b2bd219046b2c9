"""The conditions that `tideway up` waits for: each process healthy, each model served, the gateway ready. Starts and prints
nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx

from tideway.cluster import ClusterView, ModelState, ModelView, view_model

PROBE_TIMEOUT_S = 2.0
RESPONSE_TIMEOUT_S = 5.0
FAILURE_STANDS_AFTER_S = 10.0
"""While nodes register, a model has no place; only one that stays without counts as failed."""

Check = Callable[[], Awaitable[str | None]]
"""A detail to show once the thing is so (may be empty), else None. May raise `BusError`, which counts as None."""


@dataclass(frozen=True)
class Step:
    label: str
    check: Check
    process: str
    """Whose log tells more."""


def nats_greets(port: int) -> Check:
    async def check() -> str | None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                line = await asyncio.wait_for(reader.readline(), PROBE_TIMEOUT_S)
            finally:
                writer.close()
            return f"version {json.loads(line.removeprefix(b'INFO '))['version']}"
        except (OSError, TimeoutError, ValueError, KeyError):
            return None

    return check


def answers(http: httpx.AsyncClient, url: str, detail: str = "") -> Check:
    async def check() -> str | None:
        try:
            return detail if (await http.get(url, timeout=PROBE_TIMEOUT_S)).is_success else None
        except httpx.HTTPError:
            return None

    return check


def responds(http: httpx.AsyncClient, url: str) -> Check:
    """Whatever the answer is: that there is one tells a process under load from one that is stuck."""

    async def check() -> str | None:
        try:
            return str((await http.get(url, timeout=RESPONSE_TIMEOUT_S)).status_code)
        except httpx.HTTPError:
            return None

    return check


@dataclass
class ModelChecks:
    """Whether each model is served, or is not for good; `failed` and `drained` hold the latter."""

    view: ClusterView
    failed: dict[str, ModelView] = field(default_factory=dict)
    drained: dict[str, ModelView] = field(default_factory=dict)
    _failing_since_s: dict[str, float] = field(default_factory=dict)

    def settled(self, name: str) -> Check:
        async def check() -> str | None:
            view = self.view
            model = view_model(name, await view.plan(), view.instances, await view.configured())
            if model.state is ModelState.READY:
                where = f"on {model.num_ready} instance{'s' * (model.num_ready != 1)}"
                return f"{where} ({model.reason})" if model.reason else where
            if model.state is ModelState.PUT_AWAY:
                return "on demand"
            if model.state not in (ModelState.FAILED, ModelState.DRAINED):
                self._failing_since_s.pop(name, None)
                return None
            since_s = self._failing_since_s.setdefault(name, time.monotonic())
            if not view.nodes or time.monotonic() - since_s < FAILURE_STANDS_AFTER_S:
                return None
            (self.failed if model.state is ModelState.FAILED else self.drained)[name] = model
            return ""

        return check
