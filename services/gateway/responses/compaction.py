"""Conversations made short: the model sums one up, and the next request goes on from the summary. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.openai.schemas import ChatRequest
from services.gateway.responses.conversion import chat_request, sealed, shown_items
from services.gateway.responses.messages import CompactRequest, InputItem, ResponseRequest, ShownItem

_INSTRUCTIONS = (
    "The conversation above becomes too long. Write a summary that replaces it, for whoever goes on with the work: what was "
    "asked for, what was done and decided and why, what was found out (names, paths, values), and what is still to be done. "
    "Answer with the summary alone."
)


def summing_up(request: CompactRequest, items: Sequence[InputItem]) -> ChatRequest:
    """The chat whose answer is the summary of the conversation `items`. Raises `ApiError` 400."""
    asked = ResponseRequest(model=request.model, instructions=request.instructions, service_tier=request.service_tier)
    return chat_request(asked, [*items, InputItem(role="user", content=_INSTRUCTIONS)])


def compacted(items: Sequence[InputItem], response_id: str, summary: str) -> list[ShownItem]:
    """What takes the conversation's place: its user messages, and the summary."""
    kept = [item for item in shown_items(response_id, items) if item.type == "message" and item.role == "user"]
    content = sealed(summary, "tideway-summary")
    return [*kept, ShownItem(id=f"cmp_{response_id}", type="compaction", encrypted_content=content)]
