"""A server that runs already, as an engine: `/v1/completions` with prompts of token ids, as vLLM, SGLang and Tideway
itself have it; with images, which have no token ids, `/v1/chat/completions`.

Tokens come back by their ids in the log-probabilities (`return_tokens_as_token_ids`), so that a stream that broke goes
on elsewhere from its tokens. What is known of the server is what its `/v1/models` says and what the operator does; so
it is given no more requests than it has rows for (`shared/engines/admission.py`), and the pool of the load report is
these rows, each as long as a sequence may be.

A stream that ends without a reason was cut: its request is given up, and goes on elsewhere. A server that cannot be
reached, hangs, fails or serves another model than before is waited for; `problem` says so meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from services.worker.engines.interface import EngineFailed
from shared.engines.capabilities import Capability
from shared.engines.messages import Abort, Command, EngineFacts, Generate, Progress, Step
from shared.messages.requests import (
    ErrorCode,
    ErrorInfo,
    FinishReason,
    SamplingParams,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)
from shared.runtime.tasks import TaskSet

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two questions to a server that does not answer."""
CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 120.0
"""A server that has just started may compile its kernels for its first token."""
WATCH_INTERVAL_S = 5.0
"""Time between two questions whether a server that sends no tokens still serves."""
HANG_S = 15.0
"""A server that answers these questions wrongly or not at all for so long is given up; one that refuses connections at
once."""
DEFAULT_ROWS = 16
ID_PREFIX = "token_id:"
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
LACKS = (
    Capability.ADAPTERS,
    Capability.PROMPT_LOGPROBS,
    Capability.POOLING,
    Capability.GRAMMARS,
    Capability.PREFIX_SALTS,
    Capability.KV_MOVES,
    Capability.PREEMPTS,
    Capability.INTERRUPTS,
    Capability.BUDGETS,
    Capability.SEVERAL_MODELS,
    Capability.GRAMMAR_RESUME,
    Capability.SEED_RESUME,
    Capability.PENALTY_RESUME,
    Capability.IMAGE_RESUME,
)
PROBE_PROMPT = (1, 2, 3)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    root: str = ""


class _Models(msgspec.Struct):
    data: list[_Model]


class _ChatTop(msgspec.Struct):
    token: str
    logprob: float


class _ChatToken(_ChatTop):
    top_logprobs: list[_ChatTop] = []


