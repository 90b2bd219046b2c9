"""Who may delay whom, and by how much, where models, classes, priorities, tenants and stages meet ("Order of authority" in
docs/design/scheduling.md). The real engine in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shared.costs.model import StepShape
from shared.engine.batch import PlannedStep
from shared.engine.calls import SetCostModel, SetObjectives
from shared.engine.favours import Favours
from shared.engine.model_queue import ONLINE_CLASSES
from shared.engine.plan import CopyKind, KvCopy
from shared.engine.sequence import PriorityClass
from shared.messages.requests import Priority
from shared.policies.silence import allowed_silence_s
from shared.policies.tenant_shares import TenantShares
from shared.policies.token_budget import StepBudget
from tests.seeds import seeds
from tests.shared.costs import INTERRUPTIBLE_7B as COST
from tests.shared.engine.authority_world import HIGH, OFFLINE, TPOT_S, TTFT_S, World

# -------------------------------------------------------------------------------------- offline work of other models


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("num_prompt", "num_output"), [(1024, 128), (64, 512)])
def test_offline_work_of_another_model_gets_what_that_of_the_same_model_does(depth, num_prompt, num_output):
    harvested = {}
    for model in "AB":
        world = World("AB", depth=depth)
        world.submit("stream", "A", 200, 4000)
        world.lines(model, 64, num_prompt, num_output)
        world.run(50.0)
        harvested[model] = world.harvested()
        gaps = world.gaps("stream", 2.0)
        assert sum(gaps) / len(gaps) <= TPOT_S
    assert max(gaps) <= TPOT_S
    assert harvested["B"] >= 0.9 * harvested["A"]


@pytest.mark.parametrize("tpot_s", [0.03, 0.05, 0.11])
def test_a_backlog_of_another_model_costs_little_more_than_its_own_steps(tpot_s):
    """There is always more to do: what is lost is that its steps read weights of their own."""
    harvested = {}
    for model in "AB":
        world = World("AB", tpot_s=tpot_s)
        world.submit("stream", "A", 200, 4000)
        world.lines(model, 300)
        world.run(20.0)
        harvested[model] = world.harvested()
    gaps = world.gaps("stream", 2.0)
    assert sum(gaps) / len(gaps) <= tpot_s
    assert harvested["B"] >= 0.75 * harvested["A"]


def test_offline_work_of_several_models_takes_turns_beside_a_stream():
    world = World("ABC")
    world.submit("stream", "A", 200, 4000)
    for model in "ABC":
        world.lines(model, 300)
    world.run(30.0)
    tokens = {
        model: sum(len(times) for name, times in world.times.items() if name.startswith(f"line-{model}"))
        for model in "ABC"
    }
    assert min(tokens.values()) > 0.25 * max(tokens.values()), tokens
    assert max(world.gaps("stream", 2.0)) <= TPOT_S


@pytest.mark.parametrize(
    "num_models", [2, 3, pytest.param(4, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long)]
)
def test_a_backlog_of_another_model_has_turns_beside_streams_of_several(num_models):
    models, harvested = "ABCDE"[:num_models], {}
    for model in (models[0], "F"):
        world = World(models + "F")
        for streaming in models:
            world.submit(f"stream{streaming}", streaming, 200, 4000)
        world.lines(model, 300)
        world.run(12.0)
        harvested[model] = world.harvested()
        for streaming in models:
            gaps = world.gaps(f"stream{streaming}", 2.0)
            assert sum(gaps) / len(gaps) <= TPOT_S
            # with five models a step that is worth reading the weights for takes more than their steps leave
            assert max(gaps) <= (TPOT_S if num_models < 5 else 1.1 * TPOT_S)
    assert harvested["F"] >= 0.75 * harvested[models[0]] > 0


@pytest.mark.parametrize("counts", [(1, 8), (2, 10), (4, 30), (1, 1, 8), (1, 2, 4, 8)])
@pytest.mark.parametrize("backlog", ["F", "A", "B"])
def test_offline_work_gets_its_part_however_unevenly_streams_are_spread(counts, backlog):
    """Those of a model with few do not lag while others run far ahead: offline work gets what the last of them leaves."""
    world = World("ABCDF")
    for model, num in zip("ABCD", counts, strict=False):
        for index in range(num):
            world.submit(f"stream{model}{index}", model, 200, 4000)
    world.lines(backlog, 200)
    world.run(8.0)
    streams = [name for name in world.sent if name.startswith("stream")]
    gaps = [gap for name in streams for gap in world.gaps(name, 3.0)]
    assert max(gaps) <= TPOT_S
    assert world.harvested() >= 8.0 * (2500 if len(counts) < 4 else 1200)


@pytest.mark.parametrize("counts", [(1, 1, 8), (4, 4, 4), (8, 1, 1)])
@pytest.mark.parametrize("high", ["A", "AB", "C"])
@pytest.mark.parametrize("backlog", ["F", "B"])
def test_no_stream_stands_still_beside_offline_work_and_high_priority(counts, high, backlog):
    """Streams of high priority run before normal ones, also after an offline step."""
    world = World("ABCF")
    for model, num in zip("ABC", counts, strict=True):
        for index in range(num):
            priority = HIGH if model in high else Priority.NORMAL
            world.submit(f"stream{model}{index}", model, 200, 4000, priority=priority)
    world.lines(backlog, 200)
    world.run(8.0)
    streams = [name for name in world.sent if name.startswith("stream")]
    assert max(gap for name in streams for gap in world.gaps(name, 3.0)) <= TPOT_S
    assert world.harvested() >= 8.0 * 2500


def test_offline_work_without_a_row_does_not_keep_others_from_their_turns():
    """Lines of A could join the steps of its stream, but B's hold all rows."""
    world = World("AB", num_rows=8)
    world.submit("stream", "A", 200, 4000)
    world.lines("B", 40, 1024, 400, 0.5)
    world.lines("A", 50, at_s=6.0)
    world.run(12.0)
    tokens = [at_s for name, times in world.times.items() if name.startswith("line-B") for at_s in times]
    before, beside = (sum(since_s <= at_s < since_s + 4.0 for at_s in tokens) for since_s in (2.0, 7.0))
    assert beside >= 0.3 * before


