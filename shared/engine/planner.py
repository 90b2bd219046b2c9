"""The next step of one instance: continuous batching with chunked prefill, online first, offline in what is left.

Who may delay whom, and by how much, is in docs/design/scheduling.md ("Order of authority"). Which model leads a step is
decided first (`_groups`): offline work of models of which nothing online runs, where all objectives leave time for a step
of its own; else a model with online work, high priority by weight and normal by what it was promised; else offline work.
The ordering policy picks among models of a rank, and the order within one. Of that model decodes come first and prefill
chunks after, rank by rank, until the step's limits (tokens, and predicted time where an objective is to be kept), the
rows or the KV pool are used up. Memory: memory/allocator.py.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterator
from typing import cast

from shared.costs.model import StepShape, prompt_s
from shared.engine.batch import Batch, PlannedStep
from shared.engine.candidate import Candidate
from shared.engine.drafting import Drafting
from shared.engine.favours import Favours
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ONLINE_CLASSES, PROMPT_STEPS, ModelQueue, Objectives
from shared.engine.plan import NewSequence, StepPlan
from shared.engine.sequence import PriorityClass, Sequence, State
from shared.messages.timeline import EventKind
from shared.policies.ordering import ModelView
from shared.policies.patience import Patience
from shared.policies.roles import most_chunk
from shared.policies.silence import PLANNED_SHARE, SERVING_STEPS, URGENT_S, is_overfull, room_s
from shared.policies.slo_budget import MAX_SLACK, PACE
from shared.policies.token_budget import Limits, StepBudget, StepView, TokenBudgetPolicy
from shared.policies.turns import Turns

MIN_ONLINE_CHUNK = 16
"""Tokens."""

_HIGH, _NORMAL = "high", "normal"
"""Who take turns where models of both wait."""

SHORT_STEP_SHARE = 0.02
"""Share of the TTFT objective: a step that is shorter is not worth being interruptible where steps are planned ahead."""

HIGH_WEIGHT = 8.0
"""Turns of a model with requests of high priority for each of another with normal ones, whose streams keep their pace."""

HIGH_STEPS = 1.1
"""Time kept for the streams of a model with requests of high priority, in steps of them alone: their objectives are planned
with a margin already."""

WORTH_STEPS = 4.0
"""An offline step of its own, beside online work, takes at least so many times what its least one would, where waiting for
more time gives it as much: each begins anew by reading the weights."""

FULL_SLACK = 0.95
"""Share of the most time that the objectives can leave: waiting for more would be in vain."""

WAIT_SHARE = 0.25
"""Share of the TTFT objective: what all offline steps in flight take together at most where they cannot be interrupted."""

EXPECTED_STEPS = 1.5
"""While a running sequence is about to come from another instance, and with its first step, a step takes so many times as
long as its decodes alone: prompts go on slowly."""
EXPECTED_S = 0.5
"""After it may be here, it is waited for like this for so long."""
LONG_STEPS = 2.0
"""A step that takes so many times as long as its decodes alone is long for a sequence that comes meanwhile."""


class Planner:
    """The choice of the next step of one instance, from what `memory` has."""

    def __init__(
        self,
        memory: Allocator,
        token_budget: TokenBudgetPolicy,
        drafting: Drafting,
        *,
        serves_offline: bool,
        may_interrupt: bool,
        mix_phases: bool,
        prefetch: bool,
        steps_in_flight: int,
        num_stages: int = 1,
    ) -> None:
        """`steps_in_flight`: at most. `num_stages`: the first stage of a pipeline knows a step's tokens when the last one
        has sampled them, so with several no sequence is in two steps at once, and steps share the sequences that decode
        among them."""
        self._memory = memory
        self._queues = memory.queues
        self._ordering = memory.ordering
        self._favours = Favours(memory, steps_in_flight)
        self.last_limits = Limits(1)
        """Limits of the step planned last."""
        self.last_limit_s = math.inf
        """What bounded that step's time."""
        self._token_budget = token_budget
        self._drafting = drafting
        self._classes = tuple(PriorityClass) if serves_offline else ONLINE_CLASSES
        self._may_interrupt = may_interrupt
        self._mix_phases = mix_phases and memory.ordering.mixes_phases
        self._prefetch = prefetch
        self._steps_in_flight = steps_in_flight
        self._num_stages = num_stages
        self._holds_offline = False
        """No offline sequence joins the step that is being planned."""
        self._rank_turns = Turns()
        self._rank_weights: dict[str, float] = {}
        """Weights of the ranks, where models of both wait for the step that is being planned."""
        self._patience = Patience()
        self._own_began_s, self._num_led = 0.0, 0
        """Time at which the last offline step of its own beside online work began, or at which nothing online was there;
        and how many steps online work has led since."""
        self._offline_turns = Turns()
        self._offline_weights: dict[str, float] = {}
        """Weights of the models with offline work for the step that is being planned: the number of their sequences."""
        self._kept_for: str | None = None
        """The model whose offline turn it is, as soon as the objectives leave enough for a step of it: until then nobody
        else's offline work uses that up."""

    def online_need(self, now: float) -> tuple[float, float]:
        """The predicted time of the next steps of all runnable online sequences, and how soon the first of all that are
        online is due a token."""
        objectives = self._objectives(now)
        return self._online_steps_s(), min(objectives.slack_s, objectives.ttft_left_s)

    def spare_s(self, now: float) -> float:
        """What the objectives leave beside an online step."""
        objectives = self._objectives(now)
        limit_s = self._token_budget.offline_limit_s(objectives.slack_s, objectives.ttft_left_s)
        return max(0.0, limit_s - self._online_steps_s())

    def offline_spare_s(self, model: str, now: float) -> float:
        """How long an offline step of the model may run now, or soon, beside online work; 0 where the objectives leave
        none; inf without online work."""
        if not self._memory.has_online_work():
            return math.inf
        spare_s = self._most_spare_s(self._objectives(now), self._online_steps_s())
        return spare_s if spare_s > self._least_step_s(self._queues[model]) else 0.0

    def _most_spare_s(self, objectives: Objectives, need_s: float) -> float:
        """What they leave beside online steps of `need_s` now, or when the streams are as far ahead as they can get."""
        slack_s = objectives.slack_s
        if need_s < PACE * objectives.tpot_s < math.inf:
            slack_s = MAX_SLACK * objectives.tpot_s
        return self._token_budget.offline_limit_s(slack_s, objectives.ttft_left_s) - need_s

    def _online_steps_s(self) -> float:
        return sum(
            queue.cost_model.predict(queue.online_shape(self.last_limits.max_tokens))
            for queue in self._queues.values()
            if queue.cost_model is not None and queue.has_online_work()
        )

    @staticmethod
    def _least_step_s(queue: ModelQueue) -> float:
        """Seconds of the shortest step that advances offline work of the model at all."""
        return 0.0 if queue.cost_model is None else queue.cost_model.predict(StepShape(1, 0.5))

    def _objectives(self, now: float) -> Objectives:
        """Over all models."""
        found = [queue.objectives(now) for queue in self._queues.values()]
        return found[0] if len(found) == 1 else Objectives(*map(min, zip(*found, strict=True)))

    # -------------------------------------------------------------------------------------------------- plan

    def plan(
        self,
        step_id: int,
        now: float,
        begins_s: float,
        is_alone: bool,
        holds_offline: bool = False,
        ahead_s: float = 0.0,
    ) -> PlannedStep | None:
        """The next step, or None where nothing can run before a step in flight returns, a copy ends or a request
        arrives. `begins_s`: when it will begin, as far as is known; `is_alone`: no other step is in flight;
        `holds_offline`: no offline sequence joins it; `ahead_s`: predicted time of the longest step in flight."""
        has_online_work = self._memory.has_online_work()
        self._patience.observe(now, has_online_work)
        if not has_online_work:
            self._own_began_s, self._num_led = begins_s, 0
        # With steps always in flight, offline sequences would never be free to give their room up.
        self._holds_offline = holds_offline or (
            not is_alone and (self._memory.lacks_demanded() or self._waits_for_offline())
        )
        if not is_alone and self._waits_for_share(now):
            return None
        if not is_alone and self._num_stages == 1 and self._favours.waits_for(ahead_s, now):
            return None
        if not is_alone and self._drafting.is_on and self._drafting.awaits(self._queues.values()):
            return None
        for candidates in self._groups(begins_s):
            while candidates:
                picked, is_choice = candidates[0], len(candidates) > 1
                if is_choice:
                    picked = cast(Candidate, self._ordering.pick_model(cast(list[ModelView], candidates), begins_s))
                candidates.remove(picked)
                queue, leading = picked.queue, picked.priority_class
                limits = self._limits(picked, begins_s)
                if limits.is_interruptible and not is_alone and self._num_stages == 1:
                    # It would keep the results of the step before it waiting; a short one does not.
                    if queue.cost_model is None:
                        continue
                    limits = limits._replace(limit_s=self._short_step_s(), is_interruptible=False)
                limits = self._limits_for_expected(queue, limits, begins_s)
                batch = self._fill(queue, leading, limits, now)
                may_go_on = self._mix_phases and (is_alone or not self._waits_for_share(now))
                if not batch.sequences and may_go_on and self._favours.prompts(queue, leading):
                    # Those that were left out for the sake of prompts that turned out to lack room.
                    batch = self._fill_phases(queue, leading, limits, now, True, False)
                if batch.sequences:
                    queue.last_planned_step = step_id
                    if is_choice:
                        self._ordering.on_turn(picked)
                    self._take_turns(queue, leading, batch, begins_s)
                    self.last_limit_s = min(
                        limits.limit_s, math.inf if batch.sequences[-1].is_online else limits.offline_limit_s
                    )
                    return self._close(
                        step_id, queue, batch, limits.is_interruptible and leading == PriorityClass.OFFLINE, now
                    )
        return None

    # ------------------------------------------------------------------------------------------------ who leads

    def _groups(self, begins_s: float) -> Iterator[list[Candidate]]:
        """The models that could lead the step, group by group: of each the ordering policy picks, and the next one is
        asked where nothing of it can run."""
        self._rank_weights, self._kept_for = {}, None
        self._offline_weights, found = {}, []
        if PriorityClass.OFFLINE in self._classes and not self._holds_offline:
            found = self._candidates(PriorityClass.OFFLINE)
            self._offline_weights = {one.name: float(one.queue.num_offline) for one in found}
            if (turn := self._offline_turn(found, begins_s)) is not None:
                yield [turn]
                # It found no room: the time that was kept for it is anybody's.
                self._kept_for = None
                self._offline_turns.take(turn.name, self._offline_weights)
        yield from self._online_groups(begins_s)
        yield found

    def _candidates(self, priority_class: PriorityClass) -> list[Candidate]:
        """The models with work of the rank."""
        return [
            Candidate(self._memory, queue, priority_class)
            for queue in self._queues.values()
            if queue.has_work(priority_class) and (self._prefetch or not queue.restoring)
        ]

    def _offline_turn(self, found: list[Candidate], begins_s: float) -> Candidate | None:
        """The model whose offline work has a step of its own before the next online one, within what the objectives of all
        models leave. None: there is no time for one, or it is the turn of a model with online work, whose steps it joins."""
        if not self._patience.is_spent or not self._memory.has_online_work():
            return None
        if len(found) == sum(one.queue.has_online_work() for one in found):
            return None
        objectives, need_s = self._objectives(begins_s), self._online_steps_s()
        spare_s = self._token_budget.offline_limit_s(objectives.slack_s, objectives.ttft_left_s) - need_s
        if spare_s == math.inf:
            # The policy knows no objectives: what is online goes first.
            return None
        most_s = self._most_spare_s(objectives, need_s)
        left = dict(self._offline_weights)
        while left:
            name = self._offline_turns.next(left)
            del left[name]
            candidate = next(one for one in found if one.name == name)
            if candidate.queue.has_online_work():
                return None
            if candidate.queue.cost_model is None:
                continue
            least_s = self._least_step_s(candidate.queue)
            worth_s = min(WORTH_STEPS * least_s, FULL_SLACK * most_s)
            asked_s = max(least_s, min(worth_s, self._offline_decodes_s(candidate.queue)))
            # No stream is to stand still for longer than its objective, but where no step would be worth its while.
            more_s = max(0.0, worth_s / FULL_SLACK + need_s - PLANNED_SHARE * objectives.tpot_s)
            room_s = self._room_of_streams_s(begins_s, need_s)
            limit_s = min(spare_s, room_s if self._is_behind_pace(objectives, begins_s) else room_s + more_s)
            if limit_s >= asked_s:
                candidate.limit_s = limit_s
                return candidate
            if most_s >= asked_s:
                self._kept_for = name
                return None
        return None

    def _is_behind_pace(self, objectives: Objectives, begins_s: float) -> bool:
        """Whether streams had fewer tokens than their objectives ask since the last offline step of its own began, however
        far ahead they were before."""
        num_models = sum(queue.has_online_work() for queue in self._queues.values())
        due_s = self._num_led / num_models * PLANNED_SHARE * objectives.tpot_s
        return begins_s - self._own_began_s > due_s

    def _room_of_streams_s(self, begins_s: float, need_s: float) -> float:
        """How long something may run before online steps of `need_s` must begin, for no stream of whatever model to stand
        still for longer than its TPOT objective."""
        queues = [queue for queue in self._queues.values() if queue.has_online_work()]
        return min((queue.token_left_s(begins_s) for queue in queues), default=math.inf) - need_s

    def _offline_decodes_s(self, queue: ModelQueue) -> float:
        """Seconds of a step with the offline sequences that decode, where there is nothing else to do; else inf."""
        running = queue.running[PriorityClass.OFFLINE].values()
        if queue.cost_model is None or not running or any(not sequence.is_in_decode for sequence in running):
            return math.inf
        waiting, memory = queue.waiting[PriorityClass.OFFLINE], self._memory
        if waiting and memory.num_free_rows:
            has_room = memory.pool.num_available(queue.name) >= memory.num_wanted_blocks(waiting[0])
            if has_room:
                return math.inf
        context = sum(sequence.num_computed for sequence in running)
        return queue.cost_model.predict(StepShape(0, 0.0, len(running), context))

    def _online_groups(self, begins_s: float) -> Iterator[list[Candidate]]:
        """Models that could lead alike. Those come first in which favoured tenants (favours.py)
        have a prompt, or streams behind the pace of their objectives; streams that have stood still for as long as they
        may do so too."""
        for group in self._groups_of_ranks(begins_s):
            favoured = self._favours.favoured() if len(group) > 1 else set()
            first = [one for one in group if self._serves(one, group, favoured, begins_s)] if favoured else []
            if 0 < len(first) < len(group):
                yield [one for one in group if one in first or self._is_urgent(one.queue, begins_s)]
            yield group

    def _serves(self, one: Candidate, group: list[Candidate], favoured: set[str], begins_s: float) -> bool:
        """Whether a step of the model is what a favoured tenant waits for, before one of the others in the group."""
        if self._favours.prompts(one.queue, one.priority_class):
            return True
        slack_s = one.queue.objectives(begins_s, favoured).slack_s
        return slack_s < max(self._step_s(other, begins_s) for other in group if other is not one)

    def _groups_of_ranks(self, begins_s: float) -> Iterator[list[Candidate]]:
        """Within a model high priority goes before normal, always. Between models it is a weight: a model with normal
        requests alone leads where its streams have stood still for as long as they may (silence.py), where it could not
        keep its objectives otherwise and those of high priority can be kept all the same, and in its turns; these are equal
        while streams of such models lag behind."""
        high = self._candidates(PriorityClass.ONLINE_HIGH)
        are_high = {one.name for one in high}
        normal = [one for one in self._candidates(PriorityClass.ONLINE_NORMAL) if one.name not in are_high]
        if not high or not normal:
            yield high or normal
            return
        weight = HIGH_WEIGHT if all(self._is_ahead(one.queue, begins_s) for one in normal) else 1.0
        self._rank_weights = {_HIGH: weight * len(high), _NORMAL: float(len(normal))}
        urgent = [one for one in (*high, *normal) if self._is_urgent(one.queue, begins_s)]
        if urgent:
            yield [*high, *(one for one in urgent if one not in high)]
        for due in self._due(high, normal, begins_s):
            yield [due]
        groups = [high, normal]
        if self._rank_turns.next(self._rank_weights) == _NORMAL:
            groups.reverse()
        yield from groups

    def _is_ahead(self, queue: ModelQueue, begins_s: float) -> bool:
        """Whether streams of the model keep the pace of their objectives, and are as far ahead of it as they can get where
        offline work waits for what those leave."""
        objectives = queue.objectives(begins_s)
        if objectives.tpot_s == math.inf:
            return True
        ahead_s = FULL_SLACK * MAX_SLACK * objectives.tpot_s if self._offline_weights else 0.0
        return objectives.slack_s >= ahead_s

    def _due(self, high: list[Candidate], normal: list[Candidate], begins_s: float) -> list[Candidate]:
        """Models with normal requests that must lead now to keep their objectives, while those with requests of high
        priority keep theirs; favoured tenants' prompts first. Where these leave no time for them yet, the one of high
        priority that is due first: its streams have then run for the longest that may be."""
        period_s, left_s = self._time_beside_high(high, begins_s)
        # A guess is no reason not to try: steps are short until they are known.
        least_s = {one.name: self._least_online_s(one.queue) if one.queue.is_cost_known else 0.0 for one in normal}
        claims = {}
        for one in normal:
            free_s = left_s - least_s[one.name]
            prompt_steps = max(PROMPT_STEPS, period_s / free_s) if 0.0 < free_s < math.inf else PROMPT_STEPS
            claims[one.name] = one.queue.claims(begins_s, prompt_steps=prompt_steps)
        step_s = max(self._step_s(one, begins_s) for one in high)
        if room_s([claim for of_model in claims.values() for claim in of_model]) >= step_s:
            return []
        room_of_high_s = self._room_of_high_s(begins_s)
        due, waits = [], False
        for index, one in enumerate(normal):
            room_of_model_s, asked_s = room_s(claims[one.name]), least_s[one.name]
            if room_of_model_s == math.inf:
                continue
            if one.queue.token_left_s(begins_s) - asked_s >= step_s and left_s < math.inf:
                # A prompt: each chunk reads the weights, so half of what there is at best is waited for.
                asked_s = max(asked_s, left_s / 2)
            if room_of_high_s >= asked_s:
                due.append((not self._favours.prompts(one.queue, one.priority_class), room_of_model_s, index))
            elif room_of_model_s < step_s and least_s[one.name] < left_s < math.inf:
                waits = True
        if waits and not due:
            return [min(high, key=lambda one: one.queue.token_left_s(begins_s, (PriorityClass.ONLINE_HIGH,)))]
        return [normal[index] for *_, index in sorted(due)]

    def _time_beside_high(self, high: list[Candidate], begins_s: float) -> tuple[float, float]:
        """The longest time that streams of high priority may stand still, and what of it their steps leave; inf without
        such streams."""
        tpot_s = min(one.queue.objectives(begins_s).tpot_s for one in high)
        period_s = PLANNED_SHARE * tpot_s
        steps_s = sum(one.queue.streams(begins_s)[1] for one in high) / SERVING_STEPS
        return period_s, period_s - HIGH_STEPS * steps_s

    def _step_s(self, candidate: Candidate, begins_s: float) -> float:
        """What a step that it leads would take."""
        cost = candidate.queue.cost_model
        if cost is None:
            return 0.0
        limits = self._limits(candidate, begins_s)
        return min(limits.limit_s, cost.predict(candidate.queue.online_shape(limits.max_tokens)))

    def _room_of_high_s(self, begins_s: float) -> float:
        """How long something else may run without breaking an objective of a request of high priority."""
        queues = [queue for queue in self._queues.values() if queue.has_work(PriorityClass.ONLINE_HIGH)]
        classes = (PriorityClass.ONLINE_HIGH,)
        return room_s(
            [claim for queue in queues for claim in queue.claims(begins_s, classes, serving_steps=HIGH_STEPS)]
        )

    def _least_online_s(self, queue: ModelQueue) -> float:
        """Seconds of a step with its streams and a bit of a prompt."""
        if queue.cost_model is None:
            return 0.0
        return queue.cost_model.predict(queue.online_shape(MIN_ONLINE_CHUNK))

    def _take_turns(self, queue: ModelQueue, leading: PriorityClass, batch: Batch, begins_s: float) -> None:
        """After a step was filled."""
        if self._rank_weights and leading != PriorityClass.OFFLINE:
            self._rank_turns.take(_HIGH if leading == PriorityClass.ONLINE_HIGH else _NORMAL, self._rank_weights)
        if leading != PriorityClass.OFFLINE:
            self._num_led += 1
        elif self._memory.has_online_work():
            self._own_began_s, self._num_led = begins_s, 0
        if not batch.sequences[-1].is_online:  # they come last
            queue.offline_turn_s = begins_s
            if queue.name in self._offline_weights:
                self._offline_turns.take(queue.name, self._offline_weights)

    def _is_urgent(self, queue: ModelQueue, begins_s: float) -> bool:
        """Whether streams of the model have stood still for so long that they go first."""
        return self._ordering.bounds_silence and room_s([queue.streams(begins_s)]) < URGENT_S

    def _silence_limit_s(self, queue: ModelQueue, begins_s: float) -> float:
        """How long a step of the model may take without making a stream, of whatever model, stand still for longer than it
        may. Prompts make headway beside the model's own streams even where it is too late."""
        if not self._ordering.bounds_silence:
            return math.inf
        streams = {name: other.streams(begins_s) for name, other in self._queues.items()}
        least_s = streams[queue.name][1]
        serving_s = [each_s for _, each_s in streams.values()]
        if is_overfull(serving_s):
            # Prompts of a model without streams have steps as long as theirs.
            least_s = least_s or max(serving_s)
        return max(room_s(streams.values()), least_s)

    def _limits(self, candidate: Candidate, begins_s: float) -> Limits:
        queue, leading = candidate.queue, candidate.priority_class
        view = StepView(
            model=queue.name,
            now=begins_s,
            cost_model=queue.cost_model,
            is_online=leading != PriorityClass.OFFLINE,
            num_other_online=0,
            max_known_tokens=queue.max_known_tokens,
        )
        if view.is_online and queue.only_decodes:
            # Nothing can join them, and they are never left out for the sake of time.
            self.last_limits = self._token_budget.limits(view)
            return self.last_limits
        if not view.is_online:
            limits = self._offline_limits(candidate, view)
        else:
            num_others = sum(other.has_online_work() for other in self._queues.values() if other is not queue)
            own = queue.objectives(begins_s)
            tpot_s, slack_s, ttft_left_s = own if len(self._queues) == 1 else self._objectives(begins_s)
            has_both = max(tpot_s, own.ttft_left_s) < math.inf
            limits = self._token_budget.limits(
                view._replace(
                    num_other_online=num_others,
                    tpot_objective_s=tpot_s,
                    slack_s=slack_s,
                    ttft_left_s=ttft_left_s,
                    own_ttft_left_s=own.ttft_left_s,
                    online=queue.online_shape(sys.maxsize) if has_both else StepShape(),
                )
            )
            if self._kept_for is not None and self._kept_for != queue.name:
                limits = limits._replace(offline_limit_s=0.0)
            elif len(self._offline_weights) > 1:
                # The streams may have stood still for the sake of another model's.
                limit_s = max(0.0, self._room_of_streams_s(begins_s, 0.0))
                limits = limits._replace(offline_limit_s=min(limits.offline_limit_s, limit_s))
            if leading == PriorityClass.ONLINE_NORMAL and self._rank_weights:
                room_s = min(self._room_of_high_s(begins_s), queue.token_left_s(begins_s))
                limit_s = max(room_s, SERVING_STEPS * self._least_online_s(queue))
                limits = limits._replace(limit_s=min(limits.limit_s, limit_s))
            limits = limits._replace(limit_s=min(limits.limit_s, self._tenants_limit_s(queue, begins_s)))
        self.last_limits = limits._replace(limit_s=min(limits.limit_s, self._silence_limit_s(queue, begins_s)))
        return self.last_limits

    def _tenants_limit_s(self, queue: ModelQueue, begins_s: float) -> float:
        """How long a step of the model may take for the sake of tenants that may come back, or wait for a step of another
        model; inf where one of those is served, or a first token would come too late for the former."""
        waiting = [other for other in self._queues.values() if self._has_favoured_prompts(other)]
        if queue in waiting:
            return math.inf
        limit_s = self._favours.step_limit_s(queue, begins_s)
        claim = None if waiting or limit_s == math.inf else queue.first_claim(begins_s)
        return math.inf if claim is not None and room_s([claim]) < URGENT_S else limit_s

    def _has_favoured_prompts(self, queue: ModelQueue) -> bool:
        return any(self._favours.prompts(queue, priority_class) for priority_class in ONLINE_CLASSES)

    def _offline_limits(self, candidate: Candidate, view: StepView) -> Limits:
        """Limits of a step of offline sequences alone."""
        num_online = sum(other.has_online_work() or other.restores_online() for other in self._queues.values())
        limits = self._token_budget.limits(view._replace(num_other_online=num_online))
        if candidate.limit_s < math.inf:
            return limits._replace(limit_s=candidate.limit_s)
        # Else online sequences cannot run now, or the step would be led by them.
        if not num_online:
            if limits.is_interruptible and not self._may_interrupt:
                limit_s = WAIT_SHARE * self._least_ttft_s() / self._steps_in_flight
                limits = limits._replace(limit_s=max(limit_s, self._sure_step_s(candidate.queue)))
        elif self._num_stages > 1:
            # They are in flight, and their next step will come after as many of these as there are stages.
            slack_s = max(0.0, self._objectives(view.now).slack_s)
            limits = limits._replace(limit_s=min(limits.limit_s, slack_s / self._num_stages))
        return limits

    def _sure_step_s(self, queue: ModelQueue) -> float:
        """Seconds of a step into which at least one offline sequence of the model fits, whichever it is."""
        context = max((s.num_computed for s in queue.runnable(PriorityClass.OFFLINE)), default=0)
        decode_s = 0.0 if queue.cost_model is None else queue.cost_model.predict(StepShape(0, 0.0, 1, context))
        return max(decode_s, WORTH_STEPS * self._least_step_s(queue))

    def _least_ttft_s(self) -> float:
        return min(queue.ttft_objective_s for queue in self._queues.values())

    def _limits_for_expected(self, queue: ModelQueue, limits: Limits, begins_s: float) -> Limits:
        """The step ends when a sequence that comes may be here, or is a short one. One that may be interrupted is, then."""
        if queue.cost_model is None or limits.is_interruptible:
            return limits
        due_s = min((at for at in self._memory.expected.values() if begins_s < at + EXPECTED_S), default=math.inf)
        if any(other.has_restored_decodes() for other in self._queues.values()):
            due_s = begins_s
        if due_s == math.inf:
            return limits
        short_s = EXPECTED_STEPS * queue.cost_model.predict(queue.online_shape(0))
        return limits._replace(limit_s=min(limits.limit_s, max(short_s, due_s - begins_s)))

    def _fill(self, queue: ModelQueue, leading: PriorityClass, limits: Limits, now: float) -> Batch:
        """The batch of a model, rank by rank; empty if nothing of the leading rank can run."""
        if self._mix_phases:
            return self._fill_phases(queue, leading, limits, now, True, True)
        # Prompts first: who has been prefilled shares the steps of those who decode (Orca, vLLM before chunked prefill).
        phases = [(False, True), (True, False)]
        if self._is_urgent(queue, now):
            phases.reverse()
        batch = self._fill_phases(queue, leading, limits, now, *phases[0])
        return batch if batch.sequences else self._fill_phases(queue, leading, limits, now, *phases[1])

    def _fill_phases(
        self, queue: ModelQueue, leading: PriorityClass, limits: Limits, now: float, decodes: bool, prefills: bool
    ) -> Batch:
        batch = Batch(StepBudget(limits, queue.cost_model))
        for priority_class in self._classes:
            if priority_class > leading and not batch.sequences:
                break
            if priority_class == PriorityClass.OFFLINE:
                if self._holds_offline:
                    break
                batch.budget.begin_offline()
            favoured = self._favours.prompts(queue, priority_class) if prefills else []
            self._favours.make_room(queue, favoured, now)
            # Nobody is left out for the sake of a prompt that cannot be computed, now or when steps in flight have ended.
            favoured = [
                one
                for one in favoured
                if one.row >= 0 or self._finds_room(queue, one, now) or self._gets_share(one, now)
            ]
            chunks = (
                self._add_decodes(queue, priority_class, batch, now, decodes, favoured)
                if queue.running[priority_class]
                else []
            )
            first = {sequence.tenant for sequence in favoured}
            if not prefills or not (chunks or queue.waiting[priority_class] or queue.restored):
                continue
            # Who decoded elsewhere, or before it was preempted, has waited for a token already.
            self._admit_restored(queue, priority_class, batch, now, decodes=True)
            # Prompts of high priority do not make the model's other streams stand still.
            kept = (
                queue.num_decoding(PriorityClass.ONLINE_NORMAL)
                if decodes and priority_class == PriorityClass.ONLINE_HIGH
                else 0
            )
            kept = max(0, min(kept, batch.budget.tokens_left - MIN_ONLINE_CHUNK))
            batch.budget.tokens_left -= kept
            for sequence in chunks:
                self._admit_waiting(queue, priority_class, batch, now, first, before=sequence)
                if sequence.state == State.RUNNING and not (first and batch.has_chunk and sequence.tenant not in first):
                    self._add_prefill(sequence, batch, self._least_chunk(priority_class, batch))
            self._admit(queue, priority_class, batch, now, first)
            batch.budget.tokens_left += kept
        return batch

    def _close(self, step_id: int, queue: ModelQueue, batch: Batch, is_interruptible: bool, now: float) -> PlannedStep:
        sequences = batch.sequences
        # Nothing online waits in a suspended step, and what runs online can be moved within the pool at any time.
        is_interruptible = is_interruptible and not sequences[0].is_online
        if self._drafting.is_on:
            self._drafting.add(queue, batch)
        predicted_s = 0.0 if queue.cost_model is None else queue.cost_model.predict(batch.budget.shape) + batch.draft_s
        if self._steps_in_flight > 1 and 0.0 < predicted_s <= self._short_step_s():
            # Better replayed as a graph, and with a second step planned behind it, than with safepoints.
            is_interruptible = False
        plan = StepPlan(
            step_id=step_id,
            model=queue.name,
            rows=[sequence.row for sequence in sequences],
            starts=batch.starts,
            counts=batch.counts,
            samples=batch.samples,
            new_sequences=batch.new_sequences,
            new_blocks=batch.new_blocks,
            num_decodes=(batch.num_online_decodes, batch.num_offline_decodes),
            is_interruptible=is_interruptible and self._may_interrupt,
            discards=self._memory.take_discards(),
            drafts=batch.drafts,
            model_drafts=batch.model_drafts,
        )
        step = PlannedStep(plan, sequences, now, predicted_s, queue.cost_scale)
        step.draft_s = batch.draft_s
        if queue.cost_model is not None:
            decodes = batch.budget.shape._replace(prefill_tokens=0, prefill_attention=0.0)
            step.is_long = predicted_s > LONG_STEPS * queue.cost_model.predict(decodes)
        return step

    def _short_step_s(self) -> float:
        """Duration for which any online request can wait, though two such steps may be before it."""
        return SHORT_STEP_SHARE * self._least_ttft_s()

    def resume(self, now: float, stop_share: float) -> PlannedStep:
        """The suspended step, to be gone on with, up to a share of its layers."""
        step = self._memory.take_suspended()
        plan = step.plan
        step.plan = StepPlan(
            step_id=plan.step_id,
            model=plan.model,
            rows=plan.rows,
            starts=plan.starts,
            counts=plan.counts,
            samples=plan.samples,
            new_sequences=[],
            new_blocks=[],
            num_decodes=plan.num_decodes,
            is_interruptible=stop_share < 1.0 or not self._memory.has_online_work(),
            resumes=True,
            stop_share=stop_share,
            discards=self._memory.take_discards(),
            drafts=plan.drafts,
            model_drafts=plan.model_drafts,
        )
        step.planned_s = now
        step.is_interrupted = False
        self._queues[plan.model].offline_turn_s = now
        return step

    # ------------------------------------------------------------------------------------------------ filling

    def _add_decodes(
        self,
        queue: ModelQueue,
        priority_class: PriorityClass,
        batch: Batch,
        now: float,
        decodes: bool,
        favoured: list[Sequence],
    ) -> list[Sequence]:
        """One token for each decoding sequence of the rank, but those that `favoured` prompts leave out; returns those with
        more than one left to compute. This loop is the planner's hot path."""
        running = list(queue.running[priority_class].values())
        self._memory.sort(running, now)
        if favoured and queue.cost_model is not None:
            missing = sum(sequence.total - sequence.num_computed for sequence in favoured)
            step_s = queue.cost_model.predict(StepShape(missing, missing * missing / 2))
            running = [
                sequence
                for sequence in running
                if not sequence.is_in_decode or not self._favours.may_be_left_out(sequence, favoured, step_s, now)
            ]
        if waiting := queue.handing_over:
            running = [one for one in running if not (one.number in waiting and one.is_in_decode)]
        prefills: list[Sequence] = []
        add_sequence, add_start = batch.sequences.append, batch.starts.append
        budget = batch.budget
        left = budget.tokens_left if decodes else 0
        if self._num_stages > 1:
            left = min(left, -(-len(running) // self._num_stages))
            # Beside steps of other models all may be back when the next of these is filled: who waited longest goes first.
            running = [sequence for sequence in running if not sequence.in_flight]
            running.sort(key=lambda sequence: sequence.last_ran_s)
        is_offline = priority_class == PriorityClass.OFFLINE
        if is_offline:
            # Online decodes are never left out for the sake of time: an objective that online alone breaks is broken.
            left = min(left, budget.fits_decodes([s.num_computed for s in running if s.total - s.num_computed == 1]))
        planned = context = 0
        for sequence in running:
            start, total = sequence.num_computed, sequence.total
            if total >= sequence.max_total:
                continue
            if total - start != 1:
                prefills.append(sequence)
                continue
            if planned == left:
                continue
            if start >= sequence.capacity and not self._grow(sequence, batch, now):
                continue
            sequence.num_computed = total
            sequence.total = total + 1
            sequence.in_flight += 1
            add_sequence(sequence)
            add_start(start)
            planned += 1
            context += start
        budget.take_decodes(planned, context)
        if is_offline:
            batch.num_offline_decodes += planned
        else:
            batch.num_online_decodes += planned
        batch.counts.extend([1] * planned)
        batch.samples.extend([True] * planned)
        return prefills

    def _grow(self, sequence: Sequence, batch: Batch, now: float) -> bool:
        """One more block for a decoding sequence, at the cost of later or lower ones if need be."""
        if sequence.state != State.RUNNING:
            return False
        blocks = self._memory.pool.allocate(sequence.model, 1)
        if blocks is None and self._memory.make_room(sequence, 1, now):
            blocks = self._memory.pool.allocate(sequence.model, 1)
        if blocks is None:
            # It keeps what it has and waits; a sequence before it in the order may take that as a victim's.
            return False
        sequence.blocks.extend(blocks)
        sequence.capacity += sequence.block_size
        batch.new_blocks.append((sequence.row, blocks))
        return True

    @staticmethod
    def _least_chunk(priority_class: PriorityClass, batch: Batch) -> int:
        """Online prompts go on even where the decodes alone break their objective: one chunk a step."""
        return MIN_ONLINE_CHUNK if priority_class != PriorityClass.OFFLINE and not batch.has_chunk else 0

    def _add_prefill(self, sequence: Sequence, batch: Batch, at_least: int) -> None:
        wanted = sequence.total - sequence.num_computed
        if sequence.number in self._queues[sequence.model].handing_over:
            wanted = min(wanted, most_chunk(wanted))
        fitting = batch.budget.fits_prefill(wanted, sequence.num_computed)
        count = min(wanted, batch.budget.tokens_left, max(fitting, at_least))
        if count > 0:
            batch.add_chunk(sequence, count)

    def _admit(
        self, queue: ModelQueue, priority_class: PriorityClass, batch: Batch, now: float, first: set[str]
    ) -> None:
        """Waiting sequences of the rank, in order, until one does not fit: nobody overtakes a head of its own model that
        lacks room, nor one of another if that would wait for longer. `first`: tenants whose prompts share the step with
        nobody else's."""
        self._admit_restored(queue, priority_class, batch, now, decodes=False)
        self._admit_waiting(queue, priority_class, batch, now, first)

    def _admit_waiting(
        self,
        queue: ModelQueue,
        priority_class: PriorityClass,
        batch: Batch,
        now: float,
        first: set[str],
        before: Sequence | None = None,
    ) -> None:
        """`before`: only those whose tenant goes before that of a running one."""
        waiting = queue.waiting[priority_class]
        if before is not None and not (waiting and self._memory.tenants(before).are_several):
            return
        self._memory.sort(waiting, now)
        while waiting and self._has_budget(priority_class, batch):
            sequence = waiting[0]
            tenants = self._memory.tenants(sequence)
            if first and batch.has_chunk and sequence.tenant not in first:
                return
            if before is not None and tenants.key(sequence.tenant) >= tenants.key(before.tenant):
                return
            if self._is_behind_stuck(sequence, now):
                return
            num_kept = (
                self._memory.demand.num_rows
                if self._memory.demand is not None and priority_class == PriorityClass.OFFLINE
                else 0
            )
            has_row = self._memory.num_free_rows > num_kept or self._memory.make_row(sequence, now)
            if not has_row or not self._memory.allocate_prompt(queue, sequence, now):
                if not self._comes_after_stuck(sequence, now):
                    self._memory.stuck = sequence
                return
            waiting.remove(sequence)
            sequence.row = self._memory.take_row()
            if sequence.state == State.RESTORING:
                queue.restoring[sequence.number] = sequence
            else:
                self._run(queue, sequence, batch, now)
            if tenants.are_several:
                self._memory.sort(waiting, now)

    def _admit_restored(
        self, queue: ModelQueue, priority_class: PriorityClass, batch: Batch, now: float, *, decodes: bool
    ) -> None:
        """`decodes`: those that lack one token alone."""
        for sequence in [restored for restored in queue.restored.values() if restored.priority_class == priority_class]:
            if decodes and not sequence.is_in_decode:
                continue
            if not self._has_budget(priority_class, batch):
                return
            del queue.restored[sequence.number]
            self._run(queue, sequence, batch, now)

    def _has_budget(self, priority_class: PriorityClass, batch: Batch) -> bool:
        """Whether a sequence of the rank could compute at least a token."""
        if batch.budget.tokens_left < 1:
            return False
        return self._least_chunk(priority_class, batch) > 0 or batch.budget.fits_prefill(1, 0) > 0

    def _run(self, queue: ModelQueue, sequence: Sequence, batch: Batch, now: float) -> None:
        """A sequence that has row and blocks begins to run, with a chunk of at least a token: what its row is to hold
        travels with a step that computes it."""
        self._memory.count_recomputed(sequence)
        sequence.state = State.RUNNING
        queue.running[sequence.priority_class][sequence.number] = sequence
        if sequence.first_planned_s is None:
            sequence.first_planned_s = now
            self._promise(queue, sequence, now)
        numbers = (sequence.num_computed, sequence.total - sequence.num_computed)
        self._memory.events.add(sequence, EventKind.ADMITTED, now, numbers=numbers)
        request, blocks = sequence.request, list(sequence.blocks)
        tokens = request.prompt + sequence.packed_output
        adapter = "" if request.adapter is None else request.adapter.version
        batch.new_sequences.append(
            NewSequence(sequence.row, tokens, sequence.num_prompt, request.sampling, blocks, adapter)
        )
        self._add_prefill(sequence, batch, max(1, self._least_chunk(PriorityClass(sequence.priority_class), batch)))

    def _promise(self, queue: ModelQueue, sequence: Sequence, now: float) -> None:
        """Its tenant owes the whole prompt from now on, so that the next one to begin is another tenant's."""
        if queue.cost_model is not None:
            start = sequence.num_computed
            sequence.promised_s = prompt_s(queue.cost_model.prompt_cost, sequence.total - start, start)
            if sequence.is_online:
                self._favours.note(sequence, queue.cost_model.fixed_s + sequence.promised_s, now)
            self._memory.tenants(sequence).promise(sequence.tenant, sequence.promised_s)

    def _waits_for_offline(self) -> bool:
        """Whether an online sequence waits for what offline ones hold."""
        stuck = self._memory.stuck_online
        if stuck is None:
            return False
        if not self._memory.num_free_rows:
            return self._memory.num_offline_rows() > 0
        needed = self._memory.num_wanted_blocks(stuck)
        return self._memory.pool.num_available(stuck.model) < needed and self._memory.could_have(stuck.model, needed)

    def _waits_for_share(self, now: float) -> bool:
        """Whether an online sequence waits for the share of its model or tenant, of which others' online ones hold some."""
        stuck = self._memory.stuck_online
        return stuck is not None and self._gets_share(stuck, now)

    def _gets_share(self, sequence: Sequence, now: float) -> bool:
        """Whether a waiting online sequence lacks what others' online ones hold beyond their shares, perhaps in flight."""
        memory, needed = self._memory, self._memory.num_wanted_blocks(sequence)
        if not memory.num_free_rows and any(memory.beyond_tenant_share(sequence, now)):
            return True
        if memory.pool.num_available(sequence.model) >= needed:
            return False
        victims = list(memory.beyond_shares(sequence, needed, now))
        return bool(victims) and memory.reaches(sequence.model, [*memory.offline_holders(), *victims], needed)

    def _finds_room(self, queue: ModelQueue, sequence: Sequence, now: float) -> bool:
        """Whether a waiting online sequence would be admitted, as far as that can be told."""
        memory, needed = self._memory, self._memory.num_wanted_blocks(sequence)
        has_room = memory.num_free_rows > 0 and memory.pool.num_available(queue.name) >= needed
        may_hold = memory.may_hold(queue.name, needed, sequence.priority_class)
        return has_room and may_hold and not self._is_behind_stuck(sequence, now)

    def _is_behind_stuck(self, sequence: Sequence, now: float) -> bool:
        """Whether it is not admitted because one before it in the order lacks room."""
        stuck = self._memory.stuck
        if stuck is None or not self._overtakes(sequence, now):
            return False
        return stuck.model == sequence.model or self._delays(stuck, sequence)

    def _overtakes(self, sequence: Sequence, now: float) -> bool:
        """Whether one before it lacks room that is not what its own model can have in any case."""
        stuck = self._memory.stuck
        is_of_other = stuck is not None and stuck.model != sequence.model
        if sequence.is_online and is_of_other and self._memory.is_below_share(sequence.model):
            return False
        return self._comes_after_stuck(sequence, now)

    def _comes_after_stuck(self, sequence: Sequence, now: float) -> bool:
        """Whether one before it in the order lacks room."""
        stuck = self._memory.stuck
        if stuck is None or stuck is sequence or stuck.state != State.WAITING:
            return False
        return self._memory.order_key(sequence, now) > self._memory.order_key(stuck, now)

    def _delays(self, stuck: Sequence, sequence: Sequence) -> bool:
        """Whether more of those that run would have to end before the first has room, if the second had what it wants."""
        memory = self._memory
        running = [s for q in self._queues.values() for c in ONLINE_CLASSES for s in q.running[c].values()]
        running.sort(key=lambda s: len(s.blocks) / self._queues[s.model].shape.blocks_per_merged, reverse=True)
        offline, needed = memory.offline_holders(), memory.num_wanted_blocks(stuck)
        num_to_end = bisect_left(
            range(len(running) + 1),
            True,
            key=lambda num: memory.reaches(stuck.model, [*offline, *running[:num]], needed),
        )
        per_merged = {name: queue.shape.blocks_per_merged for name, queue in self._queues.items()}
        merged = -(-memory.num_wanted_blocks(sequence) // per_merged[sequence.model])
        needed += merged * per_merged[stuck.model]
        # Where it needs nobody's end it lacks something else, or its turn has come.
        return not num_to_end or not memory.reaches(stuck.model, [*offline, *running[:num_to_end]], needed)
