"""Protection of a gateway without API keys against web pages: which origins may call it, and under which host names.

A browser sends what any page wants to http://127.0.0.1:8000, and a name of the page's own may be made to lead there (DNS
rebinding). What makes the gateway safe from both is the key that such a page does not have; without keys it looks at
`Origin` and `Host`. `refusal_of` decides, purely; `Origins` is the ASGI middleware.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.errors import ApiError

PRIVATE_SUFFIXES = ("localhost", "local", "internal", "lan", "svc", "test")
"""Last labels of names that nobody can register, so that no page of the internet has one."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They change nothing, and a browser does not show their answers to pages of other origins."""


def is_private_name(host: str) -> bool:
    """Whether a page of the internet cannot have this name: an address, or a name within a network. `host`: lower case,
    without a port."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        labels = host.rstrip(".").split(".")
        return len(labels) == 1 or labels[-1] in PRIVATE_SUFFIXES
    return True


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def refusal_of(method: str, headers: Headers, allowed_hosts: list[str], allowed_origins: list[str]) -> ApiError | None:
    """Why a request without a key is refused. `allowed_hosts`, `allowed_origins`: "*" stands for all;
    hosts have no port."""
    host = headers.get("host", "")
    name = _without_port(host)
    if host and "*" not in allowed_hosts and name not in allowed_hosts and not is_private_name(name):
        message = (
            f"This server asks for no API key, and is not known under the name '{name[:200]}' (TIDEWAY_ALLOWED_HOSTS)."
        )
        return ApiError(421, message, param="host", code="host_not_allowed")
    origin = headers.get("origin")
    if method in SAFE_METHODS or origin is None or "*" in allowed_origins or origin in allowed_origins:
        return None
    if origin.lower().partition("://")[2] == host.lower():
        return None
    message = (
        f"This server asks for no API key, and pages of the origin '{origin[:200]}' may not use it "
        "(TIDEWAY_CORS_ORIGINS)."
    )
    return ApiError(403, message, param="origin", code="origin_not_allowed")


class Origins:
    """Refuses what a page of another origin wants, as long as `is_open` says that no key is asked for."""

    def __init__(
        self, app: ASGIApp, *, is_open: Callable[[], bool], allowed_hosts: list[str], allowed_origins: list[str]
    ) -> None:
        self._app = app
        self._is_open = is_open
        self._allowed_hosts = [host.lower() for host in allowed_hosts]
        self._allowed_origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_open():
            headers = Headers(scope=scope)
            refusal = refusal_of(scope["method"], headers, self._allowed_hosts, self._allowed_origins)
            if refusal is not None:
                answer = Response(refusal.body(), refusal.status, refusal.headers(), media_type="application/json")
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
