"""Prefixes that travel, in virtual time: fetched where they are missing, computed where they cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from shared.policies.prefix_fetch import MAX_SERVED, WAIT_S, Fetch, fetch_of, is_cheaper
from shared.simulation.fleet import CONTROL_S
from tests.shared.engine.fake_executor import request
from tests.shared.migration.test_backups import check, make_world
from tests.shared.migration.test_in_virtual_time import World

PAGE = 4
PREFIX = list(range(200))


def fetch(world: World, name: str, holder: str, request_id: str, prompt: list[int], max_tokens: int = 10) -> None:
    """Does what an instance does with a request that names who has its prefix: it is submitted when that is settled."""
    made = request(request_id, prompt, max_tokens)
    made = msgspec.structs.replace(made, prefix_holder=holder, prefix_tokens=len(prompt) // PAGE * PAGE)
    world.nodes[name].moves.fetch(made, PAGE, lambda: (world.send(name, made), None)[1])


def warm(world: World, *names: str, prompt: list[int] = PREFIX) -> None:
    """The prompt is in the caches of these when a second has passed."""
    for name in names:
        world.send(name, request(f"warm {name} {len(prompt)}", [*prompt, 999], 2))
    world.run(world.events.now + 1.0)


@pytest.mark.parametrize("where", ["device", "host"])
def test_what_another_has_is_fetched_and_not_computed(where: str) -> None:
    world = make_world()
    warm(world, "a")
    if where == "host":
        fetch(world, "b", "a", "first", [*PREFIX, 7])
        world.run(world.events.now + 1.0)
        world.nodes["b"].engine.pool.clear_cache()
    asker, holder = ("b", "a") if where == "device" else ("a", "b")
    world.nodes[asker].engine.pool.clear_cache()
    fetch(world, asker, holder, "r", [*PREFIX, 7, 8, 9])
    check(world)
    assert world.nodes[asker].moves.fetched["fetched"] == 1
    assert world.nodes[asker].engine.counters.restored_blocks["a"] >= len(PREFIX) // PAGE


def test_only_what_is_missing_is_fetched_and_nothing_where_all_is_here() -> None:
    world = make_world()
    warm(world, "a")
    warm(world, "b", prompt=PREFIX[:100])
    sent = world.nodes["a"].moves.num_bytes
    fetch(world, "b", "a", "r", [*PREFIX, 7])
    world.run(world.events.now + 1.0)
    assert world.nodes["b"].moves.fetched == {"fetched": 1}
    assert world.nodes["a"].moves.num_bytes - sent == 25 * 1000
    fetch(world, "b", "a", "again", [*PREFIX, 7])
    check(world)
    assert world.nodes["b"].moves.fetched == {"fetched": 1, "held": 1}


@pytest.mark.parametrize("trouble", ["dead", "cold", "draining", "no room", "busy"])
def test_what_cannot_be_had_is_computed_at_once(trouble: str) -> None:
    world = make_world("abc", num_host_merged=0 if trouble == "no room" else 300)
    if trouble != "cold":
        warm(world, "a")
    began_s = world.events.now
    if trouble == "dead":
        world.kill("a")
    elif trouble == "draining":
        world.nodes["a"].intake.is_draining = True
    elif trouble == "busy":
        world.network.fate = lambda what: (0.3 if what.__name__ == "SendBackup" else CONTROL_S,)
        for number in range(MAX_SERVED):
            fetch(world, "c", "a", f"other {number}", [*PREFIX, number])
        world.run(began_s := world.events.now + 0.1)
    fetch(world, "b", "a", "r", [*PREFIX, 7])
    check(world)
    assert world.nodes["b"].moves.fetched == {"late" if trouble == "dead" else "refused": 1}
    assert world.firsts_s["r"] - began_s < 10 * CONTROL_S + 8 * 0.01, "its prompt takes some steps"


@pytest.mark.parametrize("lost", ["FetchPrefix", "BackUp", "BackupRooms", "SendBackup", "PrefixSent"])
def test_whatever_is_lost_the_request_waits_for_a_while_at_most(lost: str) -> None:
    world = make_world()
    warm(world, "a")
    fate: Callable[[type], tuple[float, ...]] = lambda what: () if what.__name__ == lost else (CONTROL_S,)  # noqa: E731
    world.network.fate = fate
    began_s = world.events.now
    fetch(world, "b", "a", "r", [*PREFIX, 7])
    check(world)
    assert world.nodes["b"].moves.fetched == {"late": 1}
    assert world.firsts_s["r"] - began_s < WAIT_S + 0.2


def test_a_fetch_pays_where_its_time_is_well_below_that_of_computing() -> None:
    fetch = fetch_of("a", 2048, 0, 1e-5)
    assert fetch is not None and fetch == Fetch("a", 2048, pytest.approx(0.03048))
    assert is_cheaper(fetch, 0.5, 0.1) and not is_cheaper(fetch, 0.12, 0.1)
    assert fetch_of("a", 2048, 1900, 1e-5) is None, "too little is missing"
    assert fetch_of("a", 2048, 0, 0.0) is None, "it gives nothing"
    assert fetch_of("a", 2048, 0, 1e-3) is None, "it would take too long"


def walk(seed: int) -> World:
    """Prompts with common beginnings go anywhere, fetch from anybody, while messages are lost and an instance dies."""
    random = Random(seed)
    world = make_world("abc", num_host_merged=random.choice((4, 30)), num_merged=random.choice((60, 90)))
    names, loss = list(world.nodes), random.random() * 0.2

    def fate(what: type) -> tuple[float, ...]:
        luck = random.random()
        if world.events.now > 8.0 or luck > 2 * loss:
            return (CONTROL_S,)
        return () if luck < loss else (random.choice((0.05, 0.6)), CONTROL_S)

    world.network.fate = fate
    victim = random.choice(names)

    def begin(number: int) -> None:
        living = [node.name for node in world.living]
        beginning = [number % 3] * random.randrange(20, 150)
        fetch(world, random.choice(living), random.choice(names), f"r{number}", [*beginning, number], 20)

    for number in range(40):
        world.events.at(random.random() * 7, begin, number)
    world.events.at(7.5, world.kill, victim)
    for at_s in range(1, 12):
        world.events.at(at_s, lambda: [node.engine.check() for node in world.living])
    world.run()
    return world


@pytest.mark.slow
def test_texts_are_right_and_nothing_is_left_whatever_happens() -> None:
    num_fetched = 0
    for seed in range(10):
        world = walk(seed)
        world.check_streams(may_be_lost=True)
        for node in world.living:
            node.check_empty()
        num_fetched += sum(node.moves.fetched["fetched"] for node in world.nodes.values())
    assert num_fetched > 10
