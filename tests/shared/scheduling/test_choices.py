"""What a request sees of the cluster, and where it goes, against an oracle that remembers nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.costs.model import prompt_s
from shared.policies.dispatch import (
    GRAIN_S,
    MOST_UNEVEN,
    NUM_CACHED,
    NUM_TIMED,
    SPARED_S,
    Candidate,
    Candidates,
    DispatchView,
    FirstToken,
    Wanted,
    freeness_with_ledger,
)
from shared.policies.token_cost import MARGIN, first_cheap, token_cost_s
from shared.runtime.settings import SchedulerSettings
from shared.scheduling.actions import Dispatch
from shared.scheduling.calls import OnDispatched, OnRegistry, OnReport, Submit
from shared.scheduling.candidates import MAX_HOLDERS, CandidatesFor
from shared.scheduling.core import SchedulerCore
from shared.scheduling.prefixes import prompt_keys
from shared.scheduling.requests import TrackedRequest
from tests.shared.scheduling.samples import make_info, make_report, make_request

MAX_WAITING, GROWTH_STEPS = 3, 8.0
NUM_INSTANCES, PROMPTS = 20, (30, 70, 150)
"""More instances than are compared by time; tokens of prompts, which begin alike."""


@dataclass
class Plain:
    """A candidate, all of it worked out at once."""

    instance_id: str
    view: DispatchView
    demand_merged: float
    in_flight_merged: float
    left_merged: float
    missing_merged: float
    start_s: float
    prompt_s: float
    token_s: float


class PlainCandidates:
    """Those of a request, from reports, ledger and prefixes as they are now."""

    def __init__(self, core: SchedulerCore, real: CandidatesFor, is_behind: bool) -> None:
        self._core, self._real = core, real
        self._is_behind = is_behind
        self.may_wait, self.num_defragmenting, self.num_serving = (
            real.may_wait,
            real.num_defragmenting,
            real.num_serving,
        )
        prefixes = core.dispatcher._prefixes
        assert prefixes is not None and real._request is not None
        block_size = next(iter(core.cluster))[1].ready[real.model].block_size
        self._held = prefixes.held_tokens(real._request, block_size, real.now)
        found = (self._plain(instance_id) for instance_id, _ in core.cluster)
        able = [plain for plain in found if plain is not None]
        self._ordered = sorted(able, key=lambda one: (-one.view.freeness, one.view.num_requests, one.instance_id))

    def _plain(self, instance_id: str) -> Plain | None:
        core, real = self._core, self._real
        state, ledger, model = core.cluster.get(instance_id), core.dispatcher.ledger, real.model
        assert state is not None and state.report is not None
        report = state.report
        load = next(load for load in report.models if load.model == model)
        num_waiting = load.num_waiting_online + ledger.num_waiting(instance_id, model)
        if not state.is_candidate or (num_waiting >= MAX_WAITING * (2 if real.is_high else 1) and not self._is_behind):
            return None
        sent_merged, num_sent = ledger.demand_merged(instance_id), ledger.num_online(instance_id)
        freeness = freeness_with_ledger(state.freeness(real.is_high), sent_merged, num_sent)
        served, num_others = state.ready[model], state.load.num_running + ledger.num_requests(instance_id)
        demand = served.demand_merged(real.num_tokens)
        growth = GROWTH_STEPS * (num_others + 1) / served.tokens_per_merged if num_others else 0.0
        left = state.freeness(for_high=True).left_merged
        num_held = self._held.get(instance_id, 0)
        residents = [
            (one.model, one.num_running + one.num_waiting + ledger.num_waiting(instance_id, one.model), one.decode_cost)
            for one in report.models
        ]
        return Plain(
            instance_id,
            DispatchView(freeness, state.load.num_requests + num_sent, state.last_turn),
            demand,
            sent_merged,
            left,
            demand + min(growth, max(0.0, served.num_merged - demand)) + sent_merged - left,
            max(0.0, report.prompts_s - (real.now - state.heard_s)) + ledger.prompts_s(instance_id),
            prompt_s(load.prompt_cost, real.num_tokens - num_held, num_held),
            token_cost_s(model, residents, 0 if real.is_high else report.num_high),
        )

    def first(self, limit: int, until: Callable[[Candidate], bool] | None = None) -> Sequence[Candidate]:
        found: list[Candidate] = []
        for one in self._ordered[:limit]:
            found.append(one)
            if until is not None and until(one):
                break
        return found

    def cached(self, limit: int) -> Sequence[Candidate]:
        longest = []
        for name, num_tokens in islice(self._held.longest(), MAX_HOLDERS):
            state = self._core.cluster.get(name)
            assert state is not None and state.report is not None
            longest.append((num_tokens, state.report.dispatch_freeness, name))
        by_name = {one.instance_id: one for one in self._ordered}
        owners = [by_name[name] for *_, name in sorted(longest, reverse=True) if name in by_name]
        return owners[:NUM_CACHED][:limit]


class PlainFirstToken(FirstToken):
    """The rules one after another, each value asked for where it is named."""

    def _favourite(self, request: Wanted, candidates: Candidates) -> Candidate:
        freest = candidates.first(NUM_TIMED)
        known = {candidate.instance_id for candidate in freest}
        others = [owner for owner in candidates.cached(NUM_CACHED) if owner.instance_id not in known]
        able = [candidate for candidate in (*freest, *others) if candidate.missing_merged <= 0]
        if not able:
            return freest[0]
        latest_s = min(candidate.start_s + candidate.prompt_s for candidate in able) + GRAIN_S
        soon = [candidate for candidate in able if candidate.start_s + candidate.prompt_s <= latest_s]
        if len(soon) == 1 or request.is_high:
            return soon[0]
        least_s = min((candidate.token_s for candidate in soon if candidate.token_s > 0), default=0.0)
        even = [candidate for candidate in soon if candidate.token_s <= MOST_UNEVEN * least_s]
        shortest_s = min(candidate.prompt_s for candidate in even)
        most_s = shortest_s + max(SPARED_S, MARGIN * shortest_s)
        spared = [candidate for candidate in even if candidate.prompt_s <= most_s]
        return spared[first_cheap([candidate.token_s for candidate in spared])]


class Watched(FirstToken):
    """Compares each choice with the oracle's."""

    core: SchedulerCore
    num_choices = 0

    def choose(self, request: Wanted, candidates: Candidates) -> Candidate | None:
        is_behind = self.core.queue.tenants.is_behind(cast(TrackedRequest, request))
        plain = PlainCandidates(self.core, cast(CandidatesFor, candidates), is_behind)
        for mine, theirs in (
            (candidates.first(NUM_TIMED), plain.first(NUM_TIMED)),
            (candidates.cached(8), plain.cached(8)),
        ):
            assert [_values(one) for one in mine] == [_values(one) for one in theirs]
        chosen = super().choose(request, candidates)
        expected = PlainFirstToken(self.parameters).choose(request, plain)
        assert (chosen and chosen.instance_id) == (expected and expected.instance_id)
        self.num_choices += 1
        return chosen


