"""The console's files, read once. They hold nothing that is secret: what they show they ask for, with the admin key."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from services.gateway.context import GatewayContext
from services.gateway.http.errors import ApiError

KINDS = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    # Nothing from elsewhere, and in nobody's frame.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """Content, type and tag, by name."""
    found = {}
    for file in files("services.gateway.console").joinpath("static").iterdir():
        kind = KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            found[file.name] = content, kind, f'"{blake2b(content, digest_size=12).hexdigest()}"'
    return found


async def show_root(context: GatewayContext, request: Request) -> Response:
    """Redirects to the console, which is what a browser is looking for."""
    return RedirectResponse(f"{request.scope.get('root_path', '')}/console", 302)


async def show_page(context: GatewayContext, request: Request) -> Response:
    """The console, a page for browsers."""
    return _answer(request, "index.html")


async def show_file(context: GatewayContext, request: Request) -> Response:
    """A file of the console."""
    return _answer(request, request.path_params["file"])


def _answer(request: Request, name: str) -> Response:
    if name not in _files():
        raise ApiError(404, f"Not found: {request.url.path[:200]}", code="not_found")
    content, kind, tag = _files()[name]
    headers = {**HEADERS, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers={**headers, "content-type": kind})
