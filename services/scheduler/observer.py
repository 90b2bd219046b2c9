"""Metrics and spans of the scheduler: what it did, and how long requests waited for it."""

from __future__ import annotations

import logging
import time
from collections import Counter as Tally
from collections.abc import Iterable

from opentelemetry.trace import Span, Status, StatusCode
from prometheus_client import Counter, Gauge, Histogram

from shared.messages.batches import GrantReply
from shared.messages.cluster import InstanceInfo, TenantStatistics
from shared.messages.migration import AbortReason, MigrationReason
from shared.messages.requests import ErrorInfo, GenerationRequest, RequestClass
from shared.policies.tenant_labels import TenantLabels
from shared.runtime.telemetry import Telemetry, context_of
from shared.scheduling.actions import Dispatch, InstanceLost, LeftQueue, MigrationEnded, Paired
from shared.scheduling.core import SchedulerCore
from shared.scheduling.queue import Lane
from shared.scheduling.tenants import merged

logger = logging.getLogger(__name__)

LOSSES = ("drained", "exited", "restarted", "silent", "vanished")
"""How instances go away, as `InstanceLost` says it."""
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class Observer:
    def __init__(self, telemetry: Telemetry) -> None:
        self._tracer = telemetry.tracer
        self._fingerprints: dict[str, dict[str, str]] = {}
        """Fingerprints of the models of each instance, by name, in deterministic mode."""
        registry = telemetry.registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter("tideway_scheduler_" + name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge("tideway_scheduler_" + name, text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram("tideway_scheduler_" + name, text, labels, buckets=_SECONDS, registry=registry)

        self.is_leader = gauge("is_leader", "1 while this replica is the active scheduler")
        self.reports = counter("reports", "Load reports received")
        self.refused = counter("refused", "Requests refused at submission, by error code", "code")
        self._left_queue = counter("requests", "Requests that left the scheduler, by how", "outcome", "class")
        self._queue_seconds = histogram("queue_seconds", "Submission to dispatch, of dispatched requests", "class")
        self._dispatches = counter("dispatches", "Submit calls to instances, by outcome", "outcome", "class")
        self._dispatch_seconds = histogram("dispatch_seconds", "Duration of submit calls to instances", "class")
        self._lost_instances = counter("lost_instances", "Instances that went away, by how", "reason")
        self._recovered = counter("recovered_requests", "Requests that were on lost instances and are placed again")
        self._queue_length = gauge("queue_length", "Requests in the global queue", "model", "class")
        self._granted = counter("granted_tokens", "Offline tokens that gateways were allowed to submit", "model")
        self._room = gauge("offline_room_tokens", "Offline tokens that instances could take and do not have", "model")
        self._unmet = gauge("offline_unmet_tokens", "Offline tokens that gateways wait to submit", "model")
        self._throughput = gauge("offline_tokens_per_second", "Of offline requests that finished", "model")
        self._instances = gauge("instances", "Instances in the registry, by state", "state")
        self._ledger = gauge("ledger_requests", "Requests dispatched that no load report has named yet")
        self._known_blocks = gauge("prefix_blocks", "Full KV blocks of which it is known which instances have them")
        self._pairings = counter("pairings", "Times that an instance was told to give requests away, by why", "reason")
        self._pairs = gauge("pairs", "Instances that are to give requests away now, by why", "reason")
        self._migrations = counter("moves", "Migrations that ended, by how and by why they failed", "outcome", "reason")
        self._backoffs = gauge("move_backoffs", "Instances left out of pairings for a while after failed migrations")
        self._tenant_labels = TenantLabels()
        self._tenant_queue_length = gauge("tenant_queue_length", "Requests in the global queue, by tenant", "tenant")
        self._tenant_placed = gauge("tenant_placed_requests", "Requests on instances, or on their way there", "tenant")
        self._tenant_lag = gauge(
            "tenant_lag_seconds",
            "Weighted service of a tenant's online requests beyond that of the tenant with least (virtual token counters)",
            "tenant",
        )
        self._assigned = gauge("tracked_requests", "Requests queued, being dispatched or on instances")
        # What is counted later begins at 0, so that rates are known from the first event on.
        self._migrations.labels("moved", "")
        for why_not in AbortReason:
            self._migrations.labels("aborted", why_not)
        for reason in MigrationReason:
            self._pairings.labels(reason)
        for request_class in RequestClass:
            self._queue_seconds.labels(request_class)
        for how in LOSSES:
            self._lost_instances.labels(how)

    def on_registry(self, instance_id: str, info: InstanceInfo | None) -> None:
        """Says where instances make other bits of one model, in deterministic mode."""
        before = self._fingerprints.pop(instance_id, {})
        now = {model.name: model.fingerprint for model in (info.models if info else ()) if model.fingerprint}
        for name in now.keys() - before.keys():
            others = {known.get(name, now[name]) for known in self._fingerprints.values()} - {now[name]}
            if others:
                logger.warning(
                    "model %s has the fingerprint %s on %s, and %s elsewhere: a stream that goes on there may differ, in "
                    "spite of TIDEWAY_DETERMINISTIC", name, now[name], instance_id, ", ".join(sorted(others)),
                )  # fmt: skip
        if now:
            self._fingerprints[instance_id] = now

    def on_left_queue(self, left: LeftQueue, now: float) -> None:
        """Counts, and records the span `queue`, which is over now: from submission to the dispatch that succeeded."""
        request = left.request
        self._left_queue.labels(left.outcome, request.request_class).inc()
        if left.outcome == "dispatched":
            self._queue_seconds.labels(request.request_class).observe(left.left_s - left.submitted_s)
        wall_ns = time.time_ns()
        span = self._tracer.start_span(
            "queue",
            context_of(request.traceparent),
            start_time=wall_ns - int((now - left.submitted_s) * 1e9),
            attributes={
                **_attributes(request),
                "tideway.instance_id": left.instance_id,
                "tideway.num_attempts": left.attempts,
                "tideway.num_ahead": left.num_ahead,
                "tideway.outcome": left.outcome,
            },
        )
        if left.outcome in ("deadline", "refused"):
            span.set_status(Status(StatusCode.ERROR, left.outcome))
        span.end(wall_ns - int((now - left.left_s) * 1e9))

    def begin_dispatch(self, dispatch: Dispatch) -> Span:
        """The span `dispatch` of a submit call; `end_dispatch` ends it."""
        return self._tracer.start_span(
            "dispatch",
            context_of(dispatch.request.traceparent),
            attributes={
                **_attributes(dispatch.request),
                "tideway.instance_id": dispatch.instance_id,
                "tideway.epoch": dispatch.request.epoch,
                "tideway.dispatched_for": dispatch.why,
                **({"tideway.decoder": dispatch.request.decoder} if dispatch.request.decoder else {}),
            },
        )

    def end_dispatch(self, dispatch: Dispatch, span: Span, error: ErrorInfo | None, seconds: float) -> None:
        outcome = error.code.value if error else "accepted"
        request_class = dispatch.request.request_class.value
        self._dispatches.labels(outcome, request_class).inc()
        self._dispatch_seconds.labels(request_class).observe(seconds)
        span.set_attribute("tideway.outcome", outcome)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error.message))
        span.end()

    def on_instance_lost(self, lost: InstanceLost) -> None:
        self._lost_instances.labels(lost.reason).inc()
        self._recovered.inc(lost.num_requests)

    def on_paired(self, paired: Paired) -> None:
        self._pairings.labels(paired.reason).inc()
        names = ", ".join(paired.destinations)
        logger.debug("%s (freeness %.1f) gives to %s: %s", paired.instance_id, paired.freeness, names, paired.reason)

    def on_move(self, ended: MigrationEnded) -> None:
        self._migrations.labels("aborted" if ended.reason else "moved", ended.reason).inc()

    def on_granted(self, reply: GrantReply) -> None:
        for grant in reply.grants:
            self._granted.labels(grant.model).inc(grant.tokens)

    def sample(self, core: SchedulerCore, models: Iterable[str], now: float) -> None:
        """Sets the gauges. `models`: those that are configured, whether or not anything waits for them."""
        lengths = dict.fromkeys((Lane(model, is_online) for model in models for is_online in (True, False)), 0)
        self._queue_length.clear()
        for lane, length in (lengths | core.queue.lengths()).items():
            name = RequestClass.ONLINE if lane.is_online else RequestClass.OFFLINE
            self._queue_length.labels(lane.model, name).set(length)
        self._instances.clear()
        states = Tally(state.info.state if state.is_alive else state.liveness.value for _, state in core.cluster)
        for state, count in states.items():
            self._instances.labels(state).set(count)
        unmet = core.grants.unmet_tokens(now)
        room = core.dispatcher.offline_room(core.cluster.models())
        for gauge, values in (
            (self._room, room),
            (self._unmet, unmet),
            (self._throughput, core.grants.tokens_per_s(now)),
        ):
            gauge.clear()
            for model, value in values.items():
                gauge.labels(model).set(max(0, value or 0))
        reasons = Tally(pair.reason for pair in core.rescheduler.policy.pairs.values())
        for reason in MigrationReason:
            self._pairs.labels(reason).set(reasons[reason])
        self._backoffs.set(core.rescheduler.policy.num_backing_off(now))
        self._sample_tenants(core.queue.tenants.statistics(now))
        self._ledger.set(len(core.dispatcher.ledger))
        self._known_blocks.set(core.dispatcher.num_known_blocks)
        self._assigned.set(len(core.requests))

    def stand_by(self) -> None:
        """Takes back what the gauges said: another replica leads, and what it says of requests and instances counts."""
        for labelled in (self._queue_length, self._instances, self._room, self._unmet, self._throughput):
            labelled.clear()
        for reason in MigrationReason:
            self._pairs.labels(reason).set(0)
        self._sample_tenants(())
        for gauge in (self.is_leader, self._backoffs, self._ledger, self._known_blocks, self._assigned):
            gauge.set(0)

    def _sample_tenants(self, tenants: Iterable[TenantStatistics]) -> None:
        by_label: dict[str, list[TenantStatistics]] = {}
        for one in tenants:
            by_label.setdefault(self._tenant_labels.of(one.tenant), []).append(one)
        for gauge in (self._tenant_queue_length, self._tenant_placed, self._tenant_lag):
            gauge.clear()
        for label, some in by_label.items():
            together = merged(some)
            self._tenant_queue_length.labels(label).set(together.num_queued)
            self._tenant_placed.labels(label).set(together.num_placed)
            self._tenant_lag.labels(label).set(together.lag_s)


def _attributes(request: GenerationRequest) -> dict[str, str]:
    return {
        "gen_ai.request.model": request.public_model,
        "tideway.request_id": request.request_id,
        "tideway.request_class": request.request_class.value,
        "tideway.priority": request.priority.value,
        "tideway.tenant": request.tenant,
    }
