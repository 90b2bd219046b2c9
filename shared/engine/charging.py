"""Who had how much execution time: to sequences, to the counters, and real against predicted time to the cost models."""

from __future__ import annotations

from bisect import bisect_left

from shared.cost_model import CostModel, LiveScale, shape_of
from shared.engine.batch import PlannedStep
from shared.engine.planner import Planner
from shared.engine.sequence import Rank
from shared.messages.cluster import ExecutionStatistics
from shared.policies.checkpointing import SmoothedRate
from shared.policies.predicted_statistics import predicted_statistics

SCALE_STEP = 0.01
"""Relative change of the live correction from which on it is applied."""

BUSY_WINDOW_S = 5.0
"""Over which the online share of the device's time is taken."""


class Charging:
    """The cost models of one engine and what they are used for after a step."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._scales: dict[str, tuple[CostModel, LiveScale]] = {}
        self._told_statistics: set[str] = set()
        self.offline_rate = SmoothedRate()
        """Offline tokens computed per second."""
        self._online_share = SmoothedRate(BUSY_WINDOW_S)
        self._charged_until_s: float | None = None

    def remove_model(self, name: str) -> None:
        self._scales.pop(name, None)

    def set_cost_model(self, name: str, cost_model: CostModel) -> None:
        self._scales[name] = (cost_model, LiveScale())
        self._planner.queues[name].cost_model = cost_model
        if name not in self._told_statistics:
            self._planner.ordering.set_statistics(predicted_statistics(name, cost_model))

    def set_statistics(self, statistics: ExecutionStatistics) -> None:
        if statistics.num_finished:
            self._told_statistics.add(statistics.model)
        elif statistics.model in self._scales:
            return
        self._planner.ordering.set_statistics(statistics)

    def cost_models(self) -> dict[str, tuple[CostModel, float]]:
        return {name: (cost_model, live.factor) for name, (cost_model, live) in self._scales.items()}

    def charge(self, step: PlannedStep, now: float) -> None:
        """Execution time to the sequences: what their part of the step takes alone, however the prompt is chunked, so that
        it says how much work a request is and not how full the batches were. Real against predicted time to the cost
        model."""
        plan, num_tokens = step.plan, step.plan.num_tokens
        queue, counters = self._planner.queues[plan.model], self._planner.counters
        cost = queue.cost_model
        token_s = step.ran_s / num_tokens
        if cost is None:
            decode_s, context_s = step.ran_s if num_tokens == len(plan.counts) else token_s, 0.0
        else:
            decode_s, context_s = cost.fixed_s + cost.decode_s, cost.decode_context_s
        charge = self._planner.ordering.charge
        for sequence, start, count in zip(step.sequences, plan.starts, plan.counts, strict=True):
            if count == 1:
                execution_s = decode_s + context_s * start
            elif cost is None:
                execution_s = token_s * count
            else:
                step_share = min(1.0, count / sequence.num_prompt)
                execution_s = cost.prefill_cost_s(count, start) + step_share * (cost.fixed_s + cost.prefill_s)
            sequence.device_s += execution_s
            sequence.last_ran_s = now
            charge(sequence, execution_s, now)
        offline = sum(
            count for sequence, count in zip(step.sequences, plan.counts, strict=True) if not sequence.is_online
        )
        counters.harvested_tokens += offline
        counters.online_tokens += num_tokens - offline
        self.offline_rate.add(offline, step.ran_s)
        self._follow_online_share(step, now)
        if step.predicted_s and (scale := self._scales.get(plan.model)) is not None:
            base, live = scale
            live.observe(step.predicted_s / step.scale, step.ran_s)
            if abs(live.factor / step.scale - 1) > SCALE_STEP:
                queue.cost_model = base.scaled(live.factor)
                queue.cost_scale = live.factor

    def _follow_online_share(self, step: PlannedStep, now: float) -> None:
        """Of the device's time, with what the step's online tokens would have taken alone; they are its first."""
        plan, queues = step.plan, self._planner.queues
        cost = queues[plan.model].cost_model
        num_online = bisect_left(step.sequences, Rank.OFFLINE, key=lambda sequence: sequence.rank)
        online_s = 0.0
        if cost is not None and num_online:
            online_s = cost.predict(shape_of(plan.starts[:num_online], plan.counts[:num_online]))
        since_s = now - step.ran_s if self._charged_until_s is None else self._charged_until_s
        self._online_share.add(online_s, now - since_s)
        self._charged_until_s = now
        for queue in queues.values():
            queue.head_start.online_share = self._online_share.per_s
