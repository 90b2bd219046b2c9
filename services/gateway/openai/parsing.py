"""Parsing of a decoded request into what will be generated: the rules that span fields, and the model's limits.

Pure. Each refusal names the field and the limit. Types and ranges of single fields are checked before, by `schemas`.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from services.gateway.http.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, invalid
from services.gateway.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    TokenizeRequest,
    allowed_values,
)
from services.gateway.openai.structured import Grammar, check_options, grammar_of
from services.gateway.tools.use import ToolUse, tool_use_of
from shared.messages.channels import MAX_MESSAGE_BYTES
from shared.messages.requests import (
    MAX_PROMPT_LOGPROBS_BYTES,
    Priority,
    RequestClass,
    SamplingParams,
    packed_logprob_bytes,
)
from shared.models.checkpoint import SamplingDefaults

MAX_SEQUENCES = 256
"""Prompts times `n` in one call."""
DEFAULT_COMPLETION_TOKENS = 16
MAX_SEQUENCE_BYTES = MAX_MESSAGE_BYTES - 16 * 1024
"""Prompt, output and grammar travel in one message (the output when a request is placed again); the rest of it holds the
sampling parameters."""
MAX_SEQUENCE_TOKENS = MAX_SEQUENCE_BYTES // 4
MAX_CALL_LOGPROBS_BYTES = 1024 * 1024
"""Most bytes of prompts' log-probabilities, packed: many times that as JSON, which is made in one go and takes the
event loop a third of a second."""
SEED_MASK = 2**63 - 1
NO_DEFAULTS = SamplingDefaults()
LEAST_TEMPERATURE = 1e-5
"""Lower ones are greedy: logits divided by them overflow."""
_SECONDS = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the answer is made and shown; the same for all sequences of a call."""

    num_choices: int
    is_stream: bool
    includes_usage: bool
    has_continuous_usage: bool
    stops: tuple[str, ...]
    shows_stop: bool
    skips_special_tokens: bool
    num_top_logprobs: int | None
    """None: no log-probabilities."""
    request_class: RequestClass
    priority: Priority
    service_tier: str | None
    """The tier that is used, where the request named one."""
    timeout_s: float
    echo: bool
    grammar: Grammar | None
    """Grammar that the request's fields ask for."""
    tools: ToolUse | None
    prompt_logprobs: int | None
    """Value of the field of that name."""
    parts_reasoning: bool
    """Reasoning is parted from the answer."""
    shows_reasoning: bool
    """And told of."""
    names_token_ids: bool
    """In log-probabilities, instead of the text of tokens."""

    @property
    def num_prompt_top(self) -> int:
        """Alternatives to each token of a prompt that are needed; -1: its log-probabilities are not."""
        of_field = -1 if self.prompt_logprobs is None else self.prompt_logprobs
        of_echo = self.num_top_logprobs if self.echo and self.num_top_logprobs is not None else -1
        return max(of_field, of_echo)


def refuse_unsupported(request: GenerationFields) -> None:
    for name, allowed in allowed_values(type(request)).items():
        value = getattr(request, name)
        if value not in allowed and _plain(value) not in allowed:
            values = ", ".join(map(json.dumps, allowed))
            raise invalid(name, f"'{name}' is not supported by this server; it may be {values}.", "unsupported_value")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise invalid("best_of", f"'best_of' must equal 'n' ({request.n or 1}).", "unsupported_value")


def _plain(value: Any) -> Any:
    """The number or flag that a text stands for; other values as they are."""
    try:
        return msgspec.convert(value, bool | float, strict=False) if isinstance(value, str) else value
    except msgspec.ValidationError:
        return value


def seconds_of(text: str) -> float:
    """A header's number of seconds; 0.0 where it is none."""
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    return seconds if math.isfinite(seconds) else 0.0


def timeout_of(request: GenerationFields, headers: Mapping[str, str], limit_s: float) -> float:
    """Seconds; the body's value goes before the header's, and neither over the server's limit."""
    timeout_s = request.request_timeout_s
    text = headers.get("x-request-timeout")
    if timeout_s is None and text is not None and not (timeout_s := seconds_of(text)) > 0.0:
        raise invalid("x-request-timeout", "The header x-request-timeout must be a number of seconds above 0.")
    return min(limit_s, timeout_s or limit_s)


