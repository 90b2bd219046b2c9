"""The lease: never two holders at once, terms that only grow, takeover within seconds; in virtual time and on real NATS."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.bus.interface import Bus, ServiceError
from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import LEASES, TERMS
from shared.messages.requests import ErrorCode
from shared.runtime.lease import SAFETY_S, TTL_S, Lease
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer
from tests.memory_bus import MemoryHub
from tests.shared.bus_contract import eventually
from tests.virtual_time import run_virtual

TAKEOVER_S = 5.0


@dataclass
class Candidate:
    """A contender that notes what happens to it, and takes `gain_s` to come into the role."""

    bus: Bus
    name: str
    log: list[tuple[str, str, int]]
    gain_s: float = 0.0
    fail_gains: int = 0
    failure: Exception = field(default_factory=lambda: ValueError("scripted"))
    lease: Lease = field(init=False)

    def __post_init__(self) -> None:
        self.lease = Lease(self.bus, "test", self.name, self._gain, self._lose)

    async def _gain(self, term: int) -> None:
        self.log.append((self.name, "gain", term))
        if self.fail_gains > 0:
            self.fail_gains -= 1
            raise self.failure
        await asyncio.sleep(self.gain_s)

    async def _lose(self) -> None:
        self.log.append((self.name, "lose", self.lease.term))


async def watch_for_two(candidates: list[Candidate]) -> None:
    """Fails when two may act at the same time."""
    while True:
        held = [candidate for candidate in candidates if candidate.lease.is_held]
        assert len(held) <= 1, f"two holders: {[candidate.name for candidate in held]}"
        await asyncio.sleep(0.02)


class Cluster:
    """Some candidates on a memory hub, with the watch over them."""

    def __init__(self, num_candidates: int, seed: int = 0, **options: Any) -> None:
        self.hub = MemoryHub(seed)
        self.log: list[tuple[str, str, int]] = []
        self.candidates = [
            Candidate(self.hub.connect(name), name, self.log, **options) for name in "abcdef"[:num_candidates]
        ]

    async def __aenter__(self) -> Cluster:
        self.guard = asyncio.create_task(watch_for_two(self.candidates))
        for candidate in self.candidates:
            await candidate.lease.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.guard.done():
            self.guard.result()
        self.guard.cancel()
        self.hub.heal()
        await asyncio.gather(*(candidate.lease.stop() for candidate in self.candidates))

    @property
    def holder(self) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.lease.is_held), None)

    async def next_holder(self, other_than: Candidate | None = None) -> Candidate:
        async with asyncio.timeout(TAKEOVER_S):
            while self.holder in (None, other_than):
                await asyncio.sleep(0.01)
        assert self.holder is not None
        return self.holder


def test_one_of_many_gains_and_keeps_it() -> None:
    async def main() -> None:
        async with Cluster(4) as cluster:
            holder = await cluster.next_holder()
            await asyncio.sleep(600)
            assert cluster.log == [(holder.name, "gain", 1)]
            assert cluster.holder is holder

    run_virtual(main())


def test_stopping_hands_over_at_once() -> None:
    async def main() -> None:
        async with Cluster(2) as cluster:
            first = await cluster.next_holder()
            stopped_s = first.bus.now()
            await first.lease.stop()
            await first.lease.stop()
            second = await cluster.next_holder()
            assert second.bus.now() - stopped_s < 0.2
            assert cluster.log == [(first.name, "gain", 1), (first.name, "lose", 1), (second.name, "gain", 2)]

    run_virtual(main())


@pytest.mark.parametrize("fault", ["partition", "disconnect"])
def test_a_holder_that_is_cut_off_is_replaced(fault: str) -> None:
    async def main() -> None:
        async with Cluster(3) as cluster:
            first = await cluster.next_holder()
            getattr(cluster.hub, fault)(first.name)
            cut_s = first.bus.now()
            second = await cluster.next_holder(other_than=first)
            assert TTL_S - SAFETY_S - 1.5 < second.bus.now() - cut_s < TTL_S + 1.0
            assert second.lease.term == 2
            assert not first.lease.is_held
            if fault == "partition":
                # It believes itself connected, so it stepped down by its own clock before the other came.
                assert cluster.log[1:] == [(first.name, "lose", 1), (second.name, "gain", 2)]
                cluster.hub.heal()
            else:
                # Without a connection it acts for nobody; it learns of its loss when it is back.
                assert cluster.log[1:] == [(second.name, "gain", 2)]
                cluster.hub.reconnect(first.name)
                await asyncio.sleep(1)
                assert cluster.log[2:] == [(first.name, "lose", 1)]
            await asyncio.sleep(10)
            assert cluster.holder is second

    run_virtual(main())


def test_a_short_loss_of_connection_keeps_the_role() -> None:
    async def main() -> None:
        async with Cluster(2) as cluster:
            holder = await cluster.next_holder()
            cluster.hub.disconnect("a", "b")
            await asyncio.sleep(0.5)
            assert not holder.lease.is_held
            cluster.hub.reconnect("a", "b")
            await asyncio.sleep(0.5)
            assert holder.lease.is_held
            assert cluster.log == [(holder.name, "gain", 1)]

    run_virtual(main())


@pytest.mark.parametrize("downtime_s", [0.1, 2.0, 30.0])
def test_a_server_that_forgot_makes_a_new_leader(downtime_s: float) -> None:
    async def main() -> None:
        async with Cluster(3, seed=int(downtime_s)) as cluster:
            first = await cluster.next_holder()
            cluster.hub.kill()
            await asyncio.sleep(downtime_s)
            cluster.hub.start()
            await asyncio.sleep(2)
            second = await cluster.next_holder()
            assert second.lease.term == 2
            assert (first.name, "lose", 1) in cluster.log

    run_virtual(main())


def test_losing_the_role_interrupts_gaining_it() -> None:
    async def main() -> None:
        async with Cluster(1, gain_s=1000.0) as cluster:
            holder = await cluster.next_holder()
            cluster.hub.partition("a")
            await asyncio.sleep(TTL_S)
            assert cluster.log == [("a", "gain", 1), ("a", "lose", 1)]
            assert not holder.lease.is_held

    run_virtual(main())


def test_nothing_is_left_of_a_lease_that_was_stopped() -> None:
    """A process may contend for thousands, one after the other."""

    async def scenario() -> None:
        bus = MemoryHub().connect("a")
        callbacks: list[Any] = []
        register = bus.on_reconnect

        def note(callback: Any) -> Any:
            stop = register(callback)
            callbacks.append(callback)
            return lambda: (stop(), callbacks.remove(callback))

        bus.on_reconnect = note  # type: ignore[method-assign]
        lease = Candidate(bus, "a", []).lease
        await lease.start()
        assert len(callbacks) == 1
        await lease.stop()
        await lease.stop()
        assert callbacks == []

    run_virtual(scenario())


def test_a_watch_may_be_shared_by_many_leases() -> None:
    async def scenario() -> None:
        hub, log = MemoryHub(), []
        candidates = [Candidate(hub.connect(name), name, log) for name in "ab"]
        for candidate in candidates:
            shared = Lease(candidate.bus, "test", candidate.name, candidate._gain, candidate._lose, watches=False)
            candidate.lease = shared
            watch = await (await candidate.bus.key_value(LEASES)).watch(shared.on_change)
            await shared.start()
            await asyncio.sleep(0.1)
            assert watch.entries["test"].scheduler_id == "a"
        began = asyncio.get_running_loop().time()
        await candidates[0].lease.stop()
        while not candidates[1].lease.is_held:
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began < 0.3, "it was told, and did not wait for its next attempt"
        await candidates[1].lease.stop()

    run_virtual(scenario())


@pytest.mark.parametrize("failure", [ValueError("scripted"), ServiceError.of(ErrorCode.UNAVAILABLE, "no leader")])
def test_failing_to_gain_gives_the_role_back(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """What the bus does not answer is told without a traceback."""

    async def main() -> None:
        async with Cluster(1, fail_gains=2, failure=failure) as cluster:
            await asyncio.sleep(10)
            events = [event for _, event, _ in cluster.log]
            assert events == ["gain", "lose", "gain", "lose", "gain"]
            assert cluster.holder is not None and cluster.holder.lease.term == 3

    run_virtual(main())
    told = [record for record in caplog.records if "gaining it failed" in record.getMessage()]
    assert [bool(record.exc_info) for record in told] == 2 * [not isinstance(failure, ServiceError)]


Fault = tuple[str, str, float]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    faults=st.lists(
        st.tuples(
            st.sampled_from(["partition", "disconnect", "reconnect", "heal", "restart", "restart_empty"]),
            st.sampled_from("abc"),
            st.floats(0.0, 4.0),
        ),
        max_size=12,
    ),
)
def test_never_two_holders_whatever_happens(seed: int, faults: list[Fault]) -> None:
    async def main() -> None:
        async with Cluster(3, seed) as cluster:
            hub = cluster.hub
            for fault, name, pause_s in faults:
                await asyncio.sleep(pause_s)
                if fault == "heal":
                    hub.heal()
                elif fault.startswith("restart"):
                    hub.kill()
                    await asyncio.sleep(pause_s)
                    hub.start(keep_store=fault == "restart")
                else:
                    getattr(hub, fault)(name)
            hub.heal()
            hub.reconnect(*"abc")
            await asyncio.sleep(10)
            assert cluster.holder is not None
            for name in "abc":
                events = [event for who, event, _ in cluster.log if who == name]
                assert events == ["gain", "lose"] * (len(events) // 2) + ["gain"] * (len(events) % 2)
            # Only a server without its disk and a candidate that saw nothing of the last leader can repeat a term.
            if not any(fault == "restart_empty" for fault, _, _ in faults):
                terms = [term for _, event, term in cluster.log if event == "gain"]
                assert terms == sorted(set(terms))

    run_virtual(main())


# ------------------------------------------------------------------------------------------------------- real NATS

HOLDER_PROCESS = """
import asyncio, sys
from shared.bus.nats_bus import NatsBus
from shared.runtime.lease import Lease
from shared.runtime.settings import BusSettings

