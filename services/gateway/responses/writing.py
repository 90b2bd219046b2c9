"""A response while it is made: its items from deltas, and the events that tell of them.

Events in order: created, in_progress; of each item added, its deltas, done; then completed, incomplete or failed. Each has
the next `sequence_number`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal

import msgspec

from services.gateway.http.errors import CANCELLED, HANDED_OVER, ApiError
from services.gateway.openai.conversations import custom_input
from services.gateway.openai.replies import ToolCallChunk, Usage
from services.gateway.requests.answers import event_tag, on_one_line
from services.gateway.responses.client_tools import ClientTool, tool_of_item
from services.gateway.responses.conversion import SEALED_REASONING, sealed
from services.gateway.responses.messages import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from services.gateway.responses.store import item_id
from services.gateway.responses.tools import Called
from services.gateway.streams.generation import Delta
from services.gateway.text.logprobs import ShownToken, chat_logprobs
from services.gateway.text.tokenization import ModelTokenizer

Event = tuple[str, dict[str, Any]]
"""Type, and fields beside it."""


def response_usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
        usage.total_tokens,
    )


class ResponseBuilder:
    def __init__(
        self,
        response: ResponseObject,
        tokenizer: ModelTokenizer,
        num_top: int | None,
        called: Iterable[Called] = (),
    ) -> None:
        """`num_top`: alternatives to each token that are told of; None: no log-probabilities are. `called`: the tools that
        there are."""
        self._called = {one.function["function"]["name"]: one for one in called}
        self.response = response
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._is_open = False
        """Whether the last item goes on."""
        self._finish_reason: str | None = None
        self._untold: list[ShownToken] = []
        """Tokens without text, of the message that may follow."""

    def take(self, delta: Delta) -> list[Event]:
        calls = deque(delta.calls)
        events: list[Event] = self._take_reasoning(delta.reasoning) if delta.reasoning else []
        # What is left of the open call was before the text, which was before the next call.
        while calls and calls[0].id is msgspec.UNSET:
            events += self._take_arguments(calls.popleft())
        self._untold += delta.tokens
        if delta.text or (self._untold and self._is_in_message):
            events += self._take_text(delta.text)
        for chunk in calls:
            events += self._take_arguments(chunk)
        self._finish_reason = delta.finish_reason or self._finish_reason
        return events

    @property
    def _is_in_message(self) -> bool:
        return self._is_open and self.response.output[-1].type == "message"

    def _take_arguments(self, chunk: ToolCallChunk) -> list[Event]:
        events: list[Event] = []
        self._untold.clear()  # those of a call are told of nowhere
        if chunk.id is not msgspec.UNSET and chunk.function.name is not msgspec.UNSET:
            events += self._close("completed")
            events.append(self._open(self._call_item(chunk.id, chunk.function.name)))
        item = self.response.output[-1]
        item.arguments = (item.arguments or "") + chunk.function.arguments
        if chunk.function.arguments and item.type == "function_call":
            fields = {"item_id": item.id, "delta": chunk.function.arguments}
            events.append(("response.function_call_arguments.delta", {**self._place, **fields}))
        return events

    def _call_item(self, call_id: str, name: str) -> OutputItem:
        called = self._called.get(name)
        if called is not None and called.client is not None:
            return self._client_item(call_id, called.client)
        is_custom = called is not None and called.kind == "custom"
        item = OutputItem(
            id=self._new_id("ctc_" if is_custom else "fc_"),
            type="custom_tool_call" if is_custom else "function_call",
            status="in_progress",
            call_id=call_id,
            name=name if called is None else called.name,
        )
        if called is not None and called.namespace is not None:
            item.namespace = called.namespace
        if is_custom:
            item.input = ""
        else:
            item.arguments = ""
        return item

    def _client_item(self, call_id: str, tool: ClientTool) -> OutputItem:
        item = OutputItem(id=self._new_id(tool.id_prefix), type=tool.item, status="in_progress", call_id=call_id)
        tool.begin(item)
        return item

    def _take_reasoning(self, text: str) -> list[Event]:
        """Its tokens' log-probabilities are told of nowhere."""
        events: list[Event] = []
        self._untold.clear()
        if not (self._is_open and self.response.output[-1].type == "reasoning"):
            events += self._close("completed")
            item = OutputItem(id=self._new_id("rs_"), type="reasoning", status="in_progress", summary=[], content=[])
            events.append(self._open(item))
            part = {"item_id": item.id, "content_index": 0, "part": ReasoningText()}
            events.append(("response.content_part.added", {**self._place, **part}))
            item.content = [ReasoningText()]
        item = self.response.output[-1]
        assert item.content
        item.content[0].text += text
        fields = {"item_id": item.id, "content_index": 0, "delta": text}
        events.append(("response.reasoning_text.delta", {**self._place, **fields}))
        return events

    def _take_text(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_in_message:
            events += self._close("completed")
            item = OutputItem(
                id=self._new_id("msg_"), type="message", status="in_progress", role="assistant", content=[]
            )
            events.append(self._open(item))
            added = {"item_id": item.id, "content_index": 0, "part": OutputText()}
            events.append(("response.content_part.added", {**self._place, **added}))
            item.content = [OutputText(annotations=[], logprobs=[])]
        item = self.response.output[-1]
        assert item.content
        logprobs = [] if self._num_top is None else chat_logprobs(self._tokenizer, self._untold, self._num_top).content
        self._untold.clear()
        (part,) = item.content
        assert isinstance(part, OutputText)
        part.text += text
        part.logprobs += logprobs
        fields = {"item_id": item.id, "content_index": 0, "delta": text, "logprobs": logprobs}
        events.append(("response.output_text.delta", {**self._place, **fields}))
        return events

    def _new_id(self, prefix: str) -> str:
        return item_id(prefix, self.response.id, len(self.response.output))

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self.response.output) - 1}

    def _open(self, item: OutputItem) -> Event:
        self.response.output.append(item)
        self._is_open = True
        return "response.output_item.added", {**self._place, "item": copy.copy(item)}

    def _close(self, status: Literal["completed", "incomplete"]) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self.response.output[-1]
        # A patch is never incomplete in OpenAI's API.
        item.status = "in_progress" if item.type == "apply_patch_call" and status == "incomplete" else status
        if item.type == "custom_tool_call":
            item.input, item.arguments = custom_input(item.arguments or ""), msgspec.UNSET
        elif (client := tool_of_item(item.type)) is not None:
            client.finish(item, item.arguments or "")
            item.arguments = msgspec.UNSET
        elif item.type == "reasoning" and SEALED_REASONING in (self.response.include or ()):
            assert item.content
            item.encrypted_content = sealed(item.content[0].text, "tideway-reasoning")
        return _ended(len(self.response.output) - 1, item)

    def stop(self, status: Literal["cancelled", "failed"], failure: ResponseFailure | None = None) -> None:
        """It goes no further."""
        self._close("incomplete")
        self.response.status, self.response.error = status, failure

    def finish(self, usage: Usage) -> list[Event]:
        """After the last delta."""
        response, is_cut = self.response, self._finish_reason == "length"
        events = [] if response.output else self._take_text("")
        response.status = "incomplete" if is_cut else "completed"
        response.incomplete_details = IncompleteDetails("max_output_tokens") if is_cut else None
        response.usage = response_usage(usage)
        return events + self._close("incomplete" if is_cut else "completed")


