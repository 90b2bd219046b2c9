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

from services.gateway.batch_input import InputError, InputLine, insist, read_lines
from services.gateway.batch_output import BatchOutput
from services.gateway.batch_state import (
    Attempts,
    LineBook,
    LinePlan,
    advance,
    conclude,
    expire,
    failed,
    has_expired,
    is_terminal,
    predicted_finish_s,
)
from services.gateway.batch_validation import ENDPOINTS, LineChecker, custom_id_of, read_line
from services.gateway.context import GatewayContext
from services.gateway.errors import ApiError, of_info
from services.gateway.grants import Account, Grants
from services.gateway.line_answering import LineFailure, answer_line, encode_line, refused_line
from shared.bus.interface import BusError
from shared.messages import BatchLineResult, BatchProblem, BatchRecord, ErrorCode, OfflineDemand

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 1.0
LINE_TIMEOUT_S = 3600.0
"""For one attempt at one line, which may be preempted for long."""
MAX_CONCURRENT_WRITES = 64
LINES_BETWEEN_TURNS = 200
"""Of validation, which leaves the event loop to others in between."""

_CODE_OF_STATUS = {408: ErrorCode.DEADLINE, 429: ErrorCode.OVERLOADED, 503: ErrorCode.UNAVAILABLE}
_NOT_RUN = {
    "batch_expired": "This line could not be run before the batch's completion window was over.",
    "batch_cancelled": "This line was not run because the batch was cancelled.",
}