async def main():
    bus = await NatsBus.connect(BusSettings(nats_url=sys.argv[1]), "test", "child")
    async def gain(term): print("gain", term, flush=True)
    async def lose(): print("lose", flush=True)
    await Lease(bus, "test", "child", gain, lose).start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_process_is_replaced(nats_settings: BusSettings) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER_PROCESS, nats_settings.nats_url, stdout=asyncio.subprocess.PIPE
    )
    bus = await NatsBus.connect(nats_settings, "test", "parent")
    log: list[tuple[str, str, int]] = []
    candidate = Candidate(bus, "parent", log)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(30):
            assert await child.stdout.readline() == b"gain 1\n"
        await candidate.lease.start()
        leases = await bus.key_value(LEASES)
        for _ in range(5):
            await asyncio.sleep(0.1)
            entry = await leases.get("test")
            assert entry is not None and entry.value.scheduler_id == "child"
            assert not candidate.lease.is_held
        child.kill()
        killed_s = bus.now()
        await eventually(lambda: candidate.lease.is_held, TAKEOVER_S)
        # The child renewed until its death: nobody takes over before its lease has run out.
        assert bus.now() - killed_s > TTL_S - 1.5
        assert log == [("parent", "gain", 2)]
        await candidate.lease.stop()
        assert await leases.get("test") is None
        terms = await (await bus.key_value(TERMS)).get("test")
        assert terms is not None and terms.value.term == 2
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        await bus.close()


