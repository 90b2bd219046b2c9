"""The sequences of one model on an instance, by state and rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Container, Iterator
from itertools import chain
from typing import NamedTuple

from shared.costs.model import CostModel, StepShape, prompt_s
from shared.engine.memory.blocks import root_hash
from shared.engine.plan import ModelShape
from shared.engine.sequence import PriorityClass, Sequence
from shared.policies.silence import PLANNED_SHARE, SERVING_STEPS, allowed_silence_s
from shared.policies.slo_budget import HEAD_START_TOKENS, MAX_SLACK, PACE

ONLINE_CLASSES = (PriorityClass.ONLINE_HIGH, PriorityClass.ONLINE_NORMAL)
_OFFLINE = PriorityClass.OFFLINE


PROMPT_STEPS = 2.0
"""Times the time that prompts take alone, in which they are done in chunks between the steps of others."""


class Objectives(NamedTuple):
    """Objectives of a model's online sequences at some moment, whether or not they can run. All `inf`
    where there are none."""

    tpot_s: float
    """The tightest TPOT objective of those that have their first token."""
    slack_s: float
    """Until the earliest of their next tokens is due."""
    ttft_left_s: float
    """The shortest time left to a first token."""


class ModelQueue:
    """Waiting sequences in order, the others by arrival number."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.name = shape.name
        self.root = root_hash(shape.name)
        self.waiting: tuple[list[Sequence], ...] = tuple([] for _ in PriorityClass)
        self.running: tuple[dict[int, Sequence], ...] = tuple({} for _ in PriorityClass)
        self.restoring: dict[int, Sequence] = {}
        """Their blocks are being copied back from host memory."""
        self.restored: dict[int, Sequence] = {}
        """Their blocks have come back; they need nothing but a place in a step."""
        self.suspended: dict[int, Sequence] = {}
        """Running ones that a suspended step holds: not planned, nobody's victims."""
        self.leaving: dict[int, Sequence] = {}
        """On their way to another instance: not planned, nobody's victims."""
        self.handing_over: dict[int, Sequence] = {}
        """Those to be handed over when their prompts are computed, in whatever state: no step here decodes them."""
        self.last_planned_step = -1
        self.offline_turn_s = 0.0
        """Time at which the last step with offline work of the model was to begin, or the first of what it holds came."""
        self.cost_model: CostModel | None = None
        """Cost model with the live correction."""
        self.is_cost_known = False
        """Not a guess before the first steps."""
        self.cost_scale = 1.0
        """The correction itself."""
        self.max_known_tokens = sys.maxsize
        """Most tokens of a step about which the cost model says something."""
        self.fetch_token_s = 0.0
        """Seconds that a token's KV takes between instances; 0: prefixes do not travel."""
        self.ttft_objective_s = math.inf
        self.tpot_objective_s = math.inf

    def all_held(self) -> Iterator[Sequence]:
        """All that have a place in it."""
        return chain(
            *(running.values() for running in self.running),
            *self.waiting,
            *(others.values() for others in (self.restoring, self.restored, self.suspended, self.leaving)),
        )

    @property
    def num_running(self) -> int:
        leaving = sum(sequence.row >= 0 for sequence in self.leaving.values())
        return sum(len(of_class) for of_class in self.running) + len(self.suspended) + leaving

    @property
    def num_waiting(self) -> int:
        leaving = sum(sequence.row < 0 for sequence in self.leaving.values())
        return sum(len(of_class) for of_class in self.waiting) + len(self.restoring) + len(self.restored) + leaving

    @property
    def num_offline(self) -> int:
        """Held in whatever state."""
        others = chain.from_iterable(s.values() for s in (self.restoring, self.restored, self.suspended, self.leaving))
        return len(self.running[_OFFLINE]) + len(self.waiting[_OFFLINE]) + sum(not s.is_online for s in others)

    def num_waiting_of(self, is_online: bool) -> int:
        """Waiting for their first or next admission."""
        classes = ONLINE_CLASSES if is_online else (_OFFLINE,)
        return sum(len(self.waiting[priority_class]) for priority_class in classes)

    def has_work(self, priority_class: PriorityClass) -> bool:
        """Whether a sequence of the rank waits, or runs and has something to compute now."""
        return next(iter(self.runnable(priority_class)), None) is not None

    def has_prompt(self, priority_class: PriorityClass) -> bool:
        """Whether a runnable sequence of the rank lacks more than one token."""
        return any(sequence.total - sequence.num_computed > 1 for sequence in self.runnable(priority_class))

    def has_online_work(self) -> bool:
        return any(self.has_work(priority_class) for priority_class in ONLINE_CLASSES)

    @property
    def only_decodes(self) -> bool:
        """Whether all that it holds are online sequences that decode."""
        if any(self.waiting) or self.running[_OFFLINE] or self.restoring or self.restored or self.suspended:
            return False
        running = chain(*(self.running[priority_class].values() for priority_class in ONLINE_CLASSES))
        return all(sequence.total - sequence.num_computed == 1 for sequence in running)

    def has_restored_decodes(self) -> bool:
        """Whether online sequences in decode have come, or come back, and did not run here yet."""
        return any(sequence.is_online and sequence.is_in_decode for sequence in self.restored.values())

    def runnable(self, priority_class: int) -> Iterator[Sequence]:
        yield from self.waiting[priority_class]
        for sequence in self.restored.values():
            if sequence.priority_class == priority_class:
                yield sequence
        for sequence in self.running[priority_class].values():
            if sequence.total < sequence.max_total:
                yield sequence

    def restores_online(self) -> bool:
        """Whether online sequences come back from host memory: they will run soon."""
        return any(sequence.is_online for sequence in self.restoring.values())

    def objectives(self, now: float, tenants: Container[str] | None = None) -> Objectives:
        """See slo_budget.py for when a token is due. `tenants`: of their sequences alone."""
        tpot_s = token_due_s = first_due_s = math.inf
        for sequence in chain(
            *(self.running[priority_class].values() for priority_class in ONLINE_CLASSES),
            *(self.waiting[priority_class] for priority_class in ONLINE_CLASSES),
            *(
                (s for s in of_state.values() if s.is_online)
                for of_state in (self.restoring, self.restored)
                if of_state
            ),
        ):
            if tenants is not None and sequence.tenant not in tenants:
                continue
            first_token_s = sequence.first_token_s
            if first_token_s is None:
                first_due_s = min(first_due_s, sequence.ttft_due_s)
                continue
            objective_s = sequence.tpot_objective_s
            num_later = sequence.total - sequence.first_total + 1
            due_s = first_token_s + PACE * objective_s * (num_later - HEAD_START_TOKENS)
            if due_s < token_due_s:
                token_due_s = due_s
            if objective_s < tpot_s:
                tpot_s = objective_s
        return Objectives(tpot_s, min(token_due_s - now, MAX_SLACK * tpot_s), first_due_s - now)

    def streams(self, now: float) -> tuple[float, float]:
        """Time left until the earliest online sequence with blocks and a first token is to run again
        (inf: there are none), and the time that serving them takes. Those of a step in flight have run by `now`."""
        left_s, num, context = math.inf, 0, 0
        objective_s, silence_s = -1.0, 0.0
        restored = (sequence for sequence in self.restored.values() if sequence.is_online)
        for sequence in chain(*(self.running[priority_class].values() for priority_class in ONLINE_CLASSES), restored):
            if sequence.first_token_s is None or sequence.total >= sequence.max_total:
                continue
            num += 1
            context += sequence.num_computed
            if sequence.tpot_objective_s != objective_s:
                objective_s = sequence.tpot_objective_s
                silence_s = PLANNED_SHARE * allowed_silence_s(objective_s)
            due_s = silence_s if sequence.in_flight else silence_s - (now - sequence.last_ran_s)
            if due_s < left_s:
                left_s = due_s
        if not num or self.cost_model is None:
            return left_s, 0.0
        return left_s, SERVING_STEPS * self.cost_model.predict(StepShape(0, 0.0, num, context))

    def claims(
        self,
        now: float,
        classes: Collection[PriorityClass] = ONLINE_CLASSES,
        *,
        prompt_steps: float = PROMPT_STEPS,
        serving_steps: float = SERVING_STEPS,
    ) -> list[tuple[float, float]]:
        """What its online sequences of the ranks need for their objectives, as `room_s` takes it: the time left until the
        earliest next token of their streams is due by its TPOT objective, with the time of `serving_steps` steps of all its
        streams; and `first_claim`."""
        streams = [sequence for sequence in self._runnable_online() if sequence.first_token_s is not None]
        first = self.first_claim(now, classes, prompt_steps)
        claims = [] if first is None else [first]
        if streams:
            claims.append((self.token_left_s(now, classes), serving_steps * self._decodes_s(streams)))
        return claims

    def first_claim(
        self,
        now: float,
        classes: Collection[PriorityClass] = ONLINE_CLASSES,
        prompt_steps: float = PROMPT_STEPS,
    ) -> tuple[float, float] | None:
        """The time left to the first first token of the ranks that can still be in time, and the time that the prompts for
        which that holds, and those before them, take beside others' steps: `prompt_steps` times what they take alone. While
        that is a guess, there is none to lose."""
        streams: list[Sequence] = []
        prompts_s, left_s, need_s = 0.0, math.inf, 0.0
        for sequence in sorted(self._runnable_online(), key=lambda sequence: sequence.row < 0):
            if sequence.first_token_s is not None:
                streams.append(sequence)
            elif sequence.priority_class in classes:
                sequence_left_s = sequence.ttft_due_s - now
                if self.cost_model is not None and self.is_cost_known:
                    missing = sequence.total - sequence.num_computed
                    prompts_s += prompt_s(self.cost_model.prompt_cost, missing, sequence.num_computed)
                elif self.cost_model is not None:
                    prompts_s = max(0.0, sequence_left_s)
                if sequence_left_s >= prompts_s:
                    left_s, need_s = min(left_s, sequence_left_s), prompt_steps * prompts_s
        return None if left_s == math.inf else (left_s, self._decodes_s(streams) + need_s)

    def _decodes_s(self, streams: list[Sequence]) -> float:
        """Seconds of a step with these alone; 0 without a cost model."""
        context = sum(sequence.num_computed for sequence in streams)
        return 0.0 if self.cost_model is None else self.cost_model.predict(StepShape(0, 0.0, len(streams), context))

    def token_left_s(self, now: float, classes: Collection[PriorityClass] = ONLINE_CLASSES) -> float:
        """Until a stream of the ranks will have stood still for as long as its TPOT objective allows; inf without one."""
        left_s = math.inf
        for sequence in self._runnable_online(classes):
            if sequence.first_token_s is not None:
                waited_s = 0.0 if sequence.in_flight else now - sequence.last_ran_s
                left_s = min(left_s, PLANNED_SHARE * sequence.tpot_objective_s - waited_s)
        return left_s

    def _runnable_online(self, classes: Collection[PriorityClass] = ONLINE_CLASSES) -> Iterator[Sequence]:
        return chain.from_iterable(self.runnable(priority_class) for priority_class in classes)

    def num_decoding(self, priority_class: PriorityClass) -> int:
        """Running sequences of the rank that have one token to compute."""
        return sum(
            s.total - s.num_computed == 1 and s.total < s.max_total for s in self.running[priority_class].values()
        )

    def prompts_s(self) -> float:
        """Predicted time of what its online sequences lack of their prompts, those too that are leaving and may come back; 0
        without a cost model."""
        if self.cost_model is None:
            return 0.0
        cost = self.cost_model.prompt_cost
        seconds = 0.0
        leaving = [sequence for sequence in self.leaving.values() if sequence.is_online] if self.leaving else ()
        for sequence in chain(self._runnable_online(), leaving):
            if sequence.total - sequence.num_computed > 1:
                seconds += prompt_s(cost, sequence.total - sequence.num_computed, sequence.num_computed)
        return seconds

    def online_shape(self, max_tokens: int) -> StepShape:
        """Shape of a step with all that its online sequences could run now, at most `max_tokens` prefill tokens."""
        prefill = decodes = context = 0
        attention = 0.0
        for priority_class in ONLINE_CLASSES:
            for sequence in self.runnable(priority_class):
                start, count = sequence.num_computed, sequence.total - sequence.num_computed
                if count == 1:
                    decodes += 1
                    context += start
                elif prefill < max_tokens:
                    count = min(count, max_tokens - prefill)
                    prefill += count
                    attention += count * (start + count / 2)
        return StepShape(prefill, attention, decodes, context)
