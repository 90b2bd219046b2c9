"""One instance: the real engine; steps and copies take what the cost model says. The order of calls is that of the
engine's loop with one step in flight, load reports are those of the instance service."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from bench.rebalance.devices import MODEL, Device
from bench.rebalance.events import Events
from bench.rebalance.journal import Journal
from shared.cost_model import shape_of
from shared.engine.calls import AddModel, OnCopy, OnStep, OnTime, SetCostModel, Submit
from shared.engine.engine import Engine
from shared.engine.moving import TakenOut
from shared.engine.plan import CopyKind, ModelShape, StepPlan, StepResult
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
        shape = ModelShape(MODEL, device.page_tokens, 1, 1 << 20)
        self.max_length = self.engine.apply(AddModel(shape), 0.0).max_model_len
        self.engine.apply(SetCostModel(MODEL, device.cost_model), 0.0)
        self._rows: dict[int, tuple[int, int]] = {}
        """Row -> number of the request there, and the total of tokens with which it ends."""
        self._is_running = False
        self._copies_end_s = 0.0
        self._admitted: list[str] = []
        self._ended: list[str] = []
        self._finished: list[FinishedStats] = []
        self._moves: list[MoveOutcome] = []
        self._moved_in: list[HeldRequest] = []
        self._reported_s, self._num_reports = -1.0, 0
        self._is_report_due = False
        self.is_gone = False
        self._events.after(HEARTBEAT_S, self._beat)

    def info(self) -> InstanceInfo:
        device = self.device
        served = LoadedModel(
            MODEL, "loading" if self.state == "starting" else "ready", self.max_length, device.page_tokens, 1
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
        refused = self.engine.apply(Submit(request), self._events.now)
        if refused is None:
            self._admitted.append(request.request_id)
            self.wake()
        return refused

    def report_move(self, outcome: MoveOutcome) -> None:
        self._moves.append(outcome)
        self.wake()

    def report_moved_in(self, held: HeldRequest) -> None:
        self._moved_in.append(held)
        self.wake()

    def held(self) -> list[HeldRequest]:
        return [
            HeldRequest(s.request.request_id, s.request.gateway_id, s.request.epoch, MODEL, s.num_tokens, s.row >= 0)
            for s in self.engine.all_held()
        ]

    # ------------------------------------------------------------------------------------------------- steps

    def wake(self) -> None:
        """Something changed: a step may be possible, the load is another."""
        self._events.after(0.0, self._step)
        self._report_soon()

    def _step(self) -> None:
        if self._is_running or self.is_gone:
            return
        now = self._events.now
        self.engine.apply(OnTime(), now)
        plan = self.engine.plan(now)
        self._journal.on_planned(self, now)
        self._start_copies()
        self._take_effects()
        if plan is not None:
            self._is_running = True
            shape = shape_of(plan.starts, plan.counts)
            seconds = self.device.cost_model.predict(shape)
            seconds *= float(np.exp(self._draw.normal(0.0, self._noise))) if self._noise else 1.0
            if self.num_transfers:
                seconds *= MOVING_SLOWDOWN
            if shape.num_decodes:
                self.step_s += 0.1 * (seconds - self.step_s)
            self._events.after(seconds, self._end_step, plan)

    def _end_step(self, plan: StepPlan) -> None:
        self._is_running = False
        for new in plan.new_sequences:
            number = array("i", new.tokens[:4])[0]
            self._rows[new.row] = (number, self._journal.total_tokens(number))
        tokens = [
            LAST_TOKEN if start + count + 1 == self._rows[row][1] else TOKEN
            for row, start, count, samples in zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True)
            if samples
        ]
        self.engine.apply(OnStep(StepResult(plan.step_id, tokens)), self._events.now)
        self._journal.num_steps += 1
        self._start_copies()
        self._take_effects()
        self._report_soon()
        self._step()

    def _start_copies(self) -> None:
        for copy in self.engine.next_copies():
            cost = self.device.cost_model
            # A move within the device takes no time that would count.
            slot_s = {CopyKind.RESTORE: cost.restore_slot_s, CopyKind.CHECKPOINT: cost.checkpoint_slot_s}.get(
                copy.kind, 0.0
            )
            begins_s = max(self._events.now, self._copies_end_s)
            self._copies_end_s = begins_s + slot_s * len(copy.device_slots)
            self._events.at(self._copies_end_s, self._end_copy, copy.copy_id)

    def _end_copy(self, copy_id: int) -> None:
        self.engine.apply(OnCopy(copy_id, True), self._events.now)
        self.wake()

    def _take_effects(self) -> None:
        now = self._events.now
        for effect in self.engine.effects():
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
        device.num_blocks, device.num_rows, order, device.max_step_tokens, 1,
        max_waiting=1 << 20, ttft_s=device.ttft_s, tpot_s=device.tpot_s, high_priority_load=device.high_load,
    )  # fmt: skip
    return configuration.build()
