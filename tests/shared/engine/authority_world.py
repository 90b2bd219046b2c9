"""One instance in virtual time, on which work of several models, classes, priorities and tenants meets."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from shared.engine.calls import AddModel, SetCostModel, SetStatistics, Submit
from shared.engine.engine import Effect, Engine
from shared.engine.plan import ModelShape
from shared.engine.requests import Ended, Output
from shared.messages.cluster import ExecutionStatistics
from shared.messages.requests import GenerationRequest, Priority, RequestClass, SamplingParams, pack_tokens
from shared.policies.catalogue import ordering_policy
from shared.policies.slo_budget import SloTokenBudget
from shared.simulation.events import Events
from shared.simulation.instance import VirtualInstance, VirtualStep
from tests.shared.costs import INTERRUPTIBLE_7B as COST

TTFT_S, TPOT_S = 1.5, 0.11
OFFLINE, HIGH = RequestClass.OFFLINE, Priority.HIGH


class World:
    """One instance in virtual time. `is_known`: cost models were measured, else they are learnt."""

    def __init__(
        self,
        models: str,
        *,
        depth: int = 2,
        num_stages: int = 1,
        num_merged: int = 20_000,
        num_host_merged: int = 0,
        num_rows: int = 256,
        max_tokens: int = 8192,
        is_known: bool = True,
        tpot_s: float = TPOT_S,
        order: str = "doubling_budget",
    ) -> None:
        self.events = Events()
        self.engine = Engine(
            num_merged,
            num_rows,
            ordering_policy(order),
            SloTokenBudget(max_tokens),
            steps_in_flight=depth,
            num_stages=num_stages,
            num_host_merged=num_host_merged,
            ttft_s=TTFT_S,
            tpot_s=tpot_s,
            give_up_s=5.0,
        )
        for model in models:
            self.engine.apply(AddModel(ModelShape(model, 32, 1, 1 << 17, num_layers=32, layers_per_safepoint=4)), 0.0)
            if is_known:
                self.engine.apply(SetCostModel(model, COST), 0.0)
            self.engine.apply(SetStatistics(ExecutionStatistics(model, 1.0, 1.0, 100)), 0.0)
        self.sent: dict[str, float] = {}
        self.times: dict[str, list[float]] = {}
        """Times of each request's tokens."""
        self.ended: dict[str, Ended] = {}
        self.steps: list[VirtualStep] = []
        self.instance = VirtualInstance(
            self.engine,
            self.events,
            lambda _: COST,
            lambda plan: [1] * sum(plan.samples),
            self._on_effects,
            on_step=self.steps.append,
        )

    def _on_effects(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Output):
                for entry in effect.entries:
                    times = self.times.setdefault(entry.request_id, [])
                    times += [self.events.now] * (len(entry.tokens) // 4)
            elif isinstance(effect, Ended):
                assert effect.request.request_id not in self.ended
                self.ended[effect.request.request_id] = effect

    def submit(
        self,
        name: str,
        model: str,
        num_prompt: int,
        num_output: int,
        at_s: float = 0.0,
        *,
        request_class: RequestClass = RequestClass.ONLINE,
        priority: Priority = Priority.NORMAL,
        tenant: str = "",
        weight: float = 1.0,
    ) -> None:
        self.sent[name] = at_s
        number = len(self.sent)
        request = GenerationRequest(
            request_id=name,
            gateway_id="g",
            model=model,
            prompt=pack_tokens([(number * 7919 + i * 31) % 30_000 for i in range(num_prompt)]),
            sampling=SamplingParams(max_tokens=num_output, temperature=0.0),
            request_class=request_class,
            priority=priority,
            tenant=tenant,
            tenant_weight=weight,
            timeout_s=1e5,
        )
        self.events.at(at_s, lambda: self.instance.apply(Submit(request)))

    def lines(
        self,
        model: str,
        num: int,
        num_prompt: int = 1024,
        num_output: int = 128,
        at_s: float = 1.0,
        fields: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """`fields`: what else is said of each."""
        for index in range(num):
            name = f"line-{model}{index}"
            self.submit(name, model, num_prompt, num_output, at_s, request_class=OFFLINE, **fields())

    def run(self, until_s: float) -> None:
        self.events.run(lambda: False, until_s)

    def ttft_s(self, name: str) -> float:
        return self.times[name][0] - self.sent[name] if name in self.times else float("inf")

    def gaps(self, name: str, since_s: float = 0.0) -> list[float]:
        return [b - a for a, b in pairwise(self.times[name]) if a >= since_s]

    def harvested(self) -> int:
        return self.engine.counters.harvested_tokens
