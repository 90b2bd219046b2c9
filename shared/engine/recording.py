"""A recorded run of an engine, and its replay: any incident becomes a test.

A recording is a sequence of length-prefixed msgpack records: first the engine's configuration, then each call with its
arguments and, for `plan`, the plan that was made. Replaying it on the same code gives the same plans byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from shared.cost_model import CostModel, CostSource
from shared.engine import calls
from shared.engine.engine import Engine
from shared.engine.moving import PinnedBlocks, Reservation
from shared.engine.plan import ModelShape, StepPlan, StepResult
from shared.messages.cluster import ExecutionStatistics
from shared.messages.migration import Commit, PreAllocate
from shared.messages.requests import ErrorInfo, GenerationRequest
from shared.policies.catalogue import ordering_policy, token_budget_policy
from shared.policies.checkpointing import AdaptiveCheckpoint

LENGTH_BYTES = 4


class Configuration(msgspec.Struct, frozen=True, tag=True):
    """All that an engine is made of. Names of policies: `shared.policies.catalogue`; the rest: `Engine`."""

    num_merged: int
    num_rows: int
    ordering: str
    token_budget: int
    """Tokens of a step at most."""
    steps_in_flight: int
    max_waiting: int = 1024
    co_serving: str = "slo"
    """slo | priority_only | online_only"""
    interruption: str = "suspend"
    mix_phases: bool = True
    num_host_merged: int = 0
    checkpoint_start: float = 0.5
    """Used share of the KV pool."""
    prefetch: bool = True
    ttft_s: float = 1.5
    tpot_s: float = 0.11
    move_cooldown_s: float = 1.0
    high_priority_load: float = 0.0
    fits_costs: bool = True
    least_share: float = 0.25

    def arguments(self) -> dict[str, Any]:
        """Of `Engine`; policy objects are new ones."""
        return {
            "num_merged": self.num_merged,
            "num_rows": self.num_rows,
            "ordering": ordering_policy(self.ordering, mix_phases=self.mix_phases),
            "token_budget": token_budget_policy(self.co_serving, self.token_budget),
            "steps_in_flight": self.steps_in_flight,
            "max_waiting": self.max_waiting,
            "serves_offline": self.co_serving != "online_only",
            "interruption": self.interruption,
            "mix_phases": self.mix_phases,
            "num_host_merged": self.num_host_merged,
            "checkpoint": AdaptiveCheckpoint(self.checkpoint_start),
            "prefetch": self.prefetch,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "move_cooldown_s": self.move_cooldown_s,
            "high_priority_load": self.high_priority_load,
            "fits_costs": self.fits_costs,
            "least_share": self.least_share,
        }

    def build(self) -> Engine:
        return Engine(**self.arguments())


class Plan(msgspec.Struct, frozen=True, tag=True):
    now: float
    plan: bytes
    """Encoded `StepPlan`, empty where none was made."""


Record = Configuration | Plan | calls.Call
_RECORDS = reduce(or_, calls.Call.__subclasses__(), Configuration | Plan)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(_RECORDS)


class RecordingEngine(Engine):
    """An engine that hands each call, encoded, to `write` before (or, for what is only known then, after) carrying
    it out."""

    def __init__(self, configuration: Configuration, write: Callable[[bytes], object]) -> None:
        super().__init__(**configuration.arguments())
        self._write = write
        self._record(configuration)

    def _record(self, record: Record) -> None:
        encoded = _encoder.encode(record)
        self._write(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)

    def add_model(self, shape: ModelShape) -> ModelShape:
        self._record(calls.AddModel(shape))
        return super().add_model(shape)

    def remove_model(self, name: str, now: float) -> bool:
        self._record(calls.RemoveModel(name, now))
        return super().remove_model(name, now)

    def submit(self, request: GenerationRequest, now: float) -> ErrorInfo | None:
        self._record(calls.Submit(request, now))
        return super().submit(request, now)

    def cancel(self, request_id: str, now: float) -> None:
        self._record(calls.Cancel(request_id, now))
        super().cancel(request_id, now)

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        self._record(Plan(now, b"" if plan is None else _encoder.encode(plan)))
        return plan

    def take_interrupt(self, now: float) -> int | None:
        step_id = super().take_interrupt(now)
        if step_id is not None:
            self._record(calls.TakeInterrupt(now))
        return step_id

    def on_step(self, result: StepResult, now: float) -> None:
        self._record(calls.OnStep(result, now))
        super().on_step(result, now)

    def on_copy(self, copy_id: int, ok: bool, now: float) -> None:
        self._record(calls.OnCopy(copy_id, ok, now))
        super().on_copy(copy_id, ok, now)

    def set_objectives(self, name: str, ttft_s: float, tpot_s: float) -> None:
        self._record(calls.SetObjectives(name, ttft_s, tpot_s))
        super().set_objectives(name, ttft_s, tpot_s)

    def set_cost_model(self, name: str, cost_model: CostModel, source: CostSource = CostSource.PROFILED) -> None:
        self._record(calls.SetCostModel(name, cost_model, source))
        super().set_cost_model(name, cost_model, source)

    def set_statistics(self, statistics: ExecutionStatistics) -> None:
        self._record(calls.SetStatistics(statistics))
        super().set_statistics(statistics)

    def borrow_slots(self, name: str, num_slots: int) -> list[int]:
        self._record(calls.BorrowSlots(name, num_slots))
        return super().borrow_slots(name, num_slots)

    def return_slots(self, name: str, slots: list[int]) -> None:
        self._record(calls.ReturnSlots(name, slots))
        super().return_slots(name, slots)

    def clear_prefix_cache(self) -> None:
        self._record(calls.ClearPrefixCache())
        super().clear_prefix_cache()

    def on_time(self, now: float) -> None:
        self._record(calls.OnTime(now))
        super().on_time(now)

    def pin(self, request_id: str, first_block: int) -> PinnedBlocks | None:
        self._record(calls.Pin(request_id, first_block))
        return super().pin(request_id, first_block)

    def unpin(self, pinned: PinnedBlocks) -> None:
        self._record(calls.Unpin(pinned))
        super().unpin(pinned)

    def take_out(self, request_id: str, now: float) -> bool:
        self._record(calls.TakeOut(request_id, now))
        return super().take_out(request_id, now)

    def pin_rest(self, request_id: str, first_block: int) -> PinnedBlocks | None:
        self._record(calls.PinRest(request_id, first_block))
        return super().pin_rest(request_id, first_block)

    def seal(self, request_id: str) -> bool:
        self._record(calls.Seal(request_id))
        return super().seal(request_id)

    def put_back(self, request_id: str, now: float, epoch: int | None = None) -> None:
        self._record(calls.PutBack(request_id, now, epoch))
        super().put_back(request_id, now, epoch)

    def drop_moved(self, request_id: str, now: float) -> bool:
        self._record(calls.DropMoved(request_id, now))
        return super().drop_moved(request_id, now)

    def end_move(self, request_id: str, now: float) -> None:
        self._record(calls.EndMove(request_id, now))
        super().end_move(request_id, now)

    def reserve(self, query: PreAllocate, now: float) -> Reservation | ErrorInfo:
        self._record(calls.Reserve(query, now))
        return super().reserve(query, now)

    def adopt(self, commit: Commit, now: float) -> ErrorInfo | None:
        self._record(calls.Adopt(commit, now))
        return super().adopt(commit, now)

    def release(self, migration_id: str) -> None:
        self._record(calls.Release(migration_id))
        super().release(migration_id)


class ReplayMismatch(Exception):
    """The replayed engine planned something else than the recorded one, or there is nothing to replay."""


def records(recording: bytes) -> Iterator[Record]:
    """The records in order; a torn last record (the process was killed while writing) ends the iteration."""
    position = 0
    while position + LENGTH_BYTES <= len(recording):
        length = int.from_bytes(recording[position : position + LENGTH_BYTES], "little")
        position += LENGTH_BYTES
        if position + length > len(recording):
            return
        try:
            record = _decoder.decode(recording[position : position + length])
        except msgspec.DecodeError as error:
            raise ReplayMismatch(f"not a recording: {error}") from None
        yield record
        position += length


def replay(recording: bytes) -> tuple[Engine, int]:
    """Runs a recording again. Returns the engine as it stands at the end and the number of calls to `plan`; raises
    `ReplayMismatch` at the first plan that differs, and where the bytes are not a recording."""
    iterator = records(recording)
    configuration = next(iterator, None)
    if not isinstance(configuration, Configuration):
        raise ReplayMismatch("not a recording: it does not begin with an engine's configuration")
    engine = configuration.build()
    num_plans = 0
    for record in iterator:
        if isinstance(record, Configuration):
            raise ReplayMismatch("a second configuration inside a recording")
        if not isinstance(record, Plan):
            getattr(engine, record.method)(*msgspec.structs.astuple(record))
            continue
        plan = engine.plan(record.now)
        if (b"" if plan is None else _encoder.encode(plan)) != record.plan:
            raise ReplayMismatch(f"plan {num_plans} at {record.now:.6f} s differs from the recorded one")
        num_plans += 1
    return engine, num_plans
