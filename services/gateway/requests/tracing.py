"""The names of span attributes, in one place: OpenTelemetry's GenAI conventions and vLLM's latency keys.

One SERVER span a generation request; children: tokenize, place, stream. Never a span a token.
"""

from __future__ import annotations

from opentelemetry.util.types import AttributeValue

from services.gateway.models.routes import Routed
from services.gateway.openai.parsing import Options
from services.gateway.openai.schemas import GenerationFields
from services.gateway.streams.generation import Generation

Attributes = dict[str, AttributeValue]


def request_attributes(operation: str, model: str, request: GenerationFields, options: Options) -> Attributes:
    optional = {
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.frequency_penalty": request.frequency_penalty,
        "gen_ai.request.presence_penalty": request.presence_penalty,
        "gen_ai.request.stop_sequences": options.stops or None,
        "gen_ai.request.choice.count": options.num_choices if options.num_choices > 1 else None,
        "gen_ai.request.stream": options.is_stream or None,
        "tideway.num_tools": None if options.tools is None else len(options.tools.all_tools),
    }
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tideway",
        "gen_ai.request.model": model,
        "tideway.request_class": options.request_class.value,
        "tideway.priority": options.priority.value,
    }
    attributes.update({name: value for name, value in optional.items() if value is not None})
    return attributes


def route_attributes(routed: Routed) -> Attributes:
    """Span attributes of a request that names a route; none of others."""
    if routed.route is None:
        return {}
    return {"tideway.route": routed.route.name, "tideway.route_role": routed.role.value}


def structured_attributes(kind: str) -> Attributes:
    """`kind`: what the output is made to follow."""
    attributes: Attributes = {"tideway.grammar": kind}
    if kind == "json":
        attributes["gen_ai.output.type"] = "json"
    return attributes


def response_attributes(generation: Generation, call_id: str, model: str, now: float) -> Attributes:
    usage = generation.usage()
    attributes: Attributes = {
        "gen_ai.request.max_tokens": generation.prompts[0].sampling.max_tokens,
        "gen_ai.request.id": call_id,
        "gen_ai.response.id": call_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [c.finish_reason for c in generation.choices if c.finish_reason is not None],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
        "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.completion_tokens,
        "gen_ai.latency.e2e": now - generation.arrived_at,
    }
    if usage.completion_tokens > len(generation.choices):
        attributes["tideway.max_itl_s"] = max(choice.max_itl_s for choice in generation.choices)
    if generation.first_token_at is not None:
        first_s = generation.first_token_at - generation.arrived_at
        attributes["gen_ai.latency.time_to_first_token"] = first_s
        attributes["gen_ai.response.time_to_first_chunk"] = first_s
    for choice in generation.choices:
        if choice.stream is not None and (timing := choice.stream.timing) is not None:
            attributes["gen_ai.latency.time_in_queue"] = queue_s(generation, timing.prefill_s)
            attributes["gen_ai.latency.time_in_model_prefill"] = timing.prefill_s
            attributes["gen_ai.latency.time_in_model_decode"] = timing.decode_s
            attributes["gen_ai.latency.time_in_model_inference"] = timing.prefill_s + timing.decode_s
            attributes["tideway.num_preemptions"] = timing.num_preemptions
            break
    return attributes


def queue_s(generation: Generation, prefill_s: float) -> float:
    """Submission to the start of prefill, wherever the request waited: time to first token less its prefill."""
    first = generation.first_token_at if generation.first_token_at is not None else generation.submitted_at
    return max(0.0, first - generation.submitted_at - prefill_s)
