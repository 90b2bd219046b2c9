"""All that may change an engine, as plain data: `Engine.apply(call, now)`. Each call names the part that carries it out.

A host that locks, records or replays does so once, for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from shared.costs.model import CostModel, CostSource
from shared.engine.handover import BackupReservation, PinnedBlocks, Reservation
from shared.engine.plan import ModelShape, StepResult
from shared.messages.cluster import ExecutionStatistics
from shared.messages.migration import BackUp, Commit, KeepBackups, PreAllocate
from shared.messages.requests import ErrorCode, ErrorInfo, GenerationRequest
from shared.recording import Call as AnyCall

if TYPE_CHECKING:
    from shared.engine.engine import Engine

R_co = TypeVar("R_co", covariant=True)


class Call(AnyCall, Generic[R_co], frozen=True):
    """`R_co`: what it returns."""

    brings_work: ClassVar[bool] = False
    """An offline step that runs may have to give way to it."""

    def on(self, engine: Engine, now: float) -> R_co:
        """Carries it out."""
        raise NotImplementedError


# ------------------------------------------------------------------------------------------------------- models


class AddModel(Call[ModelShape], frozen=True):
    """Makes a model known. Returns its shape with `max_model_len` bounded by what the pool can hold, so that every request
    within it can run to its end."""

    shape: ModelShape

    def on(self, engine: Engine, now: float) -> ModelShape:
        return engine.add_model(self.shape)


class RemoveModel(Call[bool], frozen=True):
    """Ends what is left of the model's requests with GONE and forgets the model; False (call again later) while a step, a
    copy or a migration in flight still uses its blocks."""

    name: str

    def on(self, engine: Engine, now: float) -> bool:
        return engine.remove_model(self.name, now)


class SetObjectives(Call[None], frozen=True):
    """Default objectives of requests for the model from now on, where they name none; 0: the instance's default."""

    name: str
    ttft_s: float
    tpot_s: float

    def on(self, engine: Engine, now: float) -> None:
        engine.set_objectives(self.name, self.ttft_s, self.tpot_s)


class SetCostModel(Call[None], frozen=True):
    """Step times of the model; corrected from now on by those that are seen."""

    name: str
    cost_model: CostModel
    source: CostSource = CostSource.PROFILED

    def on(self, engine: Engine, now: float) -> None:
        engine.charging.set_cost_model(self.name, self.cost_model, self.source)


class SetFetchCost(Call[None], frozen=True):
    """What a token's KV takes from one instance to another; 0: prefixes are not fetched."""

    name: str
    token_s: float

    def on(self, engine: Engine, now: float) -> None:
        if (queue := engine.memory.queues.get(self.name)) is not None:
            queue.fetch_token_s = self.token_s


class SetStatistics(Call[None], frozen=True):
    """Execution times of the model's requests over the cluster; a mere default gives way to a prediction of here."""

    statistics: ExecutionStatistics

    def on(self, engine: Engine, now: float) -> None:
        engine.charging.set_statistics(self.statistics)


class BorrowBlocks(Call[list[int]], frozen=True):
    """Blocks of a model, for measurements; to be given back soon. Empty where there are not so many."""

    name: str
    num_blocks: int

    def on(self, engine: Engine, now: float) -> list[int]:
        return engine.pool.allocate(self.name, self.num_blocks) or []


class ReturnBlocks(Call[None], frozen=True):
    name: str
    blocks: list[int]

    def on(self, engine: Engine, now: float) -> None:
        engine.pool.release(self.name, self.blocks)


class ClearPrefixCache(Call[None], frozen=True):
    """Makes every unreferenced block unfindable, in all tiers, and what is on its way between them."""

    def on(self, engine: Engine, now: float) -> None:
        engine.pool.clear_cache()
        engine.memory.host.clear_cache()


class FoundOnDisk(Call[None], frozen=True):
    """Blocks of a model lie on disk, the one that will be needed soonest last."""

    model: str
    hashes: list[bytes]

    def on(self, engine: Engine, now: float) -> None:
        if (disk := engine.memory.host.disk) is not None:
            disk.add(self.model, self.hashes)


class LostOnDisk(Call[None], frozen=True):
    """Blocks of a model do not lie on disk any more."""

    model: str
    hashes: list[bytes]

    def on(self, engine: Engine, now: float) -> None:
        if (disk := engine.memory.host.disk) is not None:
            disk.lose(self.model, self.hashes)


class GiveUpReads(Call[None], frozen=True):
    """The disk hangs: what waits for it is computed, and nothing is read until blocks are found there anew."""

    def on(self, engine: Engine, now: float) -> None:
        engine.memory.give_up_reads(now)


class FlushTiers(Call[bool], frozen=True):
    """Lets blocks of ended requests go down to disk from now on, whatever room there is. Returns whether none is left."""

    def on(self, engine: Engine, now: float) -> bool:
        tiers = engine.memory.tiers
        tiers.is_flushing = tiers.is_on and tiers.disk is not None
        return not tiers.is_flushing or tiers.is_settled


# ------------------------------------------------------------------------------------------- requests and steps


class Submit(Call[ErrorInfo | None], frozen=True):
    """See `RequestTable.submit`."""

    brings_work = True
    request: GenerationRequest

    def on(self, engine: Engine, now: float) -> ErrorInfo | None:
        return engine.requests.submit(self.request, now)


class Cancel(Call[None], frozen=True):
    request_id: str

    def on(self, engine: Engine, now: float) -> None:
        engine.requests.cancel(self.request_id, now)