@pytest.mark.parametrize(
    ("models", "num_streams", "num_stages", "depth", "tpot_s", "most"),
    [
        ("A", 1, 1, 2, TPOT_S, 1.0),
        ("AB", 4, 1, 2, TPOT_S, 1.0),
        # virtual time has one device, on which the steps of stages come one after the other
        ("A", 2, 4, 4, TPOT_S, 1.5),
        pytest.param("A", 1, 1, 1, 0.03, 1.0, marks=pytest.mark.long),
        pytest.param("A", 8, 1, 2, TPOT_S, 1.0, marks=pytest.mark.long),
        # a model may have two turns before another's
        pytest.param("ABC", 9, 1, 2, TPOT_S, 1.1, marks=pytest.mark.long),
        pytest.param("AB", 3, 2, 2, TPOT_S, 1.1, marks=pytest.mark.long),
    ],
)
def test_no_stream_stands_still_beside_offline_work_of_its_model(models, num_streams, num_stages, depth, tpot_s, most):
    """`most`: gap, in objectives."""
    world = World(models, depth=depth, num_stages=num_stages, tpot_s=tpot_s)
    for index in range(num_streams):
        world.submit(f"stream{index}", models[index % len(models)], 200, 2000)
    for model in models:
        world.lines(model, 300)
    world.run(15.0)
    gaps = [gap for index in range(num_streams) for gap in world.gaps(f"stream{index}")]
    assert max(gaps) <= most * tpot_s
    assert sum(gaps) / len(gaps) <= tpot_s
    assert world.harvested() > 15.0 * 3000, "of 8,700 tokens a second without streams"


# --------------------------------------------------------------------------------------- high priority between models


@pytest.mark.parametrize("order", ["doubling_budget", "fcfs"])
def test_a_normal_request_beside_a_high_stream_of_another_model_keeps_its_objectives(order):
    world = World("AB", order=order)
    world.submit("stream", "B", 200, 600)
    world.submit("high", "A", 200, 3000, 2.0, priority=HIGH)
    world.submit("late", "B", 2000, 20, 5.0)
    world.run(30.0)
    assert world.ttft_s("late") <= TTFT_S
    assert max(world.gaps("stream")) <= TPOT_S
    # and the one of high priority has most of the turns
    gaps = world.gaps("high", 2.5)
    assert sum(gaps) / len(gaps) <= 0.02 and max(gaps) <= TPOT_S


def test_normal_requests_of_several_models_keep_theirs_beside_high_ones():
    world = World("ABCDE")
    for model in "BCDE":
        world.submit(f"stream{model}", model, 200, 500)
    world.submit("high", "A", 200, 3000, 1.0, priority=HIGH)
    for index in range(10):
        world.submit(f"high{index}", "A", 500, 50, 2.0 + index, priority=HIGH)
        world.submit(f"late{index}", "BCDE"[index % 4], 500, 50, 2.5 + index)
    world.run(30.0)
    assert max(world.ttft_s(f"late{index}") for index in range(10)) <= TTFT_S
    assert max(world.ttft_s(f"high{index}") for index in range(10)) <= TTFT_S
    for model in "BCDE":
        gaps = world.gaps(f"stream{model}", 1.5)
        assert sum(gaps) / len(gaps) <= TPOT_S


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("num_high", "num_prompt"), [(3, 1500), (3, 3000), (5, 300), (5, 1500)])
def test_a_normal_prompt_is_in_time_beside_high_streams_of_several_models(num_high, num_prompt, is_known):
    """These leave it a part of each of their objectives, if each of them runs once in that time."""
    models = "ABCDEF"[: num_high + 1]
    world = World(models, is_known=is_known)
    for index, model in enumerate(models[1:]):
        world.submit(f"high{model}", model, 200, 3000, 0.1 * index, priority=HIGH)
    world.submit("normal", "A", num_prompt, 20, 5.0)
    world.run(8.0)
    assert world.ttft_s("normal") <= TTFT_S
    for model in models[1:]:
        gaps = world.gaps(f"high{model}", 2.0)
        assert sum(gaps) / len(gaps) <= TPOT_S


