"""Tracing (OpenTelemetry, W3C trace context, OTLP over HTTP) and metrics (Prometheus): one call per service.

Nothing here is global: each service of a process has its own tracer and its own metric registry, passed on explicitly.
Without `otlp_endpoint` spans are not recorded, and the `traceparent` that a service is given is what it passes on. Export
happens on a thread; a collector that is away costs one warning, and spans that find no room are dropped. What became of
spans is counted. Resource attributes of the deployment, such as `k8s.pod.name`, come from OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from shared.runtime.settings import BusSettings, SettingsError

logger = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 3.0
EXPORT_INTERVAL_S = 1.0
SCRAPE_TIMEOUT_S = 10.0
SHUTDOWN_POLL_S = 0.05
LOOP_TIMEOUT_S = 3.0
"""Time for the event loop to take a turn when /live or /health asks it."""

METRICS_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_W3C = TraceContextTextMapPropagator()
MEANINGFUL_CHARACTERS = len(f"00-{0:032}-{0:016}-00-")
"""Characters of a `traceparent` that count: behind them stands what later versions may add."""


def current_traceparent() -> str:
    """The current span as a W3C `traceparent`; empty where there is none."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return carrier.get("traceparent", "")


def context_of(traceparent: str) -> Context:
    """The context that a `traceparent` names, to be the parent of spans; an empty one if it is missing or malformed."""
    # A client may send megabytes, which are not worth keeping.
    return _context_of(traceparent[:MEANINGFUL_CHARACTERS])


@lru_cache(maxsize=1024)
def _context_of(traceparent: str) -> Context:
    return _W3C.extract({"traceparent": traceparent}, Context())


def metrics_text(registry: CollectorRegistry) -> bytes:
    """The metrics in the plain format (`METRICS_TYPE`), whatever the scraper's Accept header offers: of the others
    prometheus_client writes one, OpenMetrics 1.0.0, with `vllm_` for `vllm:`, and that is what Prometheus 2 asks for."""
    return generate_latest(registry)


class Telemetry:
    """What a service needs to be observed; made by `start_telemetry`."""

    def __init__(self, service: str, settings: BusSettings, provider: TracerProvider) -> None:
        self.provider = provider
        self.tracer: Tracer = provider.get_tracer("tideway." + service)
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        if (loop := _running_loop()) is not None:
            tasks = Gauge("tideway_event_loop_tasks", "Pending tasks of the event loop", registry=self.registry)
            tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        self._settings = settings
        self._server: _MetricsServer | None = None

    def serve_metrics(
        self,
        problems: Callable[[], list[str]] = lambda: ["not connected to NATS"],
        unready: Callable[[], list[str]] = list,
    ) -> int:
        """Serves /metrics, /live, /health and /ready on `metrics_host:metrics_port` from a background thread; returns the
        port.

        /live is 200 as long as the event loop that runs here takes its turns, else 503. `problems` is called on that
        thread at each /health and must be quick: what is wrong with the service besides, a sentence each, empty when all is
        well (200, else 503). `unready` likewise at each /ready: what it lacks besides to do its work. Raises `SettingsError`
        if the port cannot be had. A service calls this before it waits for NATS, and then says by `ask` whom to ask.
        """
        assert self._server is None, "serve_metrics is called once"
        address = (self._settings.metrics_host, self._settings.metrics_port)
        try:
            self._server = _MetricsServer(address, self.registry, problems, unready, _running_loop())
        except OSError as error:
            raise SettingsError(f"metrics cannot be served on {address[0]}:{address[1]}: {error.strerror}") from None
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(SHUTDOWN_POLL_S,), name="metrics", daemon=True).start()
        return int(self._server.server_address[1])

    def ask(self, problems: Callable[[], list[str]], unready: Callable[[], list[str]] = list) -> None:
        """Asks these from now on in place of what `serve_metrics` was given."""
        assert self._server is not None, "serve_metrics is called first"
        self._server.problems, self._server.unready = problems, unready

    def close(self) -> None:
        """Sends what spans are left (seconds at most) and stops serving metrics. May be called twice."""
        self.provider.shutdown()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def start_telemetry(service: str, service_id: str, settings: BusSettings) -> Telemetry:
    own = {
        "service.name": f"tideway-{service}",
        "service.instance.id": service_id,
        "service.version": installed_version(),
    }
    # Merged after the environment's, so that no deployment can rename a service.
    resource = OTELResourceDetector().detect().merge(Resource(own))
    if not settings.otlp_endpoint:
        telemetry = Telemetry(service, settings, TracerProvider(ALWAYS_OFF, resource, shutdown_on_exit=False))
        telemetry.tracer = _PassingTracer(telemetry.tracer)
        return telemetry
    sampler = ParentBased(TraceIdRatioBased(settings.trace_sample_ratio))
    provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
    telemetry = Telemetry(service, settings, provider)
    exporter = _QuietExporter(settings.otlp_endpoint, ExportMetrics(telemetry.registry))
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_INTERVAL_S * 1000))
    return telemetry


