"""Copies of KV at other instances, in virtual time: what is there when an instance dies is not computed again, whatever was
lost on the way, and nothing is left of it."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from shared.engine.calls import Cancel
from shared.messages.migration import KeepBackups
from shared.messages.requests import GenerationRequest, RequestClass
from shared.migration import calls
from shared.migration.backup import FULL_S, KEEP_S, LOOK_S, TABLE, Event, State
from shared.migration.commands import SendBackup
from shared.migration.holding import ORPHAN_S
from shared.policies.kv_backup import BackupSettings, backup_key, choose_holders, holder_of
from shared.simulation.fleet import CONTROL_S
from tests.shared.engine.fake_executor import request
from tests.shared.migration.test_in_virtual_time import ENDED_S, Node, World

PAGE = 4
"""Tokens of a block."""
ALL = BackupSettings("all", 20)


def make_world(
    names: str = "ab", *, num_merged: int = 120, num_host_merged: int = 60, settings: BackupSettings = ALL
) -> World:
    """Instances with host memory, each on a node of its own."""
    world = World("")
    for name in names:
        world.nodes[name] = Node(
            world, name, num_merged, 0.01, num_host_merged=num_host_merged, backup=settings, node_id=f"node {name}"
        )
    return world


def place_again(world: World, request_id: str, name: str) -> GenerationRequest:
    """Does what its gateway and the scheduler do when its instance has died."""
    stream = world.streams[request_id]
    stream.lose(stream.epoch)
    again = stream.placed_again(world.sent[request_id], 0.0, None, world.events.now)
    world.nodes[name].submit(again)
    return again


def rescued(world: World, name: str) -> Counter[str]:
    """Tokens that were kept and recomputed there."""
    return world.nodes[name].engine.counters.rescued_tokens


def check(world: World) -> None:
    """Runs to the end, where every stream is whole and nothing is left."""
    world.run(ENDED_S)
    world.check_streams()
    for node in world.living:
        node.check_empty()


def test_each_state_answers_the_events_that_can_come_in_it() -> None:
    assert {state for state, _ in TABLE} == set(State) and {event for _, event in TABLE} == set(Event)
    assert all(TABLE[state, event] is State.IDLE for state, event in TABLE if event not in (Event.ASK, Event.ROOM))


def test_after_a_death_only_what_was_not_copied_yet_is_computed_again() -> None:
    world = make_world(num_merged=200, num_host_merged=250)
    for number in range(4):
        world.send("a", request(f"r{number}", [number] * 150, 200))
    world.run(1.2)
    world.kill("a")
    world.run(1.8)
    for number in range(4):
        place_again(world, f"r{number}", "b")
    check(world)
    counts = rescued(world, "b")
    known = counts["kept"] + counts["recomputed"]
    # At most what was filled since the last look, a block that is not full, and what the last transfer had under way.
    steps_of_a_look = LOOK_S / 0.01
    assert known > 4 * 200 and counts["recomputed"] <= 4 * (2 * steps_of_a_look + PAGE)
    assert counts["recomputed"] < 0.2 * known


def test_without_copies_all_is_computed_again() -> None:
    world = make_world(settings=BackupSettings("off"))
    world.send("a", request("r", [1] * 150, 200))
    world.run(1.2)
    world.kill("a")
    world.run(1.8)
    place_again(world, "r", "b")
    check(world)
    assert not rescued(world, "b")["kept"] and rescued(world, "b")["recomputed"] > 150


@pytest.mark.parametrize(
    ("settings", "num_prompt", "kind", "is_copied"),
    [
        (BackupSettings("offline", 20), 60, RequestClass.OFFLINE, True),
        (BackupSettings("offline", 20), 60, RequestClass.ONLINE, False),
        (BackupSettings("all", 20), 60, RequestClass.ONLINE, True),
        (BackupSettings("all", 300), 60, RequestClass.ONLINE, False),
        (BackupSettings("off", 20), 60, RequestClass.OFFLINE, False),
    ],
)
def test_which_requests_are_worth_a_copy(
    settings: BackupSettings, num_prompt: int, kind: RequestClass, is_copied: bool
) -> None:
    world = make_world(settings=settings)
    world.send("a", request("r", [1] * num_prompt, 100, request_class=kind))
    world.run(0.9)
    assert bool(world.nodes["a"].moves.core.backups.holder("r")) is is_copied
    check(world)


def test_what_has_ended_or_moved_is_let_go_of_and_found_again_until_the_memory_is_needed() -> None:
    world = make_world()
    world.send("a", request("r", [1] * 150, 80))
    world.run(0.8)
    backups = world.nodes["b"].engine.memory.host.backups
    assert backups is not None and backups.num_requests == 1 and 0 < backups.used_share < 0.5
    world.run(0.8 + 1.0 + 2 * KEEP_S)
    assert not backups.num_requests, "it has ended"
    world.send("b", request("again", [1] * 150, 5))
    check(world)
    assert world.nodes["b"].engine.counters.restored_blocks["a"] >= 150 // PAGE - 1, "as a prefix cache in host memory"


def test_copies_of_a_dead_source_are_kept_for_a_while() -> None:
    world = make_world()
    world.send("a", request("r", [1] * 150, 200))
    world.run(1.0)
    world.kill("a")
    backups = world.nodes["b"].engine.memory.host.backups
    assert backups is not None
    world.run(0.5 + ORPHAN_S)
    assert backups.num_requests == 1
    world.run(1.1 + ORPHAN_S + KEEP_S)
    assert not backups.num_requests
    place_again(world, "r", "b")
    check(world)


def test_a_holder_lets_go_though_the_last_words_are_lost() -> None:
    world = make_world()
    world.send("a", request("r", [1] * 150, 80))
    world.run(0.8)
    lost: list[type] = []

    def fate(what: type) -> tuple[float, ...]:
        if what is KeepBackups and len(lost) < 2:
            lost.append(what)
            return ()
        return (CONTROL_S,)

    world.network.fate = fate
    world.run(2.0 + 3 * KEEP_S)
    assert lost and not kept_for(world.nodes["b"], "a")
    num_done = world.events.num_done
    world.run(60.0)
    assert world.events.num_done < num_done + 40, "it is not told for ever"
    check(world)


def test_a_holder_lets_go_of_what_came_after_the_request_had_ended() -> None:
    world = make_world()
    world.network.fate = lambda what: (1.9 if what is SendBackup else CONTROL_S,)
    world.send("a", request("r0", [0] * 50, 340))
    world.events.at(1.0, world.send, "a", request("r1", [1] * 50, 340))
    backups = world.nodes["a"].moves.core.backups
    world.run(2.6)  # the second transfer, which is the first of r1, has begun
    due_s = backups._keep_s
    assert backups.state is State.SENDING and due_s is not None
    for number in range(2):
        world.nodes["a"].host.apply(Cancel(f"r{number}"))
    world.run(due_s + CONTROL_S)
    assert backups.state is State.SENDING, "while it says that it wants nothing, the last blocks are on their way"
    world.run(due_s + 2 * KEEP_S)
    assert not kept_for(world.nodes["b"], "a")
    check(world)


def test_an_instance_that_ends_says_what_it_still_wants() -> None:
    world = make_world()
    for number in range(2):
        world.send("a", request(f"r{number}", [number] * 150, 80 + 160 * number))
    world.run(1.8)
    assert kept_for(world.nodes["b"], "a") == {"r0", "r1"} and len(world.nodes["a"].engine.all_held()) == 1
    world.nodes["a"].moves.tell(calls.Stop(), calls.GiveUp())
    world.kill("a")
    world.run(1.9)
    assert kept_for(world.nodes["b"], "a") == {"r1"}, "it goes on elsewhere"


def test_a_holder_without_room_takes_what_fits_and_gives_way_to_checkpoints_of_its_own() -> None:
    world = make_world(num_host_merged=12)
    for number in range(4):
        world.send("a", request(f"r{number}", [number] * 100, 100))
    world.run(1.5)
    backups, pool = world.nodes["b"].engine.memory.host.backups, world.nodes["b"].engine.memory.host.pool
    assert backups is not None and pool is not None
    assert 0.3 < backups.used_share <= 0.5, "half of host memory at most"
    backups.give_up("a", pool.num_available("a") + 10)
    assert pool.num_available("a") >= 10 and backups.used_share < 0.5
    world.nodes["b"].engine.check()
    check(world)


def test_another_holder_is_found_when_one_is_gone() -> None:
    world = make_world("abc")
    world.send("a", request("r", [1] * 150, 200))
    world.run(0.7)
    core = world.nodes["a"].moves.core
    first = core.backups.holder("r")
    assert first is not None
    world.kill(first)
    world.run(1.7)
    assert core.backups.holder("r") == ({"b", "c"} - {first}).pop()
    check(world)


def test_what_a_full_holder_takes_nothing_of_goes_to_another_at_once() -> None:
    world = make_world("abc")
    names = [name for name in (f"r{number}" for number in range(20)) if holder_of(name, ["b", "c"]) == "b"][:2]
    room = world.nodes["b"].engine.memory.host.backups
    assert room is not None
    room.max_share = 0.2
    for number, name in enumerate(names):
        world.send("a", request(name, [number] * 150, 200))
    world.run(FULL_S / 20)
    assert (kept_for(world.nodes["b"], "a"), kept_for(world.nodes["c"], "a")) == ({names[0]}, {names[1]})
    check(world)


def test_nothing_is_left_of_what_could_not_be_pinned() -> None:
    """What runs when candidates are looked for may have ended when they are pinned."""
    world = make_world()
    world.nodes["a"].engine.outgoing.pin_filled = lambda *_: None  # type: ignore[method-assign]
    world.send("a", request("r", [1] * 150, 100))
    world.run(ENDED_S)
    assert world.nodes["a"].moves.core.backups.next_wakeup() is None
    check(world)


def test_nothing_is_copied_beside_a_move() -> None:
    world = make_world("abc")
    begun: list[bool] = []
    source = world.nodes["a"].moves
    fate = world.network.fate

    def note(what: type) -> tuple[float, ...]:
        if what.__name__ == "BackUp":
            begun.append(source.core.num_migrating_out > 0)
        return fate(what)

    world.network.fate = note
    for number in range(4):
        world.send("a", request(f"r{number}", [number] * 150, 150))
    world.events.at(0.5, lambda: world.nodes["a"].rebalance("b", "c", lease_s=1.0))
    check(world)
    assert begun and not any(begun)


def test_holders_are_on_other_nodes_where_there_are_any_and_each_request_has_one_of_them() -> None:
    others = [("b", "here"), ("c", "there"), ("d", "there"), ("e", "yonder")]
    assert set(choose_holders("a", "here", others)) == {"c", "d", "e"}
    assert choose_holders("a", "here", others[:1]) == ["b"]
    many = [(f"i{number}", "there") for number in range(20)]
    holders = choose_holders("a", "here", many)
    assert len(holders) == 4 and holders == choose_holders("a", "here", reversed(many))
    shares = Counter(holder_of(f"r{number}", holders) for number in range(400))
    assert min(shares.values()) > 50 and holder_of("r", []) is None
    stays = sum(holder_of(f"r{n}", holders) == holder_of(f"r{n}", holders[1:]) for n in range(400))
    assert stays == 400 - shares[holders[0]], "only those of a holder that is gone have another"


def test_online_requests_are_copied_first_and_then_what_is_missing_most() -> None:
    online, offline = request("r1", [1], 1), request("r2", [1], 1)

    class One:
        def __init__(self, request_id: str, is_online: bool) -> None:
            self.request_id, self.is_online = request_id, is_online

    ones = [(One(offline.request_id, False), 90), (One(online.request_id, True), 2), (One("r3", True), 5)]
    assert [one.request_id for one, _ in sorted(ones, key=lambda pair: backup_key(*pair))] == ["r3", "r1", "r2"]


def kept_for(node: Node, source_id: str) -> set[str]:
    """Requests of which it keeps copies for that source."""
    backups = node.engine.memory.host.backups
    assert backups is not None
    return {*backups._of_source.get(source_id, ())}


def walk(seed: int) -> World:
    """Copies are lost, late and doubled, requests move, end and are cancelled, and an instance dies."""
    random = Random(seed)
    world = make_world("abcd", num_host_merged=random.choice((6, 30, 90)), num_merged=random.choice((40, 90)))
    events, names = world.events, list(world.nodes)
    loss, late, double = (random.random() * 0.2 for _ in range(3))

    def fate(what: type) -> tuple[float, ...]:
        luck = random.random()
        if events.now > 15.0 or luck > loss + late + double:
            return (CONTROL_S,)
        if luck < loss:
            return ()
        return (random.choice((0.05, 0.5, 4.0)),) if luck < loss + late else (CONTROL_S, random.random())

    world.network.fate = fate
    victim = random.choice(names)
    for number in range(16):
        prompt = [random.randrange(3) for _ in range(random.randrange(1, 160))]
        kind = random.choice([*RequestClass])
        sent = request(f"r{number}", prompt, random.randrange(1, 200), request_class=kind)
        events.at(random.random() * 7, world.send, random.choice(names), sent)
    for _ in range(20):
        name = random.choice(names)
        others = random.sample([other for other in names if other != name], 2)
        events.at(random.random() * 10, lambda n=name, o=others: world.nodes[n].rebalance(*o))
    for at_s in range(1, 12):
        events.at(at_s, lambda: [node.engine.check() for node in world.living])
    killed_s = 7 - random.random() * 4
    events.at(killed_s, world.kill, victim)

    def place_lost() -> None:
        """Most go to where they have copies, as the scheduler has it."""
        held = {one.request.request_id for node in world.living for one in node.engine.all_held()}
        for request_id, stream in world.streams.items():
            if stream.finish_reason is None and request_id not in held:
                holders = [node.name for node in world.living if request_id in kept_for(node, victim)]
                living = [node.name for node in world.living]
                place_again(world, request_id, random.choice(holders if holders and random.random() < 0.8 else living))

    # When all moves that were under way are over.
    events.at(killed_s + 8.0, place_lost)
    world.run(ENDED_S)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("num", [6, pytest.param(12, marks=pytest.mark.long)])
def test_every_stream_is_whole_and_nothing_is_left_whatever_happens(num: int) -> None:
    counts, num_copied = Counter[str](), 0
    for seed in range(12 - num, 12):
        try:
            world = walk(seed)
            world.check_streams()
            for node in world.living:
                node.check_empty()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_copied += sum(node.moves.num_backed_up for node in world.nodes.values())
        for node in world.living:
            counts += node.engine.counters.rescued_tokens
    assert num_copied > 500 * num / 12 and counts["kept"] > 200 * num / 12
