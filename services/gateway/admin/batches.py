"""The operator's view of batches: a batch of any tenant with the errors of its first failed lines, and its cancellation."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.admin.audit import audited
from services.gateway.admin.endpoints import authenticate_operator
from services.gateway.batch.routes import batch_object, cancelled
from services.gateway.context import GatewayContext
from services.gateway.openai.replies import BatchObject
from services.gateway.requests.other_routes import json_response
from shared.messages.batches import BatchRecord

MAX_FAILURES = 20
MAX_FAILURE_BYTES = 64 << 10
"""Bytes of the error file that are read for them."""


class BatchDetail(msgspec.Struct, kw_only=True):
    tenant: str
    """Tenant that it belongs to; empty: none."""
    created_s: float
    """Unix time; likewise those of `status_s`."""
    status_s: dict[str, float]
    """Time at which each status was entered."""
    batch: BatchObject
    failures: list[str]
    """First lines of its error file; empty until that is written."""


async def show_batch(context: GatewayContext, request: Request) -> Response:
    """Shows a batch of any tenant."""
    authenticate_operator(context, request)
    return json_response(await _detail(context, await context.batches.get(request.path_params["batch_id"], None)))


@audited
async def cancel_batch(context: GatewayContext, request: Request) -> Response:
    """Cancels a batch of any tenant: what is running ends within seconds; what is finished is kept in the output file."""
    authenticate_operator(context, request)
    record = await context.batches.get(request.path_params["batch_id"], None)
    return json_response(await _detail(context, await cancelled(context, record, time.time())))


async def _detail(context: GatewayContext, record: BatchRecord) -> BatchDetail:
    return BatchDetail(
        tenant=record.tenant,
        created_s=record.created_s,
        status_s=record.status_s,
        batch=batch_object(record),
        failures=await _failures(context, record.error_file_id),
    )


async def _failures(context: GatewayContext, file_id: str) -> list[str]:
    content = await context.files.read(file_id) if file_id else None
    if content is None:
        return []
    begun = b""
    async for chunk in content:
        begun += chunk
        if len(begun) >= MAX_FAILURE_BYTES:
            break
    whole = begun[:MAX_FAILURE_BYTES].split(b"\n")[:-1]
    return [line.decode(errors="replace") for line in whole[:MAX_FAILURES]]