def test_a_late_prompt_has_turns_beside_a_normal_stream_and_high_ones_of_other_models():
    """It has no claim any more, and the stream's model has more requests: it has its share of the turns of normal ones."""
    world = World("ABCD", tpot_s=0.5)
    for model in "AB":
        world.submit(f"high{model}", model, 200, 3000, priority=HIGH)
    for index in range(3):
        world.submit(f"stream{index}", "C", 200, 2000)
    world.events.at(2.0, lambda: world.engine.apply(SetObjectives("D", 0.01, 0.5), 2.0))
    world.submit("late", "D", 200, 20, 2.5)
    world.run(20.0)
    assert world.ttft_s("late") <= 5.0


def test_beyond_what_the_device_can_do_normal_requests_have_their_share_of_the_turns():
    """Ten streams of high priority leave others' prompts no time within objectives, yet these get on."""
    world = World("AB", tpot_s=0.014)
    for index in range(10):
        world.submit(f"high{index}", "A", 200, 4000, priority=HIGH)
    world.submit("normal", "B", 3000, 20, 1.0)
    world.run(30.0)
    assert "normal" in world.ended
    gaps = world.gaps("high0", 1.0)
    assert sum(gaps) / len(gaps) <= 0.03


# ------------------------------------------------------------------------------------------- streams between models


def test_streams_of_a_model_with_few_keep_their_objective_beside_one_with_many():
    """Both can be kept, though most turns are of the model that has most requests."""
    world = World("AB")
    for index in range(30):
        world.submit(f"many{index}", "A", 200, 500)
    for index in range(4):
        world.submit(f"few{index}", "B", 200, 500, 0.5)
    world.run(60.0)
    assert max(gap for name in world.sent for gap in world.gaps(name, 3.0)) <= TPOT_S


# --------------------------------------------------------------------------------------------- floods between models

FLOODS = {"chats": (500, 300, 0.05), "prompts": (3000, 30, 0.18)}
"""Tokens of a prompt and of an answer, and seconds between two arrivals: more than the device can do."""
FLOODED_TIMES = 1.65
"""Times that first tokens of another model may take of what they take without a flood."""


def _ask_one_at_a_time(world: World, model: str, num: int, lengths: Callable[[int], tuple[int, int]]) -> list[str]:
    """Each request follows the answer to the one before by half a second."""
    names = [f"asked{index}" for index in range(num)]

    def ask() -> None:
        index = next((index for index, name in enumerate(names) if name not in world.ended), num)
        if index < num and names[index] not in world.sent:
            world.submit(names[index], model, *lengths(index), world.events.now + 0.5)
        world.events.after(0.1, ask)

    world.events.at(8.0, ask)
    return names


@pytest.mark.parametrize(
    "flood", [pytest.param("chats", marks=pytest.mark.long), "prompts", pytest.param(None, marks=pytest.mark.long)]
)
def test_a_flood_of_one_model_hardly_delays_first_tokens_of_another(flood):
    """All requests are of one tenant. None: the flood is of prompts that fill several steps each."""
    ttfts = {}
    for is_flooded in (False, True):
        world = World("AB", max_tokens=2048)
        num_prompt, num_output, each_s = FLOODS.get(flood, (8000, 2, 0.5))
        for index in range(int(30.0 / each_s) if is_flooded else 0):
            world.submit(f"flood{index}", "A", num_prompt, num_output, each_s * index)
        names = _ask_one_at_a_time(world, "B", 9, lambda index: (300 + 397 * (index * 5 % 9), 20))
        world.run(35.0)
        assert len(names) == len([name for name in names if name in world.ended]), "each answer is complete by then"
        # the first one is a stranger's
        answered = names[1:]
        if is_flooded:
            late = sum(world.ttft_s(name) > TTFT_S for name in world.sent if name.startswith("flood"))
            assert late > 20, "it is a flood"
            for name in answered:
                gaps = world.gaps(name)
                assert sum(gaps) <= len(gaps) * TPOT_S + allowed_silence_s(TPOT_S)
        ttfts[is_flooded] = [world.ttft_s(name) for name in answered]
    assert max(ttfts[True]) <= FLOODED_TIMES * max(ttfts[False])