def options_of(request: ChatRequest | CompletionRequest, headers: Mapping[str, str], limit_s: float) -> Options:
    refuse_unsupported(request)
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs and request.top_logprobs > 0:
            raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
        if request.continue_final_message and request.add_generation_prompt:
            raise invalid(
                "continue_final_message",
                "'continue_final_message' cannot be combined with 'add_generation_prompt', which begins a new message.",
            )
        num_top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        echo = False
    else:
        num_top_logprobs = request.logprobs
        echo = bool(request.echo)
        if request.max_tokens == 0 and not echo and request.prompt_logprobs is None:
            raise invalid(
                "max_tokens", "'max_tokens' must be at least 1 (0 is allowed with 'echo' or 'prompt_logprobs')."
            )
    if None not in (penalties := {request.repetition_penalty, request.repeat_penalty}) and len(penalties) > 1:
        raise invalid(
            "repeat_penalty", "'repeat_penalty' is another name of 'repetition_penalty', which has another value."
        )
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs", "'prompt_logprobs' cannot be had in a stream.")
    stream_options = request.stream_options
    if stream_options is not None and not request.stream:
        raise invalid("stream_options", "'stream_options' needs 'stream' to be true.")
    urgent = request.priority == "high" or (request.priority not in (None, "normal") and int(request.priority) < 0)
    is_offline = request.service_tier == "flex"
    is_high = not is_offline and (urgent or request.service_tier == "priority")
    tier = "flex" if is_offline else "priority" if is_high else "default"
    usage_in_chunks = bool(stream_options and stream_options.continuous_usage_stats)
    if stream_options is not None and stream_options.include_usage is False:
        usage_in_chunks = False
    stop = request.stop or ()
    grammar = grammar_of(request)
    tools = tool_use_of(request) if isinstance(request, ChatRequest) else None
    if grammar is not None:
        check_options(request, grammar)
        if tools is not None and not tools.is_required and grammar.schema is None:
            raise invalid(
                "tools", f"'tools' cannot be combined with '{grammar.param}': only JSON may come instead of calls."
            )
    return Options(
        num_choices=request.n or 1,
        is_stream=bool(request.stream),
        includes_usage=usage_in_chunks or bool(stream_options and stream_options.include_usage),
        has_continuous_usage=usage_in_chunks,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        shows_stop=bool(request.include_stop_str_in_output),
        skips_special_tokens=request.skip_special_tokens is not False,
        num_top_logprobs=num_top_logprobs,
        request_class=RequestClass.OFFLINE if is_offline else RequestClass.ONLINE,
        priority=Priority.HIGH if is_high else Priority.NORMAL,
        service_tier=tier if request.service_tier is not None else None,
        timeout_s=timeout_of(request, headers, limit_s),
        echo=echo,
        prompt_logprobs=request.prompt_logprobs,
        parts_reasoning=request.separate_reasoning is not False and request.reasoning_format != "none",
        shows_reasoning=request.include_reasoning is not False and not _excludes_reasoning(request),
        names_token_ids=bool(request.return_tokens_as_token_ids),
        grammar=grammar,
        tools=tools,
    )


SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off: that of Qwen and GLM, that of DeepSeek and Granite."""
_EFFORT = re.compile(r"[a-z]{1,16}")


class _Reasoning(NamedTuple):
    """What a request's fields about reasoning come to."""

    effort: str | None
    thinks: bool | None
    is_by_effort: bool
    """`thinks` follows from the effort: no switch says."""


def _reasoning_of(request: ChatRequest | TokenizeRequest) -> _Reasoning:
    options = request.reasoning if isinstance(request.reasoning, dict) else {}
    effort = request.reasoning_effort or _effort_of(options)
    asked = (request.enable_thinking, _is_on(request.thinking), _flag(options.get("enabled")))
    thinks = next((one for one in asked if one is not None), None)
    is_by_effort = thinks is None and effort is not None and (effort == "none" or request.reasoning_effort is None)
    return _Reasoning(effort, effort != "none" if is_by_effort else thinks, is_by_effort)