def _ended(output_index: int, item: OutputItem) -> list[Event]:
    """What is told at the end of an item."""
    at = {"output_index": output_index}
    place = {**at, "item_id": item.id}
    events: list[Event] = []
    if item.type == "function_call":
        fields = {"arguments": item.arguments, "name": item.name}
        events.append(("response.function_call_arguments.done", {**place, **fields}))
    elif item.type == "custom_tool_call":
        events.append(("response.custom_tool_call_input.delta", {**place, "delta": item.input}))
        events.append(("response.custom_tool_call_input.done", {**place, "input": item.input}))
    elif item.content:
        (whole,) = item.content
        text: dict[str, Any] = {"content_index": 0, "text": whole.text}
        if isinstance(whole, OutputText):
            events.append(("response.output_text.done", {**place, **text, "logprobs": whole.logprobs}))
        else:
            events.append(("response.reasoning_text.done", {**place, **text}))
        events.append(("response.content_part.done", {**place, "content_index": 0, "part": whole}))
    events.append(("response.output_item.done", {**at, "item": item}))
    return events


def _replayed(output_index: int, item: OutputItem) -> list[Event]:
    """What is told of an item that is whole: each text at once."""
    place = {"output_index": output_index, "item_id": item.id}
    begun = msgspec.structs.replace(item, status="in_progress")
    begun.encrypted_content = msgspec.UNSET
    if item.content:
        begun.content = []
    for name in ("arguments", "input"):
        if getattr(item, name):
            setattr(begun, name, "")
    if (client := tool_of_item(item.type)) is not None:
        client.begin(begun)
    events: list[Event] = [("response.output_item.added", {"output_index": output_index, "item": begun})]
    if item.content:
        (whole,) = item.content
        at = {**place, "content_index": 0}
        is_text = isinstance(whole, OutputText)
        events.append(("response.content_part.added", {**at, "part": OutputText() if is_text else ReasoningText()}))
        delta: dict[str, Any] = {**at, "delta": whole.text}
        if isinstance(whole, OutputText):
            delta["logprobs"] = whole.logprobs
        events.append((f"response.{'output' if is_text else 'reasoning'}_text.delta", delta))
    elif item.type == "function_call" and item.arguments:
        events.append(("response.function_call_arguments.delta", {**place, "delta": item.arguments}))
    return events + _ended(output_index, item)