def test_rows_that_a_flood_of_one_model_fills_are_given_to_another():
    """Each model has its least share of the rows, as of the pool, though none ends for long."""
    world = World("AB", max_tokens=2048, num_rows=64)
    for index in range(600):
        world.submit(f"flood{index}", "A", 500, 300, 0.05 * index)
    names = _ask_one_at_a_time(world, "B", 5, lambda index: (300, 20))
    world.run(20.0)
    assert all(name in world.ended for name in names)
    assert max(map(world.ttft_s, names)) <= 0.4 * TTFT_S
    world.engine.check()


def test_a_few_requests_of_one_model_do_not_keep_another_from_its_prompts():
    """The other is asked about as much as the device can do, so that now and then a prompt of it is late."""
    mean_s = {}
    for num_few in (0, 8):
        world = World("AB", max_tokens=2048)
        most = [f"most{index}" for index in range(240)]
        for index, name in enumerate(most):
            world.submit(name, "A", 1500, 300, 0.25 * index)
        for index in range(num_few):
            world.submit(f"few{index}", "B", 300, 60, 8.0 + 7.0 * index)
        world.run(90.0)
        assert all(world.ttft_s(f"few{index}") <= 0.4 * TTFT_S for index in range(num_few))
        assert any(world.ttft_s(name) > TTFT_S for name in most)
        mean_s[num_few] = sum(map(world.ttft_s, most)) / len(most)
    # Those of the few take some 5 s of the device, and all that comes later waits as much longer.
    assert mean_s[8] <= mean_s[0] + 6.0


def test_models_that_are_asked_little_leave_time_for_the_one_that_most_ask():
    """Its requests take the longest, so that most that run are its own; those of the others have long prompts."""
    world = World("ABC", max_tokens=2048)
    names = [f"most{index}" for index in range(100)]
    for index, name in enumerate(names):
        world.submit(name, "A", 500, 300, 0.1 * index)

    def ask(asker: str, number: int) -> None:
        if not number or f"{asker}-{number - 1}" in world.ended:
            world.submit(f"{asker}-{number}", asker[0], 3500, 25, world.events.now)
            number += 1
        world.events.after(0.05, lambda: ask(asker, number))

    for asker in ("B0", "B1", "B2", "C0", "C1", "C2"):
        world.events.at(1.0, lambda asker=asker: ask(asker, 0))
    world.run(60.0)
    assert all(name in world.ended for name in names)
    assert sum(name not in names for name in world.ended) > 70
    assert sorted(map(world.ttft_s, names))[50] < TTFT_S


def test_of_two_models_one_is_favoured_while_it_had_at_most_a_quarter_of_the_time_lately():
    models = TenantShares()
    for model in "AAAAAAAB":
        models.enter(model, 1.0)
    memory: Any = SimpleNamespace(
        models=models,
        ordering=SimpleNamespace(favours_models=True),
        first_tokens=SimpleNamespace(is_one_late=lambda now: True),
    )
    favours = Favours(memory, 2)
    favours.serve("A", 3.0, 0.0)
    favours.serve("B", 0.9, 0.0)
    assert favours.models(0.0)[0] == {"B"}
    favours.serve("B", 0.2, 0.0)
    assert favours.models(0.0)[0] == set()
    favours.serve("A", 3.0, 30.0)
    assert favours.models(30.0)[0] == {"B"}, "it was served less since"


# ------------------------------------------------------------------------------------------------------- pipelines


@pytest.mark.parametrize(("num_stages", "limit_s"), [(1, 0.5), (2, 0.5), (4, 0.5)])
@pytest.mark.parametrize("num_prompt", [300, 4096])
def test_an_online_request_waits_little_for_offline_steps_whatever_the_stages(num_stages, limit_s, num_prompt):
    world = World("A", depth=max(2, num_stages), num_stages=num_stages)
    world.lines("A", 200, num_prompt, 64, at_s=0.0)
    for index in range(12):
        world.submit(f"online{index}", "A", 64, 8, 2.0 + 0.87 * index)
    world.run(15.0)
    assert max(world.ttft_s(f"online{index}") for index in range(12)) <= limit_s


def test_offline_work_gets_on_where_a_step_takes_longer_than_it_should():
    """One token takes longer than what all steps in flight may take."""
    slow = msgspec.structs.replace(COST, fixed_s=0.5)
    world = World("A", depth=4, num_stages=4)
    world.engine.apply(SetCostModel("A", slow), 0.0)
    world.engine.apply(SetObjectives("A", 0.5, 0.05), 0.0)
    rng = random.Random(1)
    for index in range(20):
        world.submit(f"line{index}", "A", rng.randint(1, 3000), rng.randint(1, 50), request_class=OFFLINE)
    world.run(500.0)
    assert len(world.ended) == 20


# -------------------------------------------------------------------------------------------------- promises of room


def _room(world: World, model: str) -> int:
    loads = {load.model: load for load in world.engine.load(world.events.now).models}
    return loads[model].offline_room_tokens


