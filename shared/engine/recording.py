"""A recorded run of an engine, and its replay: any incident becomes a test.

A recording is a sequence of length-prefixed msgpack records: first the engine's configuration, then each call and each plan
with its time. Replaying it on the same code gives the same plans byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from shared.engine import calls
from shared.engine.engine import Engine, Recorder
from shared.engine.plan import StepPlan
from shared.policies.catalogue import ordering_policy, token_budget_policy
from shared.policies.checkpointing import AdaptiveCheckpoint

LENGTH_BYTES = 4

_CALLS = reduce(or_, calls.Call.__subclasses__())


class Configuration(msgspec.Struct, frozen=True, tag=True, kw_only=True):
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

    def build(self, record: Recorder | None = None) -> Engine:
        return Engine(**self.arguments(), record=record)


class Applied(msgspec.Struct, frozen=True, tag=True):
    call: _CALLS  # type: ignore[valid-type]
    now: float


class Planned(msgspec.Struct, frozen=True, tag=True):
    plan: bytes
    """Encoded `StepPlan`, empty where none was made."""
    now: float


Record = Configuration | Applied | Planned

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def recorded(configuration: Configuration, write: Callable[[bytes], object]) -> Engine:
    """An engine whose configuration, calls and plans go, encoded, to `write`."""

    def put(record: Record) -> None:
        encoded = _encoder.encode(record)
        write(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)

    def record(what: calls.Call[object] | StepPlan | None, now: float) -> None:
        put(Applied(what, now) if isinstance(what, calls.Call) else Planned(_encoded(what), now))

    put(configuration)
    return configuration.build(record)


def _encoded(plan: StepPlan | None) -> bytes:
    return b"" if plan is None else _encoder.encode(plan)


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
        if isinstance(record, Applied):
            engine.apply(record.call, record.now)
            continue
        if _encoded(engine.plan(record.now)) != record.plan:
            raise ReplayMismatch(f"plan {num_plans} at {record.now:.6f} s differs from the recorded one")
        num_plans += 1
    return engine, num_plans