def replayed_events(response: ResponseObject, num_seen: int) -> bytes:
    """The events of a response that is over, whose tokens are not kept any more. `num_seen`: events that the client has of
    those that were told of each token, which are other ones: it gets the last alone, which has the whole response."""
    begun = msgspec.structs.replace(
        response, status="in_progress", output=[], usage=None, error=None, incomplete_details=None
    )
    told = ("response.created", {"response": begun}), ("response.in_progress", {"response": begun})
    events: list[Event] = list(told)
    for output_index, item in enumerate(response.output):
        events += _replayed(output_index, item)
    status = "failed" if response.status == "cancelled" else response.status
    last: Event = (f"response.{status}", {"response": response})
    return _encoded([last] if num_seen else [*events, last], num_seen)


def _encoded(events: Iterable[Event], number: int, tag: bytes = b"", num_seen: int = 0) -> bytes:
    """`number`: that of the first. `tag`: of their ids; empty: they have none. `num_seen`: those before that number are left
    out."""
    parts = []
    for kind, fields in events:
        if number >= num_seen:
            data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
            if tag:
                parts.append(b"id: %d%b\n" % (number, tag))
            parts.append(b"event: " + kind.encode() + b"\ndata: " + on_one_line(data) + b"\n\n")
        number += 1
    return b"".join(parts)


class ResponseWriter:
    """The events of a stream; as `answers.ChunkWriter`."""

    def __init__(
        self,
        builder: ResponseBuilder,
        keep: Callable[[ResponseObject], Awaitable[None]],
        num_seen: int = 0,
        *,
        is_kept: bool = False,
    ) -> None:
        """`keep` stores a whole response. `num_seen`: events that the client has, which are left out. `is_kept`: they have
        ids, since the stream may be resumed."""
        self._num_seen = num_seen
        self._tag = event_tag(builder.response.id).encode() if is_kept else b""
        self._builder = builder
        self._keep = keep
        self._num_events = 0
        self._last: list[Event] = []

    def chunks(self, deltas: list[Delta], usage: Usage | None) -> bytes:
        return self._begin() + self._encoded([event for delta in deltas for event in self._builder.take(delta)])

    def _begin(self) -> bytes:
        if self._num_events:
            return b""
        whole = {"response": self._builder.response}
        return self._encoded([("response.created", whole), ("response.in_progress", whole)])

    async def before_end(self, usage: Usage) -> None:
        self._last = self._builder.finish(usage)
        await self._keep(self._builder.response)

    def end(self, usage: Usage) -> bytes:
        response = self._builder.response
        return self._encoded([*self._last, (f"response.{response.status}", {"response": response})])

    def error(self, error: ApiError) -> bytes:
        if error.code == HANDED_OVER:
            # The response has not failed: its next event is another gateway's, and this one is none of its own.
            number = max(0, self._num_events - 1)
            told = {"code": error.code, "message": error.message, "param": None, "sequence_number": number}
            return b"event: error\ndata: " + msgspec.json.encode({"type": "error", **told}) + b"\n\n"
        response = self._builder.response
        failure = ResponseFailure(error.code or "server_error", error.message)
        begun = self._begin()
        self._builder.stop("cancelled" if error.code == CANCELLED else "failed", failure)
        return begun + self._encoded([("response.failed", {"response": response})])

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def _encoded(self, events: list[Event]) -> bytes:
        encoded = _encoded(events, self._num_events, self._tag, self._num_seen)
        self._num_events += len(events)
        return encoded