class _Logprobs(msgspec.Struct):
    """A completion's; a chat's are in `content`."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None
    content: list[_ChatToken] | None = None

    def __post_init__(self) -> None:
        if self.content is not None:
            self.tokens = [one.token for one in self.content]
            self.token_logprobs = [one.logprob for one in self.content]
            self.top_logprobs = [{top.token: top.logprob for top in one.top_logprobs} for one in self.content]


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """So far, in each chunk."""


class _Failure(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Failure | None = None
    usage: _Usage | None = None


class _Error(msgspec.Struct):
    error: _Failure


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class NoTokenIds(Exception):
    """The server names its tokens otherwise than by their ids."""


class EndpointOptions(msgspec.Struct, frozen=True):
    """What the operator says of a server (`--engine-args`)."""

    served_model_name: str = ""
    """Name of the model there; empty: the first that it serves."""
    max_num_seqs: int = DEFAULT_ROWS
    """Requests that it gets at once."""
    max_model_len: int = 0
    """0: as the server says."""

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> EndpointOptions:
        """Settings from the flags as vLLM spells them. Raises `ValueError`."""
        parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
        parser.add_argument("--served-model-name", default="")
        parser.add_argument("--max-num-seqs", type=int, default=DEFAULT_ROWS)
        parser.add_argument("--max-model-len", type=int, default=0)
        try:
            found, others = parser.parse_known_args(list(arguments))
        except argparse.ArgumentError as error:
            raise ValueError(f"engine_args: {error}") from None
        if others:
            raise ValueError(f"engine_args: a server that runs already takes no {others[0]}")
        if found.max_num_seqs < 1 or found.max_model_len < 0:
            raise ValueError("engine_args: --max-num-seqs is at least 1, and --max-model-len at least 0")
        return cls(found.served_model_name, found.max_num_seqs, found.max_model_len)


class EndpointEngine:
    """`url`: of the server, without `/v1`. `max_model_len`: where neither options nor server say it. `api_key`: for
    it; empty: it wants none."""

    comes_back = True

    def __init__(
        self, url: str, options: EndpointOptions, max_model_len: int = 0, api_key: str = "", verify: bool = True
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._options = options
        self._max_model_len = max_model_len
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.max_num_seqs)
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=False, verify=verify)
        self._model = ""
        """Name of the model there, once it was found; it stays the one that is served here."""
        self._has_served = False
        self._down_since = 0.0
        """Unix seconds; 0: it serves, or was not asked yet."""
        self._problem = ""
        self._has_sent = self._has_refused = False
        """Whether the server has sent tokens, or refused a request for a fault of its own, since it was last looked at."""
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskSet()
        self._made: asyncio.Queue[Progress | EngineFailed] = asyncio.Queue()

    @property
    def problem(self) -> str:
        return self._problem

    async def start(self) -> EngineFacts:
        """Waits for the server for as long as it takes; once it has served, also where it refuses or serves another
        model."""
        await self._tasks.end_all()
        self._streams.clear()
        self._made = asyncio.Queue()
        while True:
            try:
                facts = await self._facts()
                break
            except httpx.HTTPError as error:
                self._note_down(_why(error))
            except EngineFailed as error:
                if not self._has_served:
                    raise
                self._note_down(str(error))
            await asyncio.sleep(RETRY_S)
        self._has_served, self._down_since, self._problem = True, 0.0, ""
        self._tasks.start(self._watch(), "watch")
        return facts

    async def _facts(self) -> EngineFacts:
        """Raises `httpx.HTTPError`, `EngineFailed`."""
        await self._served()
        await self._probe()
        model = await self._served()  # one that was loading its model may not have known all of it
        max_model_len = self._options.max_model_len or model.max_model_len or self._max_model_len
        if not max_model_len:
            message = (
                f"{self._url} does not say how long a sequence may be: add --max-model-len to the engine's arguments"
            )
            raise EngineFailed(message, is_final=True)
        rows = self._options.max_num_seqs
        return EngineFacts(
            version=self._url,
            lacks=LACKS,
            max_model_len=max_model_len,
            block_size=max_model_len,
            num_blocks=rows,
            block_bytes=1,
            max_running=rows,
            max_step_tokens=max_model_len,
        )

    def _note_down(self, why: str) -> None:
        if not self._down_since:
            self._down_since = time.time()
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._down_since))
        problem = f"{self._url} has been unavailable since {since}: {why.replace(f'{self._url} ', 'it ', 1)}"
        if problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem

    async def _watch(self) -> None:
        """Notices that an idle server is gone, and that one hangs or fails."""
        failing_since: float | None = None
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            has_sent, has_refused = self._has_sent, self._has_refused
            self._has_sent = self._has_refused = False
            if has_sent:
                failing_since = None
                continue
            asked_at = time.monotonic()
            try:
                await self._served()
                if has_refused or failing_since is not None:
                    await self._probe(HANG_S)
                failing_since = None
            except EngineFailed as error:
                self._lost(str(error))
                return
            except httpx.HTTPError as error:
                failing_since = asked_at if failing_since is None else failing_since
                if isinstance(error, httpx.ConnectError) or time.monotonic() - failing_since >= HANG_S:
                    self._lost(_why(error))
                    return

    def _lost(self, why: str) -> None:
        self._note_down(why)
        self._made.put_nowait(EngineFailed(self._problem))

    async def _served(self) -> _Model:
        """Raises `httpx.HTTPError`, `EngineFailed`."""
        answer = await self._http.get(f"{self._url}/v1/models", timeout=CONNECT_TIMEOUT_S)
        if answer.status_code in (401, 403):
            raise EngineFailed(f"{self._url} refuses the key: set TIDEWAY_ENGINE_API_KEY", is_final=True)
        answer.raise_for_status()
        try:
            models = msgspec.json.decode(answer.content, type=_Models).data
        except msgspec.MsgspecError as error:
            raise EngineFailed(f"{self._url}/v1/models is no list of models: {error}", is_final=True) from None
        wanted = self._options.served_model_name or (self._model if self._has_served else "")
        if not models:
            raise httpx.HTTPError("it serves no model yet")
        found = next((model for model in models if wanted in ("", model.id)), None)
        if found is None:
            named = ", ".join(model.id for model in models)
            raise EngineFailed(f"{self._url} does not serve {wanted or 'a model'}; it serves {named}", is_final=True)
        self._model = found.id
        return found

    async def _probe(self, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        """Whether it takes prompts of ids and gives ids back. Raises `httpx.HTTPError`, `EngineFailed`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask_for_a_token()
        except TimeoutError:
            raise httpx.ReadTimeout(f"no token within {timeout_s:g} s") from None

    async def _ask_for_a_token(self) -> None:
        """Raises `httpx.HTTPError`, `EngineFailed`."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        body = self._body(Generate(key="probe", prompt=pack_tokens(list(PROBE_PROMPT)), sampling=sampling, priority=0))
        async with self._http.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
            if answer.status_code >= 500:
                raise httpx.HTTPStatusError("", request=answer.request, response=answer)
            if answer.status_code != 200:
                why = _error_of(await answer.aread(), answer.status_code)
                raise EngineFailed(f"{self._url} takes no prompts of token ids: {why}", is_final=True)
            try:
                async for chunk in _chunks(answer):
                    _progress("probe", chunk, -1)
            except (NoTokenIds, msgspec.MsgspecError) as error:
                message = f"{self._url} does not name tokens by their ids (return_tokens_as_token_ids): {error}"
                raise EngineFailed(message, is_final=True) from None

    def send(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Generate):
                self._streams[command.key] = self._tasks.start(self._stream(command), command.key)
            elif isinstance(command, Abort):
                for key in command.keys:
                    if (task := self._streams.pop(key, None)) is not None:
                        task.cancel()  # the connection is closed, at which servers abort

    async def next_step(self) -> Step:
        made = [await self._made.get()]
        while not self._made.empty():
            made.append(self._made.get_nowait())
        for one in made:
            if isinstance(one, EngineFailed):
                raise one
        return Step(progress=[one for one in made if isinstance(one, Progress)])

    async def stop(self) -> None:
        await self._tasks.end_all()
        await self._http.aclose()

    # --------------------------------------------------------------------------------------------------- a stream

    async def _stream(self, message: Generate) -> None:
        key, num_top, num_bytes = message.key, message.sampling.logprobs, 0
        try:
            url = f"{self._url}/v1/{'chat/' if message.chat else ''}completions"
            async with self._http.stream("POST", url, json=self._body(message)) as answer:
                if answer.status_code != 200:
                    self._refused(key, answer.status_code, await answer.aread())
                    return
                async for chunk in _chunks(answer):
                    progress = _progress(key, chunk, num_top)
                    num_bytes += 0 if progress is None else len(progress.tokens)
                    num_made = 0 if chunk.usage is None else chunk.usage.completion_tokens
                    has_failed = progress is not None and progress.error is not None
                    if message.chat and num_made > num_bytes // 4 and not has_failed:
                        raise NoTokenIds("some came without them, as reasoning may")
                    if progress is not None:
                        self._has_sent = self._has_sent or bool(progress.tokens)
                        self._made.put_nowait(progress)
                        if progress.finish_reason is not None:
                            return
        except (httpx.HTTPError, msgspec.MsgspecError, NoTokenIds) as error:
            if isinstance(error, NoTokenIds) and message.chat:  # another try would end alike
                why = f"The server of the model does not name a chat's tokens by their ids: {error}"
                self._made.put_nowait(_given_up(key, ErrorCode.BAD_REQUEST, why))
                return
            await self._cut(key, _why(error) if isinstance(error, httpx.HTTPError) else str(error))
        else:
            await self._cut(key, "the stream ended without a reason")
        finally:
            self._streams.pop(key, None)

    async def _cut(self, key: str, why: str) -> None:
        """Others can go on with the request; and if the server is gone, with all of them."""
        self._streams.pop(key, None)  # an abort of the request does not end this question
        self._made.put_nowait(_given_up(key, ErrorCode.UNAVAILABLE, f"{self._url}: {why}"))
        try:
            await self._served()
        except httpx.HTTPError as error:
            self._lost(_why(error))
        except EngineFailed as error:
            self._lost(str(error))

    def _refused(self, key: str, status: int, body: bytes) -> None:
        code = ErrorCode.UNAVAILABLE if status >= 500 or status in (408, 429) else ErrorCode.BAD_REQUEST
        self._has_refused = self._has_refused or status >= 500
        self._made.put_nowait(_given_up(key, code, f"The server of the model refused: {_error_of(body, status)}"))

    def _body(self, message: Generate) -> dict[str, Any]:
        """What the defaults of servers say is left out, so that one that lacks a field takes what does not need it."""
        sampling = message.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
        }
        num_top = max(0, sampling.logprobs)
        if message.chat:
            body |= _chat(message) | {"logprobs": True, "top_logprobs": num_top}
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
            if message.is_open_ended:  # how long the images are is known there
                del body["max_tokens"]
        else:
            body |= {"prompt": unpack_tokens(message.prompt), "logprobs": num_top}
        optional: Mapping[str, tuple[object, object]] = {
            "min_tokens": (sampling.min_tokens, 0),
            "top_k": (sampling.top_k, 0),
            "top_p": (sampling.top_p, 1.0),
            "min_p": (sampling.min_p, 0.0),
            "repetition_penalty": (sampling.repetition_penalty, 1.0),
            "presence_penalty": (sampling.presence_penalty, 0.0),
            "frequency_penalty": (sampling.frequency_penalty, 0.0),
            "stop_token_ids": (list(sampling.stop_token_ids), []),
            "logit_bias": ({str(token): bias for token, bias in sampling.logit_bias}, {}),
            "cache_salt": (message.salt, ""),
        }
        body |= {name: value for name, (value, default) in optional.items() if value != default}
        if sampling.temperature > 0:
            body["seed"] = sampling.seed
        return body


def _chat(message: Generate) -> dict[str, Any]:
    """The chat's fields, with the images in their places."""
    chat: dict[str, Any] = msgspec.json.decode(message.chat)
    images = iter(message.images)
    for sent in chat["messages"]:
        for part in sent["content"] if isinstance(sent["content"], list) else ():
            if part["type"] == "image_url":
                image = next(images)
                encoded = base64.b64encode(image.data).decode()
                part["image_url"]["url"] = image.url or f"data:{image.media_type};base64,{encoded}"
    return chat


