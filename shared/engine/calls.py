"""The calls that change an engine, as records with their arguments (see recording.py)."""

from __future__ import annotations

import msgspec

from shared.cost_model import CostModel
from shared.engine.moving import PinnedBlocks
from shared.engine.plan import ModelShape, StepResult
from shared.messages import Commit, ExecutionStatistics, GenerationRequest, PreAllocate


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


class TakeInterrupt(msgspec.Struct, frozen=True, tag=True):
    """One that named a step; others change nothing."""

    now: float


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


class Pin(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    first_block: int


class Unpin(msgspec.Struct, frozen=True, tag=True):
    pinned: PinnedBlocks


class TakeOut(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    now: float


class PinRest(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    first_block: int


class Seal(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class PutBack(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    now: float
    epoch: int | None


class DropMoved(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    now: float


class EndMove(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    now: float


class Reserve(msgspec.Struct, frozen=True, tag=True):
    query: PreAllocate
    now: float


class Adopt(msgspec.Struct, frozen=True, tag=True):
    commit: Commit
    now: float


class Release(msgspec.Struct, frozen=True, tag=True):
    migration_id: str


CALLS: dict[type[msgspec.Struct], str] = {
    AddModel: "add_model",
    RemoveModel: "remove_model",
    Submit: "submit",
    Cancel: "cancel",
    TakeInterrupt: "take_interrupt",
    OnStep: "on_step",
    OnCopy: "on_copy",
    SetObjectives: "set_objectives",
    SetCostModel: "set_cost_model",
    SetStatistics: "set_statistics",
    BorrowSlots: "borrow_slots",
    ReturnSlots: "return_slots",
    ClearPrefixCache: "clear_prefix_cache",
    OnTime: "on_time",
    Pin: "pin",
    Unpin: "unpin",
    TakeOut: "take_out",
    PinRest: "pin_rest",
    Seal: "seal",
    PutBack: "put_back",
    DropMoved: "drop_moved",
    EndMove: "end_move",
    Reserve: "reserve",
    Adopt: "adopt",
    Release: "release",
}
"""Method of `Engine` -> its arguments are the record's fields, in order."""

Call = (
    AddModel
    | RemoveModel
    | Submit
    | Cancel
    | TakeInterrupt
    | OnStep
    | OnCopy
    | SetObjectives
    | SetCostModel
    | SetStatistics
    | BorrowSlots
    | ReturnSlots
    | ClearPrefixCache
    | OnTime
    | Pin
    | Unpin
    | TakeOut
    | PinRest
    | Seal
    | PutBack
    | DropMoved
    | EndMove
    | Reserve
    | Adopt
    | Release
)