@pytest.mark.parametrize("keep_store", [True, False])
async def test_after_a_restart_of_nats_there_is_one_leader_again(fresh_nats: NatsServer, keep_store: bool) -> None:
    buses = [await NatsBus.connect(BusSettings(nats_url=fresh_nats.url), "test", name) for name in "ab"]
    log: list[tuple[str, str, int]] = []
    candidates = [Candidate(bus, name, log) for bus, name in zip(buses, "ab", strict=True)]
    guard = asyncio.create_task(watch_for_two(candidates))
    try:
        for candidate in candidates:
            await candidate.lease.start()
        await eventually(lambda: any(candidate.lease.is_held for candidate in candidates))
        fresh_nats.kill()
        await eventually(lambda: not any(bus.is_connected for bus in buses))
        assert not any(candidate.lease.is_held for candidate in candidates)
        fresh_nats.restart(keep_store=keep_store)
        await eventually(lambda: any(candidate.lease.is_held for candidate in candidates), 15)
        await eventually(lambda: all(bus.is_connected for bus in buses), 15)
        # The lease is in memory, so the server has forgotten it either way. The terms are on its disk; without it, they
        # go on from what the candidates have seen.
        await eventually(lambda: sorted(event for _, event, _ in log) == ["gain", "gain", "lose"])
        assert [term for _, event, term in log if event == "gain"] == [1, 2]
        assert not guard.done()
    finally:
        guard.cancel()
        for candidate in candidates:
            await candidate.lease.stop()
        for bus in buses:
            await bus.close()
