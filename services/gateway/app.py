"""The ASGI application: the table of routes, request ids, and errors in OpenAI's shape."""

from __future__ import annotations

import functools
import logging
import re
import uuid
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.access.admission import RATE_LIMIT_HEADERS
from services.gateway.admin import batches as batch_admin
from services.gateway.admin import endpoints as admin_routes
from services.gateway.admin import routes as route_admin
from services.gateway.admin import tenants as tenant_admin
from services.gateway.admin.batches import BatchDetail
from services.gateway.anthropic import models as anthropic_models
from services.gateway.anthropic import routes as messages
from services.gateway.anthropic.messages import CountReply, CountRequest, MessageObject, MessageRequest
from services.gateway.batch import file_routes
from services.gateway.batch import routes as batch_routes
from services.gateway.console import pages
from services.gateway.context import GatewayContext
from services.gateway.http.bodies import EarlyAnswer
from services.gateway.http.errors import ApiError, of_info
from services.gateway.http.ignored_fields import IGNORED_HEADER
from services.gateway.http.origins import Origins
from services.gateway.openai.openapi import Route, describe
from services.gateway.openai.replies import (
    AuditLog,
    BatchList,
    BatchObject,
    ChatCompletion,
    Completion,
    DeletedBatch,
    DeletedFile,
    DetokenizeReply,
    Embeddings,
    FileList,
    FileObject,
    ModelCard,
    ModelList,
    Ranking,
    ReadyReply,
    Scores,
    TokenizeReply,
    VersionReply,
)
from services.gateway.openai.schemas import (
    AddModelRequest,
    ChangePlanRequest,
    ChatRequest,
    CompletionRequest,
    CreateBatchRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    RerankRequest,
    ScaleModelRequest,
    ScaleRequest,
    ScoreRequest,
    SetRoleRequest,
    SetRouteRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from services.gateway.requests import answering, other_routes
from services.gateway.requests.exchange import CLIENT_GONE_STATUS, ClientGone
from services.gateway.requests.kept_calls import STREAM_HEADER
from services.gateway.requests.resuming import AFTER, MAX_AFTER
from services.gateway.responses import routes as responses
from services.gateway.responses.messages import (
    CompactedResponse,
    CompactRequest,
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
    ResponseRequest,
)
from shared.bus.interface import BusError
from shared.messages.admin import (
    InstanceStates,
    ModelStates,
    ReplacementState,
    RouteState,
    RouteStates,
    ShownPlan,
    TenantStates,
)
from shared.messages.cluster import PlacementPlan
from shared.messages.console import ConsoleHistory, ConsoleState
from shared.messages.timeline import (
    LEAST_SLO_INTERVAL_S,
    MAX_REQUESTS_LISTED,
    MAX_SLO_INTERVAL_S,
    RequestTimelines,
    SloExplanation,
)
from shared.messages.traffic import LEAST_INTERVAL_S, MAX_INTERVAL_S

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

Handler = Callable[[GatewayContext, Request], Awaitable[Response]]

GENERATION_ERRORS = (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503)
RESPONSE_ERRORS = (*GENERATION_ERRORS, 507)
TOKENIZER_ERRORS = (400, 401, 404, 408, 413, 415, 429, 503)
ADMIN_ERRORS = (401, 403, 408, 409, 429, 500, 503, 507)
PLACEMENT_ERRORS = (400, 404, 413, 415, *ADMIN_ERRORS)

FILE_ERRORS = (401, 404, 408, 429, 500, 503, 507)
BATCH_ERRORS = (400, 409, *FILE_ERRORS)
RESUME_ERRORS = (400, 403, 410, *FILE_ERRORS)

_LIMITS = {"type": "integer", "minimum": 1}
_LIST_QUERY = (("after", {"type": "string"}), ("limit", {**_LIMITS, "maximum": batch_routes.MAX_BATCHES_LISTED}))
_FILE_LIST_QUERY = (
    ("after", {"type": "string"}),
    ("limit", {**_LIMITS, "maximum": file_routes.MAX_FILES_LISTED}),
    ("order", {"type": "string", "enum": ["asc", "desc"]}),
    ("purpose", {"type": "string"}),
)
_ITEMS_QUERY = (
    ("after", {"type": "string"}),
    ("limit", {**_LIMITS, "maximum": responses.MAX_ITEMS_LISTED}),
    ("order", {"type": "string", "enum": ["asc", "desc"]}),
)
_INTERVAL = {"type": "integer", "minimum": int(LEAST_INTERVAL_S), "maximum": int(MAX_INTERVAL_S)}
_MODELS_QUERY = (("interval_s", _INTERVAL),)
_FLAG = {"type": "string", "enum": ["true", "false"]}
_REQUESTS_QUERY = (
    ("limit", {**_LIMITS, "maximum": MAX_REQUESTS_LISTED}),
    ("model", {"type": "string"}),
    ("missed", _FLAG),
    ("running", _FLAG),
)
_SLO_INTERVAL = {"type": "integer", "minimum": LEAST_SLO_INTERVAL_S, "maximum": MAX_SLO_INTERVAL_S}
_SLO_QUERY = (("interval_s", _SLO_INTERVAL),)
_STREAM_QUERY = ((AFTER, {"type": "string"}),)
_RESPONSE_QUERY = (("stream", _FLAG), (AFTER, {"type": "integer", "minimum": 0, "maximum": MAX_AFTER}))
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(file_routes.PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": file_routes.MIN_EXPIRY_S,
            "maximum": file_routes.MAX_EXPIRY_S,
        },
    },
}
_TOKENIZE = (other_routes.tokenize, TokenizeRequest, TokenizeReply)
_DETOKENIZE = (other_routes.detokenize, DetokenizeRequest, DetokenizeReply)
_PLANNED = (None, PlacementPlan, (400, 404, *ADMIN_ERRORS))

