"""Prompts that are computed on one instance and decoded on another, in virtual time."""

from __future__ import annotations

from functools import partial

import pytest

from shared.engine.calls import Cancel
from shared.engine.driver import StepStats, Turn
from shared.engine.plan import StepResult
from shared.messages.cluster import MigrationOutcome
from shared.messages.migration import AbortReason, Commit, MigrationReason, PreAllocate, Reserved
from shared.messages.requests import GenerationRequest, TokenEntry
from shared.migration.commands import SendBlocks
from shared.migration.core import PEER_WAIT_S
from shared.migration.estimates import Next, next_of_handoff
from shared.simulation.fleet import CONTROL_S
from tests.shared.engine.fake_executor import request
from tests.shared.migration.test_in_virtual_time import BLOCK_BYTES, Node, World, moved_outcomes

STEP_S, PROMPT_TOKEN_S = 0.01, 1e-3


def make_world(names: str = "ab", num_merged: int = 120) -> World:
    """Instances whose steps take 10 ms, and a millisecond for each token of a prompt, at most 64 at once."""
    world = World("")
    for name in names:
        world.nodes[name] = Node(world, name, num_merged, STEP_S, prompt_token_s=PROMPT_TOKEN_S)
    return world


def long_request(number: int = 0, *, decoder: str = "b", num_prompt: int = 200) -> GenerationRequest:
    return request(f"r{number}", [number % 5] * num_prompt, 60, decoder=decoder)


def check(world: World) -> list[MigrationOutcome]:
    """Runs to the end, where every stream is whole and nothing is left."""
    world.run()
    world.check_streams()
    for node in world.living:
        node.check_empty()
    return moved_outcomes(world)


def test_each_chunk_is_sent_while_the_next_is_computed_and_the_first_decode_step_waits_for_the_last_alone() -> None:
    world = make_world()
    stages: list[tuple[float, PreAllocate]] = []
    world.network.fate = lambda what: (stages.append((world.events.now, what)), (CONTROL_S,))[1]
    tokens_s: list[float] = []
    hear = world.hear
    world.hear = lambda sender, entry: (entry.tokens and tokens_s.append(world.events.now), hear(sender, entry))[1]  # type: ignore[func-returns-value, method-assign, return-value]
    world.send("a", long_request(num_prompt=250))
    (outcome,) = check(world)
    assert (outcome.is_migrated, outcome.destination_id, outcome.epoch) == (True, "b", 1)
    asked_s = [at_s for at_s, what in stages if what is PreAllocate]
    assert len(asked_s) == 4 and asked_s[-1] < tokens_s[0], (
        "in chunks of 64; room for the last is there before its token"
    )
    # 64 tokens are 16 blocks; the request is committed beside them.
    last_copy_s = (16 + 2) * BLOCK_BYTES / 1e6
    assert tokens_s[1] - tokens_s[0] <= last_copy_s + 2 * STEP_S + 3 * CONTROL_S
    assert tokens_s[2] - tokens_s[1] <= 1.5 * STEP_S, "it decodes there"


def test_a_decoder_computes_prompts_as_ever_until_the_last_chunk_is_about_to_come() -> None:
    firsts_s = []
    for decoder in ("b", ""):
        world = make_world()
        world.send("b", request("beside", [1], 80))
        # Its prompt takes 0.44 s, and is announced with each of its chunks.
        world.send("a", long_request(num_prompt=384, decoder=decoder))
        world.events.at(0.1, world.send, "b", request("other", [2] * 200, 5))
        check(world)
        assert world.streams["r0"].owner == (decoder or "a")
        firsts_s.append(world.firsts_s["other"])
    apart_s, alone_s = firsts_s
    assert apart_s == pytest.approx(alone_s, abs=STEP_S)


@pytest.mark.parametrize("told_late_s", [0.0, 0.3])
def test_the_wait_that_is_measured_begins_with_the_end_of_the_prompt(told_late_s: float) -> None:
    """However late its last blocks come, and however late a step's end is told of where it is adopted."""
    world = make_world()
    world.network.fate = lambda what: (0.2,) if what is SendBlocks else (CONTROL_S,)
    tokens_s: list[float] = []
    hear = world.hear

    def heard(sender: str, entry: TokenEntry) -> None:
        if entry.request_id == "r0" and entry.tokens:
            tokens_s.append(world.events.now)
        hear(sender, entry)

    world.hear = heard  # type: ignore[method-assign]
    decoder = world.nodes["b"]

    on_result = decoder.host._driver.on_result

    def on_step(result: StepResult, now: float) -> tuple[Turn, StepStats]:
        turn, stats = on_result(result, now)
        world.events.after(told_late_s, decoder.moves.on_step, stats)
        return turn, stats

    decoder.host._driver.on_result = on_step  # type: ignore[method-assign]
    world.send("b", request("beside", [1], 300))
    world.send("a", long_request())
    world.run()
    (wait_s,) = decoder.moves.handoffs_s
    assert wait_s == pytest.approx(tokens_s[1] - tokens_s[0], abs=2 * CONTROL_S)


