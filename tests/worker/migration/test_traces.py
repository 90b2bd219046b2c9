"""What of a migration can be seen in the request's trace."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.shared.engine.fake_executor import request

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


async def test_spans_of_both_ends_join_the_request(make) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    group = await make(tracer=provider.get_tracer("test"))
    sent = request("r1", list(range(50)), 200, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01")
    group.source.submit(sent)
    await group.until(lambda: group.progress(sent) > 5)
    group.source.rebalance("b")
    await group.ended(sent, owner="b")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert {format(span.context.trace_id, "032x") for span in spans.values()} == {TRACE_ID}
    root, received = spans["migration"], spans["migration.receive"]
    assert format(root.parent.span_id, "016x") == PARENT_ID
    assert received.parent.span_id == root.context.span_id
    for name in ("migration.reserve", "migration.copy", "migration.commit"):
        assert spans[name].parent.span_id == root.context.span_id
    assert spans["migration.receive.stage"].parent.span_id == received.context.span_id
    assert root.attributes["tideway.migration.outcome"] == "moved"
    assert received.attributes["tideway.migration.bytes"] == root.attributes["tideway.migration.bytes"] > 0
    assert root.attributes["tideway.epoch"] == 1