def _values(one: Candidate) -> tuple[Any, ...]:
    return tuple(getattr(one, name) for name in Plain.__dataclass_fields__)


reports = st.tuples(
    st.integers(0, NUM_INSTANCES - 1),
    st.sampled_from([-3.0, 0.0, 1.0, 5.0, 5.5, 40.0]),
    st.integers(0, 6),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.integers(0, 9),
)
"""Instance, freeness, running and waiting requests, time of prompts, and blocks that it tells of."""
requests = st.tuples(st.sampled_from(PROMPTS), st.booleans(), st.booleans())
"""Tokens, whether of the second model, and whether of high priority."""


@settings(max_examples=60, deadline=None)
@given(st.lists(reports | requests, min_size=10, max_size=60))
def test_each_choice_is_that_of_an_oracle(events: list[tuple[Any, ...]]) -> None:
    settings = SchedulerSettings(max_waiting_per_model=MAX_WAITING, dispatch_growth_steps=GROWTH_STEPS)
    core, sequences = SchedulerCore(settings, term=1), [1] * NUM_INSTANCES
    num_requests = num_dispatched = 0
    policy = core.dispatcher._policy = core.dispatcher.ranking._policy = Watched(core.dispatcher._policy.parameters)
    policy.core = core
    block_size = make_info("i0").models[0].block_size
    keys = list(prompt_keys(make_request("keys", num_prompt=max(PROMPTS)), block_size))
    for number in range(NUM_INSTANCES):
        core.apply(OnRegistry(f"i{number}", make_info(f"i{number}", "m", "n")), 0.0)
        core.apply(OnReport(make_report(f"i{number}", 1, freeness=3.0 + number % 7, num_running=2)), 0.0)
    for turn, event in enumerate(events):
        now = 0.01 * turn
        if len(event) == 3:
            num_prompt, is_second, is_high = event
            num_requests += 1
            model = "n" if is_second else "m"
            request = make_request(f"r{num_requests}", num_prompt=num_prompt, model=model, high=is_high)
            core.apply(Submit(request), now)
        else:
            number, freeness, num_running, num_waiting, prompts_s, num_blocks = event
            sequences[number] += 1
            report = make_report(
                f"i{number}", sequences[number], freeness=freeness, num_running=num_running,
                running={"m": num_running}, waiting={"m": num_waiting}, prompts_s=prompts_s, token_s=2e-3, decode_s=0.02,
                num_high=number % 3, freeness_high=freeness + 1.0, cache_held=b"".join(keys[:num_blocks]),
            )  # fmt: skip
            core.apply(OnReport(report), now)
        for action in core.actions(now):
            if isinstance(action, Dispatch):
                num_dispatched += 1
                core.apply(OnDispatched.to(action, None), now)
    assert policy.num_choices >= num_dispatched
