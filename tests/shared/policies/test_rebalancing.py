"""Who is paired with whom, what each move does to the cluster, and that nothing moves for ever."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.cluster import NextMove
from shared.messages.migration import AbortReason, MigrationReason
from shared.policies.rebalancing import (
    BACKOFF_S,
    BURST_S,
    MAX_BACKOFF_S,
    MAX_CHECKED,
    MAX_LOOKED,
    MAX_LOOKS,
    MAX_SLICE,
    MOST_PROMPTS_S,
    Destination,
    InstanceView,
    Pair,
    Rebalancer,
    is_as_cheap_there,
    is_memory_bound,
    least_left,
    next_slice,
)
from shared.policies.token_cost import Resident

LOW, HIGH = 64.0, 256.0
M = frozenset({"m"})
STEP_S = (0.02, 0.0)
"""Decode cost."""


@dataclass
class Instance:
    """A KV pool with requests in it, by their tokens; those that wait come first and only their first one counts."""

    name: str
    total: int = 8000
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    models: frozenset[str] = M
    is_draining: bool = False
    can_take: bool = True
    prompts_s: float = 0.0
    num_high: int = 0
    step_s: tuple[float, float] = STEP_S
    others: tuple[Resident, ...] = ()
    """Residents of other models than "m", which is what runs."""
    late_s: float = 0.0
    """Time at which its late prompt is begun."""

    def usage(self) -> float:
        return sum(self.running) + (self.waiting[0] if self.waiting else 0)

    def view(self) -> InstanceView:
        is_idle = not self.running and not self.waiting
        freeness = math.inf if is_idle else (self.total - self.usage()) / max(1, len(self.running))
        return InstanceView(
            instance_id=self.name,
            freeness=freeness,
            num_running=len(self.running),
            num_counted=len(self.running) + bool(self.waiting),
            total_tokens=self.total,
            models=self.models,
            leaving=self.models if self.is_draining else frozenset(),
            can_give=not is_idle,
            can_take=self.can_take and not self.is_draining,
            next_moves=(NextMove("m", min(self.running)),) if self.running else (),
            running_freeness=self.running_freeness(),
            prompts_s=self.prompts_s,
            num_high=self.num_high,
            residents=[("m", len(self.running), self.step_s), *self.others],
            late_move=NextMove("m", 16) if self.late_s else None,
            late_starts_s=self.late_s,
        )

    def running_freeness(self) -> float:
        return (self.total - sum(self.running)) / max(1, len(self.running)) if self.running else math.inf

    def admit(self) -> None:
        while self.waiting and self.waiting[0] <= self.total - sum(self.running):
            self.running.append(self.waiting.pop(0))


class Cluster:
    def __init__(self, *instances: Instance, per_s: float = 1e6, max_in: int = 1) -> None:
        self.instances = {instance.name: instance for instance in instances}
        self.policy = Rebalancer(LOW, HIGH, per_s, max_in=max_in)
        self.now = 0.0
        self.begun: list[Pair] = []

    def step(self, seconds: float = 0.1) -> list[Pair]:
        self.now += seconds
        for instance in self.instances.values():
            view = instance.view()
            self.policy.touch(view.instance_id, view.freeness, view.late_starts_s)
            if view.leaving:
                self.policy.drain(view.instance_id)
        changes = self.policy.step(self.now, self.view, self.destinations_above)
        self.begun += changes.begun
        return changes.begun

    def view(self, name: str) -> InstanceView | None:
        return self.instances[name].view() if name in self.instances else None

    def destinations_above(self, freeness: float) -> list[Destination]:
        views = [instance.view() for instance in self.instances.values()]
        able = [view for view in views if view.can_take and view.freeness >= freeness]
        return [Destination(view.instance_id, view.freeness, view.models) for view in able]

    def pairs(self) -> dict[str, tuple[str, ...]]:
        return {pair.source: pair.destinations for pair in self.policy.pairs.values()}

    def move(self) -> int:
        """Each source gives its smallest request to its first destination that has room for it."""
        moved = 0
        for pair in list(self.policy.pairs.values()):
            source = self.instances[pair.source]
            for destination in (self.instances[name] for name in pair.destinations):
                mine = source.running or source.waiting
                if mine and min(mine) <= destination.total - sum(destination.running):
                    size = min(mine)
                    mine.remove(size)
                    destination.running.append(size)
                    moved += 1
                    break
            source.admit()
        return moved


def spread(name: str, *sizes: int, **options: object) -> Instance:
    return Instance(name, running=list(sizes), **options)  # type: ignore[arg-type]


FULL = [400] * 19
"""400 of 8,000 tokens are left: 21 steps."""
HALF = [400] * 10
"""400 steps."""


def test_the_least_free_gives_to_the_freest_one_to_one() -> None:
    cluster = Cluster(
        spread("full", *FULL),
        spread("fuller", *FULL, 200),
        spread("half", *HALF),
        spread("idle"),
        spread("between", *[400] * 16),
    )
    cluster.step()
    assert cluster.pairs() == {"fuller": ("idle",), "full": ("half",)}
    assert [pair.reason for pair in cluster.begun] == [MigrationReason.BALANCE] * 2


def test_two_may_come_in_at_once_if_that_is_set() -> None:
    cluster = Cluster(spread("a", *FULL), spread("b", *FULL), spread("idle"), max_in=2)
    cluster.step()
    assert cluster.pairs() == {"a": ("idle",), "b": ("idle",)}


def test_a_pair_needs_a_model_in_common_and_a_taker_that_can_take() -> None:
    cluster = Cluster(spread("full", *FULL), spread("other", models=frozenset({"n"})), spread("mute", can_take=False))
    cluster.step()
    assert cluster.pairs() == {}
    cluster.instances["both"] = spread("both", *HALF, models=frozenset({"m", "n"}))
    cluster.step()
    assert cluster.pairs() == {"full": ("both",)}


def test_a_request_moves_to_where_its_model_has_others_already_or_stays() -> None:
    """Alone of its model it would wait for another's steps, and have that one's requests wait for its own."""

    def pairs(num_high: int = 0, waiting: tuple[int, ...] = ()) -> dict[str, tuple[str, ...]]:
        full = spread("full", *FULL, others=(("n", 30, STEP_S),), num_high=num_high, waiting=[*waiting])
        cluster = Cluster(full, spread("alone", others=(("n", 8, STEP_S),)), half)
        cluster.step()
        return cluster.pairs()

    half = spread("half", *HALF)
    assert pairs() == {"full": ("half",)}, "not the freest"
    half.others = (("n", 60, STEP_S),)
    assert pairs() == {}
    assert pairs(num_high=1) == {"full": ("half",)}, "where it costs fewer turns"
    assert pairs(waiting=(500,)) == {"full": ("half",)}
    half.others = (("n", 85, STEP_S),)
    assert pairs(num_high=1) == {"full": ("alone",)}, "the freest, of two that cost as much"


def test_what_is_not_known_of_turns_is_no_reason_for_or_against_a_move() -> None:
    dear = (("n", 60, STEP_S),)
    cluster = Cluster(spread("full", *FULL), spread("half", *HALF, others=dear, step_s=(0.0, 0.0)))
    cluster.step()
    assert cluster.pairs() == {"full": ("half",)}
    cluster = Cluster(spread("full", *FULL, step_s=(0.0, 0.0)), spread("half", *HALF, others=dear))
    cluster.step()
    assert cluster.pairs() == {"full": ("half",)}


def test_where_the_next_request_cannot_go_another_goes_only_if_there_is_no_other_place() -> None:
    full = spread("full", *FULL, models=frozenset({"m", "n"}), others=(("n", 9, STEP_S),))
    other = spread("other", models=frozenset({"n"}))
    cluster = Cluster(full, other)
    cluster.step()
    assert cluster.pairs() == {"full": ("other",)}
    cluster = Cluster(full, other, spread("half", *HALF))
    cluster.step()
    assert cluster.pairs() == {"full": ("half",)}


def test_a_free_one_that_is_as_cheap_is_found_behind_many_that_are_not() -> None:
    for count, found in ((MAX_LOOKED - 1, {"full": ("half",)}), (MAX_LOOKED, {})):
        dear = [spread(f"dear-{n}", others=(("n", 60, STEP_S),)) for n in range(count)]
        cluster = Cluster(spread("full", *FULL), *dear, spread("half", *HALF), per_s=10.0)
        cluster.step()
        assert cluster.pairs() == found


def test_sources_that_find_none_take_their_turns_with_others() -> None:
    count = 2 * MAX_LOOKS // MAX_LOOKED
    dear = [spread(f"dear-{n}", others=(("n", 60, STEP_S),)) for n in range(MAX_LOOKED)]
    vain = [spread(f"vain-{n}", *FULL) for n in range(count)]
    freer = spread("freer", *FULL[1:], models=frozenset({"k"}))
    cluster = Cluster(*vain, freer, *dear, spread("idle", models=frozenset({"k"})))
    for _ in range(2):
        cluster.step()
        assert cluster.pairs() == {}, "its turn is after those that are less free"
    cluster.step()
    assert cluster.pairs() == {"freer": ("idle",)}


def test_looks_in_vain_are_bounded_over_all_of_a_step_and_leave_some_for_late_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 2 * MAX_LOOKS // MAX_LOOKED
    dear = [spread(f"dear-{n}", others=(("n", 60, STEP_S),)) for n in range(MAX_LOOKED)]
    late = spread("late", 400, late_s=4.0, prompts_s=9.0)
    vain = [spread(f"vain-{n}", *FULL) for n in range(count)]
    cluster = Cluster(*vain, late, *dear)
    looks: list[str] = []
    view = cluster.view

    def look(name: str) -> InstanceView | None:
        looks.append(name)
        return view(name)

    monkeypatch.setattr(cluster, "view", look)
    cluster.step()
    (pair,) = cluster.policy.pairs.values()
    assert pair.source == "late" and pair.reason == MigrationReason.PROMPTS
    assert sum(name.startswith("dear") for name in looks) <= MAX_LOOKS


def test_a_step_in_slices_begins_and_ends_the_pairs_of_one_in_one_go() -> None:
    """And no slice looks at many instances."""

    def run(count: int, is_sliced: bool) -> list[tuple[set[Pair], set[Pair]]]:
        cluster = Cluster(
            *(spread(f"full-{n}", *FULL) for n in range(count)), *(spread(f"idle-{n}") for n in range(count)), per_s=1e4
        )
        looks: list[str] = []

        def view_of(name: str) -> InstanceView | None:
            looks.append(name)
            return cluster.view(name)

        steps = []
        for _ in range(2):
            for instance in cluster.instances.values():
                cluster.policy.touch(instance.name, instance.view().freeness)
            if is_sliced:
                begun: set[Pair] = set()
                ended: set[Pair] = set()
                slices = cluster.policy.slices(cluster.now, view_of, cluster.destinations_above)
                is_over, num_slices = False, 0
                while not is_over:
                    changes, is_over = next_slice(slices)
                    begun, ended, num_slices = begun | {*changes.begun}, ended | {*changes.ended}, num_slices + 1
                    assert len(looks) <= MAX_SLICE + 1 + MAX_LOOKED
                    looks.clear()
                assert num_slices > 1
            else:
                begun, ended = map(set, cluster.policy.step(cluster.now, view_of, cluster.destinations_above))
            steps.append((begun, ended))
            cluster.now += 0.1
            for n in range(count // 2):
                cluster.instances[f"idle-{n}"].can_take = False
        return steps

    assert run(40, is_sliced=True) == run(40, is_sliced=False)


def test_what_goes_between_two_slices_is_in_no_pair() -> None:
    cluster = Cluster(
        *(spread(f"full-{n:02}", *FULL) for n in range(40)), *(spread(f"idle-{n}") for n in range(40)), per_s=1e4
    )
    for instance in cluster.instances.values():
        cluster.policy.touch(instance.name, instance.view().freeness)
    slices = cluster.policy.slices(0.0, cluster.view, cluster.destinations_above)
    first, is_over = next_slice(slices)
    assert first.begun and not is_over
    paired = {name for pair in first.begun for name in (pair.source, *pair.destinations)}
    gone = cluster.instances.keys() - paired - {"full-39"}
    for name in gone:
        if name.startswith("full"):
            del cluster.instances[name]
            cluster.policy.forget(name)
        else:
            cluster.instances[name].can_take = False
    while not is_over:
        changes, is_over = next_slice(slices)
        assert not changes.begun
    assert cluster.pairs().keys() == {pair.source for pair in first.begun}


def test_a_pair_ends_where_others_make_turns_dear() -> None:
    half = spread("half", *HALF)
    cluster = Cluster(spread("full", *FULL, others=(("n", 30, STEP_S),)), half)
    cluster.step()
    assert cluster.pairs() == {"full": ("half",)}
    half.others = (("n", 60, STEP_S),)
    cluster.step()
    assert cluster.pairs() == {}


def test_of_many_pairs_each_is_asked_in_its_turn_whether_it_is_still_a_gain() -> None:
    count = 2 * MAX_CHECKED + 10
    cluster = Cluster(
        *(spread(f"full-{n}", *FULL) for n in range(count)), *(spread(f"idle-{n}") for n in range(count)), per_s=1e4
    )
    cluster.step()
    assert len(cluster.pairs()) == count
    for n in range(count):
        cluster.instances[f"idle-{n}"].can_take = False
    left = []
    for _ in range(3):
        cluster.step()
        left.append(len(cluster.pairs()))
    assert left == [count - MAX_CHECKED, count - 2 * MAX_CHECKED, 0]


def test_a_pair_lives_until_the_source_is_none_any_more() -> None:
    cluster = Cluster(spread("full", *FULL), spread("idle"))
    cluster.step()
    assert cluster.pairs() == {"full": ("idle",)}
    cluster.instances["full"].running = [400] * 17
    cluster.step()
    assert cluster.pairs() == {"full": ("idle",)}, "above the lower threshold, not yet where it is released"
    cluster.instances["full"].running = [400] * 15
    assert cluster.policy.touch("full", cluster.instances["full"].view().freeness), "worth a look at once"
    cluster.step()
    assert cluster.pairs() == {} and cluster.policy.is_idle
    cluster.instances["full"].running = [400] * 17
    cluster.step()
    assert cluster.pairs() == {}, "it is below the threshold of release, but was not below the lower one again"


def test_a_taker_that_fills_up_is_replaced() -> None:
    cluster = Cluster(spread("full", *FULL), spread("idle"))
    cluster.step()
    cluster.instances["idle"].running = [400] * 18
    cluster.instances["new"] = spread("new")
    cluster.step()
    assert cluster.pairs() == {"full": ("new",)}


def test_one_long_request_alone_is_not_sent_round() -> None:
    """It would leave an idle instance behind, and make its destination the next source."""
    cluster = Cluster(spread("full", 7900), spread("idle"))
    cluster.step()
    assert cluster.pairs() == {}


def test_memory_in_pieces_comes_together_for_a_long_prompt() -> None:
    """5,000 tokens fit nowhere, and nobody is above the upper threshold; together there is room for four of them."""
    cluster = Cluster(*(spread(name, *[250] * 20) for name in "abcdefgh"))
    assert all(LOW < instance.view().freeness < HIGH for instance in cluster.instances.values())
    cluster.step()
    assert cluster.pairs() == {}
    long = cluster.instances["a"]
    long.waiting = [5000]
    assert long.view().freeness < 0
    for _ in range(20):
        cluster.step(0.05)
        cluster.move()
        if not long.waiting:
            break
    assert not long.waiting and cluster.now <= 1.0
    assert all(instance.view().freeness >= LOW / 2 for name, instance in cluster.instances.items() if name != "a")


def test_a_draining_instance_gives_to_everyone_freest_first_whatever_the_load() -> None:
    leaving = spread("leaving", 100, is_draining=True)
    cluster = Cluster(leaving, spread("full", *[400] * 16), spread("half", *HALF), spread("also", 10, is_draining=True))
    cluster.step()
    assert cluster.pairs() == {"also": ("half", "full"), "leaving": ("full", "half")}, "not all to the same one first"
    assert {pair.reason for pair in cluster.begun} == {MigrationReason.DRAIN}
    leaving.running = []
    cluster.step()
    assert list(cluster.pairs()) == ["also"]
    cluster.instances["also"].is_draining = False
    cluster.step()
    assert cluster.pairs() == {}


def test_a_source_that_begins_to_drain_is_paired_anew() -> None:
    cluster = Cluster(spread("full", *FULL), spread("idle"), spread("half", *HALF))
    cluster.step()
    cluster.instances["full"].is_draining = True
    assert cluster.policy.drain("full")
    begun = cluster.step()
    assert [(pair.reason, pair.destinations) for pair in begun] == [(MigrationReason.DRAIN, ("idle", "half"))]


def test_a_taker_of_failed_moves_is_left_out_for_longer_each_time() -> None:
    cluster = Cluster(spread("full", *FULL), spread("idle"))
    times = []
    for _ in range(9):
        while not cluster.step(0.05):
            assert cluster.now < 200
        times.append(cluster.now)
        cluster.policy.on_move("full", "idle", AbortReason.MISMATCH, cluster.now)
        cluster.policy.on_move("full", "idle", AbortReason.MISMATCH, cluster.now)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    expected = [min(MAX_BACKOFF_S, BACKOFF_S * 2**n) for n in range(8)]
    assert gaps == pytest.approx(expected, abs=0.11), "two moves that fail together count once"
    cluster.policy.on_move("full", "idle", None, cluster.now)
    cluster.policy.on_move("full", "idle", AbortReason.UNREACHABLE, cluster.now)
    assert cluster.policy.num_backing_off(cluster.now) == 2, "the fault may be the source's as well"
    cluster.now += 1.1 * BACKOFF_S
    assert cluster.policy.num_backing_off(cluster.now) == 0, "a success makes it begin anew"
    cluster.policy.on_move("full", "idle", AbortReason.ENDED, cluster.now)
    assert cluster.policy.num_backing_off(cluster.now) == 0, "nobody's fault"


def test_a_taker_without_room_is_left_out_for_a_moment_only() -> None:
    cluster = Cluster(spread("full", *FULL), spread("idle"))
    for _ in range(5):
        cluster.policy.on_move("full", "idle", AbortReason.REFUSED, cluster.now)
        assert cluster.policy.num_backing_off(cluster.now) == 1
        cluster.now += 1.1 * BACKOFF_S
        assert cluster.policy.num_backing_off(cluster.now) == 0


def test_a_drain_goes_on_over_takers_that_refuse() -> None:
    cluster = Cluster(spread("leaving", 100, is_draining=True), spread("idle"), spread("half", *HALF))
    cluster.policy.on_move("leaving", "idle", AbortReason.REFUSED, cluster.now)
    cluster.step()
    assert cluster.pairs() == {"leaving": ("half", "idle")}


def test_thresholds_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="below"):
        Rebalancer(10.0, 10.0, 1.0)


def test_numbers_that_are_none_pair_nobody() -> None:
    cluster = Cluster(spread("full", *FULL))
    policy = cluster.policy
    policy.touch("full", 1.0)
    changes = policy.step(1.0, cluster.view, lambda _: [Destination("nan", math.nan, M)])
    assert changes.begun == [] and not policy.touch("nan", math.nan)


def test_a_thousand_sources_are_paired_at_a_bounded_rate() -> None:
    per_s = 50.0
    sources = [spread(f"s{n}", *FULL) for n in range(300)]
    destinations = [spread(f"t{n}") for n in range(300)]
    cluster = Cluster(*sources, *destinations, per_s=per_s)
    for step in range(1, 21):
        cluster.step(0.1)
        assert len(cluster.begun) <= per_s * BURST_S + per_s * 0.1 * step
    assert len(cluster.begun) >= per_s * 1.5


sizes = st.lists(st.integers(16, 3000), max_size=12)
clusters = st.lists(
    st.tuples(sizes, st.booleans(), st.sampled_from([frozenset("m"), frozenset("n"), frozenset("mn")])),
    min_size=1,
    max_size=7,
)


def build(parts: list[tuple[list[int], bool, frozenset[str]]], **options: float) -> Cluster:
    instances = []
    for number, (requests, is_draining, models) in enumerate(parts):
        instance = Instance(f"i{number}", models=models, is_draining=is_draining, waiting=list(requests))
        instance.admit()
        instances.append(instance)
    return Cluster(*instances, **options)  # type: ignore[arg-type]


@given(clusters)
def test_each_pair_is_a_gain_and_each_end_is_in_one(parts: list[tuple[list[int], bool, frozenset[str]]]) -> None:
    cluster = build(parts)
    cluster.step()
    given_to: list[str] = []
    for pair in cluster.policy.pairs.values():
        source = cluster.instances[pair.source]
        assert pair.source not in pair.destinations
        assert all(not source.models.isdisjoint(cluster.instances[name].models) for name in pair.destinations)
        assert all(cluster.instances[name].view().can_take for name in pair.destinations)
        if pair.reason == MigrationReason.BALANCE:
            (name,) = pair.destinations
            given_to.append(name)
            a, b = source.view(), cluster.instances[name].view()
            kept, v = least_left(a.freeness, LOW), a.next_moves[0].num_tokens if a.next_moves else a.typical_tokens
            assert LOW / 2 <= kept <= LOW and a.freeness < LOW
            assert b.freeness >= kept * HIGH / LOW and (b.spare_tokens - v) / (b.num_running + 1) >= kept
            mine, theirs = a.usage_tokens, b.usage_tokens
            assert (mine - v) ** 2 + (theirs + v) ** 2 < mine**2 + theirs**2
    assert len(set(given_to)) == len(given_to)
    assert not set(given_to) & set(cluster.policy.pairs)


@given(clusters)
def test_who_drains_is_paired_while_anybody_can_take(parts: list[tuple[list[int], bool, frozenset[str]]]) -> None:
    cluster = build(parts, per_s=0.001)
    cluster.step()
    for instance in cluster.instances.values():
        able = {
            other.name
            for other in cluster.instances.values()
            if not other.is_draining and not other.models.isdisjoint(instance.models)
        }
        if instance.is_draining and instance.view().can_give and able:
            assert set(cluster.pairs()[instance.name]) == able


def test_nothing_moves_into_memory_that_is_got_together_for_one_that_waits() -> None:
    """The gatherer keeps 5,600 tokens for one that needs 7,000, while another is about to preempt: what moved in there would
    have to move out again, and the long one would starve."""
    cluster = Cluster(spread("full", *FULL), spread("gatherer", *[400] * 6, waiting=[7000]))
    assert is_memory_bound(cluster.instances["full"].view(), LOW)
    cluster.step()
    assert "full" not in cluster.pairs()
    cluster.instances["gatherer"].waiting.clear()
    cluster.step()
    assert cluster.pairs() == {"full": ("gatherer",)}


def test_the_destination_does_not_become_the_fuller_one_but_for_one_that_waits_for_memory() -> None:
    cluster = Cluster(spread("full", 3600, 4200), spread("roomy", 2000))
    cluster.step()
    assert cluster.pairs() == {}, "5,600 tokens there and 4,200 here are the same turned round"
    cluster.instances["full"].waiting = [1000]
    cluster.step()
    assert cluster.pairs() == {"full": ("roomy",)}


@settings(max_examples=60, deadline=None)
@given(clusters)
def test_a_constant_load_comes_to_rest_and_nothing_returns(
    parts: list[tuple[list[int], bool, frozenset[str]]],
) -> None:
    """Requests neither grow nor end. Each move lowers the sum of squares, the heads of queues in it; so it must stop."""
    cluster = build([(requests, False, M) for requests, _, _ in parts])
    squares = [sum(i.usage() ** 2 for i in cluster.instances.values())]
    num_requests = sum(len(i.running) + len(i.waiting) for i in cluster.instances.values())
    quiet = 0
    for _ in range(40 * (num_requests + 1)):
        num_waiting = [len(i.waiting) for i in cluster.instances.values()]
        cluster.step()
        quiet = 0 if cluster.move() else quiet + 1
        squares.append(sum(i.usage() ** 2 for i in cluster.instances.values()))
        if num_waiting == [len(i.waiting) for i in cluster.instances.values()]:
            assert squares[-1] <= squares[-2] + 1e-6, "but for a new head of a queue, it only falls"
        if quiet == 10:
            break
    assert quiet == 10, "still moving"


def test_a_taker_is_not_busy_with_prompts_for_longer_than_the_source() -> None:
    for source_s, destination_s, is_made in ((0.0, 0.0, True), (2.0, 2.0, True), (0.0, MOST_PROMPTS_S + 0.1, False)):
        cluster = Cluster(Instance("a", running=[1560] * 5, prompts_s=source_s), Instance("b", prompts_s=destination_s))
        assert bool(cluster.step()) == is_made


def test_who_is_about_to_be_preempted_moves_whatever_the_taker_computes() -> None:
    source = Instance("a", running=[1590] * 5)
    assert is_memory_bound(source.view(), LOW)
    cluster = Cluster(source, Instance("b", prompts_s=9.0))
    assert [pair.source for pair in cluster.step()] == ["a"]


def test_a_report_that_counts_no_request_of_the_one_that_would_move_is_a_report() -> None:
    """Whatever a worker says of itself, dispatch goes on."""
    odd = Instance("a", running=[3000, 3000], others=(("n", 2, STEP_S),))
    view = odd.view()._replace(next_moves=(NextMove("m", 16),), residents=[("m", 0, STEP_S), *odd.others])
    assert is_as_cheap_there(view, Instance("b").view())
