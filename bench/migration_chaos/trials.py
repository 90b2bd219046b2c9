"""Trials: one migration each, with one fault, while streams run; now and then everything comes to rest and is looked at."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bench.migration_chaos.cluster import Cluster, Instance
from bench.migration_chaos.faults import NOTE, Fault, draw
from bench.migration_chaos.instance import read_tag
from bench.migration_chaos.streams import Streams, counters
from services.worker.migration.faults import FaultAction
from shared.messages.catalogue import INSTANCE_REBALANCE
from shared.messages.migration import MigrationReason, Rebalance
from shared.migration.holding import ORPHAN_S

BEGIN_S = 0.6
"""A migration that was asked for begins within this time, or is asked for again elsewhere."""
END_S = 45.0
"""And is over within this, whatever happens."""
DRAIN_S = 25.0
REST_S = 20.0
"""From the last stream's end until nothing is held anywhere."""
LAST_WORD_S = 1.0
"""What an instance said last is heard within so long of its end."""
NATS_PAUSE_S = 6.0
"""Between two losses of NATS: a gateway gives streams up that are without it for 15 s."""
GROWTH = {"fds": 24, "threads": 8, "tasks": 24}
"""More than this since an instance's first rest is a leak."""
MAX_TRIES = 6
"""Tries of a trial, until a migration lives long enough to meet its fault: those around it fail too."""
UNFAULTED = "(met no fault of their own)"


@dataclass(kw_only=True)
class Migration:
    trial: str
    fault: Fault
    request_id: str
    source: Instance
    destination_id: str
    hits: list[str] = field(default_factory=list)
    outcome: str = ""
    """Empty while it goes on."""
    num_stages: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_met(self) -> bool:
        """Its fault."""
        return bool(self.fault.steps) and self.fault.steps[-1].point in self.hits

    def end(self, outcome: str) -> None:
        self.outcome = outcome
        self.over.set()


