"""What an instance tells the scheduler: each thing that happened in exactly one load report."""

from __future__ import annotations

from collections.abc import Iterable

from shared.engine.driver import StepStats
from shared.engine.engine import Effect, Engine
from shared.engine.load import InstanceLoad
from shared.engine.memory.cache_news import CacheChanges
from shared.engine.requests import Ended, Output
from shared.messages.cluster import DraftUse, FinishedStats, KvCopies, LoadReport, MigrationOutcome
from shared.messages.requests import HeldRequest
from shared.policies.speculation import GateState

REPORT_INTERVAL_S = 0.02
"""Time at least between two reports."""
LEAST_DRIFT_INTERVAL_S, MOST_DRIFT_INTERVAL_S = 0.1, 0.5
DRIFT_SHARE = 0.05
"""Bounds of `drift_interval_s`, and the change that it allows."""
LEAST_STEP_S = 0.01
"""A decode step's time where no more is known."""
HEARTBEAT_S = 1.0
"""Between reports where nothing went on at all."""

NO_CHANGES = CacheChanges()
NO_COPIES = KvCopies()


def is_news(effects: Iterable[Effect], stats: StepStats | None) -> bool:
    """Whether the next report should not wait for `drift_interval_s`. `stats`: of the step that `effects` came of."""
    if stats is None or stats.num_tokens > sum(stats.num_decodes):
        return True
    return any(not isinstance(effect, Output) for effect in effects)


def drift_interval_s(load: InstanceLoad | LoadReport) -> float:
    """Time between reports where nothing goes on but decoding, which changes an instance's load little by little: until the
    decode steps for which memory is left become fewer by `DRIFT_SHARE`, within bounds. A report costs its instance and the
    scheduler about as much as a token, and a thousand instances send most of what the scheduler has to read."""
    of_models = [one for one in load.models if one.num_running]
    costs_s = [one.decode_cost[0] + one.decode_cost[1] * one.num_running for one in of_models]
    round_s = sum(max(LEAST_STEP_S, cost_s) for cost_s in costs_s)
    drift_s = DRIFT_SHARE * load.migration_freeness * round_s if round_s else MOST_DRIFT_INTERVAL_S
    return min(MOST_DRIFT_INTERVAL_S, max(LEAST_DRIFT_INTERVAL_S, drift_s))


def draft_uses(engine: Engine) -> tuple[DraftUse, ...]:
    """Use of the engine's draft models, in the order of their models' names; of one that nothing is known of, none."""
    order = list(GateState)
    uses = []
    for model, gates in sorted(engine.speculation().items()):
        if gates:
            state, gain = max(gates.values(), key=lambda gate: (order.index(gate[0]), gate[1]))
            counters = engine.counters
            uses.append(
                DraftUse(
                    model=model,
                    state=state.value,
                    gain=gain,
                    num_drafted=counters.drafted_tokens[model],
                    num_kept=counters.accepted_tokens[model],
                )
            )
    return tuple(uses)


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
        self,
        load: InstanceLoad,
        num_migrating_out: int,
        num_migrating_in: int,
        cache: CacheChanges = NO_CHANGES,
        *,
        kv_copies: KvCopies = NO_COPIES,
        drafts: tuple[DraftUse, ...] = (),
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
            kv_copies=None if kv_copies == NO_COPIES else kv_copies,
            drafts=drafts,
            **{name: getattr(part, name) for part in (load, cache) for name in part.__struct_fields__},
        )
        self._begin()
        return report
