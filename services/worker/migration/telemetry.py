"""Metrics and spans of migrations, in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from opentelemetry import trace
from prometheus_client import Counter, Gauge, Histogram

from shared.messages.migration import MigrationReason
from shared.migration.outgoing import MOVED
from shared.runtime.telemetry import Telemetry, context_of

PAUSE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
STAGE_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16)

Attributes = Mapping[str, str | int | float | bool]


class MigrationTelemetry:
    def __init__(self, telemetry: Telemetry) -> None:
        registry = telemetry.registry
        self._tracer = telemetry.tracer
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._migrations = counter(
            "tideway_migrations",
            "Migrations ended, by direction (out | in), cause and outcome (moved, or why not)",
            ("direction", "reason", "outcome"),
        )
        self._pause = histogram(
            "tideway_migration_pause_seconds",
            "What a request waits: at the source from leaving its batch to the answer to Commit, at the destination from "
            "there to the end of its first step",
            ("end",),
            buckets=PAUSE_BUCKETS,
        )
        self._handoff = histogram(
            "tideway_handoff_wait_seconds",
            "What a request waits that is handed over: from the end of its prompt elsewhere to that of its first step here",
            buckets=PAUSE_BUCKETS,
        )
        self._bytes = counter("tideway_migration_bytes", "KV bytes moved", ("direction",))
        self._held_blocks = counter(
            "tideway_migration_held_blocks",
            "KV blocks of moved requests that destinations had already: they were not sent",
        )
        self._stages = histogram(
            "tideway_migration_stages", "Stages of a migration that moved its request", buckets=STAGE_BUCKETS
        )
        self._in_progress = Gauge(
            "tideway_migrations_in_progress", "Migrations in progress", ("direction",), registry=registry
        )
        gauge = partial(Gauge, registry=registry)
        self._backups = counter(
            "tideway_kv_backup_transfers", "Transfers of copies of KV to holders, by what came of them", ("outcome",)
        )
        self._backup_blocks = counter(
            "tideway_kv_backup_blocks", "KV blocks copied to holders: all, and those that were sent for it", ("what",)
        )
        self._backup_requests = gauge(
            "tideway_kv_backup_requests",
            "Requests of here with copies elsewhere, and of others with copies here",
            ("end",),
        )
        self._backup_missing = gauge(
            "tideway_kv_backup_missing_blocks", "Full KV blocks of requests that are worth a copy, and have none yet"
        )
        self._backup_share = gauge(
            "tideway_kv_backup_host_pool_use", "Share of host memory that copies for others take, 0 to 1"
        )
        self._fetches = counter(
            "tideway_prefix_fetches", "Prefixes asked of other instances, by what came", ("outcome",)
        )
        self._fetched_blocks = counter("tideway_prefix_fetched_blocks", "KV blocks fetched from other instances")
        # What is counted later begins at 0, so that rates are known from the first migration on.
        self._migrations.labels("in", "", MOVED)
        for reason in MigrationReason:
            self._migrations.labels("out", reason, MOVED)
        for direction in ("out", "in"):
            self._bytes.labels(direction)
            self._in_progress.labels(direction)
        for end in ("source", "destination"):
            self._pause.labels(end)
        for outcome in ("copied", "refused", "unreachable", "failed"):
            self._backups.labels(outcome)
        for outcome in ("fetched", "held", "refused", "late", "failed"):
            self._fetches.labels(outcome)
        for what in ("copied", "sent"):
            self._backup_blocks.labels(what)

    def begin(self, direction: str) -> None:
        self._in_progress.labels(direction).inc()

    def end(self, direction: str, reason: str, outcome: str) -> None:
        self._in_progress.labels(direction).dec()
        self.refused(direction, reason, outcome)

    def refused(self, direction: str, reason: str, outcome: str) -> None:
        """One that was over before it began."""
        self._migrations.labels(direction, reason, outcome).inc()

    def on_moved(self, num_stages: int, num_held: int) -> None:
        """`num_held`: blocks that the destination had already."""
        self._stages.observe(num_stages)
        self._held_blocks.inc(num_held)

    def on_pause(self, end: str, seconds: float) -> None:
        self._pause.labels(end).observe(seconds)

    def on_handoff(self, seconds: float) -> None:
        self._handoff.observe(seconds)

    def on_bytes(self, direction: str, num_bytes: int) -> None:
        self._bytes.labels(direction).inc(num_bytes)

    def on_backup(self, outcome: str, num_blocks: int, num_sent: int) -> None:
        """A transfer of copies is over. `num_blocks`: that the holder has by it, `num_sent` of them sent."""
        self._backups.labels(outcome).inc()
        self._backup_blocks.labels("copied").inc(num_blocks)
        self._backup_blocks.labels("sent").inc(num_sent if outcome == "copied" else 0)

    def on_fetch(self, outcome: str, num_blocks: int) -> None:
        """A request need not wait for its prefix any more, of which so many blocks have come."""
        self._fetches.labels(outcome).inc()
        self._fetched_blocks.inc(num_blocks)

    def on_backups(self, num_requests: int, num_missing: int, num_kept: int, kept_share: float) -> None:
        """How things stand at both ends."""
        self._backup_requests.labels("source").set(num_requests)
        self._backup_missing.set(num_missing)
        self._backup_requests.labels("holder").set(num_kept)
        self._backup_share.set(kept_share)

    def span(self, name: str, traceparent: str, attributes: Attributes) -> MigrationSpan:
        """`traceparent`: of the request, or of the migration's other end."""
        span = self._tracer.start_span(name, context=context_of(traceparent), attributes=dict(attributes))
        return MigrationSpan(self._tracer, span)


class MigrationSpan:
    """Span of one migration at one of its ends, with a child for each stage."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    @contextmanager
    def stage(self, name: str, attributes: Attributes) -> Iterator[None]:
        """A child span for as long as the block runs, current in it, so that messages sent there carry it."""
        context = trace.set_span_in_context(self._span)
        with self._tracer.start_as_current_span(name, context=context, attributes=dict(attributes)):
            yield

    def end(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))
        self._span.end()