async def _chunks(answer: httpx.Response) -> Any:
    """Events of a stream of server-sent events. Raises `msgspec.MsgspecError`, `httpx.HTTPError`."""
    rest = b""
    async for received in answer.aiter_bytes():
        # Not `aiter_lines`, for which U+0085 and U+2028 within a text end a line too.
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield _decode_chunk(data)


def _progress(key: str, chunk: _Chunk, num_top: int) -> Progress | None:
    """None: it says nothing. Raises `NoTokenIds`."""
    if chunk.error is not None:
        return _given_up(key, ErrorCode.UNAVAILABLE, chunk.error.message or "the server ended the stream")
    if not chunk.choices:
        return None
    choice = chunk.choices[0]
    told = choice.logprobs or _Logprobs()
    tokens = [_token_id(name) for name in told.tokens]
    reason = None if choice.finish_reason is None else REASONS.get(choice.finish_reason)
    if choice.finish_reason is not None and reason is None:
        return _given_up(key, ErrorCode.UNAVAILABLE, f"the server ended it: {choice.finish_reason}")
    if not tokens and choice.delta is not None and choice.delta.content:
        raise NoTokenIds("a text came without any")
    if not tokens and reason is None:
        return None
    num_prompt = 0 if chunk.usage is None else chunk.usage.prompt_tokens
    logprobs = _logprobs(told, tokens, num_top) if num_top >= 0 else ()
    packed = pack_tokens(tokens)
    return Progress(key=key, tokens=packed, logprobs=logprobs, finish_reason=reason, num_prompt=num_prompt)


