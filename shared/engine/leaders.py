"""Which model leads the next step of an instance, and within which limits: the ranks between models, the turns that
offline work of several models takes, and what the objectives of all leave.

The order is in docs/design/scheduling.md ("Order of authority"). Offline work of models of which nothing online runs leads
where all objectives leave time for a step of its own; else a model with online work, high priority by weight and normal by
what it was promised; else offline work. The ordering policy picks among models of a rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator

from shared.costs.model import StepShape
from shared.engine.admission import MIN_ONLINE_CHUNK
from shared.engine.batch import Batch
from shared.engine.favours import Favours
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ONLINE_CLASSES, PROMPT_STEPS, ModelQueue, Objectives
from shared.engine.sequence import PriorityClass, Sequence
from shared.policies.patience import Patience
from shared.policies.silence import PLANNED_SHARE, SERVING_STEPS, URGENT_S, is_overfull, room_s
from shared.policies.slo_budget import MAX_SLACK, PACE
from shared.policies.token_budget import Limits, StepView, TokenBudgetPolicy
from shared.policies.turns import Turns

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


def _stream_claim(queue: ModelQueue, begins_s: float) -> tuple[float, float]:
    """Claim for `room_s`: until a stream of the model is due by its TPOT objective, and a step of all its streams."""
    return queue.token_left_s(begins_s), queue.streams(begins_s)[1] / SERVING_STEPS


class Candidate:
    """A model with runnable sequences of one rank, which could lead; the ordering policy sees it as a `ModelView`."""

    __slots__ = ("_claim", "_memory", "limit_s", "priority_class", "queue")

    def __init__(self, memory: Allocator, queue: ModelQueue, priority_class: PriorityClass) -> None:
        self._memory = memory
        self.queue = queue
        self.priority_class = priority_class
        self.limit_s = math.inf
        """Most seconds of an offline step beside online work: what the objectives leave."""
        self._claim: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        return self.queue.name

    @property
    def last_planned_step(self) -> int:
        return self.queue.last_planned_step

    @property
    def pool_share(self) -> float:
        pool = self._memory.pool
        return pool.num_used(self.name) / (self.queue.shape.blocks_per_merged * pool.num_merged)

    @property
    def num_short(self) -> int:
        is_short = self._memory.stuck_online is not None and self._memory.num_free_rows > 0
        return len(self.queue.waiting[self.priority_class]) if is_short else 0

    def runnable(self) -> Iterable[Sequence]:
        return self.queue.runnable(self.priority_class)

    def streams(self, now: float) -> tuple[float, float]:
        return self.queue.streams(now)

    def stream_claim(self, begins_s: float) -> tuple[float, float]:
        """See `_stream_claim`; computed once, for the step that is being planned."""
        if self._claim is None:
            self._claim = _stream_claim(self.queue, begins_s)
        return self._claim


class Leaders:
    """The choice of the model that leads a step, and of the step's limits."""

    def __init__(
        self,
        memory: Allocator,
        favours: Favours,
        token_budget: TokenBudgetPolicy,
        classes: tuple[PriorityClass, ...],
        *,
        may_interrupt: bool,
        prefetch: bool,
        steps_in_flight: int,
        num_stages: int,
    ) -> None:
        """`classes`: of the sequences that run here. The others: see `Planner`."""
        self._memory = memory
        self._queues = memory.queues
        self._ordering = memory.ordering
        self._favours = favours
        self.last_limits = Limits(1)
        """Limits of the step planned last."""
        self._token_budget = token_budget
        self._classes = classes
        self._may_interrupt = may_interrupt
        self._prefetch = prefetch
        self._steps_in_flight = steps_in_flight
        self._num_stages = num_stages
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

    def spare_s(self, now: float, least_s: float = 0.0) -> float:
        """What the objectives leave beside an online step: streams keep their pace, and none stands still for longer than
        its TPOT objective, but for `least_s` and that step where the pace allows it."""
        objectives, need_s = self._objectives(now), self._online_steps_s()
        limit_s = self._token_budget.offline_limit_s(objectives.slack_s, objectives.ttft_left_s)
        return max(0.0, min(limit_s - need_s, max(self._room_of_streams_s(now, need_s), least_s)))

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

    def begin(self, now: float, begins_s: float) -> None:
        """A step is about to be planned."""
        has_online_work = self._memory.has_online_work()
        self._patience.observe(now, has_online_work)
        if not has_online_work:
            self._own_began_s, self._num_led = begins_s, 0

    def groups(self, begins_s: float, holds_offline: bool) -> Iterator[list[Candidate]]:
        """The models that could lead the step, group by group: of each the ordering policy picks, and the next one is
        asked where nothing of it can run. `holds_offline`: see `Planner.plan`."""
        self._rank_weights, self._kept_for = {}, None
        self._offline_weights, found = {}, []
        if PriorityClass.OFFLINE in self._classes and not holds_offline:
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
        claims = self._stream_claims(begins_s)
        return room_s(claims) - (need_s - sum(step_s for _, step_s in claims))

    def _room_beside_s(self, queue: ModelQueue, begins_s: float) -> float:
        """How long a step of the model's online work may be made by offline work, for no stream of whatever model to stand
        still for longer than its TPOT objective. Streams of other models run after it."""
        room_of_others_s = room_s(self._stream_claims(begins_s, but=queue))
        return max(0.0, min(queue.token_left_s(begins_s), room_of_others_s))

    def _stream_claims(self, begins_s: float, but: ModelQueue | None = None) -> list[tuple[float, float]]:
        """Claims of the models' streams, all but one's, in the order in which they run at worst: by when they are due,
        but those of models with requests of high priority before others."""
        high, others = list[tuple[float, float]](), list[tuple[float, float]]()
        for queue in self._queues.values():
            if queue is not but and queue.has_online_work():
                is_high = queue.has_work(PriorityClass.ONLINE_HIGH)
                (high if is_high else others).append(_stream_claim(queue, begins_s))
        first_s = min((left_s for left_s, _ in others), default=math.inf)
        return [(min(left_s, first_s), step_s) for left_s, step_s in high] + others

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
        have a prompt, or streams behind the pace of their objectives, then favoured models with one; streams that have
        stood still for as long as they may do so too."""
        for group in self._groups_of_ranks(begins_s):
            for first in self._favoured_of(group, begins_s) if len(group) > 1 else ():
                if 0 < len(first) < len(group):
                    yield [one for one in group if one in first or self.is_urgent(one.queue, begins_s)]
            yield group

    def due_stream(self, picked: Candidate, candidates: list[Candidate], begins_s: float) -> Candidate:
        """Which of the candidates leads where the ordering policy picked this one: the one whose streams are due first, if
        some would stand still for longer than their TPOT objective after a step of the picked one's streams, while all can
        be in time and no first token is late. While offline work waits for what streams leave, the one whose streams are
        least ahead of their pace is picked, or the one that is due first once all are as far ahead as they can get."""
        if not self._ordering.bounds_silence or picked.priority_class == PriorityClass.OFFLINE:
            return picked
        claims = {one.name: one.stream_claim(begins_s) for one in candidates}
        due = min(candidates, key=lambda one: claims[one.name][0])
        if self._waits_for_streams(begins_s) and self._can_be_in_time(candidates, begins_s):
            behind = [one for one in candidates if not self._is_ahead(one.queue, begins_s)]
            picked = min(behind, key=lambda one: one.queue.objectives(begins_s).slack_s, default=due)
        left_s = room_s(claim for name, claim in claims.items() if name != picked.name)
        if left_s >= claims[picked.name][1] or self._memory.first_tokens.is_one_late(begins_s):
            return picked
        return due if self._can_be_in_time(candidates, begins_s) else picked

    @staticmethod
    def _can_be_in_time(candidates: list[Candidate], begins_s: float) -> bool:
        """Whether one step of the streams of each for each TPOT objective leaves time for predictions that are off."""
        busy = sum(one.stream_claim(begins_s)[1] / one.queue.objectives(begins_s).tpot_s for one in candidates)
        return busy <= PACE

    def _waits_for_streams(self, begins_s: float) -> bool:
        """Whether offline work gets what online streams leave: no first token is missing, before which it gets little."""
        has_turns = self._patience.is_spent or any(
            self._queues[name].has_online_work() for name in self._offline_weights
        )
        return bool(self._offline_weights) and has_turns and self._objectives(begins_s).ttft_left_s == math.inf

    def _favoured_of(self, group: list[Candidate], begins_s: float) -> Iterator[list[Candidate]]:
        """Models in which favoured tenants wait for a step, and favoured models with sequences that do so."""
        if tenants := self._favours.favoured():
            yield [
                one
                for one in group
                if self._favours.prompts(one.queue, one.priority_class) or self._lags(one, group, begins_s, tenants)
            ]
        with_prompts, with_streams = self._favours.models(begins_s)
        yield [
            one
            for one in group
            if (one.name in with_prompts and one.queue.has_prompt(one.priority_class))
            or (one.name in with_streams and self._lags(one, group, begins_s))
        ]

    def _lags(self, one: Candidate, group: list[Candidate], begins_s: float, tenants: set[str] | None = None) -> bool:
        """Whether streams of the model (and these tenants) would be behind pace after a step of another of the group."""
        slack_s = one.queue.objectives(begins_s, tenants).slack_s
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
        is_ahead = self._kept_for is None and all(self._is_ahead(one.queue, begins_s) for one in normal)
        weight = HIGH_WEIGHT if is_ahead else 1.0
        self._rank_weights = {_HIGH: weight * len(high), _NORMAL: float(len(normal))}
        urgent = [one for one in (*high, *normal) if self.is_urgent(one.queue, begins_s)]
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
            # By claims, not by streams alone: a prompt of high priority whose first token is due has none yet.
            classes = (PriorityClass.ONLINE_HIGH,)
            return [min(high, key=lambda one: room_s(one.queue.claims(begins_s, classes, serving_steps=HIGH_STEPS)))]
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
        limits = self.limits(candidate, begins_s)
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

    def take_turns(self, queue: ModelQueue, leading: PriorityClass, batch: Batch, begins_s: float) -> None:
        """After a step was filled."""
        if self._rank_weights and leading != PriorityClass.OFFLINE:
            self._rank_turns.take(_HIGH if leading == PriorityClass.ONLINE_HIGH else _NORMAL, self._rank_weights)
        if leading != PriorityClass.OFFLINE:
            if queue.cost_model is not None:
                self._favours.serve(queue.name, queue.cost_model.predict(batch.budget.shape), begins_s)
            self._num_led += 1
        elif self._memory.has_online_work():
            self._own_began_s, self._num_led = begins_s, 0
        has_offline = not batch.sequences[-1].is_online  # they come last
        if has_offline:
            queue.offline_turn_s = begins_s
        # There was time, but its offline sequences lack room: it has no use of its turn.
        cannot_use_it = not queue.running[PriorityClass.OFFLINE] and batch.budget.fits_prefill(1, 0) > 0
        if queue.name in self._offline_weights and (has_offline or cannot_use_it):
            self._offline_turns.take(queue.name, self._offline_weights)

    def is_urgent(self, queue: ModelQueue, begins_s: float) -> bool:
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

    def limits(self, candidate: Candidate, begins_s: float) -> Limits:
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
            elif self._offline_weights and limits.offline_limit_s < math.inf:
                limit_s = self._room_beside_s(queue, begins_s)
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
            slack_s = max(0.0, min(self._objectives(view.now).slack_s, self._room_of_streams_s(view.now, 0.0)))
            limits = limits._replace(limit_s=min(limits.limit_s, slack_s / self._num_stages))
        return limits

    def _sure_step_s(self, queue: ModelQueue) -> float:
        """Seconds of a step into which at least one offline sequence of the model fits, whichever it is."""
        context = max((s.num_computed for s in queue.runnable(PriorityClass.OFFLINE)), default=0)
        decode_s = 0.0 if queue.cost_model is None else queue.cost_model.predict(StepShape(0, 0.0, 1, context))
        return max(decode_s, WORTH_STEPS * self._least_step_s(queue))

    def _least_ttft_s(self) -> float:
        return min(queue.ttft_objective_s for queue in self._queues.values())

    def short_step_s(self) -> float:
        """Duration for which any online request can wait, though two such steps may be before it."""
        return SHORT_STEP_SHARE * self._least_ttft_s()

    def limits_for_expected(self, queue: ModelQueue, limits: Limits, begins_s: float) -> Limits:
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
