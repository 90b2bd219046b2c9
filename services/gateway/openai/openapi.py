"""The OpenAPI description, made from the same types that decode requests and encode answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from services.gateway.openai.replies import ErrorReply

_REF = "#/components/schemas/{name}"
_ERROR_TEXTS = {
    400: "The request is malformed or outside a limit; the error names the field",
    401: "Missing or incorrect API key",
    403: "Not with this API key, or the admin API is closed",
    404: "No such thing",
    408: "The request's time limit passed",
    409: "In conflict with the present state",
    410: "It was there, and is kept no more",
    413: "The body is too large",
    415: "The content type is another than the endpoint takes",
    422: "The Idempotency-Key belongs to another request",
    429: "Too much at once; see Retry-After",
    500: "A defect of the server",
    501: "Not supported",
    503: "Nobody can serve it now; see Retry-After",
    507: "The server's disk is full; see Retry-After",
}
_HEADERS = (
    ("x-request-id", "Echoed in the answer", {"type": "string", "maxLength": 128}),
    ("traceparent", "W3C trace context", {"type": "string"}),
)
_GENERATION_HEADERS = (
    ("x-request-timeout", "Seconds until the request ends with an error", {"type": "number", "exclusiveMinimum": 0}),
    (
        "x-keep-alive-interval",
        "In a stream: a chunk without choices after so many seconds of silence",
        {"type": "number", "minimum": 1},
    ),
)


_RULES_OVER_FIELDS: dict[str, dict[str, Any]] = {
    "TokenizeRequest": {
        "oneOf": [
            {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
            {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
        ]
    }
}


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    """With Starlette's parameters."""
    handler: Callable[..., Awaitable[Response]]
    request: type[Any] | None
    reply: type[Any] | None
    """str: plain text; bytes: any bytes; dict: any object; None: no body."""
    errors: tuple[int, ...] = ()
    is_generation: bool = False
    not_ready_reply: type[Any] | None = None
    """What a 503 has instead of an error."""
    query: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Names and schemas of query parameters."""
    form: dict[str, Any] | None = None
    """Schema of a multipart body."""


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    types = {t for route in routes for t in (route.request, route.reply) if t not in (None, str, bytes, dict)} | {
        ErrorReply
    }
    ordered = sorted(types, key=lambda t: str(t.__name__))
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    for name, schema in components.items():
        schema.update(_RULES_OVER_FIELDS.get(name, {}))
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tideway", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"apiKey": []}],
    }


def _operation(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    headers = _HEADERS + (_GENERATION_HEADERS if route.is_generation else ())
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
        for name, text, schema in headers
    ]
    in_path = re.findall(r"\{(\w+)", route.path)
    for name in in_path:
        text_schema = {"type": "string", "minLength": 1}
        parameters.append({"name": name, "in": "path", "required": True, "schema": text_schema})
    for name, query_schema in route.query:
        parameters.append({"name": name, "in": "query", "required": False, "schema": query_schema})
    responses: dict[str, Any] = {"200": {"description": "Success", "content": _content(route, schema_of)}}
    for status in route.errors:
        error = {"application/json": {"schema": schema_of[ErrorReply]}}
        responses[str(status)] = {"description": _ERROR_TEXTS[status], "content": error}
    if route.not_ready_reply is not None:
        content = {"application/json": {"schema": schema_of[route.not_ready_reply]}}
        responses["503"] = {"description": "Nothing can be served now", "content": content}
    words = re.sub(r"\{\w+(:path)?\}|\W", " ", route.path).split()
    operation: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *words, *in_path]),
        "parameters": parameters,
        "responses": responses,
    }
    if route.handler.__doc__:
        operation["description"] = route.handler.__doc__
    if route.form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": route.form}}}
    if route.request is not None:
        content = {"application/json": {"schema": schema_of[route.request]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _content(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    if route.reply is None:
        return {}
    if route.reply is str:
        return {"text/plain": {"schema": {"type": "string"}}}
    if route.reply is bytes:
        return {"application/octet-stream": {}}
    if route.reply is dict:
        return {"application/json": {"schema": {"type": "object"}}}
    content = {"application/json": {"schema": schema_of[route.reply]}}
    if route.is_generation:
        content["text/event-stream"] = {}
    return content