def test_room_is_told_for_a_model_whose_offline_work_has_turns():
    world = World("AB")
    world.submit("stream", "A", 200, 4000)
    world.run(1.0)
    assert 0 < _room(world, "B") <= 8192
    world.lines("B", 7)
    world.run(3.0)
    assert world.harvested() > 0 and _room(world, "B") > 0


def _saturated(order: str = "doubling_budget") -> World:
    """Streams whose steps take all the time that their objective allows."""
    world = World("AB", tpot_s=0.013, order=order)
    for index in range(16):
        world.submit(f"stream{index}", "A", 200, 3000)
    return world


def test_no_room_is_told_where_online_work_leaves_no_turn():
    world = _saturated()
    world.run(3.0)
    assert _room(world, "A") == _room(world, "B") == 0
    world.run(200.0)
    assert len(world.ended) == 16 and _room(world, "A") > 0 and _room(world, "B") > 0


@pytest.mark.parametrize("model", ["A", "B"])
def test_offline_requests_without_a_turn_leave_to_be_placed_again(model):
    world = _saturated()
    world.lines(model, 5)
    world.run(3.5)
    assert _room(world, model) == 0 and world.engine.num_held(model) >= 5
    world.run(12.0)
    given_up = [end for name, end in world.ended.items() if name.startswith("line")]
    assert len(given_up) == 5 and all(end.is_given_up and end.num_output_tokens == 0 for end in given_up)
    assert world.engine.counters.unserved[model] == 5


def test_offline_requests_stay_while_their_model_has_turns():
    world = World("AB")
    world.submit("stream", "A", 200, 4000)
    world.lines("B", 400)
    world.run(40.0)
    assert not world.engine.counters.unserved
    assert not any(end.is_given_up for end in world.ended.values())


# ----------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("is_known", [True, False])
def test_copies_beside_steps_are_bounded_in_time(is_known):
    """Also where the time of a block is only learnt from the copies."""
    world = World("A", depth=1, num_merged=600, num_host_merged=2000, max_tokens=2048, is_known=is_known)
    copies: dict[CopyKind, list[int]] = {CopyKind.CHECKPOINT: [], CopyKind.RESTORE: []}
    start = world.instance._start_copies

    def start_copies(started: list[KvCopy]) -> None:
        for copy in started:
            copies[copy.kind].append(len(copy.device_blocks))
        start(started)

    world.instance._start_copies = start_copies  # type: ignore[method-assign]
    for index in range(24):
        world.submit(f"line{index}", "A", 900, 300, request_class=OFFLINE)
    for index in range(30):
        world.submit(f"online{index}", "A", 1500, 60, 10.0 + 0.7 * index)
    world.run(60.0)
    longest_s = max(step.whole_s for step in world.steps)
    for kind, blocks in copies.items():
        assert len(blocks) > 50, kind
        assert max(blocks) * COST.restore_block_s <= 0.5 * longest_s + COST.restore_block_s


def test_a_sequence_without_room_in_host_memory_does_not_keep_longer_ones_from_it():
    """Host memory is full of what is worth more than the likeliest victim, and less than the last one."""
    world = World("A", depth=1, num_merged=250, num_host_merged=40)
    for name, num_prompt in (("short", 300), ("long", 2000), ("longest", 3000)):
        world.submit(name, "A", num_prompt, 3000, request_class=OFFLINE)
    world.run(8.0)
    running = world.engine.memory.queues["A"].running[PriorityClass.OFFLINE].values()
    saved = {sequence.request.request_id: sequence.num_checkpointed_blocks for sequence in running}
    assert saved["longest"] > saved["short"] == 0


# ----------------------------------------------------------------------------------------------------------- memory


def _behind_a_long_head(*, with_small: bool) -> World:
    """A's head waits for the end of a long stream; B has more than its least share, and blocks are free that do not help
    the head."""
    world = World("AB", num_merged=450)
    world.submit("long", "A", 8000, 1000)
    for index in range(2):
        world.submit(f"b{index}", "B", 1000, 3000, 0.5)
    world.submit("head", "A", 6000, 10, 1.6)
    for index in range(20 * with_small):
        world.submit(f"small{index}", "B", 64, 20, 3.0 + 0.4 * index)
    world.run(100.0)
    return world


def test_a_head_without_room_does_not_shut_out_who_would_not_delay_it():
    alone, world = _behind_a_long_head(with_small=False), _behind_a_long_head(with_small=True)
    assert alone.ttft_s("head") > 10.0, "it waits for memory"
    assert max(world.ttft_s(f"small{index}") for index in range(20)) <= TTFT_S
    assert world.ttft_s("head") <= alone.ttft_s("head") + 1.0 + 20 * 20 * COST.predict(StepShape(0, 0.0, 20, 2000))


