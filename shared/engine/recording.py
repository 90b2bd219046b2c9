"""A recorded run of an engine, and its replay: any incident becomes a test.

A recording is a sequence of length-prefixed msgpack records: first the engine's configuration, then each call with its
arguments and, for `plan`, the plan that was made. Replaying it on the same code gives the same plans byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from shared.cost_model import CostModel
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape, StepPlan, StepResult
from shared.messages import ErrorInfo, ExecutionStatistics, GenerationRequest
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
        }

    def build(self) -> Engine:
        return Engine(**self.arguments())


class AddModel(msgspec.Struct, frozen=True, tag=True):
    shape: ModelShape


class RemoveModel(msgspec.Struct, frozen=True, tag=True):
    name: str
    now: float


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: GenerationRequest
    now: float


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    now: float


class Plan(msgspec.Struct, frozen=True, tag=True):
    now: float
    plan: bytes
    """Encoded `StepPlan`, empty where none was made."""


class OnStep(msgspec.Struct, frozen=True, tag=True):
    result: StepResult
    now: float


class OnCopy(msgspec.Struct, frozen=True, tag=True):
    copy_id: int
    ok: bool
    now: float


class SetObjectives(msgspec.Struct, frozen=True, tag=True):
    name: str
    ttft_s: float
    tpot_s: float


class SetCostModel(msgspec.Struct, frozen=True, tag=True):
    name: str
    cost_model: CostModel


class SetStatistics(msgspec.Struct, frozen=True, tag=True):
    statistics: ExecutionStatistics


class BorrowSlots(msgspec.Struct, frozen=True, tag=True):
    name: str
    num_slots: int


class ReturnSlots(msgspec.Struct, frozen=True, tag=True):
    name: str
    slots: list[int]


class ClearPrefixCache(msgspec.Struct, frozen=True, tag=True):
    pass


class OnTime(msgspec.Struct, frozen=True, tag=True):
    now: float


Record = (
    Configuration
    | AddModel
    | RemoveModel
    | Submit
    | Cancel
    | Plan
    | OnStep
    | OnCopy
    | SetObjectives
    | SetCostModel
    | SetStatistics
    | BorrowSlots
    | ReturnSlots
    | ClearPrefixCache
    | OnTime
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class RecordingEngine(Engine):
    """An engine that hands each call, encoded, to `write` before (or, for plans, after) carrying it out."""

    def __init__(self, configuration: Configuration, write: Callable[[bytes], object]) -> None:
        super().__init__(**configuration.arguments())
        self._write = write
        self._record(configuration)

    def _record(self, record: Record) -> None:
        encoded = _encoder.encode(record)
        self._write(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)

    def add_model(self, shape: ModelShape) -> ModelShape:
        self._record(AddModel(shape))
        return super().add_model(shape)

    def remove_model(self, name: str, now: float) -> bool:
        self._record(RemoveModel(name, now))
        return super().remove_model(name, now)

    def submit(self, request: GenerationRequest, now: float) -> ErrorInfo | None:
        self._record(Submit(request, now))
        return super().submit(request, now)

    def cancel(self, request_id: str, now: float) -> None:
        self._record(Cancel(request_id, now))
        super().cancel(request_id, now)

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        self._record(Plan(now, b"" if plan is None else _encoder.encode(plan)))
        return plan

    def on_step(self, result: StepResult, now: float) -> None:
        self._record(OnStep(result, now))
        super().on_step(result, now)

    def on_copy(self, copy_id: int, ok: bool, now: float) -> None:
        self._record(OnCopy(copy_id, ok, now))
        super().on_copy(copy_id, ok, now)

    def set_objectives(self, name: str, ttft_s: float, tpot_s: float) -> None:
        self._record(SetObjectives(name, ttft_s, tpot_s))
        super().set_objectives(name, ttft_s, tpot_s)

    def set_cost_model(self, name: str, cost_model: CostModel) -> None:
        self._record(SetCostModel(name, cost_model))
        super().set_cost_model(name, cost_model)

    def set_statistics(self, statistics: ExecutionStatistics) -> None:
        self._record(SetStatistics(statistics))
        super().set_statistics(statistics)

    def borrow_slots(self, name: str, num_slots: int) -> list[int]:
        self._record(BorrowSlots(name, num_slots))
        return super().borrow_slots(name, num_slots)

    def return_slots(self, name: str, slots: list[int]) -> None:
        self._record(ReturnSlots(name, slots))
        super().return_slots(name, slots)

    def clear_prefix_cache(self) -> None:
        self._record(ClearPrefixCache())
        super().clear_prefix_cache()

    def on_time(self, now: float) -> None:
        self._record(OnTime(now))
        super().on_time(now)


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
        match record:
            case AddModel(shape):
                engine.add_model(shape)
            case RemoveModel(name, now):
                engine.remove_model(name, now)
            case Submit(request, now):
                engine.submit(request, now)
            case Cancel(request_id, now):
                engine.cancel(request_id, now)
            case Plan(now, expected):
                plan = engine.plan(now)
                actual = b"" if plan is None else _encoder.encode(plan)
                if actual != expected:
                    raise ReplayMismatch(f"plan {num_plans} at {now:.6f} s differs from the recorded one")
                num_plans += 1
            case OnStep(result, now):
                engine.on_step(result, now)
            case OnCopy(copy_id, ok, now):
                engine.on_copy(copy_id, ok, now)
            case SetObjectives(name, ttft_s, tpot_s):
                engine.set_objectives(name, ttft_s, tpot_s)
            case SetCostModel(name, cost_model):
                engine.set_cost_model(name, cost_model)
            case SetStatistics(statistics):
                engine.set_statistics(statistics)
            case BorrowSlots(name, num_slots):
                engine.borrow_slots(name, num_slots)
            case ReturnSlots(name, slots):
                engine.return_slots(name, slots)
            case ClearPrefixCache():
                engine.clear_prefix_cache()
            case OnTime(now):
                engine.on_time(now)
            case Configuration():
                raise ReplayMismatch("a second configuration inside a recording")
    return engine, num_plans
