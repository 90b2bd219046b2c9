"""Spans of a request on the instances that it was on."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.worker.instance.spans import InstanceSpans
from shared.engine.handover import Detached
from shared.engine.requests import Ended
from shared.messages.migration import SequenceProgress
from shared.messages.requests import FinishReason, pack_tokens
from tests.shared.engine.fake_executor import request

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SENT = request("r", [1, 2, 3], 20, traceparent=PARENT)
NOW_S = 20.0


class Collected:
    """Spans that were made at `NOW_S` on the engine's clock."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = InstanceSpans("n-0", provider.get_tracer("test"), lambda: NOW_S)

    def times_s(self) -> dict[str, tuple[float, float]]:
        """Begin and end of each span, on the engine's clock; of those within the root, which ends at `NOW_S`."""
        found = {span.name: span for span in self.exporter.get_finished_spans()}
        end_ns = found["instance"].end_time
        assert end_ns is not None

        def at_s(time_ns: int | None) -> float:
            assert time_ns is not None
            return pytest.approx(NOW_S + (time_ns - end_ns) / 1e9, abs=1e-6)

        return {name: (at_s(span.start_time), at_s(span.end_time)) for name, span in found.items()}

    @property
    def root(self) -> ReadableSpan:
        return next(span for span in self.exporter.get_finished_spans() if span.name == "instance")


@pytest.fixture
def collected() -> Collected:
    return Collected()


def ended(here_since_s: float) -> Ended:
    times_s = {"arrived_s": 10.0, "submitted_s": 10.0, "first_planned_s": 11.0, "first_token_s": 12.0, "ended_s": NOW_S}
    counts = {"num_prompt_tokens": 3, "num_output_tokens": 20, "num_cached_tokens": 0, "num_preemptions": 0}
    return Ended(request=SENT, reason=FinishReason.LENGTH, here_since_s=here_since_s, **times_s, **counts)


def test_one_that_stayed_shows_all_its_stages(collected: Collected) -> None:
    collected.spans.ended(ended(10.0))
    expected = {
        "instance": (10.0, 20.0),
        "instance queue": (10.0, 11.0),
        "prefill": (11.0, 12.0),
        "decode": (12.0, 20.0),
    }
    assert collected.times_s() == expected
    assert collected.root.attributes is not None and collected.root.attributes["gen_ai.usage.output_tokens"] == 20


@pytest.mark.parametrize(
    ("since_s", "stages"),
    [(15.0, {"decode": (15.0, 20.0)}), (11.5, {"prefill": (11.5, 12.0), "decode": (12.0, 20.0)})],
)
def test_one_that_came_from_another_instance_shows_what_was_here(
    collected: Collected, since_s: float, stages: dict[str, tuple[float, float]]
) -> None:
    collected.spans.ended(ended(since_s))
    assert collected.times_s() == {"instance": (since_s, 20.0), **stages}


def test_one_that_moved_away_shows_what_was_here_and_where_it_went(collected: Collected) -> None:
    travelling = request("r", [1, 2, 3], 20, traceparent=PARENT, prior=pack_tokens([7, 8]))
    progress = SequenceProgress(first_planned_age_s=8.0, first_token_age_s=-1.0, submitted_age_s=9.0)
    collected.spans.moved(Detached("r", travelling, progress, 19.5, here_since_s=10.5), "n-1")
    expected = {"instance": (10.5, 20.0), "instance queue": (10.5, 11.5), "prefill": (11.5, 20.0)}
    assert collected.times_s() == expected
    attributes = collected.root.attributes
    assert attributes is not None
    assert (attributes["tideway.moved_to"], attributes["gen_ai.usage.output_tokens"]) == ("n-1", 2)
    assert attributes["tideway.instance_id"] == "n-0"


def test_without_a_trace_there_is_nothing(collected: Collected) -> None:
    untraced = request("r", [1], 20)
    collected.spans.moved(Detached("r", untraced, SequenceProgress(), 19.5, 10.5), "n-1")
    assert collected.exporter.get_finished_spans() == ()