@pytest.mark.long
def test_a_head_without_room_is_not_delayed_by_many_small_ones():
    """Ten streams of A are to end before its head fits; small requests of B that come all the time may not take what they
    leave."""
    world = World("AB", num_merged=450)
    for index in range(10):
        world.submit(f"a{index}", "A", 1000, 200 + 100 * index)
    for index in range(2):
        world.submit(f"b{index}", "B", 1000, 3000)
    world.submit("head", "A", 9000, 10, 2.0)
    for index in range(400):
        world.submit(f"small{index}", "B", 64, 200, 2.5 + 0.1 * index)
    world.run(200.0)
    assert len(world.ended) == 413
    last_of_a = max(world.times[f"a{index}"][-1] for index in range(10))
    assert world.times["head"][0] <= last_of_a + TTFT_S


# -------------------------------------------------------------------------------------------------------- properties


def _tenants(rng: random.Random) -> Callable[[], dict[str, Any]]:
    """One to four with weights, of which one is drawn at each call."""
    weights = {f"tenant{index}": rng.choice([1.0, 1.0, 2.0, 4.0]) for index in range(rng.randint(1, 4))}

    def draw() -> dict[str, Any]:
        tenant = rng.choice(list(weights))
        return {"tenant": tenant, "weight": weights[tenant]}

    return draw


def _ask(
    world: World,
    rng: random.Random,
    models: str,
    load: float,
    tenant_of_next: Callable[[], dict[str, Any]],
    *,
    seconds: float,
    most_lines: int,
) -> None:
    """Online requests for so long, and lines that come in the first half of it. `load`: of the device's time, that online
    requests take if each is served alone, about."""
    at_s, number = 0.0, 0
    while at_s < seconds:
        num_prompt, num_output = rng.randint(20, 1500), rng.randint(2, 200)
        priority = HIGH if rng.random() < 0.3 else Priority.NORMAL
        model = rng.choice(models)
        world.submit(f"online{number}", model, num_prompt, num_output, at_s, priority=priority, **tenant_of_next())
        # a step of one sequence is shared by some others, and tokens of a prompt by none
        at_s += rng.expovariate(load / (num_prompt * COST.prefill_token_s + num_output * COST.fixed_s / 4))
        number += 1
    for model in models:
        if rng.random() < 0.8:
            lengths = (rng.randint(1, most_lines), rng.randint(16, 3000), rng.randint(1, 100))
            world.lines(model, *lengths, rng.uniform(0.0, seconds / 2), fields=tenant_of_next)


def _mixed(seed: int, load: float) -> World:
    """Random models, classes, priorities, lengths, objectives, tenants, stages and pools. `load`: see `_ask`."""
    rng = random.Random(seed)
    tenant_of_next = _tenants(random.Random(-seed - 1))
    num_stages = rng.choice([1, 1, 2, 4])
    models = "ABCD"[: rng.randint(1, 4)]
    world = World(
        models,
        depth=max(num_stages, rng.randint(1, 2)),
        num_stages=num_stages,
        num_merged=rng.choice([3000, 20_000]),
        num_host_merged=rng.choice([0, 2000]),
        max_tokens=rng.choice([512, 2048, 8192]),
        is_known=rng.random() < 0.7,
        tpot_s=rng.uniform(0.11, 0.2),
    )
    _ask(world, rng, models, load, tenant_of_next, seconds=20.0, most_lines=80)
    return world


def _flooded(seed: int) -> World:
    """Some tenants that ask one request at a time, of random models and priorities, and one that asks three times as much as
    the device can do, of one model or of all: a flood from 5 to 13 s."""
    rng = random.Random(seed)
    num_stages = rng.choice([1, 1, 1, 2, 4])
    models = "ABCD"[: rng.randint(1, 4)]
    world = World(
        models,
        depth=max(num_stages, rng.randint(1, 2)),
        num_stages=num_stages,
        num_merged=rng.choice([1500, 5000, 20_000]),
        num_rows=rng.choice([32, 256]),
        num_host_merged=rng.choice([0, 2000]),
        max_tokens=rng.choice([512, 2048, 8192]),
        is_known=rng.random() < 0.7,
        tpot_s=rng.uniform(0.11, 0.2),
    )
    for index in range(rng.randint(1, 3)):
        weight, at_s, number = rng.choice([1.0, 1.0, 2.0, 4.0]), rng.uniform(0.0, 12.0), 0
        while at_s < 20.0:
            lengths = rng.randint(20, 1500), rng.randint(2, 60)
            priority = HIGH if rng.random() < 0.3 else Priority.NORMAL
            world.submit(
                f"asker{index}-{number}",
                rng.choice(models),
                *lengths,
                at_s,
                priority=priority,
                tenant=f"asker{index}",
                weight=weight,
            )
            at_s += lengths[0] * COST.prefill_token_s + lengths[1] * 0.03 + rng.expovariate(0.5)
            number += 1
    flooded, at_s, number = rng.choice([models, rng.choice(models)]), 5.0, 0
    most_prompt, most_output, batch = rng.choice([(500, 100, 16), (3000, 40, 16), (100, 600, 64)])
    while at_s < 13.0:
        num_prompt, num_output = rng.randint(20, most_prompt), rng.randint(2, most_output)
        world.submit(f"flood{number}", rng.choice(flooded), num_prompt, num_output, at_s, tenant="flood")
        at_s += rng.expovariate(3.0 / (num_prompt * COST.prefill_token_s + num_output * COST.fixed_s / batch))
        number += 1
    for model in models:
        if rng.random() < 0.8:
            world.lines(model, rng.randint(1, 80), rng.randint(16, 3000), rng.randint(1, 100), rng.uniform(0.0, 10.0))
    return world