ROUTES = (
    Route("POST", "/v1/chat/completions", answering.answer_chat, ChatRequest, ChatCompletion, GENERATION_ERRORS, True),
    *(
        Route(method, f"/v1/chat/completions{path}", other_routes.find_stored_chat, None, dict, (401, 404))
        for method, path in (
            ("GET", ""),
            ("GET", "/{completion_id}"),
            ("POST", "/{completion_id}"),
            ("DELETE", "/{completion_id}"),
            ("GET", "/{completion_id}/messages"),
        )
    ),
    Route(
        "POST", "/v1/completions", answering.answer_completion, CompletionRequest, Completion, GENERATION_ERRORS, True
    ),
    Route("POST", "/v1/responses", responses.create_response, ResponseRequest, ResponseObject, RESPONSE_ERRORS, True),
    Route(
        "GET",
        "/v1/responses/{response_id}",
        responses.get_response,
        None,
        ResponseObject,
        RESUME_ERRORS,
        query=_RESPONSE_QUERY,
    ),
    Route("GET", "/v1/streams/{stream_id}", responses.get_stream, None, dict, RESUME_ERRORS, query=_STREAM_QUERY),
    Route(
        "GET",
        "/v1/responses/{response_id}/input_items",
        responses.list_input_items,
        None,
        ItemList,
        (400, *FILE_ERRORS),
        query=_ITEMS_QUERY,
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        responses.count_input_tokens,
        ResponseRequest,
        InputTokens,
        (*TOKENIZER_ERRORS, 500, 507),
    ),
    Route(
        "POST",
        "/v1/responses/compact",
        responses.compact_response,
        CompactRequest,
        CompactedResponse,
        RESPONSE_ERRORS,
    ),
    Route(
        "POST",
        "/v1/responses/{response_id}/cancel",
        responses.cancel_response,
        None,
        ResponseObject,
        (400, *FILE_ERRORS),
    ),
    Route("DELETE", "/v1/responses/{response_id}", responses.delete_response, None, DeletedResponse, FILE_ERRORS),
    Route("POST", "/v1/messages", messages.create_message, MessageRequest, MessageObject, GENERATION_ERRORS, True),
    Route("POST", "/v1/messages/count_tokens", messages.count_tokens, CountRequest, CountReply, TOKENIZER_ERRORS),
    Route("POST", "/v1/embeddings", answering.answer_embeddings, EmbeddingRequest, Embeddings, GENERATION_ERRORS),
    *(
        Route("POST", path, answering.answer_rerank, RerankRequest, Ranking, GENERATION_ERRORS)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Route("POST", path, answering.answer_score, ScoreRequest, Scores, GENERATION_ERRORS)
        for path in ("/v1/score", "/score")
    ),
    Route("POST", "/v1/files", file_routes.upload_file, None, FileObject, (400, 413, 415, *FILE_ERRORS), form=_UPLOAD),
    Route("GET", "/v1/files", file_routes.list_files, None, FileList, (400, *FILE_ERRORS), query=_FILE_LIST_QUERY),
    Route("GET", "/v1/files/{file_id}", file_routes.get_file, None, FileObject, FILE_ERRORS),
    Route("GET", "/v1/files/{file_id}/content", file_routes.get_content, None, bytes, FILE_ERRORS),
    Route("DELETE", "/v1/files/{file_id}", file_routes.delete_file, None, DeletedFile, FILE_ERRORS),
    Route("POST", "/v1/batches", batch_routes.create_batch, CreateBatchRequest, BatchObject, (413, 415, *BATCH_ERRORS)),
    Route("GET", "/v1/batches", batch_routes.list_batches, None, BatchList, BATCH_ERRORS, query=_LIST_QUERY),
    Route("GET", "/v1/batches/{batch_id}", batch_routes.get_batch, None, BatchObject, BATCH_ERRORS),
    Route("DELETE", "/v1/batches/{batch_id}", batch_routes.delete_batch, None, DeletedBatch, BATCH_ERRORS),
    Route("POST", "/v1/batches/{batch_id}/cancel", batch_routes.cancel_batch, None, BatchObject, BATCH_ERRORS),
    Route("GET", "/v1/models", anthropic_models.list_models, None, ModelList, (400, 401)),
    Route("GET", "/v1/models/{model:path}", anthropic_models.get_model, None, ModelCard, (401, 404, 503)),
    Route("POST", "/v1/load_lora_adapter", admin_routes.load_adapter, LoadAdapterRequest, str, PLACEMENT_ERRORS),
    Route("POST", "/v1/unload_lora_adapter", admin_routes.unload_adapter, UnloadAdapterRequest, str, PLACEMENT_ERRORS),
    Route("POST", "/tokenize", *_TOKENIZE, TOKENIZER_ERRORS),
    Route("POST", "/v1/tokenize", *_TOKENIZE, TOKENIZER_ERRORS),
    Route("POST", "/detokenize", *_DETOKENIZE, TOKENIZER_ERRORS),
    Route("POST", "/v1/detokenize", *_DETOKENIZE, TOKENIZER_ERRORS),
    Route("GET", "/health", other_routes.health, None, None),
    Route("GET", "/ping", other_routes.health, None, None),
    Route("GET", "/ready", other_routes.ready, None, ReadyReply, not_ready_reply=ReadyReply),
    Route("GET", "/version", other_routes.show_version, None, VersionReply),
    Route("GET", "/metrics", other_routes.show_metrics, None, str),
    Route(
        "GET", "/admin/models", admin_routes.list_models, None, ModelStates, (400, *ADMIN_ERRORS), query=_MODELS_QUERY
    ),
    Route("POST", "/admin/models", admin_routes.add_model, AddModelRequest, PlacementPlan, PLACEMENT_ERRORS),
    Route("DELETE", "/admin/models/{model:path}", admin_routes.remove_model, None, PlacementPlan, PLACEMENT_ERRORS),
    Route(
        "POST",
        "/admin/models/{model:path}/scale",
        admin_routes.scale_model,
        ScaleModelRequest,
        PlacementPlan,
        PLACEMENT_ERRORS,
    ),
    Route("POST", "/admin/scale", admin_routes.scale_instances, ScaleRequest, PlacementPlan, PLACEMENT_ERRORS),
    Route("GET", "/admin/routes", route_admin.list_routes, None, RouteStates, ADMIN_ERRORS),
    Route("POST", "/admin/routes", route_admin.set_route, SetRouteRequest, RouteState, (400, 413, 415, *ADMIN_ERRORS)),
    Route("DELETE", "/admin/routes/{name:path}", route_admin.delete_route, None, dict, (404, *ADMIN_ERRORS)),
    Route("GET", "/admin/tenants", tenant_admin.list_tenants, None, TenantStates, ADMIN_ERRORS),
    Route("GET", "/admin/instances", admin_routes.list_instances, None, InstanceStates, ADMIN_ERRORS),
    Route(
        "POST",
        "/admin/instances/{instance_id}/drain",
        admin_routes.drain_instance,
        None,
        PlacementPlan,
        (400, 404, 409, *ADMIN_ERRORS),
        query=(("force", _FLAG),),
    ),
    Route("POST", "/admin/instances/{instance_id}/undrain", admin_routes.undrain_instance, *_PLANNED),
    Route(
        "POST",
        "/admin/instances/{instance_id}/role",
        admin_routes.set_role,
        SetRoleRequest,
        SetRoleRequest,
        (400, 404, 413, 415, *ADMIN_ERRORS),
    ),
    Route("GET", "/admin/nodes", admin_routes.list_nodes, None, dict, ADMIN_ERRORS),
    Route("GET", "/admin/audit", admin_routes.list_audit, None, AuditLog, ADMIN_ERRORS),
    Route("GET", "/admin/console/state", admin_routes.show_console_state, None, ConsoleState, ADMIN_ERRORS),
    Route(
        "GET",
        "/admin/console/history",
        admin_routes.show_console_history,
        None,
        ConsoleHistory,
        (400, *ADMIN_ERRORS),
        query=(("interval_s", {"type": "integer", "minimum": 60, "maximum": 3600}),),
    ),
    Route("GET", "/admin/batches/{batch_id}", batch_admin.show_batch, None, BatchDetail, (404, *ADMIN_ERRORS)),
    Route(
        "POST",
        "/admin/batches/{batch_id}/cancel",
        batch_admin.cancel_batch,
        None,
        BatchDetail,
        (404, 409, *ADMIN_ERRORS),
    ),
    Route(
        "GET",
        "/admin/requests",
        admin_routes.list_requests,
        None,
        RequestTimelines,
        (400, *ADMIN_ERRORS),
        query=_REQUESTS_QUERY,
    ),
    Route(
        "GET", "/admin/requests/{request_id}", admin_routes.show_request, None, RequestTimelines, (404, *ADMIN_ERRORS)
    ),
    Route("GET", "/admin/slo", admin_routes.explain_slo, None, SloExplanation, (400, *ADMIN_ERRORS), query=_SLO_QUERY),
    Route("GET", "/admin/plan", admin_routes.show_plan, None, ShownPlan, (404, *ADMIN_ERRORS)),
    Route("POST", "/admin/plan", admin_routes.change_plan, ChangePlanRequest, ReplacementState, PLACEMENT_ERRORS),
)
PAGES = (("/", pages.show_root), ("/console", pages.show_page), ("/console/{file}", pages.show_file))
"""Pages for browsers, which are no part of the API."""
DEVELOPER_ROUTES = (Route("POST", "/reset_prefix_cache", other_routes.reset_prefix_cache, None, None),)


