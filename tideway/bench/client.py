"""Sends one streamed HTTP request, times its events, and records each failure as a short reason."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Annotated, Any, Literal

import httpx
import msgspec
from msgspec import Meta

from shared.messages.requests import RequestClass
from tideway.bench.prompts import (
    CALIBRATION_WORDS,
    TokensPerWord,
    calibration_text,
    prompt_text,
    prompt_token_ids,
)
from tideway.bench.records import RequestRecord
from tideway.bench.workload import PlannedRequest, StreamSpec
from tideway.options import SERVER_KEY_VARIABLE

MESSAGE_CHARACTERS = 300
FAILED_FINISH_REASONS = ("error", "abort", "cancelled")


class BenchError(Exception):
    """The run cannot begin; the message is a sentence for the person at the keyboard."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The server, and how it is spoken to. Fields that OpenAI's API has not are sent only where asked for."""

    url: str
    """Without /v1."""
    endpoint: Literal["completions", "chat"] = "completions"
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Time for one request, from sending to its end."""
    temperature: float = 0.0
    ignore_eos: bool = False
    """Sends `ignore_eos`: answers have their planned length."""
    sends_service_tier: bool = True
    """`service_tier: "flex"` with offline requests."""
    sends_objectives: bool = False
    """Sends `ttft_ms` and `tpot_ms`."""
    max_tokens_field: str = ""
    """Default: max_tokens for completions, max_completion_tokens for chat."""
    vocabulary: Annotated[int, Meta(ge=0)] = 0
    """Above 0: prompts are token ids below it, of exact length; for completions only."""
    extra_body: dict[str, Any] = {}

    @property
    def path(self) -> str:
        return "/v1/completions" if self.endpoint == "completions" else "/v1/chat/completions"


class Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


class Body(msgspec.Struct, frozen=True):
    """A request made ready before its time: only sending is left."""

    content: bytes
    headers: dict[str, str]


def make_body(
    request: PlannedRequest, stream: StreamSpec, target: Target, rate: TokensPerWord, seed: int, api_key: str = ""
) -> Body:
    if target.vocabulary:
        prompt: str | list[int] = prompt_token_ids(request, target.vocabulary, seed)
    else:
        prompt = prompt_text(request, rate, seed)
    fields = _fields(target, request.model, prompt, request.output_tokens)
    if target.ignore_eos:
        fields["ignore_eos"] = True
    if target.sends_service_tier and request.request_class is RequestClass.OFFLINE:
        fields["service_tier"] = "flex"
    if target.sends_objectives:
        for name, objective_s in (("ttft_ms", request.ttft_objective_s), ("tpot_ms", request.tpot_objective_s)):
            if objective_s is not None:
                fields[name] = objective_s * 1000
    fields |= target.extra_body | stream.extra_body
    return Body(msgspec.json.encode(fields), _headers(api_key, request.request_id))


def _fields(target: Target, model: str, prompt: str | list[int], max_tokens: int) -> dict[str, Any]:
    is_chat = target.endpoint == "chat"
    asked = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    return {
        "model": model,
        **asked,
        target.max_tokens_field or ("max_completion_tokens" if is_chat else "max_tokens"): max_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _headers(api_key: str, request_id: str) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "X-Request-Id": request_id}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


async def send(
    connections: Connections, target: Target, body: Body, record: RequestRecord, now: Callable[[], float]
) -> None:
    """Sends it and fills in the record as the answer comes, so that a cancelled call leaves what there was.

    The first token is the first piece with text, or without text if it is neither a role alone nor the end: a token may
    have no text yet, and a role sent at admission is no token.
    """
    record.sent_s = now()
    record.has_usage = False
    try:
        async with asyncio.timeout(target.timeout_s):
            await _stream(connections, target, body, record, now)
    except TimeoutError:
        _fail(record, "timeout", f"not done after {target.timeout_s:g} s")
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        _fail(record, "connect", f"{type(error).__name__}: {error}")
    except httpx.HTTPError as error:
        _fail(record, "connection_lost", f"{type(error).__name__}: {error}")
    except msgspec.DecodeError as error:
        _fail(record, "malformed", str(error))
    record.end_s = now()


def _fail(record: RequestRecord, reason: str, message: str) -> None:
    record.error, record.error_message = reason, message[:MESSAGE_CHARACTERS]


async def _stream(
    connections: Connections, target: Target, body: Body, record: RequestRecord, now: Callable[[], float]
) -> None:
    url = target.url + target.path
    async with (
        connections.take() as client,
        client.stream("POST", url, content=body.content, headers=body.headers) as response,
    ):
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            _fail(record, f"http_{response.status_code}", _message_of(text))
            return
        is_done = False
        async with contextlib.aclosing(_events(response, now)) as events:
            async for data, at_s in events:
                if data == b"[DONE]":
                    is_done = True  # Read on to the end of the body, so that the connection can be used again.
                    continue
                chunk = _decode(data)
                if chunk.error is not None:
                    _fail(record, _reason_of(chunk.error), _message_of(data.decode(errors="replace")))
                    return
                if chunk.usage is not None:
                    _count(record, chunk.usage)
                if chunk.choices:
                    _on_choice(record, chunk.choices[0], at_s)
        if record.finish_reason in FAILED_FINISH_REASONS:
            _fail(record, f"finish_{record.finish_reason}", "the server ended it")
        elif not (is_done or record.finish_reason):
            _fail(record, "stream_cut", "the stream ended without a finish reason")


def _on_choice(record: RequestRecord, choice: Choice, at_s: float) -> None:
    if choice.finish_reason:
        record.finish_reason = choice.finish_reason
    is_role_alone = choice.delta is not None and choice.delta.role is not None
    if choice.has_text or not (choice.finish_reason or is_role_alone):
        if record.first_token_s is None:
            record.first_token_s = at_s
        record.token_times.append(at_s)
        record.last_token_s = at_s
        if not record.has_usage:
            record.output_tokens += 1
    elif choice.finish_reason:
        # The end may be a token of its own without text (end of sequence).
        record.last_token_s = at_s
        if record.first_token_s is None:
            record.first_token_s = at_s


def _count(record: RequestRecord, usage: Usage) -> None:
    record.has_usage = True
    record.prompt_tokens = usage.prompt_tokens
    record.output_tokens = usage.completion_tokens or 0
    if usage.prompt_tokens_details is not None:
        record.cached_prompt_tokens = usage.prompt_tokens_details.cached_tokens or 0


async def _events(response: httpx.Response, now: Callable[[], float]) -> AsyncGenerator[tuple[bytes, float], None]:
    """(data of an event, when its last byte came). Comments and other fields are left out."""
    buffer = b""
    async for piece in response.aiter_bytes():
        at_s = now()
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            # OpenAI's events are one line of JSON each, so that a line can be taken as soon as it is whole.
            if line.startswith(b"data:"):
                yield line[5:].strip(), at_s


def _reason_of(error: Any) -> str:
    code = error.get("code") if isinstance(error, dict) else None
    return f"stream_{code}" if code else "stream_error"


def _message_of(text: str) -> str:
    """The server's own words, where it answers in OpenAI's shape."""
    try:
        error = msgspec.json.decode(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return text


async def list_models(connections: Connections, url: str, api_key: str) -> list[str]:
    """Raises `BenchError`."""
    try:
        async with connections.take() as client:
            response = await client.get(f"{url}/v1/models", headers=_headers(api_key, "bench-models"), timeout=10.0)
        response.raise_for_status()
        return [model["id"] for model in response.json()["data"]]
    except httpx.TransportError as error:
        raise BenchError(f"{url} does not answer ({error}); --url says where the server is") from None
    except httpx.HTTPStatusError as error:
        told = f"{error.response.status_code}: {_message_of(error.response.text)}"
        remedy = "--model"
        if error.response.status_code in (401, 403):
            remedy = f"an API key of that server by --api-key or {SERVER_KEY_VARIABLE}"
        raise BenchError(f"{url}/v1/models does not name the models ({told}); give {remedy}") from None
    except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{url}/v1/models does not name the models ({error}); give --model") from None


async def calibrate(
    connections: Connections, target: Target, model: str, seed: int, api_key: str = ""
) -> tuple[TokensPerWord, bool]:
    """Sends two short prompts of known words; returns the rate, and whether the server reports usage at all.

    Also the warm-up of the model. Raises `BenchError` where the first fails: nothing else would succeed.
    """
    points: list[tuple[int, int]] = []
    start = time.perf_counter()
    for num_words in CALIBRATION_WORDS:
        name = f"calibration-{num_words}"
        record = RequestRecord(request_id=name, model=model, arrival_s=0.0)
        prompt: str | list[int] = calibration_text(num_words, seed)
        if target.vocabulary:
            prompt = [min(100, target.vocabulary - 1)] * num_words
        fields = _fields(target, model, prompt, 1) | target.extra_body
        body = Body(msgspec.json.encode(fields), _headers(api_key, name))
        await send(connections, target, body, record, lambda: time.perf_counter() - start)
        if record.error and not points:
            raise BenchError(f"model {model} does not answer at {target.url}: {record.error}: {record.error_message}")
        if not record.error and record.has_usage:
            points.append((num_words, record.prompt_tokens))
        elif not record.error:
            return TokensPerWord(), False
    return TokensPerWord.through(points), True


CONNECT_TIMEOUT_S = 10.0


class Connections:
    """One httpx client for each connection, the last used first.

    A client of its own and not httpx's pool: the pool goes through all its connections at every request, and with a few
    hundred streams the event loop does nothing else. No limit, since an open loop must never wait for a connection.
    """

    def __init__(self, num_ready: int = 0) -> None:
        """`num_ready` clients are made now rather than when they are needed, which takes half a millisecond each."""
        self._idle: list[httpx.AsyncClient] = []
        self._all: list[httpx.AsyncClient] = []
        # Made once: it takes longer than a request.
        self._ssl = ssl.create_default_context()
        self._idle += [self._make() for _ in range(num_ready)]

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncGenerator[httpx.AsyncClient, None]:
        """A client that nobody else uses until the block ends. Timeouts other than connecting are the caller's."""
        client = self._idle.pop() if self._idle else self._make()
        try:
            yield client
        finally:
            self._idle.append(client)

    def _make(self) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1),
            verify=self._ssl,
            trust_env=False,
        )
        self._all.append(client)
        return client

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for client in self._all:
            await client.aclose()


def allow_many_files() -> None:
    """Raises this process's limit of open files to what it may have: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
