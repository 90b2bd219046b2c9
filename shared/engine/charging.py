"""Who had how much execution time: to sequences, to the counters, and real against predicted time to the cost models.

A model that nobody has measured has a cost model that is fitted to its steps from the first one on."""

from __future__ import annotations

import sys

from shared.costs.live import LiveCosts
from shared.costs.model import CostModel, CostSource, KnownCosts, LiveScale, prompt_s
from shared.engine.batch import PlannedStep
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ModelQueue
from shared.engine.sequence import Sequence
from shared.messages.cluster import ExecutionStatistics
from shared.policies.checkpointing import SmoothedRate
from shared.policies.predicted_statistics import predicted_statistics

SCALE_STEP = 0.01
"""Relative change of the live correction from which on it is applied."""


class Charging:
    """The cost models of one engine and what they are used for after a step."""

    def __init__(self, memory: Allocator) -> None:
        self._memory = memory
        self._measured: dict[str, tuple[CostModel, LiveScale, CostSource]] = {}
        self._live: dict[str, LiveCosts] = {}
        """Live cost models, of the models that nobody has measured."""
        self._told_statistics: set[str] = set()
        self.offline_rate = SmoothedRate()
        """Offline tokens computed per second."""

    def add_model(self, queue: ModelQueue) -> None:
        shape = queue.shape
        live = self._live[queue.name] = LiveCosts(shape.num_layers, shape.layers_per_safepoint)
        queue.cost_model, queue.max_known_tokens = live.cost_model, live.max_step_tokens

    def remove_model(self, name: str) -> None:
        self._measured.pop(name, None)
        self._live.pop(name, None)

    def set_cost_model(self, name: str, cost_model: CostModel, source: CostSource) -> None:
        self._live.pop(name, None)
        self._measured[name] = (cost_model, LiveScale(), source)
        queue = self._memory.queues[name]
        queue.cost_model, queue.cost_scale, queue.max_known_tokens = cost_model, 1.0, sys.maxsize
        queue.is_cost_known = True
        self._predict_statistics(name, cost_model)

    def _predict_statistics(self, name: str, cost_model: CostModel) -> None:
        if name not in self._told_statistics:
            self._memory.ordering.set_statistics(predicted_statistics(name, cost_model))

    def set_statistics(self, statistics: ExecutionStatistics) -> None:
        if statistics.num_finished:
            self._told_statistics.add(statistics.model)
        elif statistics.model in self._measured:
            return
        self._memory.ordering.set_statistics(statistics)

    def cost_models(self) -> dict[str, KnownCosts]:
        known = {
            name: KnownCosts(cost_model, scale.factor, source)
            for name, (cost_model, scale, source) in self._measured.items()
        }
        for name, live in self._live.items():
            known[name] = KnownCosts(live.cost_model, 1.0, CostSource.LIVE if live.is_known else CostSource.NONE)
        return known

    def charge(self, step: PlannedStep, drafted_s: float, now: float) -> None:
        """Execution time to the sequences: what their part of the step takes alone, however the prompt is chunked, so that
        it says how much work a request is and not how full the batches were. Real against predicted time to the cost
        model, without the draft model's `drafted_s`."""
        plan, num_tokens = step.plan, step.plan.num_tokens
        queue, counters = self._memory.queues[plan.model], self._memory.counters
        cost = queue.cost_model if queue.is_cost_known else None
        token_s = step.ran_s / num_tokens
        if cost is None:
            decode_s, context_s = step.ran_s if num_tokens == len(plan.counts) else token_s, 0.0
        else:
            decode_s, context_s = cost.fixed_s + cost.decode_s, cost.decode_context_s
        seconds = [decode_s + context_s * start for start in plan.starts]
        for index, count in enumerate(plan.counts) if num_tokens > len(plan.counts) else ():
            if count == 1:
                continue
            if cost is None:
                seconds[index] = token_s * count
            else:
                step_share = min(1.0, count / step.sequences[index].num_prompt)
                prefill_s = cost.prefill_cost_s(count, plan.starts[index])
                seconds[index] = prefill_s + step_share * (cost.fixed_s + cost.prefill_s)
        for index, drafted in plan.drafts:
            if cost is not None:
                seconds[index] += len(drafted) * cost.decode_cost_s(plan.starts[index])
        for sequence, execution_s in zip(step.sequences, seconds, strict=True):
            sequence.device_s += execution_s
            sequence.last_ran_s = now
        self._charge_tenants(step, cost)
        self._memory.ordering.charge(step.sequences, seconds, now)
        offline = 0
        if not step.sequences[-1].is_online:  # they come last
            offline = sum(
                count for sequence, count in zip(step.sequences, plan.counts, strict=True) if not sequence.is_online
            )
        counters.harvested_tokens += offline
        counters.online_tokens += num_tokens - offline
        self.offline_rate.add(offline, step.ran_s)
        self._learn(queue, step, drafted_s)

    def charge_leaving(self, sequence: Sequence, step: PlannedStep, ran_s: float) -> None:
        """Its part of a step in flight that it does not live to see the end of, to its tenant: that is computed all the
        same. `ran_s`: how long the step has run."""
        queue = self._memory.queues[step.plan.model]
        index = step.sequences.index(sequence)
        if index not in step.charged:
            step.charged.add(index)
            self._serve(step, index, queue.cost_model if queue.is_cost_known else None, ran_s)

    def _charge_tenants(self, step: PlannedStep, cost: CostModel | None) -> None:
        """Charges each tenant with what its sequences add to the step, and a part of what any step takes: together its
        time."""
        for index in range(len(step.sequences)):
            if index not in step.charged:
                self._serve(step, index, cost, step.ran_s)

    def _serve(self, step: PlannedStep, index: int, cost: CostModel | None, ran_s: float) -> None:
        plan, sequence = step.plan, step.sequences[index]
        start, count = plan.starts[index], plan.counts[index]
        if cost is None:
            service_s = ran_s / plan.num_tokens * count
        elif count == 1:
            service_s = cost.fixed_s / len(plan.counts) + cost.decode_cost_s(start)
        else:
            service_s = cost.fixed_s / len(plan.counts) + prompt_s(cost.prompt_cost, count, start)
        sequence.service_s += service_s
        tenants = self._memory.tenants(sequence)
        tenants.charge(sequence.tenant, service_s)
        if sequence.is_online:
            self._memory.models.charge(sequence.model, service_s)
        is_prefill = start < sequence.num_prompt
        self._memory.counters.serve(sequence.tenant, service_s, count, is_prefill=is_prefill)
        if sequence.promised_s:
            kept_s = 0.0 if sequence.is_in_decode else max(0.0, sequence.promised_s - service_s)
            tenants.promise(sequence.tenant, kept_s - sequence.promised_s)
            sequence.promised_s = kept_s

    def _learn(self, queue: ModelQueue, step: PlannedStep, drafted_s: float) -> None:
        """What the step says of the model's step times. `drafted_s`: of it the draft model had."""
        ran_s = step.ran_s - drafted_s
        if (live := self._live.get(queue.name)) is not None:
            is_changed = live.observe(step.plan.shape, ran_s)
            queue.cost_model, queue.max_known_tokens = live.cost_model, live.max_step_tokens
            queue.is_cost_known = live.is_known
            if is_changed and live.is_known:
                self._predict_statistics(queue.name, live.cost_model)
        elif step.predicted_s and queue.name in self._measured:
            base, scale, _ = self._measured[queue.name]
            scale.observe((step.predicted_s - step.draft_s) / step.scale, ran_s)
            if abs(scale.factor / step.scale - 1) > SCALE_STEP:
                queue.cost_model = base.scaled(scale.factor)
                queue.cost_scale = scale.factor
