"""Two instances whose engine is another's, between which requests move; the caller plays gateway and scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from services.worker.engines.interface import ForeignEngine
from services.worker.instance.migrations import OpenTransport
from services.worker.migration.faults import FaultPoints
from shared.messages.catalogue import INSTANCE_REBALANCE
from shared.messages.migration import MigrationReason, Rebalance
from shared.messages.requests import GenerationRequest, TokenEntry, unpack_tokens
from shared.runtime.settings import BusSettings
from tests.worker.engines.engine_stage import engine_instance_on
from tests.worker.instance_stage import Stage


class Pair:
    """Two instances with one model, and what their gateway heard of both."""

    def __init__(self, stages: list[Stage]) -> None:
        self.stages = stages

    def entries(self, sent: GenerationRequest) -> list[TokenEntry]:
        found = [one for stage in self.stages for one in stage.entries if one.request_id == sent.request_id]
        return sorted(found, key=lambda one: (one.epoch, one.offset))

    def output(self, sent: GenerationRequest) -> list[int]:
        """Tokens as a gateway puts them together: by offset, whatever instance they came from."""
        tokens: list[int] = []
        for entry in self.entries(sent):
            new = unpack_tokens(entry.tokens)
            assert entry.offset <= len(tokens), "tokens are missing"
            assert tokens[entry.offset : entry.offset + len(new)] == new[: len(tokens) - entry.offset]
            tokens[entry.offset :] = new if entry.offset + len(new) >= len(tokens) else tokens[entry.offset :]
        return tokens

    def end(self, sent: GenerationRequest) -> TokenEntry | None:
        return next((one for one in self.entries(sent) if one.finish_reason is not None), None)

    def rebalance(
        self,
        source: int,
        lease_s: float = 5.0,
        max_concurrent: int = 1,
        reason: MigrationReason = MigrationReason.BALANCE,
    ) -> None:
        order = Rebalance([f"node-{1 - source}"], reason, lease_s, max_concurrent)
        self.stages[source].bus.publish(INSTANCE_REBALANCE.at(instance_id=f"node-{source}"), order)

    def stop(self, source: int) -> None:
        order = Rebalance([], MigrationReason.BALANCE, 0.0)
        self.stages[source].bus.publish(INSTANCE_REBALANCE.at(instance_id=f"node-{source}"), order)

    def set_faults(self, text: str) -> None:
        """At both ends, as `TIDEWAY_FAULT_POINTS` has them."""
        for stage in self.stages:
            service: Any = stage.service
            service._migrations._service._faults = FaultPoints(text)

    @property
    def num_moved(self) -> int:
        outcomes = [one for stage in self.stages for report in stage.reports for one in report.migrations]
        return sum(one.is_migrated for one in outcomes)

    async def until(self, condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
        await self.stages[0].until(condition, timeout_s)

    async def until_rest(self, num_slots: int) -> None:
        """No slot of either staging memory, of so many, is in use."""
        await self.until(lambda: all(stage.service._moves.num_slots_free == num_slots for stage in self.stages))  # type: ignore[attr-defined]


@asynccontextmanager
async def pair_on(
    nats_settings: BusSettings, engines: list[ForeignEngine], transports: list[OpenTransport], **fields: Any
) -> AsyncIterator[Pair]:
    """Both are ready, and requests move. `fields`: of the instances' settings."""
    async with (
        engine_instance_on(
            nats_settings, engines[0], open_transport=transports[0], migration_cooldown_s=0.0, **fields
        ) as one,
        engine_instance_on(
            nats_settings,
            engines[1],
            instance_id="node-1",
            open_transport=transports[1],
            migration_cooldown_s=0.0,
            **fields,
        ) as other,
    ):
        pair = Pair([one, other])
        await pair.until(lambda: all(stage.info.kv_address for stage in pair.stages))
        yield pair
