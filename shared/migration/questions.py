"""What the decisions of migration ask of what is around them (engine, transport, registry, intake), as plain data.

Answers come at once. Each question is asked through `Around`, so that recording and replay of answers are written once, as
those of calls are; calls of the engine (`shared.engine.calls`) are questions too, that change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from shared.engine.calls import Call
from shared.engine.engine import Engine
from shared.engine.handover import BackupCandidate, MigrationCandidate
from shared.messages.cluster import InstanceInfo
from shared.messages.requests import Adapter, ErrorInfo, GenerationRequest
from shared.policies.kv_backup import BackupSettings

if TYPE_CHECKING:
    from shared.migration.incoming import Intake

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


class EngineHost(Protocol):
    """An engine with whoever drives it, and looks again after each call."""

    def apply(self, call: Call[T], /) -> T: ...

    def ask(self, question: Callable[[Engine], T], /) -> T: ...


class KvEnd(Protocol):
    """What is asked of a KV transport of here."""

    @property
    def address(self) -> str:
        """Address at which peers reach it."""

    def block_bytes(self, pool: str, /) -> int | None:
        """Bytes of a pool's KV block; None: there is no such pool."""

    def bandwidth_bytes_s(self, address: str, /) -> float | None:
        """Bandwidth to a peer, as measured; None: not yet."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Surroundings of one instance's migrations. Answers questions by asking those that know."""

    engine: EngineHost
    transport: KvEnd | None
    """None: only requests without KV move."""
    intake: Intake
    peers: Callable[[], Mapping[str, InstanceInfo]]
    """The registry as it stands, this instance included; nothing where it is not known yet."""
    new_id: Callable[[], str]
    """Makes the id of a migration, unlike any other."""

    def apply(self, call: Call[T], /) -> T:
        return self.engine.apply(call)

    def ask(self, question: Question[T], /) -> T:
        return question.of(self)


class Around(Protocol):
    """Answers questions: `Surroundings`, or who records or replays its answers."""

    def apply(self, call: Call[T], /) -> T:
        """Applies a call to the engine."""

    def ask(self, question: Question[T], /) -> T: ...


class Question(msgspec.Struct, Generic[R_co], frozen=True, tag=True):
    """`R_co`: its answer."""

    def of(self, around: Surroundings) -> R_co:
        raise NotImplementedError


# ------------------------------------------------------------------------------------------------------ the engine


class HeldRequestHere(msgspec.Struct, frozen=True):
    request: GenerationRequest
    """The request as it is held."""
    block_size: int
    """Tokens of its KV blocks."""


class Candidates(Question[list[MigrationCandidate]], frozen=True):
    """See `Engine.migration_candidates`."""

    now: float
    include_offline: bool

    def of(self, around: Surroundings) -> list[MigrationCandidate]:
        return around.engine.ask(lambda engine: engine.migration_candidates(self.now, self.include_offline))


class LateCandidates(Question[list[MigrationCandidate]], frozen=True):
    """See `Engine.late_candidates`."""

    now: float

    def of(self, around: Surroundings) -> list[MigrationCandidate]:
        return around.engine.ask(lambda engine: engine.late_candidates(self.now))


class HandoffCandidate(Question[MigrationCandidate | None], frozen=True):
    """See `Outgoing.handoff_candidate`."""

    request_id: str

    def of(self, around: Surroundings) -> MigrationCandidate | None:
        return around.engine.ask(lambda engine: engine.outgoing.handoff_candidate(self.request_id))


class LastChunks(Question[int | None], frozen=True):
    """See `Outgoing.last_chunks`."""

    request_id: str

    def of(self, around: Surroundings) -> int | None:
        return around.engine.ask(lambda engine: engine.outgoing.last_chunks(self.request_id))


class RestOfPromptS(Question[float], frozen=True):
    """See `Outgoing.rest_of_prompt_s`."""

    request_id: str

    def of(self, around: Surroundings) -> float:
        return around.engine.ask(lambda engine: engine.outgoing.rest_of_prompt_s(self.request_id))


class Held(Question[HeldRequestHere | None], frozen=True):
    request_id: str

    def of(self, around: Surroundings) -> HeldRequestHere | None:
        sequence = around.engine.ask(lambda engine: engine.held(self.request_id))
        return None if sequence is None else HeldRequestHere(sequence.request, sequence.block_size)


class HeldEpoch(Question[int | None], frozen=True):
    request_id: str

    def of(self, around: Surroundings) -> int | None:
        return around.engine.ask(lambda engine: engine.held_epoch(self.request_id))


class HeldAmong(Question[list[str]], frozen=True):
    """Those of these requests that are held."""

    request_ids: list[str]

    def of(self, around: Surroundings) -> list[str]:
        return around.engine.ask(
            lambda engine: [name for name in self.request_ids if engine.held_epoch(name) is not None]
        )


class BackupCandidates(Question[list[BackupCandidate]], frozen=True):
    """See `Outgoing.backup_candidates`."""

    classes: str
    min_tokens: int

    def of(self, around: Surroundings) -> list[BackupCandidate]:
        settings = BackupSettings(self.classes, self.min_tokens)
        return around.engine.ask(lambda engine: engine.outgoing.backup_candidates(settings))


class FoundBlocks(Question[int], frozen=True):
    """How many of the first of these blocks are found on the device or in host memory here."""

    model: str
    hashes: bytes

    def of(self, around: Surroundings) -> int:
        return around.engine.ask(lambda engine: engine.outgoing.num_found(self.model, self.hashes))


class BusyS(Question[float], frozen=True):
    """How long the steps in flight still take, seconds."""

    now: float

    def of(self, around: Surroundings) -> float:
        return around.engine.ask(lambda engine: engine.busy_s(self.now))


# --------------------------------------------------------------------------------------------------- the transport


class BlockBytes(Question[int | None], frozen=True):
    pool: str

    def of(self, around: Surroundings) -> int | None:
        return None if around.transport is None else around.transport.block_bytes(self.pool)


class BandwidthBytesS(Question[float | None], frozen=True):
    address: str

    def of(self, around: Surroundings) -> float | None:
        return None if around.transport is None else around.transport.bandwidth_bytes_s(self.address)


# -------------------------------------------------------------------------------------- registry, intake, identities


class Peer(Question[InstanceInfo | None], frozen=True):
    """The entry of an instance in the registry."""

    instance_id: str

    def of(self, around: Surroundings) -> InstanceInfo | None:
        return around.peers().get(self.instance_id)


class Peers(Question[list[InstanceInfo]], frozen=True):
    """Entries of all instances."""

    def of(self, around: Surroundings) -> list[InstanceInfo]:
        return list(around.peers().values())


class IsDraining(Question[bool], frozen=True):
    def of(self, around: Surroundings) -> bool:
        return around.intake.is_draining


class Refusal(Question[ErrorInfo | None], frozen=True):
    """See `Intake.refusal`."""

    model: str
    adapter: Adapter | None

    def of(self, around: Surroundings) -> ErrorInfo | None:
        return around.intake.refusal(self.model, self.adapter)


class NewId(Question[str], frozen=True):
    def of(self, around: Surroundings) -> str:
        return around.new_id()
