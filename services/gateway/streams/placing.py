"""Placing of a request: it goes to the scheduler, or, where none answers, straight to a live instance (bypass)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Protocol

from services.gateway.metrics import GatewayMetrics
from services.gateway.models.catalog import Catalog, loaded_model, serves
from shared.bus.interface import Bus, BusError, ServiceError
from shared.engines.capabilities import asked
from shared.messages.catalogue import INSTANCE_SUBMIT, SCHEDULER_SUBMIT
from shared.messages.cluster import InstanceInfo
from shared.messages.requests import ErrorCode, GenerationRequest
from shared.policies.virtual_usage import left_of, merged_demand

logger = logging.getLogger(__name__)

SCHEDULER_TIMEOUT_S = 2.0
INSTANCE_TIMEOUT_S = 2.0
SCHEDULER_PAUSE_S = 1.0
"""After a scheduler let a deadline pass, requests go past it for so long, instead of each waiting in turn."""
PATIENCE_S = 5.0
"""How long a client waits for anybody to take its request before it is told that nobody does."""
RECOVERY_PATIENCE_S = 30.0
"""The same for a request that was running already and lost its instance."""
RETRY_INTERVAL_S = 0.25
LATENESS_INTERVAL_S = 0.05
LATE_SHARE = 0.25
"""Share of the time that a peer had to answer: if this process was late for more of it, that is not held against the
peer."""

NOBODY_CODES = frozenset(
    {ErrorCode.UNAVAILABLE, ErrorCode.NOT_LEADER, ErrorCode.DEADLINE, ErrorCode.DRAINING, ErrorCode.GONE}
)
"""Answers that say that this peer cannot take the request, not that the request cannot be taken."""
MAYBE_DELIVERED_CODES = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE, ErrorCode.INTERNAL})
"""The peer may have taken the request all the same (a connection that broke after sending also says UNAVAILABLE)."""
FINAL_CODES = frozenset({ErrorCode.TOO_LONG, ErrorCode.BAD_REQUEST, ErrorCode.UNKNOWN_MODEL})
"""Asking again is answered alike."""
PASSING_CODES = NOBODY_CODES | {ErrorCode.BUSY, ErrorCode.LOADING}
"""Worth another attempt soon; a full queue (OVERLOADED) is not, for a client that can be told so."""


class Placeable(Protocol):
    """A stream as placing sees it."""

    model: str
    deadline: float
    holder: str
    """The instance that keeps copies of its KV; empty: none is known."""

    @property
    def is_open(self) -> bool: ...

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""

    def to_send(self, now: float) -> GenerationRequest:
        """The request in its present epoch, with the tokens that the client already has."""

    def begin_placement(self) -> None:
        """The last attempt may have been accepted unseen; the next one must outrank it."""

    def owned_by(self, instance_id: str | None) -> None:
        """Who is about to get it; None: the scheduler decides."""


def candidates(
    instances: Iterable[InstanceInfo], model: str, sent: Mapping[str, int], num_tokens: int = 1
) -> list[str]:
    """Ids of the instances that serve `model`, freest first as dispatch sees it, then those with the fewest requests.
    `sent`: requests that this gateway sent since the instance last wrote its numbers, taken to be as long as this one with
    `num_tokens` tokens."""
    ranked = []
    for info in instances:
        own = loaded_model(info, model)
        if own is not None and serves(info, model):
            num_sent, num_running = sent.get(info.instance_id, 0), sum(loaded.num_running for loaded in info.models)
            freeness = info.dispatch_freeness
            if num_sent:
                # Where it is unbounded, what runs is no load.
                num_counted = 0 if freeness == math.inf else num_running
                needed = num_sent * merged_demand(num_tokens, own.block_size or 1, own.blocks_per_merged or 1)
                left = left_of(info.num_merged, freeness, num_counted) - needed
                freeness = left / max(1, num_counted + num_sent)
            num_waiting = sum(loaded.num_waiting for loaded in info.models)
            ranked.append((-freeness, num_running + num_waiting + num_sent, own.num_waiting, info.instance_id))
    return [instance_id for *_, instance_id in sorted(ranked)]


def _too_late() -> ServiceError:
    return ServiceError.of(ErrorCode.DEADLINE, "The request's time limit has passed.")


class Lateness:
    """By how much the event loop has been late, summed up: a deadline that ran meanwhile tells nothing of a peer."""

    def __init__(self) -> None:
        self._late_s = 0.0
        self._due = math.inf
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def total_s(self) -> float:
        return self._late_s + max(0.0, time.monotonic() - self._due)

    async def _watch(self) -> None:
        while True:
            self._due = time.monotonic() + LATENESS_INTERVAL_S
            await asyncio.sleep(LATENESS_INTERVAL_S)
            self._late_s = self.total_s()


class Placer:
    def __init__(self, bus: Bus, catalog: Catalog, metrics: GatewayMetrics, max_submissions: int) -> None:
        """`max_submissions`: attempts at once; the others wait, and no deadline of theirs but the request's runs."""
        self._bus = bus
        self._turns = asyncio.Semaphore(max_submissions)
        self._lateness = Lateness()
        self._num_waiting = 0
        metrics.waiting_submissions.set_function(lambda: self._num_waiting)
        self._catalog = catalog
        self._metrics = metrics
        self._sent: Counter[str] = Counter()
        self._pause_until = float("-inf")

    def start(self) -> None:
        self._lateness.start()

    def stop(self) -> None:
        self._lateness.stop()

    def on_instance(self, instance_id: str) -> None:
        """The instance wrote its numbers, which count what was sent before."""
        self._sent.pop(instance_id, None)

    async def place(self, stream: Placeable, *, patient: bool, slots: asyncio.Semaphore | None = None) -> None:
        """Returns when somebody took the request.

        Raises `ServiceError` with the refusal. `patient` (a client is already reading this stream): the wait is longer,
        and a full queue is tried again too. `blocks` bounds how many attempts run at once.
        """
        patience_s = RECOVERY_PATIENCE_S if patient else PATIENCE_S
        give_up = math.inf
        while True:
            async with slots or contextlib.nullcontext(), self._turn(stream):
                # It begins with the first attempt: nobody has refused a request that waits for its turn here.
                give_up = min(give_up, self._bus.now() + patience_s)
                refusal = await self._attempt(stream)
            if refusal is None:
                return
            if refusal.code not in PASSING_CODES and not (patient and refusal.code is ErrorCode.OVERLOADED):
                raise refusal
            now = self._bus.now()
            if now >= stream.deadline:
                raise _too_late()
            if now >= give_up or not stream.is_open:
                raise self._nobody(refusal)
            await asyncio.sleep(min(RETRY_INTERVAL_S, stream.deadline - now))

    def _nobody(self, refusal: ServiceError) -> ServiceError:
        """What a client is told that may still wait: not that its time is over, where a peer's or the bus's answer is
        late."""
        problems = ". ".join(self._bus.problems)
        if refusal.code is not ErrorCode.DEADLINE and not problems:
            return refusal
        message = f"Nobody takes the request now: {problems or refusal.info.message}."
        return ServiceError.of(ErrorCode.UNAVAILABLE, message, retry_after_s=PATIENCE_S)

    @contextlib.asynccontextmanager
    async def _turn(self, stream: Placeable) -> AsyncIterator[None]:
        """Peers are asked about so many requests at once as they can answer in time. Raises `ServiceError`."""
        self._num_waiting += 1
        try:
            async with asyncio.timeout(stream.deadline - self._bus.now()):
                await self._turns.acquire()
        except TimeoutError:
            raise _too_late() from None
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._turns.release()

    async def _attempt(self, stream: Placeable) -> ServiceError | None:
        """One round over everybody who could take it; None: taken."""
        if self._bus.now() >= self._pause_until:
            stream.owned_by(None)
            started, late_s = self._bus.now(), self._lateness.total_s()
            try:
                await self.announce(stream)
            except BusError as error:
                if error.code not in NOBODY_CODES:
                    return ServiceError(error.info)
                if error.code in MAYBE_DELIVERED_CODES:
                    stream.begin_placement()
                if error.code is ErrorCode.DEADLINE:
                    now = self._bus.now()
                    if self._lateness.total_s() - late_s > LATE_SHARE * (now - started) and now < stream.deadline:
                        # The answer may be here, unread: the scheduler is asked again.
                        return await self._attempt(stream)
                    self._pause_until = now + SCHEDULER_PAUSE_S
            else:
                return None
        return await self._bypass(stream)

    async def announce(self, stream: Placeable) -> None:
        """Tells the scheduler of a request that it should know; never goes past it. Raises `BusError`."""
        now = self._bus.now()
        timeout_s = min(SCHEDULER_TIMEOUT_S, max(0.001, stream.deadline - now))
        await self._bus.request(SCHEDULER_SUBMIT, stream.to_send(now), timeout_s=timeout_s)

    async def _bypass(self, stream: Placeable) -> ServiceError | None:
        refusal = ServiceError.of(
            ErrorCode.UNAVAILABLE,
            f"No scheduler answers and no instance serves model '{stream.model}' now.",
            retry_after_s=PATIENCE_S,
        )
        request = stream.to_send(self._bus.now())
        instances = [info for info in self._catalog.instances.values() if not asked(request) & frozenset(info.lacks)]
        ordered = candidates(instances, stream.model, self._sent, stream.num_tokens)
        # The one that keeps its KV first, if it is one of them; the order of the others stays.
        for instance_id in sorted(ordered, key=lambda name: name != stream.holder):
            now = self._bus.now()
            if now >= stream.deadline or not stream.is_open:
                break
            self._sent[instance_id] += 1
            # Frames may come before the answer does.
            stream.owned_by(instance_id)
            try:
                await self._bus.request(
                    INSTANCE_SUBMIT.at(instance_id=instance_id),
                    stream.to_send(now),
                    timeout_s=min(INSTANCE_TIMEOUT_S, stream.deadline - now),
                )
            except BusError as error:
                logger.info("%s did not take a request in bypass: %s", instance_id, error)
                stream.owned_by(None)
                if error.code in MAYBE_DELIVERED_CODES:
                    stream.begin_placement()
                refusal = ServiceError(error.info)
                if error.code not in PASSING_CODES | {ErrorCode.OVERLOADED, ErrorCode.INTERNAL}:
                    break
            else:
                self._metrics.bypassed.inc()
                return None
        return refusal
