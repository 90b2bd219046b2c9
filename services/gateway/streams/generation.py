"""One client's call as it is generated: its sequences, and the text that may be shown of each so far.

`Choice` turns the tokens of one stream into text pieces, `Generation` runs the choices of a call together. Neither knows
HTTP: the answer is written by `answers` from the `Delta`s that `advance()` gives.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from services.gateway.metrics import CallMetrics
from services.gateway.openai.parsing import SEED_MASK, Options
from services.gateway.openai.replies import (
    CompletionTokensDetails,
    CustomCallChunk,
    FinishedBy,
    PromptTokensDetails,
    ToolCallChunk,
    Usage,
)
from services.gateway.streams.stream import Stream
from services.gateway.streams.stream_table import StreamTable
from services.gateway.text.detokenization import StopStrings
from services.gateway.text.logprobs import ShownToken
from services.gateway.text.tokenization import ModelTokenizer
from services.gateway.tools.output_reader import OutputReader, Told
from services.gateway.tools.reasoning import Opening, ReasoningSplitter
from shared.bus.interface import ServiceError
from shared.messages.requests import (
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    Image,
    SamplingParams,
    TokenEntry,
    TokenLogprob,
    pack_tokens,
    unpack_logprobs,
)
from shared.runtime.tasks import TaskSet


@dataclass(slots=True)
class Delta:
    """What is new of one choice."""

    index: int
    text: str
    is_first: bool
    finish_reason: FinishedBy | None
    tokens: Sequence[ShownToken] = ()
    """Those whose text is shown by now, where log-probabilities were asked for."""
    calls: Sequence[ToolCallChunk] = ()
    custom_calls: Sequence[CustomCallChunk] = ()
    reasoning: str = ""
    """Before the text."""
    num_tokens: int = 0
    """Tokens of the choice up to the delta's end."""


@dataclass(frozen=True, slots=True)
class Seen:
    """How far a client has a choice."""

    num_tokens: int = 0
    is_over: bool = False
    """It has the finish_reason too."""


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    sampling: SamplingParams
    echo_text: str = ""
    """Put before the output."""
    shows_output: bool = True
    """Else the request ends with its first token, which is not shown."""
    is_open_ended: bool = False
    """See `GenerationRequest`."""
    opening: Opening | None = None
    """How the output of a chat begins; None: it is the text of a completion."""
    images: tuple[Image, ...] = ()
    """See `GenerationRequest`; likewise `chat`."""
    chat: bytes = b""


