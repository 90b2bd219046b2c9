"""The cores of several instances against each other in virtual time: real engines whose tokens are hashes of their prefix,
read back through KV cells that copies really carry. Messages are lost, late and doubled, blocks stay away, instances die, or
are taken for dead while they live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import count
from random import Random

import msgspec
import pytest

from shared.engine.calls import AddModel, Cancel, SetCostModel, Submit
from shared.engine.driver import StepStats
from shared.engine.engine import Effect
from shared.engine.handover import Detached
from shared.engine.plan import ModelShape
from shared.engine.recording import Configuration
from shared.engine.requests import Ended, Output
from shared.engine.sequence import Handover
from shared.messages.cluster import InstanceInfo, LoadedModel, MigrationOutcome
from shared.messages.migration import AbortReason, Commit, MigrationReason, Rebalance
from shared.messages.requests import FinishReason, GenerationRequest, Priority, RequestClass, TokenEntry
from shared.migration import calls, recording
from shared.migration.backup import State
from shared.migration.commands import SendBackup, SendBlocks
from shared.migration.incoming import Intake
from shared.policies.kv_backup import NO_BACKUP, BackupSettings
from shared.simulation.events import Events
from shared.simulation.fleet import CONTROL_S
from shared.simulation.instance import VirtualInstance, VirtualStep
from shared.simulation.migration import Network, VirtualMigrations
from shared.streams import Outcome, StreamState
from tests.shared.costs import costs
from tests.shared.engine.fake_executor import FakeExecutor, expected_output, request

SHAPE = ModelShape("a", 4, 3, 400)
BLOCK_BYTES = 1000
ORDERS = (MigrationReason.BALANCE, MigrationReason.PROMPTS, MigrationReason.DRAIN)
"""Reasons for which a scheduler has requests given away."""
ENDED_S = 1000.0
"""Time after which nothing may be left of anything: what is remembered longest is forgotten after 600 s."""


class Node:
    """One instance."""

    def __init__(
        self,
        world: World,
        name: str,
        num_merged: int,
        step_s: float,
        token_budget: int = 64,
        prompt_token_s: float = 1e-5,
        *,
        num_host_merged: int = 0,
        backup: BackupSettings = NO_BACKUP,
        node_id: str = "node",
    ) -> None:
        configuration = Configuration(
            num_merged=num_merged, num_rows=32, ordering="fcfs", token_budget=token_budget, steps_in_flight=2,
            interruption="off", migration_cooldown_s=0.05, num_host_merged=num_host_merged,
        )  # fmt: skip
        self.world, self.name, self.node_id = world, name, node_id
        self.engine = configuration.build()
        self.executor = FakeExecutor([SHAPE])
        cost = costs(step_s, prompt_token_s, decode_s=1e-4)
        self.host = VirtualInstance(
            self.engine, world.events, lambda _: cost, lambda plan: self.executor.execute(plan).tokens,
            self._on_effects, on_copy=self.executor.copy,
            on_step=self._on_step if backup.classes != "off" else lambda _: None,
        )  # fmt: skip
        self.engine.apply(AddModel(SHAPE), 0.0)
        self.engine.apply(SetCostModel("a", cost), 0.0)
        self.intake = Intake(name)
        self.intake.models.add("a")
        self.written: list[bytes] = []
        """Its recording."""
        # By its estimates a few blocks are worth a stage.
        self.moves = VirtualMigrations(
            world.network, self.host, self.intake, lambda: world.registry, lambda: str(next(world.ids)),
            lambda _: BLOCK_BYTES, 1e6, max_migrations=2, max_stages=8, rate_share=0.5,
            write=self.written.append, backup=backup,
        )  # fmt: skip
        self.moves.on_over, self.moves.on_adopted, self.moves.on_blocks = self._over, self._adopted, self._copied
        self.moves.on_backup = self._backed_up
        self.outcomes: list[MigrationOutcome] = []
        self.num_ended = 0
        self.register()

    @property
    def info(self) -> InstanceInfo:
        served = LoadedModel(name="a", state="ready", max_model_len=400, block_size=4, blocks_per_merged=3)
        return InstanceInfo(
            instance_id=self.name, incarnation="1", node_id=self.node_id, state="ready", models=[served], num_merged=1,
            merged_bytes=1, device="cpu", kv_address=self.name,
        )  # fmt: skip

    def register(self) -> None:
        self.world.registry[self.name] = self.info
        for node in self.world.living:
            node.moves.tell(calls.OnInstance(self.name, self.info))

    def rebalance(
        self,
        *names: str,
        reason: MigrationReason = MigrationReason.BALANCE,
        lease_s: float = 0.5,
        preferred: Mapping[str, str] | None = None,
    ) -> None:
        self.moves.tell(calls.OnRebalance(Rebalance([*names], reason, lease_s, 4, dict(preferred or {}))))

    def submit(self, sent: GenerationRequest) -> None:
        assert self.host.apply(Submit(sent)) is None

    def _on_step(self, step: VirtualStep) -> None:
        self.moves.on_step(StepStats(step.plan.model, sum(step.plan.counts), step.plan.num_decodes, step.whole_s))

    def _on_effects(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Output):
                for entry in effect.entries:
                    self.world.hear(self.name, entry)
            elif isinstance(effect, Ended):
                self.num_ended += 1
        self.moves.on_effects(effects)

    def _over(self, outcome: MigrationOutcome, sent: GenerationRequest, taken: Detached | None) -> None:
        self.outcomes.append(outcome)
        self.world.check_owners(sent.request_id)

    def _adopted(self, commit: Commit, num_output: int) -> None:
        adopted = commit.request
        entry = TokenEntry(request_id=adopted.request_id, epoch=adopted.epoch, offset=num_output, tokens=b"")
        self.world.hear(self.name, entry)
        self.world.check_owners(adopted.request_id)

    def _copied(self, source: VirtualMigrations, command: SendBlocks, blocks: list[int]) -> None:
        cells = self.world.nodes[source.address].executor
        for block, other in zip(command.blocks, blocks, strict=True):
            self.executor._block("a", other)[:] = cells._block("a", block)

    def _backed_up(self, source: VirtualMigrations, command: SendBackup, blocks: list[int]) -> None:
        cells = self.world.nodes[source.address].executor
        for block, other in zip(command.blocks, blocks, strict=True):
            is_on_host = command.pool.startswith("host/")
            self.executor._host["a", other] = list(cells._host["a", block] if is_on_host else cells._block("a", block))

    def check_empty(self) -> None:
        engine, core = self.engine, self.moves.core
        engine.check()
        if (backups := engine.memory.host.backups) is not None:
            assert not backups.num_requests and not [*backups.references()]
        assert core.backups.state is State.IDLE and not core.backups.num_requests
        assert not self.moves._backups and not self.moves._expected_backups and not self.moves._prefixes
        assert not core.fetches.num_served and not core.fetches._asked and not core.fetches._arriving
        assert not engine.all_held() and engine.pool.used_merged() == 0
        assert not engine.outgoing.pinned and not [*engine.reservations]
        assert (core.num_migrating_out, core.num_migrating_in, core.incoming.num_disowned) == (0, 0, 0)
        assert not self.moves._out and not self.moves._expected and not self.moves._coming
        assert self.moves.num_transfers == self.moves.num_out == 0
        assert not self.moves._rooms and not self.moves._verdicts


class World:
    def __init__(self, names: str = "abc", num_merged: int = 40, step_s: float = 0.01, token_budget: int = 64) -> None:
        self.events = Events()
        self.network = Network(self.events)
        self.network.reach = self._reach
        self.registry: dict[str, InstanceInfo] = {}
        self.ids = count()
        self.nodes: dict[str, Node] = {}
        self.streams: dict[str, StreamState] = {}
        self.sent: dict[str, GenerationRequest] = {}
        self.firsts_s: dict[str, float] = {}
        """Time at which the first token of each came."""
        self.gaps: set[str] = set()
        self.has_ghosts = False
        """Some are taken for dead that live."""
        for name in names:
            self.nodes[name] = Node(self, name, num_merged, step_s, token_budget)

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.moves.is_dead]

    def _reach(self, name: str) -> VirtualMigrations | None:
        moves = self.nodes[name].moves
        return None if moves.is_dead else moves

    def send(self, name: str, sent: GenerationRequest) -> GenerationRequest:
        self.sent[sent.request_id] = sent
        self.streams[sent.request_id] = StreamState(sent.request_id, sent.sampling)
        self.nodes[name].submit(sent)
        return sent

    def hear(self, sender: str, entry: TokenEntry) -> None:
        outcome = self.streams[entry.request_id].accept(entry, sender)
        if entry.tokens:
            self.firsts_s.setdefault(entry.request_id, self.events.now)
        assert outcome is not Outcome.GAP, f"{sender} left tokens out of {entry.request_id}"
        if outcome is Outcome.GIVEN_UP:
            assert entry.finish_reason is FinishReason.CANCELLED, entry
            self.streams[entry.request_id].finish_reason = entry.finish_reason

    def check_owners(self, request_id: str) -> None:
        """No two run it in one epoch; a frozen one does not run. (One that was taken for dead may have handed on what its
        source then goes on with: the gateway believes who speaks first in an epoch.)"""
        if self.has_ghosts:
            return
        epochs = [
            held.request.epoch
            for node in self.living
            if (held := node.engine.held(request_id)) is not None and held.handover != Handover.FROZEN
        ]
        assert len(set(epochs)) == len(epochs), f"{request_id} runs twice in one of the epochs {epochs}"

    def kill(self, name: str) -> None:
        node = self.nodes[name]
        node.host.is_stopped = node.moves.is_dead = True
        self.events.after(0.5, self.lose, name)

    def lose(self, name: str) -> None:
        """It is taken for dead."""
        self.registry.pop(name, None)
        for node in self.living:
            if node.name != name:
                node.moves.tell(calls.OnInstance(name, None))

    def run(self, until_s: float = ENDED_S) -> None:
        self.events.run(lambda: False, until_s)

    def check_streams(self, *, may_be_lost: bool = False) -> None:
        """And that whatever happened runs again from its recordings with the same decisions."""
        for node in self.nodes.values():
            core, number = recording.replay(b"".join(node.written))
            assert core.num_migrating_out == node.moves.core.num_migrating_out
            assert number or not node.outcomes
        for request_id, sent in self.sent.items():
            known, whole = list(self.streams[request_id].tokens), expected_output(sent, 400)
            reason = self.streams[request_id].finish_reason
            is_short = reason is FinishReason.CANCELLED or (may_be_lost and reason is None)
            assert known == (whole[: len(known)] if is_short else whole), request_id
            assert is_short or reason is FinishReason.LENGTH


def moved_outcomes(world: World) -> list[MigrationOutcome]:
    return [outcome for node in world.nodes.values() for outcome in node.outcomes]


def test_a_running_request_moves_and_its_stream_goes_on() -> None:
    world = World("ab")
    world.send("a", request("r1", list(range(50)), 200))
    world.events.at(0.5, world.nodes["a"].rebalance, "b")
    world.run()
    (outcome,) = moved_outcomes(world)
    assert (outcome.is_migrated, outcome.destination_id, outcome.epoch) == (True, "b", 1)
    world.check_streams()
    assert world.streams["r1"].owner == "b" and world.nodes["b"].num_ended == 1 and not world.nodes["a"].num_ended
    for node in world.nodes.values():
        node.check_empty()


def test_each_request_goes_to_where_its_prefix_is_and_that_is_not_copied() -> None:
    world, prompts = World("abcd", num_merged=60), {"r1": list(range(50)), "r2": list(range(100, 150))}
    for holder, name in (("c", "r1"), ("d", "r2")):
        world.send(holder, request(f"{name} before", prompts[name], 2))
    for name, tokens in prompts.items():
        world.events.at(0.3, world.send, "a", request(name, tokens, 200))
    preferred = {"r1": "c", "r2": "d", "gone": "b"}
    drain = partial(world.nodes["a"].rebalance, "b", reason=MigrationReason.DRAIN, preferred=preferred)
    world.events.at(0.5, drain)
    world.run()
    assert {o.request_id: o.destination_id for o in moved_outcomes(world)} == {"r1": "c", "r2": "d"}
    assert all(outcome.is_migrated for outcome in moved_outcomes(world))
    assert world.nodes["a"].moves.num_held_blocks == 2 * (50 // 4)
    world.check_streams()


def test_a_preferred_destination_that_is_gone_or_refuses_costs_no_move() -> None:
    world = World("abc")
    world.send("a", request("r1", list(range(50)), 200))
    world.nodes["c"].intake.is_draining = True
    world.events.at(0.4, partial(world.nodes["a"].rebalance, "b", preferred={"r1": "nobody"}))
    world.run(0.9)
    assert [outcome.destination_id for outcome in moved_outcomes(world) if outcome.is_migrated] == ["b"]
    world.nodes["b"].rebalance("a", preferred={"r1": "c"})
    world.run()
    assert [(o.destination_id, o.is_migrated) for o in world.nodes["b"].outcomes] == [("c", False), ("a", True)]
    world.check_streams()


@pytest.mark.parametrize("lost", ["PreAllocate", "Reserved", "SendBlocks", "Commit", "Committed", "OwnsReply"])
def test_whatever_is_lost_once_or_always_one_has_the_request(lost: str) -> None:
    for times in (1, 10**9):
        world, left = World("ab"), count()
        world.network.fate = lambda what, n=times, c=left: () if what.__name__ == lost and next(c) < n else (CONTROL_S,)  # type: ignore[misc]
        if lost == "OwnsReply":
            fate = world.network.fate
            world.network.fate = lambda what, fate=fate: () if what is Commit else fate(what)  # type: ignore[misc]
        world.send("a", request("r1", list(range(50)), 300))
        world.events.at(0.2, world.nodes["a"].rebalance, "b")
        if times > 1:
            world.events.at(20.0, world.lose, "b")
        world.run()
        world.check_streams()
        assert moved_outcomes(world), "it was tried"
        for node in world.nodes.values():
            node.check_empty()


def test_a_commit_that_comes_after_a_no_is_refused() -> None:
    world = World("ab")
    world.network.fate = lambda what: (4.0,) if what is Commit else (CONTROL_S,)
    world.send("a", request("r1", list(range(50)), 300))
    world.events.at(0.2, world.nodes["a"].rebalance, "b")
    world.run()
    outcome = moved_outcomes(world)[0]
    assert (outcome.is_migrated, outcome.epoch, outcome.reason) == (False, 2, AbortReason.UNREACHABLE)
    world.check_streams()
    assert world.nodes["a"].num_ended == 1 and not world.nodes["b"].num_ended


def test_the_schedulers_order_and_the_instances_own_do_not_end_each_other() -> None:
    world = World("abc")
    a, core = world.nodes["a"], world.nodes["a"].moves.core
    for number in range(6):
        world.send("a", request(f"r{number}", [number] * 20, 300))
    world.events.at(0.3, lambda: a.rebalance("b", reason=MigrationReason.BALANCE, lease_s=60.0))
    world.events.at(0.4, a.moves.tell, calls.GiveAway("a"))
    world.run(0.41)
    assert core.lease is not None and set(core._leaving) == {"a"}
    a.moves.tell(calls.StopGiving("a"))
    assert core.lease is not None and core.lease.destinations == ["b"]
    a.moves.tell(calls.GiveAway("a"))
    a.rebalance()
    assert core.lease is None
    world.run(1.4)
    assert not a.engine.all_held(), "its own order went on, and to whoever serves the model"
    assert {outcome.destination_id for outcome in a.outcomes if outcome.is_migrated} == {"b", "c"}
    world.run()
    world.check_streams()


def test_destinations_are_tried_in_their_order_and_those_that_cannot_take_it_are_passed_over() -> None:
    world = World("abcd")
    world.nodes["b"].intake.models.clear()  # the registry does not know yet
    world.registry["c"] = msgspec.structs.replace(world.registry["c"], models=[])
    world.send("a", request("r1", list(range(50)), 300))
    world.events.at(0.2, world.nodes["a"].rebalance, "b", "c", "nobody", "a", "d")
    world.run()
    world.check_streams()
    assert [(one.destination_id, one.reason) for one in moved_outcomes(world)] == [("b", "refused"), ("d", "")]


def test_a_full_destination_refuses_and_is_left_alone_for_a_while() -> None:
    world = World("ab")
    world.nodes["b"] = Node(world, "b", num_merged=10, step_s=0.01)
    world.send("a", request("r1", [3] * 200, 150))
    world.events.at(0.4, lambda: world.nodes["a"].rebalance("b", lease_s=1.2))
    world.run()
    world.check_streams()
    outcomes = moved_outcomes(world)
    assert {one.reason for one in outcomes} == {"refused"} and 2 <= len(outcomes) <= 3


def test_blocks_that_the_destination_has_are_not_sent() -> None:
    world = World("ab")
    first = world.send("b", request("first", list(range(50)) * 4, 2))
    sent = world.send("a", request("r1", list(range(50)) * 4, 150))
    world.events.at(0.3, world.nodes["a"].rebalance, "b")
    world.run()
    world.check_streams()
    assert world.streams["r1"].owner == "b" and first.prompt == sent.prompt
    assert world.nodes["a"].moves.num_bytes < 45 * BLOCK_BYTES, "of 50 blocks of the prompt and those of the output"


def test_prompts_that_would_be_too_late_begin_elsewhere_until_that_is_no_sooner() -> None:
    """Ten prompts of 0.4 s come to one of two instances, each due 1.2 s after it came."""
    started: dict[bool, list[float]] = {}
    for may_move in (False, True):
        world = World("")
        for name in "ab":
            world.nodes[name] = Node(world, name, num_merged=400, step_s=0.01, prompt_token_s=2e-3)
        nodes = list(world.nodes.values())
        for number in range(10):
            world.send("a", request(f"r{number}", [number] * 200, 5, ttft_objective_s=1.2))
        for node, other in (nodes, reversed(nodes)) if may_move else ():
            order = partial(node.rebalance, other.name, reason=MigrationReason.PROMPTS, lease_s=30.0)
            world.events.at(0.05, order)
        world.run()
        world.check_streams()
        firsts_s = [world.firsts_s[f"r{number}"] for number in range(10)]
        started[may_move] = sorted(firsts_s)
        moved = [one for one in moved_outcomes(world) if one.is_migrated]
        assert len({one.request_id for one in moved}) == len(moved), "nobody moves back"
        if may_move:
            assert {one.destination_id for one in moved} == {"b"} and 4 <= len(moved) <= 5
            assert not {"r0", "r1"} & {one.request_id for one in moved}, "who is in time stays"
    assert sum(first_s <= 1.2 for first_s in started[False]) < sum(first_s <= 1.2 for first_s in started[True])
    assert started[True][-1] < 0.6 * started[False][-1]


@pytest.mark.parametrize(("reason", "most"), [(MigrationReason.BALANCE, 2), (MigrationReason.DRAIN, 4)])
def test_a_drain_moves_everything_and_more_at_once(reason: MigrationReason, most: int) -> None:
    world = World("ab", num_merged=120)
    a = world.nodes["a"]
    for number in range(8):
        kind = RequestClass.OFFLINE if number > 5 else RequestClass.ONLINE
        world.send("a", request(f"r{number}", [number] * 30, 300, request_class=kind))
    world.events.at(0.3, lambda: a.rebalance("b", reason=reason, lease_s=1.5))
    at_once = 0
    while world.events.now < 1.5:
        world.events.run(lambda at_s=world.events.now: world.events.now > at_s, 2.0)  # type: ignore[misc]
        at_once = max(at_once, a.moves.core.num_migrating_out)
    held = {one.request.request_id for one in a.engine.all_held()}
    assert at_once == most
    assert held == (set() if reason is MigrationReason.DRAIN else {"r6", "r7"})
    world.run()
    world.check_streams()


def test_a_pairing_ends_with_its_lease_or_at_once() -> None:
    world = World("ab")
    a = world.nodes["a"]
    a.rebalance("b", lease_s=0.05)
    for number in range(3):
        world.events.at(0.1, world.send, "a", request(f"r{number}", [number] * 30, 60))
    world.events.at(0.2, lambda: (a.rebalance("b", lease_s=30.0), a.rebalance()))
    world.run()
    world.check_streams()
    assert not moved_outcomes(world)


def test_a_request_goes_to_and_fro_until_its_placement_has_no_epochs_left() -> None:
    world = World("ab")
    world.send("a", request("r1", list(range(50)), 340, epoch=56))
    for here, there in (("a", "b"), ("b", "a")):
        world.nodes[here].rebalance(there, lease_s=60.0)
    world.run()
    world.check_streams()
    outcomes = moved_outcomes(world)
    assert all(outcome.is_migrated for outcome in outcomes)
    assert sorted(outcome.epoch for outcome in outcomes) == [57, 58, 59, 60, 61, 62]


def test_one_that_would_wait_there_too_stays_and_leaves_the_destination_as_it_is() -> None:
    world = World("ab", num_merged=20, token_budget=512)
    for name, where in (("long", "a"), ("other", "b")):
        world.send(where, request(name, [len(name)] * 150, 60))
    world.events.at(0.2, world.send, "a", request("waits", [9] * 150, 60))
    world.events.at(0.3, lambda: world.nodes["a"].rebalance("b", lease_s=0.1))
    world.run()
    world.check_streams()
    how = {outcome.request_id: outcome.reason for outcome in moved_outcomes(world)}
    assert how == {"waits": AbortReason.NOT_WORTH, "long": AbortReason.REFUSED}


def test_one_that_is_not_worth_its_move_does_not_stop_others() -> None:
    world = World("ab", step_s=0.001)
    world.send("a", request("ending", [7] * 150, 60))
    world.send("a", request("lasting", [9] * 20, 300, priority=Priority.HIGH))
    world.events.at(0.03, lambda: world.nodes["a"].rebalance("b", lease_s=2.0))
    world.run()
    world.check_streams()
    how = {outcome.request_id: outcome.reason for outcome in moved_outcomes(world)}
    assert how["lasting"] == "" and how["ending"] in (AbortReason.NOT_WORTH, AbortReason.ENDED)


def walk(seed: int, trouble: str) -> World:
    """A quarter of a minute in which anything may happen, then peace."""
    random = Random(seed)
    world = World(num_merged=random.choice((40, 60)), step_s=random.choice((0.005, 0.03)))
    events, names = world.events, list(world.nodes)
    loss, late, double = (random.random() * 0.15 for _ in range(3))

    def fate(what: type) -> tuple[float, ...]:
        if events.now > 15.0:
            return (CONTROL_S,)
        luck = random.random()
        if luck < loss:
            return ()
        if luck < loss + late:
            return (random.choice((0.05, 0.5, 3.0, 7.0)),)
        return (CONTROL_S, random.random()) if luck < loss + late + double else (CONTROL_S,)

    world.network.fate = fate
    for number in range(16):
        prompt = [random.randrange(5) for _ in range(random.randrange(1, 120))]
        name = random.choice(names)
        decoder = random.choice(["", "nobody", *names])
        sent = request(f"r{number}", prompt, random.randrange(1, 200), decoder=decoder)
        events.at(random.random() * 10, world.send, name, sent)
    for _ in range(60):
        name, reason = random.choice(names), random.choice(ORDERS)
        others = random.sample([other for other in names if other != name], 2)
        events.at(random.random() * 14, lambda n=name, o=others, r=reason: world.nodes[n].rebalance(*o, reason=r))
    for _ in range(3):
        name, request_id = random.choice(names), f"r{random.randrange(16)}"
        events.at(random.random() * 12, lambda n=name, r=request_id: world.nodes[n].host.apply(Cancel(r)))
    world.has_ghosts = trouble == "ghosts"
    for _ in range(4 * world.has_ghosts):
        name, at_s = random.choice(names), random.random() * 12
        events.at(at_s, lambda n=name: world.lose(n))
        events.at(
            at_s + random.random(),
            lambda n=name: world.nodes[n].moves.is_dead or world.nodes[n].register(),
        )
    if trouble == "a death":
        victim = random.choice(names)
        events.at(2 + random.random() * 8, world.kill, victim)
        # Whoever sent it something may be waiting for an answer from beyond.
        events.at(14.0, world.lose, victim)
    world.run()
    return world


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["messages", "a death", "ghosts"])
def test_one_owner_or_none_and_nothing_left_whatever_happens(trouble: str) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(6):
        try:
            world = walk(seed, trouble)
            world.check_streams(may_be_lost=trouble == "a death")
            for node in world.living:
                node.check_empty()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        outcomes.update(outcome.reason for outcome in moved_outcomes(world))
    assert outcomes[""] > 20 and len(outcomes) > 5
    assert outcomes[AbortReason.DESTINATION_LOST] or trouble == "messages"