@cache
def installed_version() -> str:
    """Tideway's, as its package was installed."""
    try:
        return version("tideway")
    except PackageNotFoundError:
        return "0.0.0+unknown"  # a checkout on the path, not installed


class ExportMetrics:
    """Shows what becomes of spans; on a registry only where there is a collector to send them to."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._up = Gauge(
            "tideway_trace_collector_up",
            "1 while the trace collector accepts spans, else 0",
            registry=registry,
        )
        self._spans = Counter("tideway_trace_spans", "Spans by outcome", ["outcome"], registry=registry)
        self._up.set(1)
        for outcome in ("sent", "lost"):
            self._spans.labels(outcome)

    def on_export(self, num_spans: int, *, is_sent: bool) -> None:
        self._up.set(is_sent)
        self._spans.labels("sent" if is_sent else "lost").inc(num_spans)


class _PassingTracer(Tracer):
    """Records nothing. A span stands for its parent, so whether the trace is sampled reaches those who do record."""

    def __init__(self, roots: Tracer) -> None:
        """`roots`: makes those that have no parent."""
        self._roots = roots

    def start_span(self, name: str, context: Context | None = None, *args: Any, **options: Any) -> Span:
        parent = trace.get_current_span(context).get_span_context()
        return NonRecordingSpan(parent) if parent.is_valid else self._roots.start_span(name, context)

    @contextmanager
    def start_as_current_span(  # type: ignore[override]  # OpenTelemetry's can also be a decorator
        self, name: str, context: Context | None = None, *args: Any, **options: Any
    ) -> Iterator[Span]:
        with trace.use_span(self.start_span(name, context)) as span:
            yield span


class _QuietExporter(SpanExporter):
    """OTLP over HTTP that says once when the collector goes away, and once when it is back."""

    def __init__(self, endpoint: str, metrics: ExportMetrics) -> None:
        self._endpoint = endpoint
        self._metrics = metrics
        # Imported here: a process that exports nothing needs neither protobuf nor requests.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._exporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._is_failing = False
        # These log every failed batch, some with a stack trace.
        for name in (OTLPSpanExporter.__module__, "opentelemetry.sdk._shared_internal", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
            reason = "no answer, or a refusal"
        except Exception as error:
            result, reason = SpanExportResult.FAILURE, repr(error)
        failed = result is not SpanExportResult.SUCCESS
        self._metrics.on_export(len(spans), is_sent=not failed)
        if failed and not self._is_failing:
            logger.warning(
                "traces cannot be sent to %s (%s); they are dropped until it answers", self._endpoint, reason
            )
        elif self._is_failing and not failed:
            logger.info("traces are sent to %s again", self._endpoint)
        self._is_failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        registry: CollectorRegistry,
        problems: Callable[[], list[str]],
        unready: Callable[[], list[str]],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        super().__init__(address, _MetricsHandler)
        self.registry = registry
        self.problems = problems
        self.unready = unready
        self._loop = loop

    def standstill(self) -> list[str]:
        """A sentence if the event loop takes no turn in time; waits for one."""
        if self._loop is None:
            return []
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:
            return ["the event loop has ended"]
        return [] if turned.wait(LOOP_TIMEOUT_S) else [f"the event loop has not answered for {LOOP_TIMEOUT_S:g} s"]


class _MetricsHandler(BaseHTTPRequestHandler):
    server: _MetricsServer
    protocol_version = "HTTP/1.1"
    timeout = SCRAPE_TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, METRICS_TYPE, metrics_text(self.server.registry))
        elif path in ("/live", "/health", "/ready"):
            problems = self.server.standstill()
            if path != "/live":
                problems += self.server.problems()
            if path == "/ready":
                problems += self.server.unready()
            if problems:
                self._answer(503, "application/json", json.dumps(problems).encode())
            else:
                self._answer(200, "text/plain", b"ok")
        else:
            self._answer(404, "text/plain", b"not found")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)
