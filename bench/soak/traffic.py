"""Clients of a soak: one request after another at both gateways, each of a kind (`kinds`). What was answered is counted, and
judged by what was done to the system meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

KEY = "soak-key"
"""API key of all requests, and the admin key."""
MAX_FAULTS_KEPT = 50
AFTERMATH_S = 15.0
"""After NATS answers again, in which services connect, elect and read anew what they watch."""
TRUE_REASON = re.compile(r"NATS|JetStream|scheduler|placement|instance|gateway|handed over", re.IGNORECASE)
"""What the reason of a refusal speaks of, where NATS is away."""

Ask = Callable[["Traffic", random.Random], Awaitable[str]]


class FaultError(Exception):
    """An answer that is not what was asked for."""


class RefusedError(Exception):
    """The answer names no fault: NATS is away, or the gateway was killed. A client comes again."""


@dataclass(slots=True)
class Window:
    """Time in which requests may fail for a fault that was injected."""

    begun_s: float
    ended_s: float = float("inf")
    url: str = ""
    """The gateway that is killed; empty: NATS is away, for all."""

    def has(self, begun_s: float, url: str) -> bool:
        """Whether a request to `url` that ends now was under way in it."""
        return self.url in ("", url) and begun_s <= self.ended_s and time.monotonic() >= self.begun_s


class Traffic:
    """Counts answers by kind and outcome."""

    def __init__(self, urls: Sequence[str], client: httpx.AsyncClient, kinds: Mapping[str, Ask]) -> None:
        """`urls`: of the gateways."""
        self.urls = urls
        self.client = client
        self.counts: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[str] = Counter()
        """Reasons of refusals, without what differs from one to the next."""
        self.faults: list[str] = []
        self.num_faults = 0
        self._kinds = kinds
        self._windows: list[Window] = []

    def fault(self, what: str) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_FAULTS_KEPT:
            self.faults.append(what)

    async def one(self, kind: str, random_: random.Random) -> None:
        try:
            outcome = await self._kinds[kind](self, random_)
        except RefusedError as error:
            outcome = "refused"
            self.reasons[re.sub(r"[0-9a-f-]{8,}|\d+", "N", str(error))[:160]] += 1
        except (FaultError, httpx.HTTPError) as error:
            outcome = "fault"
            self.fault(f"{kind}: {error if isinstance(error, FaultError) else repr(error)}")
        self.counts[kind, outcome] += 1

    async def forever(self, seed: int) -> None:
        """One client, which asks one thing after another."""
        random_ = random.Random(seed)
        kinds = list(self._kinds)
        while True:
            random_.shuffle(kinds)
            for kind in kinds:
                await self.one(kind, random_)

    # ------------------------------------------------------------------------------------------------- windows

    @contextmanager
    def window(self, url: str = "", aftermath_s: float = AFTERMATH_S) -> Iterator[None]:
        """While a fault is there, and for so long after it: see `Window`."""
        window = Window(time.monotonic(), url=url)
        self._windows = [*self._windows[-20:], window]
        try:
            yield
        finally:
            window.ended_s = time.monotonic() + aftermath_s

    def check(self, answer: httpx.Response, begun_s: float, expected: Sequence[int] = (200,)) -> None:
        """Raises `RefusedError` for a refusal that a fault is the reason of, `FaultError` for any other status than
        expected."""
        if answer.status_code in expected:
            return
        is_refusal = answer.status_code == 503 and "retry-after" in answer.headers
        if is_refusal and self.is_excused(begun_s, reason := message_of(answer.text)):
            raise RefusedError(reason)
        raise FaultError(f"{answer.request.url.path}: {answer.status_code} {answer.text[:300]}")

    def is_excused(self, begun_s: float, reason: str) -> bool:
        """Whether NATS was away while the request was under way, and the refusal says something of the kind."""
        is_away = any(not each.url and each.has(begun_s, "") for each in self._windows)
        return is_away and TRUE_REASON.search(reason) is not None

    def is_cut(self, begun_s: float, url: str) -> bool:
        """Whether that gateway was killed while the request was under way."""
        return any(each.url and each.has(begun_s, url) for each in self._windows)

    @contextmanager
    def judged(self, url: str) -> Iterator[float]:
        """Makes a connection that breaks because the gateway was killed a refusal. Gives the time."""
        begun_s = time.monotonic()
        try:
            yield begun_s
        except httpx.TransportError as error:
            if self.is_cut(begun_s, url):
                raise RefusedError("the gateway was killed") from None
            raise FaultError(f"{error!r} at {url}") from None

    # ------------------------------------------------------------------------------------------------ requests

    async def ask(
        self, method: str, path: str, random_: random.Random, *, expected: Sequence[int] = (200,), **more: Any
    ) -> httpx.Response:
        """At any gateway. Raises as `check`."""
        url = random_.choice(self.urls)
        with self.judged(url) as begun_s:
            answer = await self.client.request(method, f"{url}{path}", **more)
        self.check(answer, begun_s, expected)
        return answer

    async def post(
        self, path: str, body: dict[str, Any], random_: random.Random, expected: int = 200, **more: Any
    ) -> Any:
        return (await self.ask("POST", path, random_, expected=(expected,), json=body, **more)).json()


def message_of(text: str) -> str:
    """The message of an error in OpenAI's or Anthropic's shape."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text


async def run_clients(traffic: Traffic, num_clients: int, seconds: float) -> None:
    """Each ends what it has begun."""
    clients = [asyncio.create_task(traffic.forever(seed)) for seed in range(num_clients)]
    try:
        done, _ = await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for each in done:
            each.result()
    finally:
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
