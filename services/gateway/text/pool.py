"""Processes for text work that could harm the gateway (`work`): killed when they take too long or too much memory, or when
no request waits for a long text any more.

Started when they are needed first. A template that had to be killed over a few short messages will be again: its model's
chats are refused for a while, so that they do not hold up those of others.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from services.gateway.access.admission import WORKING_FOR
from services.gateway.http.errors import ApiError, invalid
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.structured import Grammar
from services.gateway.text import work as text_work
from services.gateway.text.turns import FairTurns, Turn
from services.gateway.text.work import (
    LENGTH_BYTES,
    MAX_GRAMMAR_CPU_S,
    MEMORY_EXIT_CODE,
    Encode,
    Render,
    Result,
    TryGrammar,
)
from shared.messages.cluster import ModelSpec
from shared.runtime.settings import GatewaySettings

logger = logging.getLogger(__name__)

SHORT_CHARACTERS = 64 * 1024
"""A text that is not worth killing a process for when its client has gone."""
SMALL_BYTES = 16 * 1024
"""Messages and variables that are no reason for a template to fail: it is the template."""
PAUSE_S = 30.0
"""Without a template, or a grammar, that had to be killed."""
START_MARGIN_S = 10.0
"""Beyond a text's own time, for a process that cannot even end itself."""
RETRY_AFTER_S = 1.0
MAX_TRIED_GRAMMARS = 256
"""Whose outcome is remembered."""
REPOSITORY = Path(__file__).resolve().parents[2]


class _KilledError(Exception):
    """The process ended at this text."""


class _SharedMemoryError(_KilledError):
    """Its memory was used up, in part by the tokenizers of other models: not by this text, perhaps."""