class BatchRun:
    def __init__(self, context: GatewayContext, grants: Grants, record: BatchRecord) -> None:
        self._context = context
        self._grants = grants
        self._record = record
        self._output = BatchOutput(context.batches, context.files, record.batch_id)
        self._is_cancelled = asyncio.Event()
        self._book: LineBook
        self._span: Span

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
                problem = BatchProblem(error.code, str(error), error.line, "input_file_id")
                await self._change(lambda r: failed(r, [problem], time.time()))
            self._span.set_attribute("tideway.batch_status", self._record.status)
        logger.info(
            "%s: %s, %d lines answered, %d not",
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
        """What the lines are; None: the batch has ended in here."""
        is_new = self._record.status == "validating"
        # Of a batch that was begun all lines are good; those of a model that was removed since fail one by one.
        has_model = self._context.catalog.has if is_new else lambda model: True
        checker = LineChecker(self._record.endpoint, self._context.settings.max_batch_lines, has_model)
        if is_new or "in_progress" in self._record.status_s:
            async for line in self._lines():
                checker.take(line.number, line.raw)
                if is_new and (checker.is_hopeless or self._is_cancelled.is_set()):
                    break
                if line.index % LINES_BETWEEN_TURNS == 0:
                    await asyncio.sleep(0)
            plan = checker.finish()
            if not is_new:
                return plan
            if checker.problems and not self._is_cancelled.is_set():
                await self._change(lambda r: failed(r, checker.problems, time.time()))
            elif not self._is_cancelled.is_set():
                await self._change(lambda r: _begun(r, plan, time.time()))
                if self._record.status == "in_progress":
                    return plan
        # Cancelled before it was begun.
        await self._change(lambda r: conclude(r, "", "", time.time()))
        return None

    def _lines(self) -> AsyncIterator[InputLine]:
        return read_lines(self._context.files, self._record.input_file_id, self._context.settings.max_body_bytes)

    # -------------------------------------------------------------------------------------------------- running

    async def _run(self, plan: LinePlan) -> None:
        self._book = book = LineBook(plan)
        await self._recall()
        if self._record.status == "in_progress" or (
            self._record.status == "finalizing" and not has_expired(self._record)
        ):
            await self._answer_all()
            step = expire if book.num_open else _finalize
            if not (book.num_open and self._is_cancelled.is_set()):
                await self._change(lambda r: book.counted(step(r, time.time())))
        if book.num_open:
            await self._fill("batch_cancelled" if self._is_cancelled.is_set() else "batch_expired")
        files = await self._assemble()
        if files is not None:
            await self._change(lambda r: book.counted(conclude(r, *files, time.time())))
        await insist(lambda: self._context.batches.results.purge(self._record.batch_id))

    async def _recall(self) -> None:
        """Which lines are done, from their results."""

        async def read() -> None:
            async for index, result in self._output.read(len(self._book)):
                if result is not None:
                    self._book.note(index, result)

        await insist(read)

    async def _assemble(self) -> tuple[str, str] | None:
        """Ids of the output and error file; None: another gateway has concluded the batch."""

        async def assemble() -> tuple[str, str] | None:
            try:
                return await self._output.assemble(self._record, len(self._book))
            except BusError as error:
                current = await self._context.batches.record(self._record.batch_id)
                if error.code is ErrorCode.CONFLICT and (current is None or is_terminal(current)):
                    return None
                raise

        return await insist(assemble)

    async def _answer_all(self) -> None:
        """Returns when all lines are done, the window is over, or the batch is cancelled; then nothing is running."""
        remaining_s = self._record.deadline_s - time.time()
        if remaining_s <= 0 or self._is_cancelled.is_set() or self._book.num_open == 0:
            return
        progress = asyncio.create_task(self._show_progress())
        cancelled = asyncio.create_task(self._is_cancelled.wait())
        feeding = asyncio.gather(*(self._feed(model) for model in range(len(self._book.plan.models))))
        try:
            ends: set[asyncio.Future[Any]] = {feeding, cancelled}
            await asyncio.wait(ends, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                feeding.result()
        finally:
            for task in (feeding, progress, cancelled):
                task.cancel()
            await asyncio.gather(feeding, progress, cancelled, return_exceptions=True)

    async def _feed(self, model: int) -> None:
        """The open lines of one model, a bounded number at once."""
        book, name = self._book, self._book.plan.models[model]
        account = self._grants.open(self._record.batch_id, name, lambda wanted: self._demand(model, wanted))
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
            self._grants.close(self._record.batch_id, name)

    def _demand(self, model: int, wanted_tokens: int) -> OfflineDemand:
        record = self._record
        return OfflineDemand(
            record.batch_id,
            record.tenant,
            self._book.plan.models[model],
            wanted_tokens,
            self._book.unfinished_tokens(model),
            max(0.0, record.deadline_s - time.time()),
        )

    async def _answer(self, line: InputLine, account: Account) -> None:
        custom_id, attempts = custom_id_of(line.raw), Attempts()
        while True:
            await account.take(self._book.plan.tokens[line.index])
            try:
                result = await self._attempt(custom_id, line.raw)
                break
            except ApiError as error:
                failure, code = error, _CODE_OF_STATUS.get(error.status, ErrorCode.BAD_REQUEST)
            except BusError as error:
                failure, code = of_info(error.info), error.code
            except Exception:
                logger.exception("%s: line %d", self._record.batch_id, line.number)
                failure = ApiError(500, "Internal error.", type="server_error", code="internal_error")
                code = ErrorCode.INTERNAL
            backoff_s = attempts.backoff_s(code, random.random())
            if backoff_s is None:
                result = refused_line(custom_id, failure)
                break
            self._context.metrics.batch_retries.labels(code.value).inc()
            logger.info("%s: line %d again in %.1f s: %s", self._record.batch_id, line.number, backoff_s, failure)
            await asyncio.sleep(backoff_s)
        await self._keep(line.index, result, "completed" if result.is_success else "failed")

    async def _attempt(self, custom_id: str, raw: bytes) -> BatchLineResult:
        endpoint = self._record.endpoint
        _, body = read_line(raw, endpoint)
        timeout_s = min(LINE_TIMEOUT_S, max(0.001, self._record.deadline_s - time.time()))
        span = self._span.get_span_context()
        return await answer_line(self._context, custom_id, body, ENDPOINTS[endpoint][0], timeout_s, span)

    async def _keep(self, index: int, result: BatchLineResult, label: str) -> None:
        kept = await insist(lambda: self._output.keep(index, result))
        if self._book.note(index, kept):
            self._context.metrics.batch_lines.labels(label).inc()

    async def _fill(self, code: str) -> None:
        """Gives every open line the result that it was not run."""
        slots = asyncio.Semaphore(MAX_CONCURRENT_WRITES)
        async with asyncio.TaskGroup() as group:
            async for line in self._lines():
                if not self._book.is_done(line.index):
                    failure = LineFailure(code, _NOT_RUN[code])
                    result = encode_line(custom_id_of(line.raw), None, failure)
                    await slots.acquire()
                    task = group.create_task(self._keep(line.index, result, code.removeprefix("batch_")))
                    task.add_done_callback(lambda _: slots.release())

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            try:
                record = await self._context.batches.change(self._record.batch_id, self._with_progress)
            except BusError as error:
                logger.info("%s: progress is not shown: %s", self._record.batch_id, error)
                continue
            if record is not None:
                self._record = record
                self.on_record(record)

    def _with_progress(self, record: BatchRecord) -> BatchRecord:
        finish_s = predicted_finish_s(self._book, self._grants.tokens_per_s, time.time())
        return msgspec.structs.replace(self._book.counted(record), predicted_finish_s=finish_s)


def _begun(record: BatchRecord, plan: LinePlan, now_s: float) -> BatchRecord:
    changed = advance(record, "in_progress", now_s)
    return msgspec.structs.replace(changed, num_total=len(plan.tokens), model=plan.models[0])


def _finalize(record: BatchRecord, now_s: float) -> BatchRecord:
    return advance(record, "finalizing", now_s)
