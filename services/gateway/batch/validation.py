"""Validation of a batch's input lines, and an estimate of what each will cost. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.anthropic import conversion as anthropic
from services.gateway.anthropic.messages import MessageRequest
from services.gateway.batch.state import LinePlan
from services.gateway.http.errors import ApiError, decode, invalid
from services.gateway.openai.parsing import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_SEQUENCES,
    check_num_sequences,
    options_of,
    prompts_of,
)
from services.gateway.openai.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from services.gateway.requests.answers import Operation
from services.gateway.requests.pooling import PooledRequest, of_embedding
from services.gateway.responses import conversion as responses
from services.gateway.responses.messages import REFERENCE, ResponseRequest
from shared.messages.batches import BatchProblem

MAX_PROBLEMS = 100
"""Reported of one file."""
CHARACTERS_PER_TOKEN = 4
DEFAULT_CHAT_TOKENS = 512
"""Assumed output of a chat that names no limit."""
MAX_ESTIMATE = 2**31 - 1


class BatchLine(msgspec.Struct, frozen=True):
    """One line of an input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Id(msgspec.Struct, frozen=True):
    custom_id: str = ""


_LINE = msgspec.json.Decoder(BatchLine)
_ID = msgspec.json.Decoder(_Id)

Body = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class LineForm:
    """How the lines of an endpoint are read."""

    operation: Operation
    decoder: msgspec.json.Decoder[Any]
    body_of: Callable[[Any], Body] = lambda asked: asked
    """What is generated for a decoded line. Raises `ApiError`."""
    renamed: Callable[[ApiError], ApiError] = lambda error: error
    """A refusal of that, with the field as the endpoint calls it."""


def _body_of_response(asked: ResponseRequest) -> ChatRequest:
    for name in ("previous_response_id", "background"):
        if getattr(asked, name):
            raise invalid(name, f"'{name}' is not possible in a batch.", "unsupported_value")
    items = responses.items_of(asked)
    if any(item.type == REFERENCE for item in items):
        message = f"'{REFERENCE}' is not possible in a batch: a line has its whole input."
        raise invalid("input", message, "unsupported_value")
    return responses.chat_request(asked, items)


ENDPOINTS = {
    "/v1/chat/completions": LineForm("chat", msgspec.json.Decoder(ChatRequest)),
    "/v1/completions": LineForm("text_completion", msgspec.json.Decoder(CompletionRequest)),
    "/v1/responses": LineForm("chat", msgspec.json.Decoder(ResponseRequest), _body_of_response, responses.renamed),
    "/v1/messages": LineForm("chat", msgspec.json.Decoder(MessageRequest), anthropic.chat_request, anthropic.renamed),
    "/v1/embeddings": LineForm("embeddings", msgspec.json.Decoder(EmbeddingRequest), of_embedding),
}


@dataclass(frozen=True, slots=True)
class ReadLine:
    custom_id: str
    asked: Any
    """The request as the line's endpoint has it."""
    body: Body
    """What is generated for it."""


def read_line(raw: bytes, endpoint: str) -> ReadLine:
    """Raises `ApiError`."""
    line: BatchLine = decode(_LINE, raw)
    if line.url != endpoint:
        raise invalid("url", f"'url' is {line.url[:200]!r}, but the batch's endpoint is {endpoint!r}.", "invalid_url")
    form = ENDPOINTS[endpoint]
    with _within_body(form):
        asked = decode(form.decoder, bytes(line.body))
        return ReadLine(line.custom_id, asked, form.body_of(asked))


@contextmanager
def _within_body(form: LineForm) -> Iterator[None]:
    """Refusals name the field within the line."""
    try:
        yield
    except ApiError as error:
        error = form.renamed(error)
        error.param = f"body.{error.param}" if error.param else "body"
        raise


def custom_id_of(raw: bytes) -> str:
    """The custom id of a line that has been validated."""
    try:
        return _ID.decode(raw).custom_id
    except msgspec.MsgspecError:
        return ""