def make_app(context: GatewayContext) -> FastAPI:
    # With Swagger UI's own files, so that the page needs no other server.
    app = FastAPIOffline(title="Tideway", docs_url="/docs", redoc_url=None)
    routes = (*ROUTES, *DEVELOPER_ROUTES) if context.settings.developer_mode else ROUTES
    for route in routes:
        app.router.add_route(route.path, functools.partial(route.handler, context), [route.method])
    for path, page in PAGES:
        app.router.add_route(path, functools.partial(page, context), ["GET"])
    app.openapi = functools.partial(describe, routes)  # type: ignore[method-assign]
    app.add_exception_handler(ApiError, _on_api_error)  # type: ignore[arg-type]
    app.add_exception_handler(BusError, _on_bus_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _on_http_error)  # type: ignore[arg-type]
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_any_error)
    app.router.redirect_slashes = False
    app.add_middleware(_Paths, base=context.settings.base_path)
    origins = _listed(context.settings.cors_origins)
    app.add_middleware(
        Origins,
        is_open=lambda: context.admission.is_open,
        allowed_hosts=_listed(context.settings.allowed_hosts),
        allowed_origins=origins,
    )
    app.add_middleware(_RequestIds)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", STREAM_HEADER, IGNORED_HEADER, *RATE_LIMIT_HEADERS],
        )
    return app


