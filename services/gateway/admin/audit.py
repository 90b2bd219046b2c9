"""The audit log: which key changed what by the admin API, from where, with which outcome. Lines in the log, and a bounded
bucket that all gateways share."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.errors import ApiError, of_info
from services.gateway.metrics import GatewayMetrics
from shared.bus.interface import Bus, BusError, KeyValue
from shared.messages.catalogue import AUDIT
from shared.messages.cluster import AdminAction

if TYPE_CHECKING:
    from services.gateway.context import GatewayContext

logger = logging.getLogger(__name__)

MAX_ACTIONS = 1000
ACTIONS_BETWEEN_TRIMS = 20
"""Stored by one gateway before it looks again for those that are too many."""
REFUSALS_LOGGED_S = 1.0
"""Between two lines about those without a key."""
MAX_BODY_CHARACTERS = 2000
MAX_BYTES = 16 << 20


class Audit:
    def __init__(self, bus: Bus, gateway_id: str, metrics: GatewayMetrics) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._metrics = metrics
        self._num_until_trim = 0
        self._refusal_logged_s = float("-inf")
        self._actions: KeyValue[AdminAction]

    async def start(self) -> None:
        self._actions = await self._bus.key_value(AUDIT, max_bytes=MAX_BYTES)

    async def record(self, request: Request, status: int) -> None:
        """In the log in any case; where NATS does not take it, that is logged too. Whoever has no key is only counted and
        now and then logged: strangers could push everything else out of the bucket."""
        action = AdminAction(
            at_s=time.time(),
            who=getattr(request.state, "admin", ""),
            action=f"{request.method} {request.url.path[:500]}",
            body=getattr(request.state, "audited_body", "")[:MAX_BODY_CHARACTERS],
            address=request.client.host if request.client is not None else "",
            status=status,
            gateway_id=self._gateway_id,
        )
        if not action.who:
            self._metrics.admin_refusals.inc()
            now = self._bus.now()
            if now - self._refusal_logged_s < REFUSALS_LOGGED_S:
                return
            self._refusal_logged_s = now
        logger.info("audit %s", msgspec.json.encode(action).decode())
        if not action.who:
            return
        try:
            await self._make_room()
            await self._actions.put(f"{time.time_ns():020d}.{self._gateway_id}", action)
        except BusError as error:
            self._num_until_trim = 0
            logger.warning("an admin action is in this log alone: %s", error)

    async def _make_room(self) -> None:
        """Before an action is stored: a bucket at its bound would take none any more."""
        self._num_until_trim -= 1
        if self._num_until_trim < 0:
            for key in sorted(await self._actions.entries())[:-MAX_ACTIONS]:
                await self._actions.purge(key)
            self._num_until_trim = ACTIONS_BETWEEN_TRIMS

    async def actions(self) -> list[AdminAction]:
        """The newest first. Raises `BusError`."""
        newest = sorted((await self._actions.entries()).items(), reverse=True)[:MAX_ACTIONS]
        return [entry.value for _, entry in newest]


Handler = Callable[["GatewayContext", Request], Awaitable[Response]]


def audited(handler: Handler) -> Handler:
    """A handler of the admin API that changes something."""

    @functools.wraps(handler)
    async def handle(context: GatewayContext, request: Request) -> Response:
        status = 500
        try:
            answer = await handler(context, request)
            status = answer.status_code
            return answer
        except ApiError as error:
            status = error.status
            raise
        except BusError as error:
            status = of_info(error.info).status
            raise
        finally:
            await context.audit.record(request, status)

    return handle