def _idle_s(world: World) -> float:
    """The time that no step ran while requests were held."""
    held = sorted(
        [(at_s, 1) for name, at_s in world.sent.items()] + [(end.ended_s, -1) for end in world.ended.values()]
    )
    busy = sorted((step.start_s, step.end_s) for step in world.steps)
    spans, num, since_s = [], 0, 0.0
    for at_s, change in held:
        if num == 0 and change > 0:
            since_s = at_s
        num += change
        if num == 0:
            spans.append((since_s, at_s))
    total_s = sum(end_s - start_s for start_s, end_s in spans)
    return total_s - sum(end_s - start_s for start_s, end_s in busy)


def _tight(seed: int, load: float) -> World:
    """Several stages, tight objectives that differ between models, tenants, pools of which one request takes a fifth, and
    few rows."""
    rng = random.Random(seed)
    tenant_of_next = _tenants(random.Random(-seed - 1))
    num_stages = rng.choice([1, 1, 1, 2, 4])
    models = "ABCD"[: rng.randint(1, 4)]
    world = World(
        models,
        depth=max(num_stages, rng.randint(1, 2)),
        num_stages=num_stages,
        num_merged=rng.choice([250, 600, 3000, 20_000]),
        num_host_merged=rng.choice([0, 2000]),
        num_rows=rng.choice([8, 32, 256]),
        max_tokens=rng.choice([512, 2048, 8192]),
        is_known=rng.random() < 0.7,
    )
    for model in models:
        tpot_s = rng.uniform(*rng.choice([(0.02, 0.05), (0.05, 0.11), (0.11, 0.2)]))
        world.engine.apply(SetObjectives(model, rng.choice([0.5, 1.5, 3.0]), tpot_s), 0.0)
    _ask(world, rng, models, load, tenant_of_next, seconds=10.0, most_lines=40)
    return world


LEAST_LEFT = 8
"""Tokens of a prompt: a step with room for fewer is full."""


def _watch_left_out(world: World) -> list[str]:
    """Who could have joined a step of its model and did not: appended to while the world runs. Left aside are the steps of
    favoured tenants' prompts, which others do not join, and decodes on pipelines, which share them out."""
    planner, memory, left_out = world.engine.planner, world.engine.memory, list[str]()
    plan = planner.plan

    def planned(*arguments: Any, **options: Any) -> PlannedStep | None:
        step = plan(*arguments, **options)
        if step is not None and (cost := memory.queues[step.plan.model].cost_model) is not None:
            limits = planner.leaders.last_limits
            budget = StepBudget(
                limits._replace(
                    max_tokens=limits.max_tokens - step.plan.num_tokens,
                    limit_s=min(limits.limit_s, planner.last_limit_s),
                    offline_limit_s=math.inf,
                ),
                cost,
            )
            budget.shape, budget.used_s = step.plan.shape, cost.predict(step.plan.shape)
            left_out.extend(f"{name} at {world.events.now:.3f}" for name in _left_out(step, budget))
        return step

    def _left_out(step: PlannedStep, budget: StepBudget) -> Iterator[str]:
        queue, favoured = memory.queues[step.plan.model], planner._favours.favoured()
        sampled = {one.number: samples for one, samples in zip(step.sequences, step.plan.samples, strict=True)}
        if budget.tokens_left < 1 or any(one.tenant in favoured for one in step.sequences):
            return
        for priority_class in ONLINE_CLASSES if step.sequences[-1].is_online else PriorityClass:
            if any(planner._favours.prompts(queue, priority_class)):
                continue
            for one in queue.running[priority_class].values():
                missing = one.total - one.num_computed
                if sampled.get(one.number, False) or one.total >= one.max_total or missing < 1:
                    continue
                is_shared_out = planner._num_stages > 1
                if one.number in sampled or (missing > 1 and not (is_shared_out and one.in_flight)):
                    if budget.fits_prefill(missing, one.num_computed) >= min(missing, LEAST_LEFT):
                        yield f"prompt of {one.request.request_id}"
                elif missing == 1 and one.num_computed < one.capacity and not is_shared_out:
                    # decodes are added in order until one does not fit, be it a longer one than this
                    longest = max(other.num_computed for other in queue.running[priority_class].values())
                    fits = one.is_online or budget.fits_decodes([longest]) > 0
                    yield from [f"token of {one.request.request_id}"] * fits
            waiting = queue.waiting[priority_class]
            if not waiting or budget.fits_prefill(LEAST_LEFT, 0) < LEAST_LEFT:
                continue
            needed, is_stuck = memory.num_wanted_blocks(waiting[0]), memory.stuck is not None
            has_room = memory.num_free_rows > 0 and memory.pool.num_available(queue.name) >= needed
            may_join = waiting[0].is_online or not planner._holds_offline
            if has_room and may_join and not is_stuck and memory.may_hold(queue.name, needed, priority_class):
                yield f"prompt of {waiting[0].request.request_id}, which waits"

    planner.plan = planned  # type: ignore[method-assign]
    return left_out


