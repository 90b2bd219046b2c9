"""The prompts of a request: texts and messages as tokens, with what is to be sampled behind each."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec

from services.gateway.access.admission import Key
from services.gateway.context import GatewayContext
from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.images import chat_of, check_choices, images_of
from services.gateway.openai.parsing import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_SEQUENCE_BYTES,
    NO_DEFAULTS,
    Options,
    check_num_characters,
    check_prompt_logprobs,
    check_token_ids,
    max_tokens_of,
    prompts_of,
    sampling_of,
    template_variables,
)
from services.gateway.openai.schemas import ChatMessage, ChatRequest, CompletionRequest, GenerationFields
from services.gateway.openai.structured import Grammar, check_options
from services.gateway.requests.pooling import PooledRequest, pooled_prompts, refuse_generation
from services.gateway.streams.generation import Prompt
from services.gateway.text.tokenization import ModelTokenizer
from services.gateway.tools.reasoning import Opening
from services.gateway.tools.use import tool_use_of
from shared.messages.cluster import ModelSpec
from shared.messages.requests import Image


async def prompts_in_time(
    context: GatewayContext,
    spec: ModelSpec,
    message: ChatRequest | CompletionRequest,
    options: Options,
    texts_or_ids: list[str] | list[list[int]] | None = None,
) -> tuple[list[Prompt], ModelTokenizer]:
    """`texts_or_ids`: see `texts_or_ids_of`; None: not known yet. Raises `ApiError`, 408 when the time has passed."""
    if texts_or_ids is None:
        texts_or_ids = texts_or_ids_of(message)
    try:
        async with asyncio.timeout(options.timeout_s):
            tokenizer = await context.tokenizers.get(spec)
            return await _make_prompts(context, spec, tokenizer, message, options, texts_or_ids), tokenizer
    except TimeoutError:
        message_text = f"The request's time limit of {options.timeout_s:g} s has passed."
        raise ApiError(408, message_text, type="timeout_error", code="deadline_exceeded") from None


def texts_or_ids_of(message: ChatRequest | CompletionRequest) -> list[str] | list[list[int]]:
    """What each prompt is made of; a chat is one prompt, of its messages. Raises `ApiError`."""
    return prompts_of(message.prompt) if isinstance(message, CompletionRequest) else [""]


async def _make_prompts(
    context: GatewayContext,
    spec: ModelSpec,
    tokenizer: ModelTokenizer,
    message: GenerationFields,
    options: Options,
    texts_or_ids: list[str] | list[list[int]],
) -> list[Prompt]:
    if isinstance(message, PooledRequest):
        return await pooled_prompts(context, spec, tokenizer, message)
    refuse_generation(tokenizer, message.model)
    max_model_len = context.catalog.max_model_len(spec, tokenizer)
    opening, chat_text, images, chat = None, "", tuple[Image, ...](), b""
    if isinstance(message, ChatRequest):
        tools = None if options.tools is None else options.tools.definitions()
        messages, images = images_of(message.messages, spec)
        if images and options.num_prompt_top >= 0:
            raise invalid("prompt_logprobs", "'prompt_logprobs' cannot be had of a prompt with images.")
        check_choices(images, options.num_choices)
        if images and spec.is_endpoint:
            chat = chat_of(message, tools, images, takes_tools=tokenizer.takes_tools)
        chat_text = await rendered_chat(context, tokenizer, message, messages, max_model_len, tools)
        opening = tokenizer.opening(chat_text, message.messages[-1] if message.continue_final_message else None)
    grammar = grammar_behind(tokenizer, options, opening)
    if grammar is not None:
        check_options(message, grammar)
        grammar = await context.tokenizers.try_grammar(tokenizer, grammar)
        max_model_len = min(max_model_len, (MAX_SEQUENCE_BYTES - grammar.num_bytes) // 4)
    if isinstance(message, ChatRequest):
        requested = message.max_tokens if message.max_completion_tokens is None else message.max_completion_tokens
        default = None
        if message.fit_max_tokens:
            requested, default = None, requested
        param = "messages"
        all_ids = [await chat_ids(context, tokenizer, message, chat_text)]
        texts_or_ids = [""]
    else:
        assert isinstance(message, CompletionRequest)
        requested, default, param = message.max_tokens, DEFAULT_COMPLETION_TOKENS, "prompt"
        all_ids = [each for each in texts_or_ids if isinstance(each, list)]
        if texts := [each for each in texts_or_ids if isinstance(each, str)]:
            for text in texts:
                check_num_characters(len(text), tokenizer.max_characters(max_model_len), max_model_len, param)
            add_special = message.add_special_tokens is not False
            all_ids = await context.tokenizers.encode(tokenizer, texts, add_special, param)
    check_prompt_logprobs(list(map(len, all_ids)), options.num_choices, options.num_prompt_top, param)
    prompts = []
    # One token is made then, and not shown: the prompt's log-probabilities come with it.
    shows_output = requested != 0 or options.num_prompt_top < 0
    requested = requested if shows_output else 1
    for ids, text_or_ids in zip(all_ids, texts_or_ids, strict=True):
        check_token_ids(ids, tokenizer.vocab_size, param)
        max_tokens = max_tokens_of(requested, default, len(ids), max_model_len, param, _limit_field(message))
        sampling = sampling_of(
            message,
            options,
            max_tokens=max_tokens,
            eos_token_ids=tokenizer.eos_token_ids,
            vocab_size=tokenizer.vocab_size,
            grammar="" if grammar is None else grammar.text,
            defaults=tokenizer.defaults if context.settings.generation_config == "auto" else NO_DEFAULTS,
        )
        echo_text = ""
        if options.echo and isinstance(text_or_ids, str):
            echo_text = text_or_ids
        elif options.echo:
            echo_text = await context.tokenizers.decode(tokenizer, ids, options.skips_special_tokens)
        # Beside images, whose tokens the engine counts, a limit that was fitted to the text alone may be too large for it.
        is_filled = bool(images) and max_tokens == max_model_len - len(ids)
        is_open_ended = requested is None and (default is None or is_filled)
        prompts.append(Prompt(ids, sampling, echo_text, shows_output, is_open_ended, opening, images, chat))
    return prompts


def grammar_behind(tokenizer: ModelTokenizer, options: Options, opening: Opening | None) -> Grammar | None:
    """The grammar that an output follows, behind the reasoning that a model may do before its answer; None: none.
    `opening`: None where the output is no chat's. Raises `ApiError`."""
    spelled, special = tokenizer.tool_format, tokenizer.special_token_id
    of_calls = None if options.tools is None else options.tools.grammar_with(options.grammar, spelled, special)
    grammar = of_calls or options.grammar
    if grammar is None or opening is None:
        return grammar
    marks = tokenizer.reasoning_format
    return spelled.behind_reasoning(grammar, marks, opening, special, has_calls=of_calls is not None)