class _TextProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.tokenizers: set[ModelSpec] = set()
        """Tokenizers of the tasks it had, whose vocabularies take of its memory."""

    @classmethod
    async def start(cls, settings: GatewaySettings) -> _TextProcess:
        # Whoever wrote a template has no use for this process's secrets. One text at a time: threads would gain nothing.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("TIDEWAY_", "HF_TOKEN"))
        }
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        environment["RAYON_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = "1"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.gateway.text.work",
            str(settings.text_timeout_s),
            str(settings.text_memory_bytes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        return cls(process)

    async def exchange(self, task: bytes) -> Result:
        """Raises `_KilledError` with the reason."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(len(task).to_bytes(LENGTH_BYTES, "big") + task)
            await self._process.stdin.drain()
            length = int.from_bytes(await self._process.stdout.readexactly(LENGTH_BYTES), "big")
            return text_work.decode_result(await self._process.stdout.readexactly(length))
        except (OSError, asyncio.IncompleteReadError):
            code = await self._process.wait()
            reason = {
                -signal.SIGALRM: "time",
                -signal.SIGPROF: "computing",
                MEMORY_EXIT_CODE: "memory",
                -signal.SIGABRT: "memory",
            }.get(code, "failed")
            raise _KilledError(reason) from None

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class TextPool:
    def __init__(self, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._turns = FairTurns(settings.text_processes)
        # One fewer, so that no short chat waits for its template behind long ones of others.
        self._long_turns = FairTurns(settings.text_processes - 1)
        self._idle: list[_TextProcess] = []
        self._exchanges: set[asyncio.Task[Result]] = set()
        self._num_characters = 0
        self._paused: dict[str, tuple[float, str]] = {}
        """By folder: until when its template is not run, and why."""
        self._tried: OrderedDict[str, tuple[str, str, float]] = OrderedDict()
        """By the text of a grammar: as llguidance takes it (empty: as it is), why it cannot be followed (empty: it can),
        and until when that is believed."""
        metrics.text_characters.set_function(lambda: self._num_characters)

    @contextlib.contextmanager
    def room(self, num_characters: int) -> Iterator[None]:
        """Holds room for texts of so many characters together (of a template's input: bytes). Raises `ApiError` 429 where
        too many are in work."""
        limit = self._settings.max_text_characters
        if self._num_characters + num_characters > limit:
            raise ApiError(
                429,
                f"The server is working on {self._num_characters} characters of prompts, and this request has "
                f"{num_characters}; the limit is {limit} (TIDEWAY_MAX_TEXT_CHARACTERS).",
                type="rate_limit_error",
                code="overloaded",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_characters += num_characters
        try:
            yield
        finally:
            self._num_characters -= num_characters

    async def render(self, task: Render) -> Result:
        """Raises `ApiError`."""
        self._check_pause(task.folder)
        try:
            body = text_work.encode(task)
        except OverflowError as error:  # integers beyond 64 bits, which JSON has
            raise invalid("messages", f"A message or a variable of the template cannot be taken: {error}.") from None
        try:
            with self.room(len(body)):  # tool calls and variables take it as contents do
                return await self._run(body, len(body), folder=task.folder)
        except _KilledError as error:
            reason = f"The chat template of this model {self._why(error)}."
            if len(body) > SMALL_BYTES:
                raise ApiError(400, reason, param="messages", code="text_too_large") from None
            logger.error("%s: its chat template %s", task.folder, self._why(error))
            pause_s = RETRY_AFTER_S if str(error) == "failed" else PAUSE_S
            self._paused[task.folder] = (time.monotonic() + pause_s, reason)
            raise _broken(reason, pause_s) from None

    async def encode(self, task: Encode, num_characters: int, param: str) -> list[list[int]]:
        """In the room that the caller has taken. Raises `ApiError`."""
        try:
            result = await self._run(text_work.encode(task), num_characters, tokenizer=task.spec)
        except _KilledError as error:
            message = f"Tokenising the {num_characters} characters of '{param}' {self._why(error)}."
            raise ApiError(400, message, param=param, code="text_too_large") from None
        return [array.array("I", ids).tolist() for ids in result.ids]

    async def try_grammar(self, grammar: Grammar) -> Grammar:
        """Gives the grammar as llguidance takes it. Raises `ApiError` 400 where it cannot be followed."""
        text = grammar.text
        if text not in self._tried or self._tried[text][2] < time.monotonic():
            taken, reason, until_s = "", "", math.inf
            try:
                with self.room(len(text)):
                    taken = (await self._run(text_work.encode(TryGrammar(text)), len(text))).text
            except _KilledError as error:
                reason = f"to try it {self._why(error)}."
                until_s = time.monotonic() + PAUSE_S  # the machine may have stood still
            except ApiError as error:
                if error.status != 400:
                    raise
                reason = error.message
            self._tried[text] = taken, reason, until_s
            if len(self._tried) > MAX_TRIED_GRAMMARS:
                self._tried.popitem(last=False)
        self._tried.move_to_end(text)
        taken, reason, _ = self._tried[text]
        if reason:
            raise invalid(grammar.param, f"Invalid value for '{grammar.param}': {reason}")
        return replace(grammar, text=taken) if taken else grammar

    def _why(self, error: _KilledError) -> str:
        settings = self._settings
        return {
            "time": f"takes longer than {settings.text_timeout_s:g} s (TIDEWAY_TEXT_TIMEOUT_S)",
            "computing": f"takes more than {2 * MAX_GRAMMAR_CPU_S:g} s of computing; the limit is {MAX_GRAMMAR_CPU_S:g} s",
            "memory": f"takes more than {settings.text_memory_bytes} bytes of memory (TIDEWAY_TEXT_MEMORY_BYTES)",
        }.get(str(error), "fails in a process of its own")

    def _check_pause(self, folder: str) -> None:
        until, reason = self._paused.get(folder, (0.0, ""))
        if (left_s := until - time.monotonic()) > 0:
            raise _broken(reason, left_s)

    async def _take(self, turns: FairTurns, until: float) -> Turn:
        """`until`: a time of the event loop. Raises `ApiError`."""
        try:
            async with asyncio.timeout_at(until):
                return await turns.take(WORKING_FOR.get())
        except TimeoutError:
            message = f"Other texts were worked on for {self._settings.request_timeout_s:g} s."
            raise ApiError(408, message, type="timeout_error", code="deadline_exceeded") from None

    async def _run(
        self, task: bytes, num_characters: int, *, folder: str | None = None, tokenizer: ModelSpec | None = None
    ) -> Result:
        """`tokenizer`: the one that the task needs."""
        until = asyncio.get_running_loop().time() + self._settings.request_timeout_s
        if len(task) <= SMALL_BYTES:
            return await self._run_next(task, num_characters, folder, tokenizer, until)
        turn = await self._take(self._long_turns, until)
        try:
            return await self._run_next(task, num_characters, folder, tokenizer, until)
        finally:
            turn.end()

    async def _run_next(
        self, task: bytes, num_characters: int, folder: str | None, tokenizer: ModelSpec | None, until: float
    ) -> Result:
        turn = await self._take(self._turns, until)
        try:
            if folder is not None:
                self._check_pause(folder)  # it may have been killed while this one waited
        except ApiError:
            turn.end()
            raise
        exchange = asyncio.get_running_loop().create_task(self._exchange(task, tokenizer, turn))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._on_done)
        try:
            result = await asyncio.shield(exchange)
        except asyncio.CancelledError:
            if num_characters > SHORT_CHARACTERS:
                exchange.cancel()
            raise
        if result.refusal is not None:
            refusal = result.refusal
            raise ApiError(400, refusal.message, param=refusal.param, code=refusal.code)
        return result

    def _on_done(self, exchange: asyncio.Task[Result]) -> None:
        self._exchanges.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # whoever waited has it

    async def _exchange(self, task: bytes, tokenizer: ModelSpec | None, turn: Turn) -> Result:
        """In the turn that the caller has taken."""
        try:
            try:
                return await self._exchange_once(task, tokenizer)
            except _SharedMemoryError:
                return await self._exchange_once(task, tokenizer, is_new=True)
        finally:
            turn.end()

    async def _exchange_once(self, task: bytes, tokenizer: ModelSpec | None, is_new: bool = False) -> Result:
        process = None
        reason = "cancelled"
        try:
            async with asyncio.timeout(self._settings.text_timeout_s + START_MARGIN_S):
                while process is None or not process.is_alive:
                    process = (
                        self._idle.pop() if self._idle and not is_new else await _TextProcess.start(self._settings)
                    )
                result = await process.exchange(task)
            if tokenizer is not None:
                process.tokenizers.add(tokenizer)
            self._idle.append(process)
            process = None
            return result
        except TimeoutError:
            reason = "time"
            raise _KilledError(reason) from None
        except _KilledError as error:
            reason = str(error)
            if reason == "memory" and process is not None and process.tokenizers - {tokenizer}:
                raise _SharedMemoryError(reason) from None
            raise
        finally:
            if process is not None:
                self._metrics.killed_text_processes.labels(reason).inc()
                await process.end()

    async def close(self) -> None:
        for exchange in self._exchanges:
            exchange.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._idle))


def _broken(reason: str, retry_after_s: float) -> ApiError:
    return ApiError(
        503,
        reason,
        type="service_unavailable",
        param="model",
        code="chat_template_failed",
        retry_after_s=retry_after_s,
    )