@dataclass(kw_only=True)
class Result:
    seed: int
    num_migrations: int = 0
    seconds: float = 0.0
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By fault."""
    stages: Counter[int] = field(default_factory=Counter)
    streams: dict[str, int] = field(default_factory=dict)
    silences_s: dict[str, float] = field(default_factory=dict)
    """By class, the longest of a stream."""
    gateway: dict[str, int] = field(default_factory=dict)
    num_starts: int = 0
    """Starts of instances."""
    num_rests: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    """The largest growth of an instance between rests."""
    failures: list[str] = field(default_factory=list)


class Trials:
    def __init__(
        self,
        seed: int,
        *,
        num_instances: int = 3,
        num_streams: int = 18,
        num_at_once: int = 6,
        rest_every: int = 100,
        faults: str = "all",
        is_everywhere: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`faults`: that are drawn, see `draw`; `is_everywhere`: see `Cluster`."""
        self.result = Result(seed=seed)
        self.cluster = Cluster(seed, num_instances, self._on_event, is_everywhere=is_everywhere)
        self._seed = seed
        self._num_streams = num_streams
        self._num_at_once = num_at_once
        self._rest_every = rest_every
        self._faults = faults
        self._say = say
        self._migrations: dict[str, Migration] = {}
        self._began: dict[str, asyncio.Future[Migration]] = {}
        """By trial."""
        self._checks: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._sizes: dict[str, dict[str, int]] = {}
        """Sizes of incarnations at their first rest."""
        self._num_reactions = 0
        self._nats = asyncio.Lock()
        self._schedulers = asyncio.Lock()
        self._streams: Streams | None = None
        self._started_s = time.monotonic()

    async def run(self, num_migrations: int) -> Result:
        """Until so many migrations have met their faults."""
        first, started_s = 0, time.monotonic()
        try:
            await self.cluster.start()
            self._streams = Streams(self.cluster.bus, self._seed, self._fail)
            await self._streams.start()
            while (missing := num_migrations - self.result.num_migrations) > 0:
                first, begin = first + min(missing, self._rest_every), first
                await self._some(range(begin, first))
                await self._rest()
                self._say(self._progress())
        finally:
            result = self.result
            result.seconds = time.monotonic() - started_s
            result.num_starts = sum(instance.num_starts for instance in self.cluster.instances)
            if self._streams is not None:
                result.streams = dict(self._streams.counts)
                result.silences_s = self._streams.silences_s
                result.gateway = counters(self._streams.metrics)
                await self._streams.stop()
            await self.cluster.stop()
        return self.result

    def _fail(self, text: str) -> None:
        at_s = time.monotonic() - self._started_s
        self.result.failures.append(f"{at_s:.1f} s ({time.strftime('%H:%M:%S')}): {text}")
        self._say("FAILURE: " + text)

    def _progress(self) -> str:
        assert self._streams is not None
        moved = sum(of["moved"] for of in self.result.outcomes.values())
        return (
            f"{self.result.num_migrations} migrations, {moved} moved; {self._streams.counts['complete']} streams; "
            f"{len(self.result.failures)} failures"
        )

    # ------------------------------------------------------------------------------------------------- events

    def _on_event(self, instance: Instance, event: tuple[Any, ...]) -> None:
        name, *values = event
        if name == "began":
            migration_id, request_id, destination_id = values
            trial, fault = read_tag(migration_id)
            migration = Migration(
                trial=trial, fault=fault, request_id=request_id, source=instance, destination_id=destination_id
            )
            self._migrations[migration_id] = migration
            if (waiting := self._began.get(trial)) is not None and not waiting.done():
                waiting.set_result(migration)
        elif name == "hit":
            migration_id, point, action = values
            if (hit := self._migrations.get(migration_id)) is not None:
                self._on_hit(hit, instance, point, action)
        elif name == "ended":
            migration_id, is_migrated, reason, num_stages = values
            if (ended := self._migrations.pop(migration_id, None)) is not None:
                ended.num_stages = num_stages
                ended.end("moved" if is_migrated else reason)
                self._count(ended)
        elif name == "died":
            for migration_id, lost in list(self._migrations.items()):
                if lost.source is instance:
                    del self._migrations[migration_id]
                    lost.end("source died")
                    self._count(lost)
            if (check := self._checks.pop(instance.name, None)) is not None:
                check.cancel()
        elif name == "checked":
            if (check := self._checks.pop(instance.name, None)) is not None and not check.done():
                check.set_result(values[0])
        elif name == "wrong":
            self._fail(f"{instance.name}: KV differs: {values[0]}")

    def _count(self, migration: Migration) -> None:
        result, name = self.result, migration.fault.name if migration.has_met else UNFAULTED
        result.num_migrations += migration.has_met
        result.outcomes[name][migration.outcome] += 1
        if migration.outcome == "moved":
            result.stages[migration.num_stages] += 1

    def _on_hit(self, migration: Migration, instance: Instance, point: str, action: str) -> None:
        migration.hits.append(point)
        if action == NOTE:
            self._react(self._disturb(migration))
        elif action == FaultAction.STOP:
            instance.num_stops += 1
            self._react(self._wake(instance, migration.fault.then_s))

    def _react(self, work: Any) -> None:
        async def counted() -> None:
            self._num_reactions += 1
            try:
                await work
            except Exception as error:
                self._fail(f"the driver itself: {error!r}")
                raise
            finally:
                self._num_reactions -= 1

        self.cluster.tasks.start(counted())

    # ------------------------------------------------------------------------------------- what is done to them

    @staticmethod
    async def _wake(instance: Instance, after_s: float) -> None:
        await asyncio.sleep(after_s)
        instance.go_on()

    async def _stop(self, instance: Instance, seconds: float) -> None:
        instance.stop()
        await self._wake(instance, seconds)

    async def _disturb(self, migration: Migration) -> None:
        assert self._streams is not None
        then, seconds = migration.fault.then, migration.fault.then_s
        source, destination = migration.source, self.cluster[migration.destination_id]
        match then.split("_"):
            case ["cancel"]:
                self._streams.cancel(migration.request_id)
            case ["kill", whom]:
                victim = source if whom == "source" else destination
                victim.is_up, victim.is_ending = False, True
                victim.kill()
            case ["stop", "both"]:
                await asyncio.gather(self._stop(source, seconds), self._stop(destination, seconds / 2))
            case ["stop", whom]:
                await self._stop(source if whom == "source" else destination, seconds)
            case ["drain", whom]:
                await self._drain(source if whom == "source" else destination)
            case ["cut", "kv", mode]:
                cut = self.cluster.random.choice((source, destination))
                cut.tell("cut", mode)
                await asyncio.sleep(seconds)
                cut.tell("mend")
            case ["cut", "nats", whom, mode]:
                cuts = {"source": [source], "destination": [destination]}.get(whom, [source, destination])
                for instance in cuts:
                    instance.proxy.cut(mode)
                await asyncio.sleep(seconds)
                for instance in cuts:
                    instance.proxy.mend()
            case ["nats", *how]:
                await self._restart_nats(seconds, how == ["restart"])
            case ["scheduler", "stop"]:
                async with self._schedulers:
                    scheduler = self.cluster.random.choice(self.cluster.schedulers)
                    scheduler.stop()
                    await asyncio.sleep(seconds)
                    scheduler.go_on()
            case [("scheduler" | "schedulers") as which, "kill"]:
                async with self._schedulers:
                    victims = list(self.cluster.schedulers)
                    self.cluster.random.shuffle(victims)
                    killed = victims[:1] if which == "scheduler" else victims
                    await asyncio.gather(*(one.killed(seconds / 2) for one in killed))
            case _:
                raise AssertionError(then)

    async def _drain(self, instance: Instance) -> None:
        if instance.is_ending:
            return
        instance.is_up, instance.is_ending = False, True
        died = instance.died
        instance.terminate()
        try:
            async with asyncio.timeout(DRAIN_S):
                await died.wait()
        except TimeoutError:
            if not instance.is_stopped:
                self._fail(f"{instance.name} did not end within {DRAIN_S:g} s of SIGTERM")
            instance.kill()

    async def _restart_nats(self, down_s: float, keep_store: bool) -> None:
        if self._nats.locked():
            return
        async with self._nats:
            await self.cluster.restart_nats(down_s, keep_store)
            await asyncio.sleep(NATS_PAUSE_S)

    # ------------------------------------------------------------------------------------------------- trials

    async def _some(self, numbers: range) -> None:
        assert self._streams is not None
        self._streams.retarget(self._num_streams)
        left = iter(numbers)

        async def work() -> None:
            for number in left:
                await self._trial(number)

        await asyncio.gather(*(work() for _ in range(self._num_at_once)))

    async def _trial(self, number: int) -> None:
        """One migration, begun and ended, with its fault met."""
        random = Random(f"{self._seed} trial {number}")
        fault = draw(random, self._faults)
        num_tries = 0
        for attempt in itertools.count():
            migration = await self._begin(f"{number}.{attempt}", fault, random)
            if migration is None:
                continue
            await self._end(migration)
            num_tries += 1
            if migration.has_met or num_tries == MAX_TRIES:
                return

    async def _end(self, migration: Migration) -> None:
        try:
            async with asyncio.timeout(END_S):
                await migration.over.wait()
        except TimeoutError:
            self._fail(
                f"migration {migration.trial} of {migration.request_id} from {migration.source.name} to "
                f"{migration.destination_id} ({migration.fault.name}, met {migration.hits}) is not over after {END_S:g} s"
            )

    async def _begin(self, trial: str, fault: Fault, random: Random) -> Migration | None:
        source, *destinations = await self._pair(random)
        began = self._began[trial] = asyncio.get_running_loop().create_future()
        source.tell("arm", trial, fault)
        names = [one.name for one in destinations[: random.choice((1, 1, 2))]]
        topic = INSTANCE_REBALANCE.at(instance_id=source.name)
        self.cluster.bus.publish(topic, Rebalance(names, MigrationReason.BALANCE, BEGIN_S, 4))
        died = asyncio.ensure_future(source.died.wait())
        await asyncio.wait([began, died], timeout=BEGIN_S, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if not began.done():
            source.tell("disarm", trial)
            await asyncio.wait([began], timeout=0.05)
        del self._began[trial]
        return began.result() if began.done() else None

    async def _pair(self, random: Random) -> list[Instance]:
        """Instances that could serve, in the order drawn; at least two."""
        while True:
            up = [one for one in self.cluster.instances if one.is_up and not one.is_stopped and not one.is_ending]
            if len(up) >= 2 and self.cluster.is_nats_up:
                random.shuffle(up)
                return up
            await asyncio.sleep(0.02)

    # --------------------------------------------------------------------------------------------------- rest

    async def _rest(self) -> None:
        """All streams end, all is mended, and nothing may be left anywhere."""
        assert self._streams is not None
        self._streams.retarget(0)
        while self._num_reactions or self._streams.num_open:
            await asyncio.sleep(0.05)
        deadline_s = time.monotonic() + REST_S + 40
        while not all(instance.is_up for instance in self.cluster.instances):
            if time.monotonic() > deadline_s:
                down = [instance.name for instance in self.cluster.instances if not instance.is_up]
                self._fail(f"not ready in time: {down}")
                return
            await asyncio.sleep(0.05)
        await asyncio.gather(*(self._rest_of(instance) for instance in self.cluster.instances))
        await self._rest_of_scheduler()
        self.result.num_rests += 1

    async def _rest_of(self, instance: Instance) -> None:
        deadline_s = time.monotonic() + REST_S
        while True:
            state = await self._check(instance)
            if state["wrong"] or state["failure"]:
                self._fail(f"{instance.name}: {state['wrong']} {state['failure']}")
                return
            held = {name: count for name, count in state["held"].items() if count}
            if not held:
                break
            if held.keys() == {"host merged"}:
                deadline_s = max(deadline_s, self._until_let_go_s(state["silences_s"]))
            if time.monotonic() > deadline_s:
                self._fail(
                    f"{instance.name} still holds {held}; sources of copies were last heard {state['silences_s']}"
                )
                return
            await asyncio.sleep(0.1)
        first = self._sizes.setdefault(instance.incarnation, state["size"])
        for name, size in state["size"].items():
            growth = size - first[name]
            self.result.sizes[name] = max(growth, self.result.sizes.get(name, 0))
            if growth > GROWTH[name]:
                self._fail(f"{instance.name} has {size} {name}, {first[name]} at its first rest")

    def _until_let_go_s(self, silences_s: dict[str, float]) -> float:
        """Time at which copies of instances that have died are let go of: until then their requests may need them."""
        now = time.monotonic()
        orphans_s = [
            silent_s
            for source_id, silent_s in silences_s.items()
            if now - silent_s < self.cluster[source_id].died_s + LAST_WORD_S
        ]
        return now + ORPHAN_S - min(orphans_s) + LAST_WORD_S if orphans_s else 0.0

    async def _check(self, instance: Instance) -> dict[str, Any]:
        asked = self._checks[instance.name] = asyncio.get_running_loop().create_future()
        instance.tell("check")
        try:
            async with asyncio.timeout(10):
                state: dict[str, Any] = await asked
                return state
        except TimeoutError:
            return {"held": {}, "size": {}, "wrong": "does not answer the driver", "failure": ""}

    async def _rest_of_scheduler(self) -> None:
        deadline_s = time.monotonic() + REST_S
        while True:
            held = [await scheduler.held() for scheduler in self.cluster.schedulers]
            leaders = [one for one in held if one]
            if len(leaders) == 1 and not any(leaders[0].values()):
                return
            if time.monotonic() > deadline_s:
                self._fail(f"the scheduler still holds {leaders}")
                return
            await asyncio.sleep(0.2)