async def rendered_chat(
    context: GatewayContext,
    tokenizer: ModelTokenizer,
    message: Any,
    messages: list[ChatMessage],
    max_model_len: int | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The prompt that the chat template makes of `messages`. `message`: the ChatRequest or TokenizeRequest they are of.
    `max_model_len`: a text that is longer for certain is refused; None: none is."""
    limit = None if max_model_len is None else tokenizer.max_characters(max_model_len)
    text, num_characters = await context.tokenizers.render(
        tokenizer,
        messages,
        limit,
        tools,
        add_generation_prompt=message.add_generation_prompt is not False,
        continue_final_message=bool(message.continue_final_message),
        variables=template_variables(message),
    )
    if max_model_len is not None:
        check_num_characters(num_characters, limit, max_model_len, "messages")
    return text


async def num_prompt_tokens(context: GatewayContext, message: ChatRequest) -> int:
    """Number of prompt tokens of a chat that is not to be answered, images left out. Raises `ApiError`."""
    spec = context.catalog.spec(context.routes.model_of(message.model))
    tokenizer = await context.tokenizers.get(spec)
    tools = tool_use_of(message)
    messages, _ = images_of(message.messages, spec)
    definitions = None if tools is None else tools.definitions()
    text = await rendered_chat(context, tokenizer, message, messages, tools=definitions)
    return len(await chat_ids(context, tokenizer, message, text))


async def chat_ids(context: GatewayContext, tokenizer: ModelTokenizer, message: Any, text: str) -> list[int]:
    """The tokens of a chat's prompt. Templates write the special tokens themselves."""
    (ids,) = await context.tokenizers.encode(tokenizer, [text], message.add_special_tokens is True, "messages")
    return ids


def fitted_prompts(
    key: Key, prompts: list[Prompt], num_choices: int, message: ChatRequest | CompletionRequest
) -> list[Prompt]:
    """The prompts with outputs that the key may have in a minute. Raises `ApiError` 400."""
    num_tokens, num_sequences = sum(len(prompt.tokens) for prompt in prompts), len(prompts) * num_choices
    fixed_by = "n" if num_choices > 1 else "prompt" if len(prompts) > 1 else _limit_field(message)
    is_fitted = isinstance(message, ChatRequest) and message.fit_max_tokens

    def fitted(prompt: Prompt) -> Prompt:
        field = "" if is_fitted or prompt.is_open_ended else fixed_by
        most = key.fitted_output(num_tokens, num_sequences, prompt.sampling.max_tokens, field)
        if most == prompt.sampling.max_tokens:
            return prompt
        return dataclasses.replace(prompt, sampling=msgspec.structs.replace(prompt.sampling, max_tokens=most))

    return list(map(fitted, prompts))


def _limit_field(message: ChatRequest | CompletionRequest) -> str:
    """The field in which the client limits the output."""
    is_newer = isinstance(message, ChatRequest) and message.max_completion_tokens is not None
    return "max_completion_tokens" if is_newer else "max_tokens"
