"""Tracing and metrics: context in and out, export to a collector (or none), the metrics server."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import Counter

from shared.runtime import telemetry as telemetry_module
from shared.runtime.settings import BusSettings, SettingsError
from shared.runtime.telemetry import context_of, current_traceparent, metrics_text, start_telemetry
from tests.conftest import free_port
from tests.stalls import Stopwatch

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = SAMPLED[:-2] + "00"


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CollectorHandler)
        self.requests: list[ExportTraceServiceRequest] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    yield server
    server.shutdown()
    server.server_close()


# ---------------------------------------------------------------------------------------------------------- contexts


def test_no_span_is_no_traceparent() -> None:
    assert current_traceparent() == ""


@pytest.mark.parametrize("traceparent", [SAMPLED, UNSAMPLED])
@pytest.mark.parametrize("is_exported", [False, True])
def test_a_trace_goes_on_with_and_without_export(traceparent: str, is_exported: bool, collector: Collector) -> None:
    telemetry = start_telemetry("test", "one", BusSettings(otlp_endpoint=collector.url if is_exported else ""))
    with telemetry.tracer.start_as_current_span("work", context=context_of(traceparent)) as span:
        inside = current_traceparent()
        version, trace_id, span_id, flags = inside.split("-")
    assert (version, trace_id) == ("00", traceparent.split("-")[1])
    if not is_exported:
        assert inside == traceparent
        assert not span.is_recording()
    else:
        assert span_id != traceparent.split("-")[2] and int(span_id, 16)
        assert flags == traceparent[-2:]
    telemetry.close()


def test_without_export_a_root_span_still_has_a_context() -> None:
    telemetry = start_telemetry("test", "one", BusSettings())
    with telemetry.tracer.start_as_current_span("work") as span:
        assert not span.is_recording()
        assert len(current_traceparent()) == len(SAMPLED)
    telemetry.close()
    telemetry.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        SAMPLED + "-more",
        "ff" + SAMPLED[2:],
        SAMPLED.upper(),
        SAMPLED[:-1],
        "00-" + "0" * 32 + SAMPLED[35:],
        SAMPLED[:36] + "0" * 16 + "-01",
    ],
)
def test_malformed_contexts_are_no_context(text: str) -> None:
    assert not trace.get_current_span(context_of(text)).get_span_context().is_valid


def test_what_follows_a_context_is_not_kept() -> None:
    more = "01" + SAMPLED[2:] + "-more"
    assert context_of(more + "x" * 1_000_000) is context_of(more)


def test_future_versions_are_understood() -> None:
    context = trace.get_current_span(context_of("01" + SAMPLED[2:] + "-more")).get_span_context()
    assert context.is_valid and context.is_remote and context.trace_flags.sampled


# ------------------------------------------------------------------------------------------------------------ export


def test_spans_reach_the_collector(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=scheduler-x,service.name=mine")
    telemetry = start_telemetry("scheduler", "one", BusSettings(otlp_endpoint=collector.url))
    with telemetry.tracer.start_as_current_span("dispatch", context=context_of(SAMPLED)):
        pass
    with telemetry.tracer.start_as_current_span("unsampled", context=context_of(UNSAMPLED)):
        pass
    telemetry.close()
    spans = []
    for request in collector.requests:
        for resource_spans in request.resource_spans:
            attributes = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
            assert attributes["service.name"] == "tideway-scheduler"
            assert attributes["service.instance.id"] == "one"
            assert attributes["service.version"] == version("tideway")
            assert attributes["k8s.pod.name"] == "scheduler-x"
            spans += [span for scope in resource_spans.scope_spans for span in scope.spans]
    assert [span.name for span in spans] == ["dispatch"]
    assert spans[0].trace_id.hex() == SAMPLED.split("-")[1]
    assert spans[0].parent_span_id.hex() == SAMPLED.split("-")[2]
    assert telemetry.registry.get_sample_value("tideway_trace_collector_up") == 1
    assert telemetry.registry.get_sample_value("tideway_trace_spans_total", {"outcome": "sent"}) == 1


def test_the_sample_ratio_is_kept(collector: Collector) -> None:
    telemetry = start_telemetry("test", "one", BusSettings(otlp_endpoint=collector.url, trace_sample_ratio=0.0))
    with telemetry.tracer.start_as_current_span("root"):
        pass
    telemetry.close()
    assert collector.requests == []


def test_a_missing_collector_costs_one_warning_and_no_time(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = start_telemetry("test", "one", BusSettings(otlp_endpoint=f"http://127.0.0.1:{free_port()}"))
    with caplog.at_level(logging.WARNING), Stopwatch() as watch:
        for _ in range(3):
            for _ in range(300):
                with telemetry.tracer.start_as_current_span("work"):
                    pass
        assert watch.seconds < 2
        telemetry.close()
        assert watch.seconds < 15
    assert [record.getMessage()[:29] for record in caplog.records] == ["traces cannot be sent to http"]
    assert telemetry.registry.get_sample_value("tideway_trace_collector_up") == 0
    assert telemetry.registry.get_sample_value("tideway_trace_spans_total", {"outcome": "lost"}) > 0


def test_without_a_collector_there_are_no_metrics_of_one() -> None:
    telemetry = start_telemetry("test", "one", BusSettings())
    assert b"tideway_trace" not in metrics_text(telemetry.registry)


# ----------------------------------------------------------------------------------------------------------- metrics


def get(port: int, path: str, accept: str = "*/*") -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.status, response.headers["Content-Type"], response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_metrics_and_health_are_served() -> None:
    telemetry = start_telemetry("test", "one", BusSettings())
    Counter("tideway_test_events", "Scripted", registry=telemetry.registry).inc(3)
    problems: list[str] = []
    unready = ["a model is loading"]
    port = telemetry.serve_metrics(lambda: problems, lambda: unready)
    try:
        status, content_type, body = get(port, "/metrics")
        assert status == 200 and content_type.startswith("text/plain")
        assert "tideway_test_events_total 3.0" in body and "process_cpu_seconds_total" in body
        assert get(port, "/health") == (200, "text/plain", "ok")
        assert get(port, "/ready") == (503, "application/json", json.dumps(unready))
        unready.clear()
        assert get(port, "/ready") == (200, "text/plain", "ok")
        problems.append("NATS cannot be reached")
        status, content_type, body = get(port, "/health?verbose")
        assert (status, content_type, json.loads(body)) == (503, "application/json", problems)
        assert get(port, "/ready")[0] == 503
        assert get(port, "/other")[0] == 404
    finally:
        telemetry.close()
    with pytest.raises(OSError):
        get(port, "/health")


# What Prometheus 2.42 and 3.1 send.
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize("accept", ["*/*", PROMETHEUS_2, PROMETHEUS_3, "application/openmetrics-text"])
def test_names_are_the_same_for_every_scraper(accept: str) -> None:
    telemetry = start_telemetry("test", "one", BusSettings())
    Counter("vllm:prompt_tokens", "Scripted", registry=telemetry.registry).inc(3)
    port = telemetry.serve_metrics(list)
    try:
        status, content_type, body = get(port, "/metrics", accept)
    finally:
        telemetry.close()
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "\nvllm:prompt_tokens_total 3.0\n" in body


async def test_health_fails_where_the_event_loop_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "LOOP_TIMEOUT_S", 0.5)
    telemetry = start_telemetry("test", "one", BusSettings())
    port = telemetry.serve_metrics(list)
    try:
        for path in ("/live", "/health"):
            assert await asyncio.to_thread(get, port, path) == (200, "text/plain", "ok")
            # called on the event loop's own thread, which so takes no turn
            status, _, body = get(port, path)
            assert (status, json.loads(body)) == (503, ["the event loop has not answered for 0.5 s"])
    finally:
        telemetry.close()


def test_a_port_that_is_taken_is_the_operators_to_mend() -> None:
    one = start_telemetry("test", "one", BusSettings())
    port = one.serve_metrics(list)
    other = start_telemetry("test", "two", BusSettings(metrics_port=port))
    with pytest.raises(SettingsError, match=str(port)):
        other.serve_metrics(list)
    one.close()
    other.close()