def template_variables(request: ChatRequest | TokenizeRequest) -> dict[str, Any] | None:
    """What a chat template is given beside the messages: what the request names, whether to reason, and its effort at that.
    Templates ignore what they do not know."""
    effort, thinks, _ = _reasoning_of(request)
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if thinks is not None:
        found |= dict.fromkeys(SWITCHES, thinks)
    return found | (request.chat_template_kwargs or {}) if found else request.chat_template_kwargs


def _is_on(thinking: Any) -> bool | None:
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    return {"enabled": True, "adaptive": True, "disabled": False}.get(kind) if isinstance(kind, str) else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _effort_of(options: dict[str, Any]) -> str | None:
    effort = options.get("effort")
    return effort if isinstance(effort, str) and _EFFORT.fullmatch(effort) else None


def fields_without_effect(request: ChatRequest, known: Collection[str]) -> list[str]:
    """Fields about reasoning that change nothing, or differ from those that go before them. `known`: variables of the
    model's chat template."""
    effort, thinks, is_by_effort = _reasoning_of(request)
    has_switch = not set(SWITCHES).isdisjoint(known)
    takes_effort = "reasoning_effort" in known or (has_switch and is_by_effort)
    works = {
        "reasoning_effort": takes_effort,
        "enable_thinking": has_switch,
        "thinking": has_switch and thinks is not None and _is_on(request.thinking) == thinks,
        "reasoning": isinstance(request.reasoning, dict),
    }
    names = [name for name, has_effect in works.items() if getattr(request, name) is not None and not has_effect]
    if isinstance(options := request.reasoning, dict):
        parts = {
            "enabled": has_switch and thinks is not None and _flag(options.get("enabled")) == thinks,
            "effort": takes_effort and effort is not None and _effort_of(options) == effort,
            "exclude": _flag(options.get("exclude")) is not None,
        }
        names += [f"reasoning.{name}" for name, value in options.items() if value is not None and not parts.get(name)]
    return names


def _excludes_reasoning(request: GenerationFields) -> bool:
    options = request.reasoning if isinstance(request, ChatRequest) else None
    return isinstance(options, dict) and options.get("exclude") is True


