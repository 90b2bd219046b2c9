"""One instance in virtual time, with the load reports of the instance service."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from bench.rebalance.devices import MODEL, Device
from bench.rebalance.journal import Journal
from shared.engine.calls import AddModel, SetCostModel, Submit
from shared.engine.engine import Effect, Engine
from shared.engine.moving import TakenOut
from shared.engine.plan import ModelShape, StepPlan
from shared.engine.recording import Configuration
from shared.engine.requests import Ended, Output
from shared.messages.cluster import (
    FinishedStats,
    InstanceInfo,
    LoadedModel,
    LoadReport,
    MoveOutcome,
)
from shared.messages.requests import ErrorInfo, GenerationRequest, HeldRequest
from shared.simulation.events import Events
from shared.simulation.instance import VirtualInstance, VirtualStep

REPORT_INTERVAL_S = 0.02
HEARTBEAT_S = 1.0
"""Between two load reports at least and at most."""
TOKEN, LAST_TOKEN = 5, 2
"""Sampled for any request but at its end, and there."""
MOVING_SLOWDOWN = 1.01
"""Of the steps of an instance that sends or receives KV (Llumnix measures at most 1 %)."""


class Instance:
    def __init__(
        self,
        instance_id: str,
        device: Device,
        events: Events,
        journal: Journal,
        on_report: Callable[[LoadReport], None],
        *,
        order: str,
        noise: float,
        seed: int,
    ) -> None:
        """`noise`: standard deviation of the logarithm of step times around the cost model."""
        self.instance_id, self.device = instance_id, device
        self.on_taken_out: Callable[[TakenOut], None] = lambda taken: None
        self.on_ended: Callable[[str], None] = lambda request_id: None
        self.step_s = device.cost_model.fixed_s
        """Of the last steps that held decodes, on average."""
        self.num_transfers = 0
        """Under way, in or out."""
        self.num_out = 0
        """Of these, out."""
        self.state = "ready"
        """starting | ready | draining, as in the registry."""
        self._events, self._journal, self._on_report = events, journal, on_report
        self._draw, self._noise = np.random.default_rng(seed), noise
        self.engine = _engine(device, order)
        self._host = VirtualInstance(
            self.engine, events, lambda _: device.cost_model, self._sample, self._on_effects,
            on_turn=self._on_turn, on_step=self._on_step, slowdown=self._slowdown,
        )  # fmt: skip
        shape = ModelShape(MODEL, device.page_tokens, 1, 1 << 20)
        self.max_length = self.engine.apply(AddModel(shape), 0.0).max_model_len
        self.engine.apply(SetCostModel(MODEL, device.cost_model), 0.0)
        self._rows: dict[int, tuple[int, int]] = {}
        """Row -> number of the request there, and the total of tokens with which it ends."""
        self._admitted: list[str] = []
        self._ended: list[str] = []
        self._finished: list[FinishedStats] = []
        self._moves: list[MoveOutcome] = []
        self._moved_in: list[HeldRequest] = []
        self._reported_s, self._num_reports = -1.0, 0
        self._is_report_due = False
        self._events.after(HEARTBEAT_S, self._beat)

    @property
    def is_gone(self) -> bool:
        return self._host.is_stopped

    def stop(self) -> None:
        self._host.is_stopped = True

    def info(self) -> InstanceInfo:
        device = self.device
        served = LoadedModel(
            name=MODEL,
            state="loading" if self.state == "starting" else "ready",
            max_model_len=self.max_length,
            page_tokens=device.page_tokens,
            slots_per_merged=1,
        )
        return InstanceInfo(
            instance_id=self.instance_id,
            incarnation="1",
            node_id=self.instance_id,
            state=self.state,
            models=[served],
            num_merged=device.num_blocks,
            merged_bytes=device.block_bytes,
            device="cuda",
            kv_address=self.instance_id,
        )

    # ---------------------------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest) -> ErrorInfo | None:
        refused = self._host.apply(Submit(request))
        if refused is None:
            self._admitted.append(request.request_id)
            self._report_soon()
        return refused

    def report_move(self, outcome: MoveOutcome) -> None:
        self._moves.append(outcome)
        self.wake()

    def report_moved_in(self, held: HeldRequest) -> None:
        self._moved_in.append(held)
        self.wake()

    def held(self) -> list[HeldRequest]:
        return self.engine.held_requests()

    # ------------------------------------------------------------------------------------------------- steps

    def wake(self) -> None:
        """Something changed: a step may be possible, the load is another."""
        self._host.wake()
        self._report_soon()

    def _slowdown(self) -> float:
        noise = float(np.exp(self._draw.normal(0.0, self._noise))) if self._noise else 1.0
        return noise * (MOVING_SLOWDOWN if self.num_transfers else 1.0)

    def _on_turn(self, step: VirtualStep | None) -> None:
        self._journal.on_planned(self, self._events.now)
        if step is not None and sum(step.plan.num_decodes):
            self.step_s += 0.1 * (step.whole_s - self.step_s)

    def _sample(self, plan: StepPlan) -> list[int]:
        for new in plan.new_sequences:
            number = array("i", new.tokens[:4])[0]
            self._rows[new.row] = (number, self._journal.total_tokens(number))
        return [
            LAST_TOKEN if start + count + 1 == self._rows[row][1] else TOKEN
            for row, start, count, samples in zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True)
            if samples
        ]

    def _on_step(self, _step: VirtualStep) -> None:
        self._journal.num_steps += 1
        self._report_soon()

    def _on_effects(self, effects: list[Effect]) -> None:
        now = self._events.now
        for effect in effects:
            if isinstance(effect, Output):
                self._journal.on_entries(effect.entries, now)
            elif isinstance(effect, TakenOut):
                self.on_taken_out(effect)
            else:
                self._on_ended(effect)

    def _on_ended(self, ended: Ended) -> None:
        request = ended.request
        self._ended.append(request.request_id)
        self._finished.append(ended.stats())
        self._journal.on_ended(ended)
        self.on_ended(request.request_id)

    # ----------------------------------------------------------------------------------------------- reports

    def _report_soon(self) -> None:
        if not self._is_report_due:
            self._is_report_due = True
            self._events.at(self._reported_s + REPORT_INTERVAL_S, self._report)

    def _beat(self) -> None:
        if not self.is_gone:
            self._report_soon()
            self._events.after(HEARTBEAT_S, self._beat)

    def _report(self) -> None:
        self._is_report_due = False
        if self.is_gone:
            return
        self._reported_s = self._events.now
        self._num_reports += 1
        load = self.engine.load(self._events.now)
        report = LoadReport(
            instance_id=self.instance_id,
            incarnation="1",
            sequence=self._num_reports,
            admitted=tuple(self._admitted),
            ended=tuple(self._ended),
            finished=tuple(self._finished),
            moves=tuple(self._moves),
            moved_in=tuple(self._moved_in),
            **{name: getattr(load, name) for name in load.__struct_fields__},
        )
        self._admitted, self._ended, self._finished, self._moves, self._moved_in = [], [], [], [], []
        self._on_report(report)


def _engine(device: Device, order: str) -> Engine:
    configuration = Configuration(
        num_merged=device.num_blocks, num_rows=device.num_rows, ordering=order, token_budget=device.max_step_tokens,
        steps_in_flight=1, max_waiting=1 << 20, ttft_s=device.ttft_s, tpot_s=device.tpot_s,
        high_priority_load=device.high_load,
    )  # fmt: skip
    return configuration.build()
