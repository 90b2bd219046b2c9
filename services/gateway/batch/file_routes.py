"""The Files API: upload, list, retrieve, content, delete."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from services.gateway.batch.files import DEFAULT_EXPIRY_S, new_file_id
from services.gateway.batch.uploads import Upload, receive_upload
from services.gateway.context import GatewayContext
from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.parsing import whole_number_of
from services.gateway.openai.replies import DeletedFile, FileList, FileObject
from services.gateway.requests.other_routes import json_response
from shared.messages.batches import StoredFile

T = TypeVar("T")

PURPOSES = ("batch", "assistants", "evals", "fine-tune", "user_data", "vision")
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86400
MAX_FILES_LISTED = 10_000


async def upload_file(context: GatewayContext, request: Request) -> Response:
    """Streamed to storage; with purpose=batch, a file of one request a line (JSON)."""
    tenant = context.admission.authenticate(request.headers).tenant
    length = request.headers.get("content-length", "")
    # One without a length counts as the largest there may be.
    num_bytes = int(length) if re.fullmatch("[0-9]{1,15}", length) else context.settings.max_file_bytes
    num_bytes = min(num_bytes, context.settings.max_file_bytes)
    await context.files.check_room(num_bytes)
    async with context.files.share_of(tenant, num_bytes, context.settings.max_key_file_bytes):
        file_id = new_file_id()
        writer = await context.files.writer(file_id)
        upload = await receive_upload(request, writer, context.settings.max_file_bytes, _check)
        file = _stored(file_id, upload, tenant, time.time())
        await context.files.register(file)
    return json_response(file_object(file))


def _check(upload: Upload) -> None:
    if upload.filename is None:
        raise invalid("file", "The form has no file (field 'file', with a file name).", "missing_field")
    if (purpose := upload.fields.get("purpose")) not in PURPOSES:
        raise invalid("purpose", f"'purpose' is {purpose!r}; it may be {', '.join(PURPOSES)}.")
    _expiry_s(upload.fields)


def _expiry_s(fields: Mapping[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return DEFAULT_EXPIRY_S if fields["purpose"] == "batch" else None
    if anchor != "created_at":
        raise invalid("expires_after.anchor", "'expires_after[anchor]' may only be created_at.")
    if not re.fullmatch(r"[0-9]{1,9}", seconds or "") or not MIN_EXPIRY_S <= int(seconds or 0) <= MAX_EXPIRY_S:
        limits = f"from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}"
        raise invalid("expires_after.seconds", f"'expires_after[seconds]' must be a whole number {limits}.")
    return int(seconds or 0)


def _stored(file_id: str, upload: Upload, tenant: str, now_s: float) -> StoredFile:
    expiry_s = _expiry_s(upload.fields)
    return StoredFile(
        file_id=file_id,
        filename=upload.filename or "",
        purpose=upload.fields["purpose"],
        num_bytes=upload.num_bytes,
        created_s=now_s,
        expires_s=None if expiry_s is None else now_s + expiry_s,
        tenant=tenant,
    )


def file_object(file: StoredFile) -> FileObject:
    expires_at = None if file.expires_s is None else int(file.expires_s)
    return FileObject(
        id=file.file_id,
        object="file",
        bytes=file.num_bytes,
        created_at=int(file.created_s),
        expires_at=expires_at,
        filename=file.filename,
        purpose=file.purpose,
        status="processed",
    )


async def list_files(context: GatewayContext, request: Request) -> Response:
    """The newest first, unless order=asc."""
    tenant = context.admission.authenticate(request.headers).tenant
    query = request.query_params
    limit = whole_number_of(query, "limit", MAX_FILES_LISTED, 1, MAX_FILES_LISTED)
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise invalid("order", "'order' may be asc or desc.")
    files = await context.files.all_of(tenant)
    if (purpose := query.get("purpose")) is not None:
        files = [file for file in files if file.purpose == purpose]
    if order == "asc":
        files.reverse()
    page, has_more = page_of(files, lambda file: file.file_id, query.get("after"), limit)
    return json_response(FileList(*listed([file_object(file) for file in page], has_more)))


def page_of(items: list[T], id_of: Callable[[T], str], after: str | None, limit: int) -> tuple[list[T], bool]:
    """Up to `limit` items behind the one with the id `after`, and whether more follow."""
    start = 0
    if after:
        ids = [id_of(item) for item in items]
        if after not in ids:
            raise invalid("after", f"'after' names nothing in this list: '{after[:100]}'.")
        start = ids.index(after) + 1
    return items[start : start + limit], len(items) > start + limit


def listed(objects: list[Any], has_more: bool) -> tuple[Any, ...]:
    """The fields of a list's reply."""
    return "list", objects, objects[0].id if objects else None, objects[-1].id if objects else None, has_more


async def _file(context: GatewayContext, request: Request) -> StoredFile:
    tenant = context.admission.authenticate(request.headers).tenant
    return await context.files.get(request.path_params["file_id"], tenant)


async def get_file(context: GatewayContext, request: Request) -> Response:
    return json_response(file_object(await _file(context, request)))


async def get_content(context: GatewayContext, request: Request) -> Response:
    file = await _file(context, request)
    chunks = await context.files.read(file.file_id)
    if chunks is None:
        await _file(context, request)  # it may have been deleted just now
        message = f"The content of file '{file.file_id}' was stored and is lost: JetStream's store was damaged."
        raise ApiError(500, message, type="server_error", param="id", code="file_lost")
    # The first chunk decides about the status: what fails later can only break the connection off.
    first = await anext(chunks, b"")

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    headers = {"content-length": str(file.num_bytes)}
    return StreamingResponse(body(), headers=headers, media_type="application/octet-stream")


async def delete_file(context: GatewayContext, request: Request) -> Response:
    """A batch that is running reads its input to the end all the same."""
    file = await _file(context, request)
    await context.files.delete(file)
    return json_response(DeletedFile(file.file_id, "file", True))