def test_the_source_makes_one_token_and_no_more() -> None:
    world = make_world()
    senders: list[tuple[str, int]] = []
    hear = world.hear
    world.hear = lambda sender, entry: (senders.append((sender, len(entry.tokens) // 4)), hear(sender, entry))[1]  # type: ignore[func-returns-value, method-assign, return-value]
    world.send("a", long_request())
    check(world)
    assert sum(num for sender, num in senders if sender == "a") == 1
    assert sum(num for sender, num in senders if sender == "b") == 59


def test_a_full_decoder_leaves_it_where_its_prompt_was_computed() -> None:
    world = make_world()
    world.nodes["b"] = Node(world, "b", 10, STEP_S)
    world.send("a", long_request())
    assert {outcome.reason for outcome in check(world)} == {AbortReason.REFUSED}
    assert world.streams["r0"].owner == "a"


@pytest.mark.parametrize("decoder", ["nobody", "a"])
def test_one_without_a_decoder_decodes_here_after_a_bounded_time(decoder: str) -> None:
    world = make_world("a")
    world.send("a", request("r0", [1] * 20, 60, decoder=decoder))
    (outcome,) = check(world)
    assert (outcome.destination_id, outcome.is_migrated, outcome.epoch) == (decoder, False, 0)
    most_s = PEER_WAIT_S if decoder == "nobody" else 0.0
    assert world.events.now > 0 and world.streams["r0"].owner == "a"
    assert world.firsts_s["r0"] < most_s + 0.1


def test_nothing_is_done_about_room_that_is_answered_when_all_is_over() -> None:
    """Whoever carries commands out knows the migration no more, and may still hear the answer."""
    world = make_world()
    world.network.fate = lambda what: (0.5,) if what is Reserved else (CONTROL_S,)
    core, known = world.nodes["a"].moves.core, []
    world.send("a", long_request())
    world.events.at(0.15, lambda: known.extend(core._outgoing.values()))
    world.events.at(0.2, world.nodes["a"].host.apply, Cancel("r0"))
    world.run()
    (migration,) = known
    assert migration.machine.is_over and not core.take_commands(world.events.now)
    number = migration._stages[-1].number
    migration.on_room(number, Reserved(migration.migration_id, 0, "b", b"ticket"), world.events.now)
    assert not core.take_commands(world.events.now)


@pytest.mark.parametrize("slow", [PreAllocate, Reserved, SendBlocks, Commit])
def test_one_that_waits_for_its_decoder_to_be_known_may_move_meanwhile(slow: type) -> None:
    world = make_world("abc")
    world.network.fate = lambda what: (0.4,) if what is slow else (CONTROL_S,)
    world.send("a", long_request(decoder="nobody"))
    drain = partial(world.nodes["a"].rebalance, "c", reason=MigrationReason.DRAIN, lease_s=5.0)
    world.events.at(0.3, drain)
    outcomes = check(world)
    assert [one.destination_id for one in outcomes if one.is_migrated] == ["c"]


def test_a_decoder_that_dies_under_a_prompt_does_not_end_it() -> None:
    for dies_s in (0.05, 0.15, 0.23, 0.25, 0.3):
        world = make_world("abc")
        world.send("a", long_request())
        world.events.at(dies_s, world.kill, "b")
        world.run()
        world.check_streams(may_be_lost=True)
        world.nodes["a"].check_empty()


def test_the_source_dies_under_a_prompt_and_the_decoder_keeps_nothing() -> None:
    world = make_world("ab")
    world.send("a", long_request())
    world.events.at(0.15, world.kill, "a")
    world.run()
    world.nodes["b"].check_empty()


def test_handoffs_are_not_bounded_as_other_moves_are_nor_bound_them() -> None:
    world = make_world("abc", num_merged=240)
    for number in range(8):
        world.send("a", request(f"r{number}", [number] * 8, 60, decoder="b"))
    world.send("a", request("stays", [9] * 40, 300))
    world.events.at(0.3, lambda: world.nodes["a"].rebalance("b", "c", reason=MigrationReason.BALANCE))
    outcomes = check(world)
    assert {outcome.request_id for outcome in outcomes if outcome.is_migrated} >= {f"r{number}" for number in range(8)}
    assert world.streams["stays"].owner in ("b", "c"), "with so many on their way in, another move is not refused"


def test_one_that_was_handed_over_may_move_at_once_as_one_that_came_may() -> None:
    world = make_world("abc")
    world.send("a", long_request())
    world.events.at(0.5, lambda: world.nodes["b"].rebalance("c", reason=MigrationReason.BALANCE, lease_s=5.0))
    assert [one.destination_id for one in check(world) if one.is_migrated] == ["b", "c"]


def test_a_prompt_of_which_all_but_one_token_is_cached_is_handed_over_too() -> None:
    world = make_world()
    world.send("a", request("first", [3] * 41, 2))
    world.events.at(1.0, world.send, "a", request("again", [3] * 41, 60, decoder="b"))
    check(world)
    assert world.streams["again"].owner == "b"


@pytest.mark.parametrize(
    ("num_filled", "num_chunks", "next_"),
    [
        (3, None, Next.STAGE), (0, None, Next.WAIT), (3, 2, Next.STAGE), (0, 2, Next.WAIT), (3, 1, Next.STAGE),
        (0, 1, Next.LAST), (0, 0, Next.LAST), (9, 0, Next.LAST),
    ],
)  # fmt: skip
def test_what_is_next(num_filled: int, num_chunks: int | None, next_: Next) -> None:
    assert next_of_handoff(num_filled, num_chunks) is next_
