"""What an instance tells the scheduler: each thing that happened in exactly one load report."""

from __future__ import annotations

from collections.abc import Iterable

from shared.engine.driver import StepStats
from shared.engine.engine import Effect
from shared.engine.load import InstanceLoad
from shared.engine.memory.cache_news import CacheChanges
from shared.engine.requests import Ended, Output
from shared.messages.cluster import FinishedStats, LoadReport, MigrationOutcome
from shared.messages.requests import HeldRequest

REPORT_INTERVAL_S = 0.02
"""At least, between two reports."""
DRIFT_INTERVAL_S = 0.1
"""Between reports where nothing went on but decoding, which changes an instance's load little by little. A report costs its
instance and the scheduler about as much as a token."""
HEARTBEAT_S = 1.0
"""Between reports where nothing went on at all."""

NO_CHANGES = CacheChanges()


def is_news(effects: Iterable[Effect], stats: StepStats | None) -> bool:
    """Whether the next report should not wait for `DRIFT_INTERVAL_S`. `stats`: of the step that `effects` came of."""
    if stats is None or stats.num_tokens > sum(stats.num_decodes):
        return True
    return any(not isinstance(effect, Output) for effect in effects)


class LoadReports:
    """Collects between two reports; when to report is the caller's matter."""

    def __init__(self, instance_id: str, incarnation: str) -> None:
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._sequence = 0
        self._num_migrated_out = 0
        self._num_migrated_in = 0
        self._begin()

    def _begin(self) -> None:
        self.admitted: list[str] = []
        self.ended: list[str] = []
        self.finished: list[FinishedStats] = []
        self.migrations: list[MigrationOutcome] = []
        self.migrated_in: list[HeldRequest] = []

    def on_ended(self, ended: Ended) -> None:
        self.ended.append(ended.request.request_id)
        self.finished.append(ended.stats())

    def take(
        self, load: InstanceLoad, num_migrating_out: int, num_migrating_in: int, cache: CacheChanges = NO_CHANGES
    ) -> LoadReport:
        """The next one. `num_migrating_out`, `num_migrating_in`: migrations under way. `cache`: what is to be told of it."""
        self._sequence += 1
        self._num_migrated_out += sum(outcome.is_migrated for outcome in self.migrations)
        self._num_migrated_in += len(self.migrated_in)
        report = LoadReport(
            instance_id=self._instance_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            admitted=tuple(self.admitted),
            ended=tuple(self.ended),
            finished=tuple(self.finished),
            migrations=tuple(self.migrations),
            migrated_in=tuple(self.migrated_in),
            num_migrating_out=num_migrating_out,
            num_migrating_in=num_migrating_in,
            num_migrated_out=self._num_migrated_out,
            num_migrated_in=self._num_migrated_in,
            **{name: getattr(part, name) for part in (load, cache) for name in part.__struct_fields__},
        )
        self._begin()
        return report