def _listed(setting: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in setting.split(",") if part.strip()]


def _response(error: ApiError) -> Response:
    kind = EarlyAnswer if error.status == 413 else Response
    return kind(error.body(), error.status, error.headers(), media_type="application/json")


def _on_api_error(request: Request, error: ApiError) -> Response:
    return _response(error)


def _on_bus_error(request: Request, error: BusError) -> Response:
    return _response(of_info(error.info))


def _on_http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        error_answer = ApiError(404, f"Not found: {request.url.path[:200]}", code="not_found")
    elif error.status_code == 405:
        error_answer = ApiError(405, f"{request.method} is not allowed on {request.url.path[:200]}.", code="bad_method")
    else:
        error_answer = ApiError(error.status_code, str(error.detail))
    error_answer.is_of_messages = "/v1/messages" in request.url.path
    answer = _response(error_answer)
    answer.headers.update(error.headers or {})
    return answer


def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)


def _on_any_error(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _response(ApiError(500, "Internal error.", type="server_error", code="internal_error"))


_UNVERSIONED = frozenset(("/chat/completions", "/completions", "/embeddings", "/models", "/responses"))
"""Paths that llama.cpp serves without `/v1` too."""


class _Paths:
    """Paths as clients and proxies spell them: with a slash at the end, several in a row, behind a base path, or without
    `/v1`. They are served in place, since many clients drop their key or the encryption when they are redirected."""

    def __init__(self, app: ASGIApp, base: str) -> None:
        self._app = app
        self._base = base.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = re.sub("/{2,}", "/", scope["path"])
            path = path.rstrip("/") or "/"
            root = self._base if self._base and (path + "/").startswith(self._base + "/") else ""
            inner = path.removeprefix(root)
            scope = {**scope, "path": f"{root}/v1{inner}" if inner in _UNVERSIONED else path}
            if root:
                scope["root_path"] = root
        await self._app(scope, receive, send)


class _RequestIds:
    """Every answer carries the client's X-Request-Id, or one made here, and what of the request had no effect."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if _REQUEST_ID.fullmatch(request_id) is None:
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if ignored := scope["state"].get("ignored_fields"):
                    headers[IGNORED_HEADER] = ", ".join(ignored)
            await send(message)

        await self._app(scope, receive, send_with_id)
