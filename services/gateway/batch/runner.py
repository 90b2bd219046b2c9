"""One batch, run by the gateway that owns it: validate, answer every line, put the files together.

A run may end at any point (lost lease, death of the process) and be begun again elsewhere from what lies in JetStream: the
record says where the batch stands, the results which lines are done. Only answers in the making are lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import Span

from services.gateway.access.admission import Key, PromptCharge, name_of
from services.gateway.batch.grants import Grants, take
from services.gateway.batch.line_answering import LineFailure, answer_line, refused_line
from services.gateway.batch.output import BatchOutput
from services.gateway.batch.reading import InputError, InputLine, insist, read_lines
from services.gateway.batch.records import ResultsFull
from services.gateway.batch.state import (
    MAX_LOAD_FAILURES,
    Attempts,
    BatchFiles,
    LineBook,
    LinePlan,
    Pace,
    advance,
    conclude,
    expire,
    failed,
    has_expired,
    is_terminal,
    predicted_finish_s,
)
from services.gateway.batch.validation import Body, LineChecker, custom_id_of, read_line
from services.gateway.context import GatewayContext
from services.gateway.http.errors import ApiError, of_info
from shared.bus.interface import BusError
from shared.messages.batches import (
    BatchLineResult,
    BatchProblem,
    BatchRecord,
    BatchWait,
    OfflineDemand,
)
from shared.messages.requests import ErrorCode
from shared.runtime.tasks import set_within
from shared.scheduling.batch_feed import Account, Ticket

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 1.0
LINE_TIMEOUT_S = 6 * 3600.0
"""Time for one attempt at one line, which may be preempted for long; after it the line starts over."""
ROOM_INTERVAL_S = 1.0
FULL_PATIENCE_S = 900.0
"""Time for the batch that was begun first, in which no result of it could be stored: longer than what others leave stays."""
FIRST_ASSEMBLY_BACKOFF_S, MAX_ASSEMBLY_BACKOFF_S = 0.5, 30.0
LINES_BETWEEN_TURNS = 200
"""Lines of validation between two turns, in which it leaves the event loop to others in between."""

_NOT_OF_THE_LINE = frozenset(
    {ErrorCode.INTERNAL, ErrorCode.UNKNOWN_MODEL, ErrorCode.MODEL_FAILED, ErrorCode.STORAGE_FULL, ErrorCode.UNAVAILABLE}
)
"""Reasons that may be false while the bus is not whole: they do not count then."""
_CODE_OF_STATUS = {408: ErrorCode.DEADLINE, 429: ErrorCode.OVERLOADED, 503: ErrorCode.UNAVAILABLE}
_EXPIRED = LineFailure("batch_expired", "This line could not be run before the batch's completion window was over.")
_INPUT_LOST = LineFailure("input_lost", "This line was not run because the batch's input file is lost.")
_STORE_FULL = "The server's storage for answers is full; what could be stored is in the output."
_WAITS_FOR_ROOM = BatchWait("storage", "The server's storage for answers has no room for its results now.")
_WAITS_FOR_SCHEDULER = BatchWait("scheduler", "No scheduler answers that could grant its lines.")
_FULL = LineFailure("storage_full", "This line has no answer because the server's storage for answers is full.")


class _StoreFull(Exception):
    """This batch cannot go on, nor make room by waiting."""


class BatchRun:
    def __init__(self, context: GatewayContext, grants: Grants, record: BatchRecord) -> None:
        self._context = context
        self._grants = grants
        self._record = record
        self._output = BatchOutput(context.batches, context.files, record.batch_id)
        self._is_cancelled = asyncio.Event()
        self._stopped: tuple[BatchProblem, LineFailure] | None = None
        """Why a batch that was begun cannot go on, and what that means for its open lines."""
        self._pace = Pace()
        self._accounts: dict[str, Account] = {}
        """By model."""
        self._progress_at = context.bus.now()
        self._full_at: float | None = None
        """Since when nothing could be stored."""
        self._num_without_tokens = 0
        """Lines that wait for tokens per minute of their key."""
        self._book: LineBook
        self._span: Span

    def idle_s(self) -> float:
        """How long no line was finished, and no token of one came."""
        return self._context.bus.now() - self._progress_at

    def on_record(self, record: BatchRecord) -> None:
        """Somebody wrote the record."""
        if record.status == "cancelling":
            self._is_cancelled.set()

    async def run(self) -> None:
        """Returns when the batch is in a terminal state."""
        record = self._record
        logger.info("%s: begun as %s", record.batch_id, record.status)
        self.on_record(record)
        with self._context.telemetry.tracer.start_as_current_span(
            f"batch {record.endpoint}", Context(), attributes={"tideway.batch_id": record.batch_id}
        ) as self._span:
            try:
                plan = await self._plan()
                if plan is not None:
                    await self._run(plan)
            except InputError as error:
                problem = _problem(error)
                await self._change(lambda r: failed(r, [problem], time.time()))
            self._span.set_attribute("tideway.batch_status", self._record.status)
        logger.info(
            "%s: %s, %d lines answered, %d failed",
            record.batch_id,
            self._record.status,
            self._record.num_completed,
            self._record.num_failed,
        )

    async def _change(self, change: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
        record = await insist(lambda: self._context.batches.change(self._record.batch_id, change))
        if record is not None:
            self._record = record
            self.on_record(record)
        return self._record

    # ----------------------------------------------------------------------------------------------- validating

    async def _plan(self) -> LinePlan | None:
        """What the lines are; None: the batch has ended in here. Raises `InputError` for a batch that was not begun."""
        if self._record.status == "validating":
            return await self._validate()
        if "in_progress" not in self._record.status_s:  # cancelled before it was begun
            await self._change(lambda r: conclude(r, BatchFiles(), time.time()))
            return None
        try:
            # All its lines were found good; those of a model that was removed since fail one by one.
            return (await self._check(self._model_of)).finish()
        except InputError as error:
            if not self._record.num_total:
                raise
            self._stopped = _problem(error), _INPUT_LOST
            return LinePlan.of_lost_input(self._record)

    async def _validate(self) -> LinePlan | None:
        while True:
            await self._until_models_are_seen()
            checker = await self._check(self._known_model_of)
            if not (checker.problems and self._context.catalog.problem):
                break
        plan = checker.finish()
        if checker.problems and not self._is_cancelled.is_set():
            await self._change(lambda r: failed(r, checker.problems, time.time()))
            return None
        await self._wait_for_room(plan)
        if not self._is_cancelled.is_set():
            await self._change(lambda r: _begun(r, plan, time.time()))
            if self._record.status == "in_progress":
                return plan
        await self._change(lambda r: conclude(r, BatchFiles(), time.time()))
        return None

    async def _until_models_are_seen(self) -> None:
        """Or the batch is cancelled or its window over: a line's model may be there, though it is not known here."""
        catalog, is_told = self._context.catalog, False
        while (why := catalog.problem) and not self._is_cancelled.is_set() and time.time() < self._record.deadline_s:
            if not is_told:
                logger.warning("%s waits: %s", self._record.batch_id, why)
            is_told = True
            await set_within(self._is_cancelled, ROOM_INTERVAL_S)

    def _model_of(self, body: Body, custom_id: str) -> str:
        return self._context.routes.resolve(body.model, self._record.tenant, body.user, custom_id).model

    def _known_model_of(self, body: Body, custom_id: str) -> str | None:
        model = self._model_of(body, custom_id)
        return None if self._context.catalog.is_gone(model) else model

    async def _check(self, model_of: Callable[[Body, str], str | None]) -> LineChecker:
        """Reads the lines, to their end unless the batch is hopeless or was cancelled before it was begun."""
        checker = LineChecker(self._record.endpoint, self._context.settings.max_batch_lines, model_of)
        is_new = self._record.status == "validating"
        async for line in self._lines():
            checker.take(line.number, line.raw)
            if is_new and (checker.is_hopeless or self._is_cancelled.is_set()):
                break
            if line.index % LINES_BETWEEN_TURNS == 0:
                await asyncio.sleep(0)
        return checker

    async def _wait_for_room(self, plan: LinePlan) -> None:
        """Returns when there is room for the results, the batch is cancelled or its window over. Raises `InputError`."""
        is_told, reserve = False, self._context.batches.reserve
        while not self._is_cancelled.is_set() and time.time() < self._record.deadline_s:
            if await insist(lambda: reserve(self._record.batch_id, len(plan.tokens), sum(plan.tokens))):
                return
            if not is_told:
                logger.warning("%s waits until there is room for its results", self._record.batch_id)
                await self._change(lambda record: _waiting(record, "validating", _WAITS_FOR_ROOM))
            is_told = True
            await set_within(self._is_cancelled, ROOM_INTERVAL_S * (0.5 + random.random()))

    def _lines(self) -> AsyncIterator[InputLine]:
        return read_lines(self._context.files, self._record.input_file_id, self._context.settings.max_body_bytes)

    # -------------------------------------------------------------------------------------------------- running

    async def _run(self, plan: LinePlan) -> None:
        self._book = book = LineBook(plan)
        await self._recall()
        if self._stopped is None and self._must_answer:
            try:
                await self._answer_all()
            except InputError as error:
                self._stopped = _problem(error), _INPUT_LOST
            except _StoreFull:
                self._stopped = BatchProblem("storage_full", _STORE_FULL, None, None), _FULL
        if self._must_answer and (self._stopped is None or not book.num_open):
            step = expire if book.num_open else _finalize
            if not (book.num_open and self._is_cancelled.is_set()):
                await self._change(lambda r: book.counted(step(r, time.time())))
        not_run, problem = None, None
        is_cancelled = self._is_cancelled.is_set() and book.num_open > 0
        if book.num_open and not is_cancelled:
            not_run = _EXPIRED
            if self._must_answer and self._stopped is not None:
                problem, not_run = self._stopped
        files = await self._assemble(not_run, is_cancelled=is_cancelled)
        if files is not None:
            await self._change(lambda r: _ended(book.counted(r), files, problem, time.time()))
            why = "cancelled" if not_run is None else not_run.code.removeprefix("batch_")
            if book.num_open:
                self._context.metrics.batch_lines.labels(why).inc(book.num_open)
        await insist(lambda: self._context.batches.results.purge(self._record.batch_id))

    @property
    def _must_answer(self) -> bool:
        """Whether lines without an answer should still get one."""
        status = self._record.status
        return status == "in_progress" or (status == "finalizing" and not has_expired(self._record))

    async def _recall(self) -> None:
        """Which lines are done, from their results."""

        async def read() -> None:
            async for index, result in self._output.read(len(self._book)):
                if result is not None:
                    self._book.note(index, result)

        await insist(read)

    async def _assemble(self, not_run: LineFailure | None, *, is_cancelled: bool) -> BatchFiles | None:
        """None: another gateway has concluded the batch."""
        backoff_s = FIRST_ASSEMBLY_BACKOFF_S

        async def assemble() -> BatchFiles | None:
            try:
                return await self._output.assemble(
                    self._record, len(self._book), self._lines(), not_run, is_cancelled=is_cancelled
                )
            except BusError as error:
                current = await self._context.batches.record(self._record.batch_id)
                if error.code is ErrorCode.CONFLICT and (current is None or is_terminal(current)):
                    return None
                if error.code in (
                    ErrorCode.OVERLOADED,
                    ErrorCode.STORAGE_FULL,
                ):  # all that was written is written again
                    nonlocal backoff_s
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(MAX_ASSEMBLY_BACKOFF_S, 2 * backoff_s)
                raise

        return await insist(assemble)

    async def _answer_all(self) -> None:
        """Returns when all lines are done, the window is over, or the batch is cancelled; then nothing is running."""
        if self._record.deadline_s <= time.time() or self._is_cancelled.is_set() or self._book.num_open == 0:
            return
        progress = asyncio.create_task(self._show_progress())
        cancelled = asyncio.create_task(self._is_cancelled.wait())
        expired = asyncio.create_task(self._until_expired())
        feeding = asyncio.gather(*(self._feed(model) for model in range(len(self._book.plan.models))))
        try:
            ends: set[asyncio.Future[Any]] = {feeding, cancelled, expired}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                feeding.result()
        finally:
            for task in (feeding, progress, cancelled, expired):
                task.cancel()
            await asyncio.gather(feeding, progress, cancelled, expired, return_exceptions=True)

    async def _until_expired(self) -> None:
        """The window is over by the wall clock, which may be set while it waits."""
        while (left_s := self._record.deadline_s - time.time()) > 0:
            await asyncio.sleep(min(left_s, PROGRESS_INTERVAL_S))

    async def _feed(self, model: int) -> None:
        """The open lines of one model, a bounded number at once."""
        book, name = self._book, self._book.plan.models[model]
        account = self._grants.open(self._record.batch_id, name, lambda wanted: self._demand(model, wanted))
        account.set_free(self._context.catalog.is_gone(name))
        self._accounts[name] = account
        slots = asyncio.Semaphore(self._context.settings.batch_lines_in_flight)
        try:
            async with asyncio.TaskGroup() as group:
                async for line in self._lines():
                    if book.is_done(line.index) or book.plan.model_of[line.index] != model:
                        continue
                    await slots.acquire()
                    group.create_task(self._answer(line, account)).add_done_callback(lambda _: slots.release())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._grants.feed.close(self._record.batch_id, name)
            del self._accounts[name]

    def _demand(self, model: int, wanted_tokens: int) -> OfflineDemand:
        record = self._record
        return OfflineDemand(
            record.batch_id,
            record.tenant,
            self._context.catalog.base(self._book.plan.models[model]),
            wanted_tokens,
            self._book.unfinished_tokens(model),
            max(0.0, record.deadline_s - time.time()),
            self._context.admission.tenants.weight(name_of(record.tenant)),
        )

    async def _answer(self, line: InputLine, account: Account) -> None:
        custom_id, attempts, charge = custom_id_of(line.raw), Attempts(), PromptCharge(self._context.admission)
        while True:
            while (wait_s := await charge.wait_s(self._key(), self._context.bus.now())) > 0:
                self._num_without_tokens += 1
                try:
                    await asyncio.sleep(wait_s)
                finally:
                    self._num_without_tokens -= 1
            ticket = await take(account, self._book.plan.tokens[line.index])
            limit = None
            try:
                result = await self._attempt(custom_id, line.raw, ticket, charge)
                break
            except ApiError as error:
                failure, code = error, _CODE_OF_STATUS.get(error.status, ErrorCode.BAD_REQUEST)
                if code is ErrorCode.UNAVAILABLE:  # on the way to the scheduler only the tokenizer says so
                    limit = MAX_LOAD_FAILURES
            except BusError as error:
                failure, code = of_info(error.info), error.code
            except Exception:
                logger.exception("%s: line %d", self._record.batch_id, line.number)
                failure = ApiError(500, "Internal error.", type="server_error", code="internal_error")
                code = ErrorCode.INTERNAL
            finally:
                ticket.settle()
            if code in _NOT_OF_THE_LINE and self._context.bus.problems:
                code, limit = ErrorCode.UNAVAILABLE, None
            backoff_s = attempts.backoff_s(code, random.random(), limit)
            if backoff_s is None:
                result = refused_line(custom_id, failure)
                break
            self._context.metrics.batch_retries.labels(code.value).inc()
            logger.info("%s: line %d again in %.1f s: %s", self._record.batch_id, line.number, backoff_s, failure)
            await asyncio.sleep(backoff_s)
        kept = await insist(lambda: self._keep(line.index, result))
        if self._book.note(line.index, kept):
            self._progress_at = self._context.bus.now()
            self._context.metrics.batch_lines.labels("completed" if result.is_success else "failed").inc()

    async def _keep(self, index: int, result: BatchLineResult) -> BatchLineResult:
        """Raises `BusError`; `_StoreFull` where it is of no use to try again."""
        try:
            kept = await self._output.keep(index, result)
        except BusError as error:
            now = self._context.bus.now()
            if not isinstance(error, ResultsFull):
                self._full_at = None
            elif self._full_at is None:
                self._full_at = now
            elif now - self._full_at > FULL_PATIENCE_S:
                raise _StoreFull from error
            raise
        self._full_at = None
        return kept

    def _on_output(self, num_tokens: int, now: float) -> None:
        self._progress_at = self._context.bus.now()

    def _key(self) -> Key:
        return self._context.admission.key_of(self._record.tenant)

    async def _attempt(self, custom_id: str, raw: bytes, ticket: Ticket, charge: PromptCharge) -> BatchLineResult:
        line = read_line(raw, self._record.endpoint)
        timeout_s = min(LINE_TIMEOUT_S, max(0.001, self._record.deadline_s - time.time()))
        span = self._span.get_span_context()
        return await answer_line(
            self._context,
            line,
            self._record.endpoint,
            timeout_s,
            span,
            self._key(),
            charge,
            ticket.settle,
            self._on_output,
        )

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            try:
                self._pace.sample(self._book, time.time())
                for model, account in self._accounts.items():
                    account.set_free(self._context.catalog.is_gone(model))
                record = await self._context.batches.change(self._record.batch_id, self._with_progress)
                if record is not None:
                    self._record = record
                    self.on_record(record)
            except BusError as error:
                logger.info("%s: progress is not shown: %s", self._record.batch_id, error)
            except Exception:
                logger.exception("%s: progress is not shown", self._record.batch_id)

    def _with_progress(self, record: BatchRecord) -> BatchRecord:
        shares = {
            model: self._grants.feed.share_per_s(self._context.catalog.base(model)) for model in self._book.plan.models
        }
        finish_s = predicted_finish_s(self._book, self._pace, shares, time.time())
        shown = msgspec.structs.replace(self._book.counted(record), predicted_finish_s=finish_s)
        return _waiting(shown, "in_progress", self._waits_for())

    def _waits_for(self) -> BatchWait | None:
        if self._full_at is not None:
            return _WAITS_FOR_ROOM
        if self._num_without_tokens and (limit := self._key().tokens_per_minute) is not None:
            message = f"The {limit:,} tokens per minute of its API key are used up; lines wait until some are left."
            return BatchWait("tokens_per_minute", message)
        is_wanting = any(account.wanted_tokens for account in self._accounts.values())
        return _WAITS_FOR_SCHEDULER if is_wanting and self._grants.feed.is_refused else None


def _problem(error: InputError) -> BatchProblem:
    return BatchProblem(error.code, str(error), error.line, "input_file_id")


def _waiting(record: BatchRecord, status: str, wait: BatchWait | None) -> BatchRecord:
    """What it waits for in this status; unchanged in another."""
    return msgspec.structs.replace(record, waiting_for=wait) if record.status == status else record


def _ended(record: BatchRecord, files: BatchFiles, problem: BatchProblem | None, now_s: float) -> BatchRecord:
    return conclude(record, files, now_s) if problem is None else failed(record, [problem], now_s, files)


def _begun(record: BatchRecord, plan: LinePlan, now_s: float) -> BatchRecord:
    changed = advance(record, "in_progress", now_s)
    return msgspec.structs.replace(changed, num_total=len(plan.tokens), model=plan.models[0])


def _finalize(record: BatchRecord, now_s: float) -> BatchRecord:
    return advance(record, "finalizing", now_s)
