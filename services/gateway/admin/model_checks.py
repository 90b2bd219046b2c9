"""Checks of a checkpoint before it is served: its tokenizer loads, its chat template renders usual conversations, and all
resulting tokens are in the model's vocabulary. An embedding or scoring model gets a plain text."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from services.gateway.context import GatewayContext
from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.schemas import ChatMessage
from services.gateway.text.tokenization import ModelTokenizer
from shared.messages.cluster import ModelSpec
from shared.models.checkpoint import CheckpointError, CheckpointMissing

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 20.0
"""After which a checkpoint is taken as it is: one of the hub may take minutes to come."""

_TEXT = "Will it rain in Oslo?"
_USER = ChatMessage("user", _TEXT)
_CALL: dict[str, Any] = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_CONVERSATIONS: tuple[tuple[str, list[ChatMessage], list[dict[str, Any]] | None], ...] = (
    ("a user's message", [_USER], None),
    ("a system message", [ChatMessage("system", "Be short."), _USER], None),
    ("a developer's message", [ChatMessage("developer", "Be short."), _USER], None),
    ("several turns", [_USER, ChatMessage("assistant", "Yes."), ChatMessage("user", "And in Rome?")], None),
    ("tools", [_USER], _TOOLS),
    (
        "what a tool returned",
        [
            _USER,
            ChatMessage("assistant", None, tool_calls=[_CALL]),
            ChatMessage("tool", "Rain", tool_call_id=_CALL["id"]),
        ],
        _TOOLS,
    ),
)


async def check_model(context: GatewayContext, spec: ModelSpec) -> None:
    """Raises `ApiError` 400 with the reason. A checkpoint that is not here, or not yet, is not judged."""
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            tokenizer = await context.tokenizers.load_anew(spec)
    except (TimeoutError, CheckpointMissing) as error:
        logger.info("%s is not tried before it is served: %r", spec.source, error)
        return
    except CheckpointError as error:
        raise invalid("source", str(error)) from None
    if tokenizer.pooling is not None:
        # Nobody chats with it: its chat template is of no use.
        await _check_text(context, tokenizer, _TEXT, adds_special=True)
        return
    for name, messages, tools in _CONVERSATIONS:
        try:
            await _check_conversation(context, tokenizer, messages, tools)
        except ApiError as error:
            if error.status == 429:
                return  # others' texts take all the room
            raise invalid("source", f"{spec.source} cannot serve a chat with {name}: {error.message}") from None


async def _check_conversation(
    context: GatewayContext,
    tokenizer: ModelTokenizer,
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None,
) -> None:
    text, _ = await context.tokenizers.render(
        tokenizer, messages, None, tools, add_generation_prompt=True, continue_final_message=False, variables=None
    )
    await _check_text(context, tokenizer, text, adds_special=False)


async def _check_text(context: GatewayContext, tokenizer: ModelTokenizer, text: str, *, adds_special: bool) -> None:
    (ids,) = await context.tokenizers.encode(tokenizer, [text], adds_special, "messages")
    if ids and max(ids) >= tokenizer.vocab_size:
        piece = tokenizer.token_piece(max(ids))
        message = f"its tokenizer has the token {max(ids)} ({piece!r}), and its vocabulary {tokenizer.vocab_size}."
        raise invalid("source", message)