def prompts_of(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """The prompts of a completion, all texts or all token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "'prompt' must not be an empty list.")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds == {str} or kinds == {list}:
        return prompt
    raise invalid("prompt", "'prompt' must be a text, a list of texts, token ids, or a list of lists of token ids.")


def check_num_sequences(num_prompts: int, num_choices: int, limit: int) -> int:
    num_sequences = num_prompts * num_choices
    if num_sequences > limit:
        param = "n" if num_prompts == 1 else "prompt"
        raise invalid(param, f"{num_prompts} prompts with n={num_choices} are more than the {limit} sequences allowed.")
    return num_sequences


def check_token_ids(ids: list[int], vocab_size: int, param: str) -> None:
    if not ids:
        raise invalid(param, f"'{param}' must have at least one token.")
    if (largest := max(ids)) >= vocab_size:
        raise invalid(param, f"Invalid value for '{param}': token id {largest} is outside the vocabulary (0 to "
                             f"{vocab_size - 1}).")  # fmt: skip


def check_num_characters(num_characters: int, limit: int | None, max_model_len: int, param: str) -> None:
    """`limit`: no text with more characters fits into the model; None: any may. What passes is counted in tokens later."""
    if limit is not None and num_characters > limit:
        raise ApiError(
            400,
            f"This model's maximum context length is {max_model_len} tokens, which no text of more than {limit} characters "
            f"fits into; you requested {num_characters} characters in '{param}'.",
            param=param,
            code=CONTEXT_LENGTH_EXCEEDED,
        )


def whole_number_of(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """A parameter of a URL."""
    text = query.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,6}", text) or not least <= int(text) <= most:
        raise invalid(name, f"'{name}' must be a whole number from {least} to {most}.")
    return int(text)


def check_prompt_logprobs(num_prompt_tokens: Sequence[int], num_choices: int, num_top: int, param: str) -> None:
    """`num_prompt_tokens`: of each of a call's prompts. `num_top`: as of `Options.num_prompt_top`."""
    if num_top < 0:
        return
    bounds = (
        ("a prompt", max(num_prompt_tokens, default=0), MAX_PROMPT_LOGPROBS_BYTES),
        ("a request's prompts, once for each of 'n',", sum(num_prompt_tokens) * num_choices, MAX_CALL_LOGPROBS_BYTES),
    )
    for what, num_tokens, max_bytes in bounds:
        limit = max_bytes // packed_logprob_bytes(num_top)
        if num_tokens > limit:
            raise invalid(
                param,
                f"Log-probabilities of {what} with {num_top} alternatives to each token can be had of {limit} tokens at "
                f"most; you requested {num_tokens}. Ask for fewer alternatives, or for less in one request.",
            )


def max_tokens_of(
    requested: int | None,
    default: int | None,
    num_prompt_tokens: int,
    max_model_len: int,
    prompt_field: str,
    limit_field: str,
) -> int:
    """How many tokens may come after the prompt. `default` None: as many as fit. `limit_field`: which `requested` is of."""
    room = max_model_len - num_prompt_tokens
    max_tokens = requested if requested is not None else room if default is None else min(default, room)
    if max(max_tokens, 0 if requested == 0 else 1) <= room:
        return max_tokens
    asked = f"{num_prompt_tokens} in the prompt"
    if requested is not None:
        asked = f"{num_prompt_tokens + requested} tokens ({asked}, {requested} in the completion)"
    else:
        asked += ", which leaves no room for a completion"
    error = ApiError(
        400,
        f"This model's maximum context length is {max_model_len} tokens; you requested {asked}.",
        param=prompt_field if room < 1 else limit_field,
        code=CONTEXT_LENGTH_EXCEEDED,
    )
    if room < 1:
        error.too_long = num_prompt_tokens, max_model_len
    raise error


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise invalid(
                "logit_bias",
                f"Invalid key '{key[:40]}' in 'logit_bias': expected a token id from 0 to {vocab_size - 1}.",
            )
        pairs.append((int(key), value))
    return tuple(pairs)


def sampling_of(
    request: GenerationFields,
    options: Options,
    *,
    max_tokens: int,
    eos_token_ids: tuple[int, ...],
    vocab_size: int,
    grammar: str = "",
    defaults: SamplingDefaults = NO_DEFAULTS,
) -> SamplingParams:
    """Sampling parameters of the first choice; the i-th has `seed + i`. `defaults`: the model's, where the request says
    nothing."""
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"'min_tokens' ({min_tokens}) is more than the {max_tokens} tokens that may come.")
    stop_token_ids = tuple(request.stop_token_ids or ())
    if not request.ignore_eos:
        stop_token_ids = tuple(dict.fromkeys((*eos_token_ids, *stop_token_ids)))

    num_prompt_top = min(options.num_prompt_top, vocab_size)

    def or_default(value: float | None, of_model: float | None, default: float) -> float:
        return value if value is not None else default if of_model is None else of_model

    top_k = request.top_k if request.top_k is not None else defaults.top_k or 0

    temperature = or_default(request.temperature, defaults.temperature, 1.0)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_k=1 if request.top_p == 0 else max(0, top_k),
        top_p=or_default(request.top_p, defaults.top_p, 1.0) or 1.0,
        min_p=or_default(request.min_p, defaults.min_p, 0.0),
        repetition_penalty=or_default(
            request.repeat_penalty if request.repetition_penalty is None else request.repetition_penalty,
            defaults.repetition_penalty,
            1.0,
        ),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=(secrets.randbits(63) if request.seed is None else request.seed) & SEED_MASK,
        stop_token_ids=stop_token_ids,
        logprobs=max(-1 if options.num_top_logprobs is None else options.num_top_logprobs, min(0, num_prompt_top)),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        prompt_logprobs=num_prompt_top,
        grammar=grammar,
        is_seed_drawn=request.seed is None,
    )
