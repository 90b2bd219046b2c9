"""Multipart uploads, written to the object store while they arrive: neither memory nor disk holds the whole file."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from services.gateway.batch.files import MAX_UPLOAD_S
from services.gateway.http.errors import ApiError, invalid
from shared.bus.interface import BusError, ObjectWriter

logger = logging.getLogger(__name__)

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 32
FORM_BYTES = 64 * 1024
"""Room for boundaries, headers and fields beside the file."""


# RFC 5987: filename*=UTF-8''na%C3%AFve.txt
_EXTENDED_FILENAME = re.compile(rb";\s*filename\*\s*=\s*(utf-8|iso-8859-1)'[^']*'([^;\s]+)", re.IGNORECASE)


def file_too_large(limit: int) -> ApiError:
    return ApiError(413, f"The file is larger than the limit of {limit} bytes.", param="file", code="file_too_large")


class Upload:
    """The form's text fields by name, and what is known of its file (None: it has none)."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.num_bytes = 0


class _Form:
    """Collects what the parser finds; `pending` are bytes of the file that are not written yet."""

    def __init__(self) -> None:
        self.upload = Upload()
        self.pending = bytearray()
        self.is_complete = False
        self._name = b""
        self._content = b""
        self._headers: dict[bytes, bytes] = {}
        self._field: str | None = None
        self._value = bytearray()
        self._in_file = False

    def callbacks(self) -> Any:
        names = ("part_begin", "header_field", "header_value", "header_end", "headers_finished", "part_data")
        return {f"on_{name}": getattr(self, f"_{name}") for name in (*names, "part_end", "end")}

    def _part_begin(self) -> None:
        self._headers = {}
        self._value.clear()
        self._field, self._in_file = None, False

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._name.lower()] = self._content
        self._name = self._content = b""

    def _headers_finished(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"")
        _, options = parse_options_header(disposition)
        if extended := _EXTENDED_FILENAME.search(disposition):
            options[b"filename"] = unquote(extended[2].decode("ascii", "replace"), extended[1].decode()).encode()
        name = options.get(b"name", b"").decode(errors="replace")
        if name == "file" and b"filename" in options:
            if self.upload.filename is not None:
                raise invalid("file", "The form has more than one file.")
            self._in_file = True
            filename = options[b"filename"].decode(errors="replace")[:512]
            self.upload.filename = "".join(c if c.isprintable() else "\ufffd" for c in filename)
        else:
            self._field = name
            if len(self.upload.fields) >= MAX_FIELDS:
                raise invalid(name[:100], f"The form has more than {MAX_FIELDS} fields.")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.pending += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise invalid(str(self._field)[:100], f"A field of the form is longer than {MAX_FIELD_BYTES} bytes.")

    def _part_end(self) -> None:
        if self._field is not None:
            self.upload.fields[self._field] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self.is_complete = True


async def receive_upload(
    request: Request, writer: ObjectWriter, max_bytes: int, check: Callable[[Upload], None]
) -> Upload:
    """Reads the whole form, writes its file and, if `check` raises nothing, commits it. Raises `ApiError` 400, 408, 413
    or 415, `BusError` or `ClientDisconnect`; then nothing is stored."""
    try:
        try:
            async with asyncio.timeout(MAX_UPLOAD_S):
                upload = await _receive(request, writer, max_bytes)
        except TimeoutError:
            message = f"The upload took longer than {MAX_UPLOAD_S:g} s."
            raise ApiError(408, message, type="timeout_error", code="deadline_exceeded") from None
        check(upload)
        await writer.commit()
        return upload
    except BaseException:
        try:
            await writer.abort()
        except BusError as error:
            logger.warning("chunks of an unfinished upload stay: %s", error)
        raise


async def _receive(request: Request, writer: ObjectWriter, max_bytes: int) -> Upload:
    media_type, options = parse_options_header(request.headers.get("content-type"))
    if media_type != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(
            415,
            "A file is uploaded as multipart/form-data with a boundary.",
            param="content-type",
            code="unsupported_media_type",
        )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes + FORM_BYTES:
        raise file_too_large(max_bytes)
    form = _Form()
    num_form_bytes = 0
    try:
        parser = MultipartParser(options[b"boundary"], form.callbacks())
        async for chunk in request.stream():
            if form.is_complete or not chunk:
                continue
            parser.write(chunk)
            form.upload.num_bytes += len(form.pending)
            num_form_bytes += len(chunk) - len(form.pending)
            if form.upload.num_bytes > max_bytes:
                raise file_too_large(max_bytes)
            if num_form_bytes > FORM_BYTES:
                raise invalid("file", f"The form has more than {FORM_BYTES} bytes beside the file.")
            await writer.write(bytes(form.pending))
            form.pending.clear()
    except FormParserError as error:
        raise ApiError(400, f"The form cannot be read: {error}.", code="invalid_form") from None
    if not form.is_complete:
        raise ApiError(400, "The form ends before its last boundary.", code="invalid_form")
    return form.upload
