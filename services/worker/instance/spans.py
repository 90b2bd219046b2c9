"""Spans of a request's time on an instance, made when it has left: never one per token. A request that moves has a span
`instance` of each instance that it was on, with the parts of its stages that lie there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

from shared.engine.handover import Detached
from shared.engine.requests import Ended
from shared.messages.requests import FinishReason, GenerationRequest
from shared.messages.timeline import RequestEvent
from shared.runtime.telemetry import context_of


class InstanceSpans:
    def __init__(self, instance_id: str, tracer: trace.Tracer, clock: Callable[[], float]) -> None:
        """`clock`: that of the engine's times, in seconds."""
        self._instance_id = instance_id
        self._tracer = tracer
        self._clock = clock

    def ended(self, ended: Ended, events: Sequence[RequestEvent] = ()) -> None:
        """`events`: what happened to it here, for the span to name; likewise of `moved`."""
        attributes: dict[str, AttributeValue] = {
            "gen_ai.usage.input_tokens": ended.num_prompt_tokens,
            "gen_ai.usage.output_tokens": ended.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": ended.num_cached_tokens,
            "tideway.num_cached_tokens_host": ended.num_host_tokens,
            "tideway.num_cached_tokens_disk": ended.num_disk_tokens,
            "gen_ai.response.finish_reasons": [str(ended.reason)],
            "tideway.num_preemptions": ended.num_preemptions,
            "tideway.num_suspended_steps": ended.num_suspensions,
            "tideway.num_recomputed_tokens": ended.recomputed_tokens,
            "tideway.num_restored_blocks": ended.restored_blocks,
            "tideway.num_draft_tokens": ended.num_draft_tokens,
            "tideway.num_accepted_draft_tokens": ended.num_draft_kept,
            "tideway.device_s": ended.device_s,
            "tideway.latency_s": ended.ended_s - ended.arrived_s,
            "tideway.max_itl_s": ended.max_itl_s,
            "tideway.ttft_objective_s": ended.ttft_objective_s,
            "tideway.tpot_objective_s": ended.tpot_objective_s,
        }
        times_s = (ended.submitted_s, ended.first_planned_s, ended.first_token_s, ended.ended_s)
        is_error = ended.reason == FinishReason.ERROR
        self._make(ended.request, attributes, ended.here_since_s, times_s, events, is_error=is_error)

    def moved(self, taken: Detached, destination_id: str, events: Sequence[RequestEvent] = ()) -> None:
        """It is another's from now on."""
        request, progress = taken.request, taken.progress

        def at_s(age_s: float) -> float | None:
            return taken.taken_s - age_s if age_s >= 0 else None

        attributes: dict[str, AttributeValue] = {
            "gen_ai.usage.input_tokens": len(request.prompt) // 4,
            "gen_ai.usage.output_tokens": len(request.prior) // 4,
            "tideway.moved_to": destination_id,
        }
        times_s = (
            taken.taken_s - progress.submitted_age_s,
            at_s(progress.first_planned_age_s),
            at_s(progress.first_token_age_s),
            self._clock(),
        )
        self._make(request, attributes, taken.here_since_s, times_s, events)

    def _make(
        self,
        request: GenerationRequest,
        attributes: dict[str, AttributeValue],
        since_s: float,
        times_s: tuple[float, float | None, float | None, float],
        events: Sequence[RequestEvent],
        *,
        is_error: bool = False,
    ) -> None:
        """`times_s`: of submission, the first step and the first token, anywhere, and of the end here."""
        if not request.traceparent:
            return
        offset_ns = time.time_ns() - int(self._clock() * 1e9)

        def wall_ns(at_s: float) -> int:
            return offset_ns + int(at_s * 1e9)

        submitted_s, planned_s, token_s, end_s = times_s
        about: dict[str, AttributeValue] = {
            "tideway.instance_id": self._instance_id,
            "tideway.request_id": request.request_id,
            "tideway.epoch": request.epoch,
            "tideway.request_class": str(request.request_class),
            "tideway.tenant": request.tenant,
            "gen_ai.request.model": request.public_model,
            **({} if request.adapter is None else {"tideway.base_model": request.model}),
        }
        root = self._tracer.start_span(
            "instance",
            context=context_of(request.traceparent),
            start_time=wall_ns(since_s),
            attributes={**about, **attributes},
        )
        for event in events:
            about_event = {"tideway.cause": event.cause, "tideway.place": event.place}
            root.add_event(event.kind, {key: value for key, value in about_event.items() if value}, wall_ns(event.at_s))
        if is_error:
            root.set_status(trace.StatusCode.ERROR)
        context = trace.set_span_in_context(root)
        stages = (
            ("instance queue", submitted_s, planned_s),
            ("prefill", planned_s, token_s),
            ("decode", token_s, None),
        )
        for name, begin_s, until_s in stages:
            if begin_s is None or (until_s is not None and until_s <= since_s):
                continue
            span = self._tracer.start_span(name, context=context, start_time=wall_ns(max(begin_s, since_s)))
            span.end(wall_ns(until_s if until_s is not None else end_s))
        root.end(wall_ns(end_s))
