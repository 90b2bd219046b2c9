"""A recorded run of an engine, and its replay (`shared.recording`): its decisions are its plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from shared import recording
from shared.engine import calls
from shared.engine.config import EngineConfig
from shared.engine.engine import Engine
from shared.policies.catalogue import ordering_policy, token_budget_policy
from shared.policies.checkpointing import AdaptiveCheckpoint
from shared.recording import Recorder

CALLS = recording.decoder_of(calls.Call)


class Configuration(EngineConfig, frozen=True, tag="engine", kw_only=True):
    """All that an engine is made of. Names of policies: `shared.policies.catalogue`."""

    num_merged: int
    num_rows: int
    ordering: str
    token_budget: int
    """Tokens of a step at most."""
    co_serving: str = "slo"
    """slo | priority_only | online_only"""
    checkpoint_start: float = 0.5
    """Used share of the KV pool."""

    def arguments(self) -> dict[str, Any]:
        """Arguments of `Engine`; policy objects are new ones."""
        fields = msgspec.structs.asdict(self)
        co_serving, checkpoint_start = fields.pop("co_serving"), fields.pop("checkpoint_start")
        return fields | {
            "ordering": ordering_policy(self.ordering, mix_phases=self.mix_phases),
            "token_budget": token_budget_policy(co_serving, self.token_budget),
            "serves_offline": co_serving != "online_only",
            "checkpoint": AdaptiveCheckpoint(checkpoint_start),
        }

    def build(self, record: Recorder | None = None) -> Engine:
        return Engine(**self.arguments(), record=record)


def recorded(configuration: Configuration, write: Callable[[bytes], object]) -> Engine:
    """An engine whose configuration, calls and plans go, encoded, to `write`."""
    return configuration.build(recording.recorder(configuration, write))


def replay(recorded: bytes) -> tuple[Engine, int]:
    """Runs a recording again. Returns the engine as it stands at the end and the number of calls to `plan`; raises
    `ReplayMismatch` at the first plan that differs, and where the bytes are no recording of an engine."""
    engine = recording.header_of(recorded, Configuration).build()
    return engine, recording.replay(recorded, engine, CALLS, engine.plan)