class TakeInterrupt(Call[int | None], frozen=True):
    """See `Engine.take_interrupt`."""

    def on(self, engine: Engine, now: float) -> int | None:
        return engine.steps.take_interrupt(now)


class OnStep(Call[None], frozen=True):
    """What a step made, or that it failed or was suspended."""

    result: StepResult

    def on(self, engine: Engine, now: float) -> None:
        engine.on_step(self.result, now)


class OnCopy(Call[None], frozen=True):
    """A copy has ended; one to or from host memory that failed leaves things as if it had not been begun."""

    copy_id: int
    ok: bool
    seconds: float = 0.0
    """How long it took, from its turn among the copies on; 0: not known."""

    def on(self, engine: Engine, now: float) -> None:
        engine.on_copy(self.copy_id, self.ok, now, self.seconds)


class OnTime(Call[None], frozen=True):
    """Ends requests past their deadline; offline work gives way to what another instance was refused."""

    def on(self, engine: Engine, now: float) -> None:
        engine.on_time(now)


# ---------------------------------------------------------------------------------- to other instances: outgoing.py


class Pin(Call[PinnedBlocks | None], frozen=True):
    request_id: str
    first_block: int

    def on(self, engine: Engine, now: float) -> PinnedBlocks | None:
        return engine.outgoing.pin(self.request_id, self.first_block)


class PinFilled(Call[PinnedBlocks | None], frozen=True):
    """See `Outgoing.pin_filled`."""

    request_id: str
    first_block: int
    max_blocks: int

    def on(self, engine: Engine, now: float) -> PinnedBlocks | None:
        return engine.outgoing.pin_filled(self.request_id, self.first_block, self.max_blocks)


class PinFound(Call[PinnedBlocks | None], frozen=True):
    """See `Outgoing.pin_found`."""

    model: str
    hashes: bytes

    def on(self, engine: Engine, now: float) -> PinnedBlocks | None:
        return engine.outgoing.pin_found(self.model, self.hashes)


class Unpin(Call[None], frozen=True):
    pinned: PinnedBlocks

    def on(self, engine: Engine, now: float) -> None:
        engine.outgoing.unpin(self.pinned)


class Detach(Call[bool], frozen=True):
    request_id: str

    def on(self, engine: Engine, now: float) -> bool:
        return engine.outgoing.detach(self.request_id, now)


class PinRest(Call[PinnedBlocks | None], frozen=True):
    request_id: str
    first_block: int

    def on(self, engine: Engine, now: float) -> PinnedBlocks | None:
        return engine.outgoing.pin_rest(self.request_id, self.first_block)


class Freeze(Call[bool], frozen=True):
    request_id: str

    def on(self, engine: Engine, now: float) -> bool:
        return engine.outgoing.freeze(self.request_id)


class Reattach(Call[None], frozen=True):
    brings_work = True
    request_id: str
    epoch: int | None = None

    def on(self, engine: Engine, now: float) -> None:
        engine.outgoing.reattach(self.request_id, now, self.epoch)


class Release(Call[bool], frozen=True):
    request_id: str

    def on(self, engine: Engine, now: float) -> bool:
        return engine.outgoing.release(self.request_id, now)


class EndMigration(Call[None], frozen=True):
    """The move is off, or does not begin: one that was to be handed over decodes here."""

    brings_work = True
    request_id: str

    def on(self, engine: Engine, now: float) -> None:
        engine.outgoing.end_migration(self.request_id, now)


# ---------------------------------------------------------------- from other instances: reservations.py, incoming.py


class Reserve(Call[Reservation | ErrorInfo], frozen=True):
    query: PreAllocate

    def on(self, engine: Engine, now: float) -> Reservation | ErrorInfo:
        return engine.reservations.reserve(self.query, now)


class Adopt(Call[ErrorInfo | None], frozen=True):
    brings_work = True
    commit: Commit

    def on(self, engine: Engine, now: float) -> ErrorInfo | None:
        return engine.incoming.adopt(self.commit, now)


class Unreserve(Call[None], frozen=True):
    migration_id: str

    def on(self, engine: Engine, now: float) -> None:
        engine.reservations.release(self.migration_id)


# ------------------------------------------------------------------------- copies for other instances: memory/backups.py


class ReserveBackup(Call[BackupReservation | ErrorInfo], frozen=True):
    """See `Backups.reserve`."""

    query: BackUp

    def on(self, engine: Engine, now: float) -> BackupReservation | ErrorInfo:
        backups, queue = engine.memory.host.backups, engine.memory.queues.get(self.query.model)
        if backups is None:
            return ErrorInfo(ErrorCode.OVERLOADED, "this instance has no host memory for backups")
        if queue is None:
            return ErrorInfo(ErrorCode.GONE, f"model {self.query.model!r} is not loaded on this instance", "model")
        if self.query.block_size != queue.shape.block_size:
            message = f"blocks here have {queue.shape.block_size} tokens, not {self.query.block_size}"
            return ErrorInfo(ErrorCode.BAD_REQUEST, message, "block_size")
        return backups.reserve(self.query)


class SettleBackup(Call[None], frozen=True):
    """See `Backups.settle`."""

    backup_id: str
    ok: bool

    def on(self, engine: Engine, now: float) -> None:
        if (backups := engine.memory.host.backups) is not None:
            backups.settle(self.backup_id, self.ok)


class Keep(Call[None], frozen=True):
    """See `Backups.keep`."""

    query: KeepBackups

    def on(self, engine: Engine, now: float) -> None:
        if (backups := engine.memory.host.backups) is not None:
            backups.keep(self.query)