def _num_prompt_tokens(body: Body) -> int:
    """A guess from the number of characters."""
    if isinstance(body, CompletionRequest):
        return sum(
            len(prompt) if isinstance(prompt, list) else 1 + len(prompt) // CHARACTERS_PER_TOKEN
            for prompt in prompts_of(body.prompt)
        )
    num_characters = 0
    for message in body.messages:
        parts = (
            [message.content] if isinstance(message.content, str) else [part.shown for part in message.content or ()]
        )
        num_characters += sum(len(text) for text in parts) + 16
    return 1 + num_characters // CHARACTERS_PER_TOKEN


def estimated_tokens(body: Body) -> int:
    """Prompt and output of all its sequences; the output is taken to reach its limit."""
    if isinstance(body, CompletionRequest):
        limit = body.max_tokens if body.max_tokens is not None else DEFAULT_COMPLETION_TOKENS
        num_prompts = len(prompts_of(body.prompt))
    else:
        limit = body.max_completion_tokens or body.max_tokens or DEFAULT_CHAT_TOKENS
        num_prompts = 1
    return min(MAX_ESTIMATE, _num_prompt_tokens(body) + limit * num_prompts * (body.n or 1))


class LineChecker:
    """Takes all lines of a file in order. `model_of(body, custom_id)`: the model that answers a line; None: none is here."""

    def __init__(self, endpoint: str, max_lines: int, model_of: Callable[[Body, str], str | None]) -> None:
        self.problems: list[BatchProblem] = []
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._model_of_line = model_of
        self._custom_ids: set[str] = set()
        self._models: dict[str, int] = {}
        self._model_of = array("H")
        self._tokens = array("i")

    @property
    def is_hopeless(self) -> bool:
        """More lines would bring no more problems to report."""
        return len(self.problems) >= MAX_PROBLEMS or len(self._tokens) > self._max_lines

    def take(self, number: int, raw: bytes) -> None:
        """`number`: of the line in the file, from 1."""
        model, tokens = "", 0
        try:
            line = read_line(raw, self._endpoint)
            model, tokens = self._check(line.custom_id, line.body)
        except ApiError as error:
            self._refuse(error.code or "invalid_value", error.message, number, error.param)
        self._model_of.append(self._models.setdefault(model, len(self._models)))
        self._tokens.append(tokens)
        if len(self._tokens) == self._max_lines + 1:
            message = f"The file has more than {self._max_lines} lines, the most that a batch may have."
            self._refuse("too_many_lines", message, number, None)

    def _check(self, custom_id: str, body: Body) -> tuple[str, int]:
        if custom_id in self._custom_ids:
            message = f"The custom_id {custom_id!r} is not unique in the file."
            raise invalid("custom_id", message, "duplicate_custom_id")
        self._custom_ids.add(custom_id)
        if body.stream:
            raise invalid("body.stream", "Streaming is not possible in a batch.", "unsupported_value")
        with _within_body(ENDPOINTS[self._endpoint]):
            options = options_of(body, {}, float("inf"))
            num_prompts = len(prompts_of(body.prompt)) if isinstance(body, CompletionRequest) else 1
            if not isinstance(body, PooledRequest):
                check_num_sequences(num_prompts, options.num_choices, MAX_SEQUENCES)
        if not body.model:
            raise invalid("body.model", "Missing required parameter: 'body.model'.", "missing_field")
        if (model := self._model_of_line(body, custom_id)) is None:
            raise invalid("body.model", f"The model '{body.model[:200]}' does not exist.", "model_not_found")
        return model, estimated_tokens(body)

    def _refuse(self, code: str, message: str, line: int | None, param: str | None) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(BatchProblem(code, message, line, param))

    def finish(self) -> LinePlan:
        """After the last line."""
        if not self._tokens:
            self._refuse("empty_file", "The file has no lines.", None, "input_file_id")
        return LinePlan(list(self._models), self._model_of, self._tokens)
