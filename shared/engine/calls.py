"""The calls that change an engine, as records with their arguments (see recording.py)."""

from __future__ import annotations

import re

import msgspec

from shared.cost_model import CostModel, CostSource
from shared.engine.moving import PinnedBlocks
from shared.engine.plan import ModelShape, StepResult
from shared.messages.cluster import ExecutionStatistics
from shared.messages.migration import Commit, PreAllocate
from shared.messages.requests import GenerationRequest


def _method(name: str) -> str:
    return re.sub("(?<!^)(?=[A-Z])", "_", name).lower()


class Call(msgspec.Struct, frozen=True, tag=_method):
    """Its tag is a method of `Engine`, which takes the record's fields, in order."""

    @property
    def method(self) -> str:
        return str(self.__struct_config__.tag)


class AddModel(Call, frozen=True):
    shape: ModelShape


class RemoveModel(Call, frozen=True):
    name: str
    now: float


class Submit(Call, frozen=True):
    request: GenerationRequest
    now: float


class Cancel(Call, frozen=True):
    request_id: str
    now: float


class TakeInterrupt(Call, frozen=True):
    """One that named a step; others change nothing."""

    now: float


class OnStep(Call, frozen=True):
    result: StepResult
    now: float


class OnCopy(Call, frozen=True):
    copy_id: int
    ok: bool
    now: float


class SetObjectives(Call, frozen=True):
    name: str
    ttft_s: float
    tpot_s: float


class SetCostModel(Call, frozen=True):
    name: str
    cost_model: CostModel
    source: CostSource = CostSource.PROFILED


class SetStatistics(Call, frozen=True):
    statistics: ExecutionStatistics


class BorrowSlots(Call, frozen=True):
    name: str
    num_slots: int


class ReturnSlots(Call, frozen=True):
    name: str
    slots: list[int]


class ClearPrefixCache(Call, frozen=True):
    pass


class OnTime(Call, frozen=True):
    now: float


class Pin(Call, frozen=True):
    request_id: str
    first_block: int


class Unpin(Call, frozen=True):
    pinned: PinnedBlocks


class TakeOut(Call, frozen=True):
    request_id: str
    now: float


class PinRest(Call, frozen=True):
    request_id: str
    first_block: int


class Seal(Call, frozen=True):
    request_id: str


class PutBack(Call, frozen=True):
    request_id: str
    now: float
    epoch: int | None


class DropMoved(Call, frozen=True):
    request_id: str
    now: float


class EndMove(Call, frozen=True):
    request_id: str
    now: float


class Reserve(Call, frozen=True):
    query: PreAllocate
    now: float


class Adopt(Call, frozen=True):
    commit: Commit
    now: float


class Release(Call, frozen=True):
    migration_id: str