@pytest.mark.parametrize("seed", seeds(60, normally=2))
def test_no_step_is_idle_or_partly_filled_while_work_fits(seed):
    world = _tight(seed, load=0.35)
    left_out = _watch_left_out(world)
    world.run(1500.0)
    assert set(world.ended) == set(world.sent)
    assert _idle_s(world) <= 0.2
    assert not left_out


# 111: a prompt of high priority between a stream of high priority and normal streams, each of another model
@pytest.mark.parametrize("seed", [*seeds(10, normally=2), 111])
def test_at_a_load_that_fits_everybody_has_what_was_promised(seed):
    world = _mixed(seed, load=0.35)
    num_stages = world.engine.planner._num_stages
    world.run(1000.0)
    assert set(world.ended) == set(world.sent), "all end"
    if num_stages == 1:  # virtual time has one device, on which the steps of stages come one after the other
        assert not any(end.is_given_up for end in world.ended.values())
    assert _idle_s(world) <= 0.2, "the device is not idle while anybody waits"
    online = [name for name in world.sent if name.startswith("online")]
    assert max(map(world.ttft_s, online)) <= TTFT_S
    assert max(max(world.gaps(name), default=0.0) for name in online) <= 0.5
    if num_stages == 1:
        assert all(world.ended[name].objectives_met()[1] is not False for name in online)


@pytest.mark.parametrize("seed", seeds(6, normally=2))
def test_beyond_what_fits_all_end_and_nobody_waits_without_bound(seed):
    world = _mixed(seed, load=2.0)
    world.run(2000.0)
    assert set(world.ended) == set(world.sent)
    assert _idle_s(world) <= 0.2
    for name, end in world.ended.items():
        assert end.num_output_tokens > 0 or (end.is_given_up and name.startswith("line"))
    for times in world.times.values():
        assert max((b - a for a, b in pairwise(times)), default=0.0) < 60.0


@pytest.mark.parametrize("seed", seeds(8, normally=2))
def test_who_asks_little_keeps_its_objectives_beside_a_tenant_that_floods(seed):
    """Whatever model the flood is of, and however many."""
    world = _flooded(seed)
    num_stages, tpot_s = world.engine.planner._num_stages, world.engine._objectives[1]
    world.run(2000.0)
    assert set(world.ended) == set(world.sent)
    assert _idle_s(world) <= 0.2
    flood = [name for name in world.sent if name.startswith("flood")]
    assert sum(world.ttft_s(name) > TTFT_S for name in flood) > 20, "it is a flood"
    askers = [name for name in world.sent if name.startswith("asker")]
    assert max(map(world.ttft_s, askers)) <= (TTFT_S if num_stages == 1 else 2 * TTFT_S)
    if num_stages == 1:  # virtual time has one device, on which the steps of stages come one after the other
        for name in askers:
            # one gap may be as long as any; else the pace is that of the objective
            assert max(world.gaps(name), default=0.0) <= allowed_silence_s(tpot_s)
            assert sum(world.gaps(name)) <= len(world.gaps(name)) * tpot_s + allowed_silence_s(tpot_s)


@pytest.mark.parametrize("num_objectives", [1, 3])
def test_whether_a_first_token_is_late_is_known_as_if_all_sequences_were_asked(num_objectives):
    world, rng = World("AB", num_merged=4000), random.Random(5)
    for index in range(150):
        world.submit(f"one{index}", rng.choice("AB"), rng.randrange(10, 3000), rng.randrange(1, 20), 0.02 * index)
    seen = set()

    def look() -> None:
        memory, now = world.engine.memory, world.events.now
        lacking = [one for one in world.engine.all_held() if one.first_token_s is None]
        for ahead_s in (-1.0, 0.0, 1.0, 5.0)[:num_objectives]:
            is_late = any(one.ttft_due_s < now + ahead_s for one in lacking)
            assert memory.first_tokens.is_one_late(now + ahead_s) is is_late
            seen.add(is_late)
        world.events.after(0.07, look)

    world.events.at(0.01, look)
    world.run(40.0)
    assert seen == {False, True} and not world.engine.all_held()