def _token_id(name: str) -> int:
    number = name.removeprefix(ID_PREFIX)
    if number == name or not number.isdecimal():
        raise NoTokenIds(f"a token is called {name[:40]!r}")
    return int(number)


def _logprobs(told: _Logprobs, tokens: list[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """A server names the most likely tokens and, where it is none of them, the chosen one."""
    found = []
    tops = told.top_logprobs or [None] * len(tokens)
    for token, logprob, top in zip(tokens, told.token_logprobs, tops, strict=True):
        ranked = sorted(((value, _token_id(name)) for name, value in (top or {}).items()), reverse=True)
        ids = [one for _, one in ranked]
        rank = 1 + ids.index(token) if token in ids[:num_top] else 0
        kept = ranked[:num_top]
        found.append(
            TokenLogprob(
                -9999.0 if logprob is None else logprob,
                tuple(one for _, one in kept),
                tuple(value for value, _ in kept),
                rank,
            )
        )
    return tuple(found)


def _given_up(key: str, code: ErrorCode, why: str) -> Progress:
    return Progress(key=key, finish_reason=FinishReason.ERROR, error=ErrorInfo(code, why[:500]))


def _why(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answers with status {error.response.status_code}"
    if isinstance(error, httpx.ConnectError):
        return f"no connection ({error})" if str(error) else "no connection"
    if isinstance(error, httpx.TimeoutException):
        return str(error) or "no answer in time"
    if isinstance(error, httpx.TransportError):
        return "the connection broke"
    return str(error)


def _error_of(body: bytes, status: int) -> str:
    try:
        return msgspec.json.decode(body, type=_Error).error.message
    except msgspec.MsgspecError:
        return f"status {status}"