class Choice:
    def __init__(
        self,
        index: int,
        prompt: Prompt,
        options: Options,
        tokenizer: ModelTokenizer,
        *,
        call_id: str = "",
        seen: Seen | None = None,
        is_stepwise: bool = False,
    ) -> None:
        """`call_id`: ids of tool calls are made of it. `seen`: what is not shown again. `is_stepwise`: a delta for each
        token and one for the end, so that they are the same whenever the tokens come."""
        self.index = index
        self.prompt = prompt
        self.stream: Stream | None = None
        """None: not placed yet, or nothing is to be generated."""
        self.num_tokens = 0
        """Output tokens that count: those after a stop string do not."""
        self.finish_reason: FinishedBy | None = None
        self.is_dirty = False
        self.last_news_at: float | None = None
        self.max_itl_s = 0.0
        """The longest time between two of its news."""
        self.listener: Callable[[], None] = lambda: None
        """Listener of its stream."""
        self._is_first = True
        self._stop_token_ids = frozenset(prompt.sampling.stop_token_ids)
        self._min_tokens = prompt.sampling.min_tokens
        self._seen = seen
        self._is_stepwise = is_stepwise
        self.num_reasoning_tokens = 0
        self._reader = None
        if prompt.opening is not None:
            self._reader = _reader(prompt.opening, options, tokenizer, f"{call_id}/{index}")
        self._detokenizer = tokenizer.detokenizer(
            options.skips_special_tokens,
            has_calls=options.tools is not None,
            has_reasoning=self._reader is not None,
        )
        self._stops = StopStrings(options.stops, options.shows_stop)
        self._options = options
        self._tokenizer = tokenizer
        self._num_decoded = 0
        self._hidden: deque[ShownToken] | None = None if options.num_top_logprobs is None else deque()

    def advance(self) -> Delta | None:
        """What the stream has brought since the last call; None: nothing."""
        if self.finish_reason is not None:
            return None
        if self._seen is not None:
            seen = self._seen
            if seen.num_tokens or seen.is_over:
                is_short = self.stream is not None and len(self.stream.tokens) < seen.num_tokens
                # Who has the end has all, whatever its number says: nothing else would end what was said to be over.
                self._next(None if seen.is_over else seen.num_tokens, may_end=seen.is_over or is_short)
            if self.finish_reason is not None:
                end = Delta(self.index, "", False, self.finish_reason, num_tokens=self.num_tokens)
                return None if seen.is_over else end
            if seen.is_over or self.num_tokens < seen.num_tokens:
                return None
            self._seen = None
        limit = self.num_tokens + 1 if self._is_stepwise else None
        return self._next(limit, may_end=True)

    def _next(self, limit: int | None, *, may_end: bool) -> Delta | None:
        """The output up to `limit` tokens (None: all that there are), and its end where `may_end`."""
        if self.stream is None:
            self.finish_reason = "length"
            return Delta(self.index, self.prompt.echo_text, True, self.finish_reason)
        stream = self.stream
        num_here = len(stream.tokens)
        has_ended = may_end and stream.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if self._is_stepwise and self.num_tokens < num_here:
            has_ended = False
        if self.num_tokens == num_here and not has_ended:
            return None
        if not self.prompt.shows_output:
            self.finish_reason = "length"
            return Delta(self.index, self.prompt.echo_text, True, self.finish_reason, self._echoed_tokens())
        text = self.prompt.echo_text if self._is_first else ""
        echoed = self._echoed_tokens() if self._is_first else ()
        end = num_here if limit is None else min(limit, num_here)
        while self.num_tokens < end and self.finish_reason is None:
            token_id = stream.tokens[self.num_tokens]
            # A token that ends the output is its end and not its text, even where it has one.
            piece = "" if token_id in self._stop_token_ids else self._detokenizer.push(token_id)
            if self._hidden is not None:
                start = len(self.prompt.echo_text) + self._num_decoded
                self._hidden.append(ShownToken(token_id, stream.logprobs[self.num_tokens], start, start + len(piece)))
            self.num_tokens += 1
            if self._reader is None:
                text += self._show(piece, self.num_tokens <= self._min_tokens)
            else:
                self._read(self._reader, piece)
        if has_ended and self.num_tokens == num_here and self.finish_reason is None:
            last = self._show(self._detokenizer.flush(), self._is_in_call)
            if self.finish_reason is None:
                last += self._stops.flush()
                self.finish_reason = "stop" if stream.finish_reason is FinishReason.STOP else "length"
            if self._reader is None:
                text += last
            else:
                self._reader.feed(last)
        told = Told(content=text)
        if self._reader is not None and self.finish_reason is not None:
            told, self.finish_reason = self._reader.end(self.finish_reason)
        elif self._reader is not None:
            told = self._reader.take()
        tokens = (*echoed, *self._tokens_now_shown())
        delta = Delta(
            self.index,
            told.content,
            self._is_first,
            self.finish_reason,
            tokens,
            told.calls,
            told.custom_calls,
            told.reasoning,
            self.num_tokens,
        )
        self._is_first = False
        return delta

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the output; None: none did."""
        return self._stops.matched

    @property
    def _is_in_call(self) -> bool:
        return self._reader is not None and self._reader.is_in_call

    def _read(self, reader: OutputReader, piece: str) -> None:
        """Reads one token at a time, so that it is known which ones are reasoning."""
        was_reasoning = reader.is_reasoning
        reader.feed(self._show(piece, self.num_tokens <= self._min_tokens or reader.is_in_call))
        self.num_reasoning_tokens += was_reasoning or reader.is_reasoning

    def _show(self, piece: str, is_exempt: bool) -> str:
        """`is_exempt`: stop strings do not count before `min_tokens`."""
        self._num_decoded += len(piece)
        if is_exempt:
            return self._stops.skip(piece)
        shown, is_stopped = self._stops.feed(piece)
        if is_stopped:
            self.finish_reason = "stop"
        return shown

    def _tokens_now_shown(self) -> Sequence[ShownToken]:
        """A token is told of when its text is, so that no part of a stop string shows in the log-probabilities."""
        hidden = self._hidden
        if not hidden:
            return ()
        shown = []
        num_released = len(self.prompt.echo_text) + self._stops.num_released
        while hidden and hidden[0].end <= num_released:
            shown.append(hidden.popleft())
        return shown

    def prompt_logprobs(self) -> list[TokenLogprob | None]:
        """Log-probabilities of each token of the prompt, once the first token has come. None for the first token, and
        for all where the instance that had them is gone and its successor has them not."""
        num_tokens, num_top = len(self.prompt.tokens), self.prompt.sampling.prompt_logprobs
        first = self.stream.logprobs[0] if self.stream is not None and self.stream.logprobs else None
        known = [] if first is None else unpack_logprobs(first.prompt, num_top)
        return [None, *known] if len(known) == num_tokens - 1 else [None] * num_tokens

    def pooled(self) -> bytes:
        """What was pooled of the prompt; empty where the instance that had it is gone and its successor has it not."""
        known = self.stream.logprobs if self.stream is not None else ()
        return known[0].prompt if known else b""

    def _echoed_tokens(self) -> Sequence[ShownToken]:
        """Those of the prompt, where it is part of the text and log-probabilities were asked for."""
        if self._hidden is None or not self._options.echo:
            return ()
        detokenizer = self._tokenizer.detokenizer(self._options.skips_special_tokens)
        shown, end, last = [], 0, len(self.prompt.echo_text)
        for token_id, logprob in zip(self.prompt.tokens, self.prompt_logprobs(), strict=True):
            start, end = end, min(last, end + len(detokenizer.push(token_id)))
            shown.append(ShownToken(token_id, logprob, start, end))
        return shown


def _reader(opening: Opening, options: Options, tokenizer: ModelTokenizer, output_id: str) -> OutputReader | None:
    """Reader of an output of a chat; None: all of it is content."""
    spelled, marks = tokenizer.tool_format, tokenizer.reasoning_format
    splitter = None
    if marks is not None and options.parts_reasoning and not spelled.has_reasoning:
        splitter = ReasoningSplitter(marks, is_open=opening is Opening.WITHIN)
    if splitter is None and options.tools is None and not spelled.has_reasoning:
        return None
    return OutputReader(spelled, options.tools, splitter, output_id, shows_reasoning=options.shows_reasoning)


@dataclass(kw_only=True)
class Generation:
    """The sequences of a call. `prompts` times `options.num_choices` choices, those of one prompt together."""

    table: StreamTable
    template: GenerationRequest
    """Everything that the requests have in common. `timeout_s` counts from `arrived_at`."""
    prompts: list[Prompt]
    options: Options
    tokenizer: ModelTokenizer
    metrics: CallMetrics
    arrived_at: float
    now: Callable[[], float]
    on_output: Callable[[int, float], None]
    """Called with the number of new tokens and the time."""
    seen: Sequence[Seen] = ()
    """How far the client has each choice, where another answer began this one."""
    is_stepwise: bool = False
    """`is_stepwise` of `Choice`."""
    max_open: int = 0
    """Choices that are placed at once; the others follow as these end. 0: all."""

    def __post_init__(self) -> None:
        self.failure: ErrorInfo | None = None
        """Set: the call has failed; deltas before it are good."""
        self.submitted_at = self.arrived_at
        self.first_token_at: float | None = None
        n = self.options.num_choices
        self.choices = [
            Choice(
                index,
                prompt,
                self.options,
                self.tokenizer,
                call_id=self.template.request_id,
                seen=self.seen[index] if self.seen else None,
                is_stepwise=self.is_stepwise,
            )
            for index, prompt in enumerate(prompt for prompt in self.prompts for _ in range(n))
        ]
        self._num_unfinished = len(self.choices)
        self.listener: Callable[[], None] | None = None
        """Called at news instead of ending the wait in `news`; it must not block."""
        self._dirty: list[Choice] = []
        self._unopened = deque(self.choices[self.max_open :] if self.max_open else ())
        self._opening = TaskSet()
        self._news = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return self._num_unfinished == 0

    async def start(self) -> None:
        """Places all sequences. Raises `ServiceError` with the first refusal; then none is left running."""
        self.submitted_at = self.now()
        try:
            first = self.choices[: self.max_open or None]
            if len(first) == 1:
                await self._open(first[0])
            else:
                async with asyncio.TaskGroup() as group:
                    for choice in first:
                        group.create_task(self._open(choice))
        except BaseExceptionGroup as errors:
            self.close()
            raise errors.exceptions[0] from None
        except BaseException:
            self.close()
            raise

    async def attach(self, outputs: Sequence[TokenEntry]) -> None:
        """In place of `start`, for a call that was placed before. `outputs`: of each choice, where all have ended."""
        for choice in self.choices:
            if choice.prompt.sampling.max_tokens > 0:
                request = self._request(choice)
                if outputs:
                    choice.stream = Stream(request, self.arrived_at, choice.listener)
                    choice.stream.accept(outputs[choice.index], None)
                    choice.stream.is_open = False
                else:
                    choice.stream = await self.table.attach(request, self.arrived_at, choice.listener)
            self._on_news(choice)

    async def _open(self, choice: Choice) -> None:
        if choice.prompt.sampling.max_tokens > 0:
            choice.stream = await self.table.open(self._request(choice), self.arrived_at, choice.listener)
        self._on_news(choice)

    async def _open_later(self, choice: Choice) -> None:
        try:
            await self._open(choice)
        except ServiceError as error:
            self.failure = error.info
            self.wake()

    def _request(self, choice: Choice) -> GenerationRequest:
        choice.listener = functools.partial(self._on_news, choice)
        return msgspec.structs.replace(
            self.template,
            request_id=f"{self.template.request_id}-{choice.index}",
            prompt=pack_tokens(choice.prompt.tokens),
            sampling=self._sampling(choice),
            images=choice.prompt.images,
            chat=choice.prompt.chat,
        )

    def _sampling(self, choice: Choice) -> SamplingParams:
        sampling = choice.prompt.sampling
        number = choice.index % self.options.num_choices
        return msgspec.structs.replace(sampling, seed=(sampling.seed + number) & SEED_MASK) if number else sampling

    def _on_news(self, choice: Choice) -> None:
        if not choice.is_dirty:
            choice.is_dirty = True
            self._dirty.append(choice)
        if self.listener is None:
            self._news.set()
        else:
            self.listener()

    def wake(self) -> None:
        """Makes `news` return."""
        self._news.set()

    async def news(self, timeout_s: float | None = None) -> None:
        """Returns when `advance` may have something, or `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            await self._news.wait()
        self._news.clear()

    def advance(self) -> list[Delta]:
        """What is new of the choices; sets `failure` where one has failed."""
        dirty, self._dirty = self._dirty, []
        now = self.now()
        deltas = []
        for choice in dirty:
            choice.is_dirty = False
            num_before, was_over = choice.num_tokens, choice.finish_reason is not None
            while (delta := choice.advance()) is not None:
                deltas.append(delta)
            self._measure(choice, choice.num_tokens - num_before, now)
            if choice.finish_reason is not None and not was_over:
                self._finish(choice)
            if choice.stream is not None and choice.finish_reason is None and choice.stream.failure is not None:
                self.failure = choice.stream.failure
        return deltas

    def _measure(self, choice: Choice, num_new: int, now: float) -> None:
        if num_new == 0:
            return
        self.on_output(num_new, now)
        self.metrics.output_tokens.inc(num_new)
        if choice.last_news_at is not None:
            silence_s = now - choice.last_news_at
            self.metrics.inter_token.observe(silence_s)
            choice.max_itl_s = max(choice.max_itl_s, silence_s)
        elif self.first_token_at is None:
            self.first_token_at = now
            self.metrics.first_token.observe(now - self.arrived_at)
            self.metrics.gen_ai_first_token.observe(now - self.arrived_at)
        choice.last_news_at = now

    def _finish(self, choice: Choice) -> None:
        self._num_unfinished -= 1
        if self._unopened:
            self._opening.start(self._open_later(self._unopened.popleft()))
        if choice.num_tokens > 1:
            self.metrics.max_inter_token.observe(choice.max_itl_s)
        if choice.stream is not None:
            choice.stream.is_enough = True
            self.table.leave(choice.stream, choice.listener)

    def close(self) -> None:
        """Cancels what has not ended. May be called twice."""
        self._unopened.clear()
        self._opening.cancel_all()
        for choice in self.choices:
            if choice.stream is not None:
                self.table.leave(choice.stream, choice.listener)

    @property
    def num_prompt_tokens(self) -> int:
        """A prompt's images count once their engine has told how much they are."""
        first = self.choices[:: self.options.num_choices]
        told = [0 if choice.stream is None else choice.stream.num_prompt_tokens for choice in first]
        return sum(num or len(choice.prompt.tokens) for num, choice in zip(told, first, strict=True))

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def usage(self) -> Usage:
        """So far. A prompt counts once, however many choices it has and however often it was computed."""
        num_cached = 0
        for choice in self.choices[:: self.options.num_choices]:
            if choice.stream is not None:
                num_cached += choice.stream.num_cached_tokens or 0
        num_prompt, num_output = self.num_prompt_tokens, self.num_output_tokens
        return Usage(
            num_prompt,
            num_output,
            num_prompt + num_output,
            PromptTokensDetails(num_cached),
            CompletionTokensDetails(sum(choice.num_reasoning_tokens for choice in self.choices)),
        )
