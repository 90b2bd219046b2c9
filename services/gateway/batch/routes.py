"""The Batch API: create, retrieve, list, cancel, delete. What happens to a batch is `service`'s."""

from __future__ import annotations

import time
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.batch.file_routes import listed, page_of
from services.gateway.batch.state import advance, is_terminal, window_s
from services.gateway.context import GatewayContext
from services.gateway.http.bodies import read_message
from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.parsing import whole_number_of
from services.gateway.openai.replies import (
    BatchError,
    BatchErrors,
    BatchInputDetails,
    BatchList,
    BatchObject,
    BatchOutputDetails,
    BatchRequestCounts,
    BatchUsage,
    DeletedBatch,
)
from services.gateway.openai.schemas import CreateBatchRequest
from services.gateway.requests.other_routes import json_response
from shared.messages.batches import BatchRecord

DEFAULT_BATCHES_LISTED, MAX_BATCHES_LISTED = 20, 100

_CREATE = msgspec.json.Decoder(CreateBatchRequest)


async def create_batch(context: GatewayContext, request: Request) -> Response:
    """Its lines run as offline work, in what interactive requests leave free."""
    tenant = context.admission.authenticate(request.headers).tenant
    message: CreateBatchRequest = await read_message(request, _CREATE, context.bodies)
    window = window_s(message.completion_window)
    if window is None:
        raise invalid("completion_window", "'completion_window' is a time such as 24h, 10m or 1h30m, at most 30 days.")
    try:
        file = await context.files.get(message.input_file_id, tenant)
    except ApiError as error:
        error.param = "input_file_id"
        raise
    if file.purpose != "batch":
        raise invalid("input_file_id", f"The purpose of '{file.file_id}' is {file.purpose!r}, not 'batch'.")
    now_s = time.time()
    expiry = message.output_expires_after
    record = BatchRecord(
        batch_id=f"batch_{uuid.uuid4().hex}",
        tenant=tenant,
        endpoint=message.endpoint,
        input_file_id=file.file_id,
        completion_window=message.completion_window,
        deadline_s=now_s + window,
        status="validating",
        created_s=now_s,
        metadata=message.metadata or {},
        output_expires_after_s=None if expiry is None else expiry.seconds,
    )
    await context.batches.create(record)
    return json_response(batch_object(record))


async def get_batch(context: GatewayContext, request: Request) -> Response:
    return json_response(batch_object(await _batch(context, request)))


async def _batch(context: GatewayContext, request: Request) -> BatchRecord:
    tenant = context.admission.authenticate(request.headers).tenant
    return await context.batches.get(request.path_params["batch_id"], tenant)


async def list_batches(context: GatewayContext, request: Request) -> Response:
    """The newest first."""
    tenant = context.admission.authenticate(request.headers).tenant
    limit = whole_number_of(request.query_params, "limit", DEFAULT_BATCHES_LISTED, 1, MAX_BATCHES_LISTED)
    records = await context.batches.all_of(tenant)
    page, has_more = page_of(records, lambda record: record.batch_id, request.query_params.get("after"), limit)
    return json_response(BatchList(*listed([batch_object(record) for record in page], has_more)))


async def cancel_batch(context: GatewayContext, request: Request) -> Response:
    """What is running ends within seconds; what is finished is kept in the output file."""
    return json_response(batch_object(await cancelled(context, await _batch(context, request), time.time())))


async def cancelled(context: GatewayContext, record: BatchRecord, now_s: float) -> BatchRecord:
    """The record once it is being cancelled. Raises `ApiError` 409 where it is over."""
    record = await context.batches.change(record.batch_id, lambda r: advance(r, "cancelling", now_s)) or record
    if record.status not in ("cancelling", "cancelled"):
        raise ApiError(409, f"A batch that is {record.status} cannot be cancelled.", param="batch_id", code="conflict")
    return record


async def delete_batch(context: GatewayContext, request: Request) -> Response:
    """Not OpenAI's: removes the record of a batch that is over. Its files stay until they are deleted or expire."""
    record = await _batch(context, request)
    if not is_terminal(record):
        message = f"A batch that is {record.status} cannot be deleted: cancel it first."
        raise ApiError(409, message, param="batch_id", code="conflict")
    await context.batches.delete(record.batch_id)
    return json_response(DeletedBatch(record.batch_id))


def batch_object(record: BatchRecord) -> BatchObject:
    def at(status: str) -> int | None:
        return int(record.status_s[status]) if status in record.status_s else None

    problems = [BatchError(each.code, each.message, each.line, each.param) for each in record.errors]
    finish_s = record.predicted_finish_s
    return BatchObject(
        id=record.batch_id,
        object="batch",
        endpoint=record.endpoint,
        model=record.model or None,
        errors=BatchErrors("list", problems) if problems else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.status,  # type: ignore[arg-type]
        output_file_id=record.output_file_id or None,
        error_file_id=record.error_file_id or None,
        created_at=int(record.created_s),
        in_progress_at=at("in_progress"),
        expires_at=int(record.deadline_s),
        finalizing_at=at("finalizing"),
        completed_at=at("completed"),
        failed_at=at("failed"),
        expired_at=at("expired") if record.status == "expired" else None,
        cancelling_at=at("cancelling"),
        cancelled_at=at("cancelled"),
        request_counts=BatchRequestCounts(record.num_total, record.num_completed, record.num_failed),
        usage=BatchUsage(
            record.input_tokens,
            BatchInputDetails(record.cached_tokens),
            record.output_tokens,
            BatchOutputDetails(0),
            record.input_tokens + record.output_tokens,
        ),
        metadata=record.metadata or None,
        waiting_for=record.waiting_for,
        predicted_finish_at=None if finish_s is None else int(finish_s),
    )
