"""The OpenAPI description, made from the same types that decode requests and encode answers."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec
from starlette.responses import Response

from services.gateway.http.errors import forms_of
from services.gateway.openai.field_texts import ANSWER_TEXTS, FIELD_TEXTS
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


_MODEL = "tideway-demo-llama"
_SHORT = {"max_tokens": 16}
_HI = [{"role": "user", "content": "What is a compiler?"}]
_TEXTS = ["A compiler translates programs.", "An apple is a fruit."]
_RERANK, _SCORE = ("/v1/rerank", "/v2/rerank", "/rerank"), ("/v1/score", "/score")
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": _MODEL, "messages": _HI, **_SHORT},
    "/v1/completions": {"model": _MODEL, "prompt": "An operating system is", **_SHORT},
    "/v1/responses": {"model": _MODEL, "input": "What is a compiler?", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"model": _MODEL, "input": "What is a compiler?"},
    "/v1/responses/compact": {"model": _MODEL, "input": "What is a compiler?"},
    "/v1/messages": {"model": _MODEL, "messages": _HI, **_SHORT},
    "/v1/messages/count_tokens": {"model": _MODEL, "messages": _HI},
    "/v1/embeddings": {"model": "an-embedding-model", "input": "What is a compiler?"},
    **{path: {"model": "a-reranker", "query": _HI[0]["content"], "documents": _TEXTS} for path in _RERANK},
    **{path: {"model": "a-reranker", "text_1": _HI[0]["content"], "text_2": _TEXTS} for path in _SCORE},
    "/tokenize": {"model": _MODEL, "prompt": "An operating system is"},
    "/v1/tokenize": {"model": _MODEL, "messages": _HI},
    "/detokenize": {"model": _MODEL, "tokens": [1, 2, 3]},
    "/v1/detokenize": {"model": _MODEL, "tokens": [1, 2, 3]},
    "/v1/batches": {"input_file_id": "file-ID", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    "/v1/load_lora_adapter": {"lora_name": "poet", "lora_path": "/path/to/adapter", "base_model_name": _MODEL},
    "/v1/unload_lora_adapter": {"lora_name": "poet"},
    "/admin/models": {"name": "another", "source": "/path/to/checkpoint"},
    "/admin/models/{model:path}/scale": {"replicas": 1},
    "/admin/scale": {"instances": 2},
    "/admin/routes": {"name": "chat", "arms": {_MODEL: 1}},
    "/admin/plan": {"action": "search"},
}
"""Examples of bodies, by path; with the demonstration models."""


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    """Path with Starlette's parameters."""
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
    requests = [route.request for route in routes if route.request is not None]
    _describe_fields(ordered, components, _structs(requests).keys())
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


def _structs(types: Iterable[type[Any]]) -> dict[str, type[msgspec.Struct]]:
    """The structs among the types and their fields, by the names of their components: two of one name have their modules'
    before it."""
    found: dict[type[msgspec.Struct], None] = {}
    pending: list[Any] = list(types)
    while pending:
        kind = pending.pop()
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)) or kind in found:
            continue
        found[kind] = None
        pending += [form for hint in get_type_hints(kind).values() for form in forms_of(hint)]
    return {name: kind for kind in found for name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")}


def _describe_fields(
    types: Iterable[type[Any]], components: dict[str, dict[str, Any]], of_requests: Collection[str]
) -> None:
    """Each by the text below it in its struct, else by what is said of its name everywhere. `of_requests`: names of
    components that requests have."""
    known = _structs(types)
    for name, component in components.items():
        everywhere = FIELD_TEXTS if name in of_requests else FIELD_TEXTS | ANSWER_TEXTS
        texts = everywhere | (field_docs(known[name]) if name in known else {})
        for field, schema in component.get("properties", {}).items():
            is_without_effect = None in schema.get("enum", ())
            if text := texts.get(field) or ("Not supported: no other value is taken." if is_without_effect else ""):
                schema.setdefault("description", text)


@functools.cache
def field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The texts that stand below the fields of a struct and of those that it is made from, by the fields' names in JSON."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base is msgspec.Struct or not issubclass(base, msgspec.Struct):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                if is_text and isinstance(below.value.value, str):  # type: ignore[attr-defined]
                    docs[statement.target.id] = " ".join(below.value.value.split())  # type: ignore[attr-defined]
    names = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
    return {names[name]: text for name, text in docs.items() if name in names}


def _tag(path: str) -> str:
    """What of the API a path belongs to."""
    parts = path.strip("/").split("/")
    if parts[0] == "admin" or path.endswith("_lora_adapter"):
        return "operators"
    if parts[0] == "v1":
        return {"chat": "chat", "completions": "completions", "detokenize": "tokenize"}.get(parts[1], parts[1])
    return {"tokenize": "tokenize", "detokenize": "tokenize"}.get(parts[0], "server")


def _summary(route: Route) -> str:
    """In a few words: the first sentence of the handler's own, else its name."""
    first = (route.handler.__doc__ or "").strip().split(". ")[0].split(".\n")[0].rstrip(".")
    name = route.handler.__name__.replace("_", " ").strip().capitalize()
    return " ".join(first.split()) if 0 < len(first) <= 80 else name


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
        "tags": [_tag(route.path)],
        "summary": _summary(route),
        "operationId": "_".join([route.method.lower(), *words, *in_path]),
        "parameters": parameters,
        "responses": responses,
    }
    if route.handler.__doc__:
        operation["description"] = route.handler.__doc__
    if route.form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": route.form}}}
    if route.request is not None:
        body: dict[str, Any] = {"schema": schema_of[route.request]}
        if (example := EXAMPLES.get(route.path)) is not None:
            body["example"] = example
        content = {"application/json": body}
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
