"""The admin API of tenants: weights, recent service, requests, and use of their keys' limits."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.admin.endpoints import api_errors, authenticate_operator
from services.gateway.context import GatewayContext
from services.gateway.requests.other_routes import json_response
from shared.messages.admin import KeyState, TenantState, TenantStates
from shared.messages.cluster import TenantStatistics
from shared.messages.requests import RequestClass
from shared.messages.tenants import KeyUses

_NOTHING = TenantStatistics(tenant="")


async def list_tenants(context: GatewayContext, request: Request) -> Response:
    """Tenants of keys and of weights, and all others with requests now or in the last minute."""
    authenticate_operator(context, request)
    uses = context.admission.limited_keys() | await api_errors(context.admission.uses.all())
    served = context.loads.tenants()
    names = context.admission.tenant_names() | {one.tenant for one in uses.values()} | set(served or ())
    total_s = sum(one.service_s for one in (served or {}).values())
    states = [
        _state(context, name, None if served is None else served.get(name, _NOTHING), uses, total_s) for name in names
    ]
    states.sort(key=lambda state: (-(state.service_s or 0.0), state.tenant))
    return json_response(TenantStates(states))


def _state(
    context: GatewayContext, name: str, told: TenantStatistics | None, uses: dict[str, KeyUses], total_s: float
) -> TenantState:
    return TenantState(
        tenant=name,
        weight=context.admission.tenants.weight(name),
        num_running=None if told is None else told.num_placed,
        num_waiting=None if told is None else told.num_queued,
        service_s=None if told is None else told.service_s,
        share=None if told is None else told.service_s / total_s if total_s else 0.0,
        lag_s=None if told is None else told.lag_s,
        keys=[_key(use_id, one) for use_id, one in sorted(uses.items()) if one.tenant == name],
    )


def _key(use_id: str, uses: KeyUses) -> KeyState:
    return KeyState(
        key=use_id[:8],
        max_in_flight=uses.max_in_flight,
        num_online=uses.num_in_flight(RequestClass.ONLINE),
        num_offline=uses.num_in_flight(RequestClass.OFFLINE),
        tokens_per_minute=uses.tokens_per_minute,
        num_tokens=uses.num_tokens,
    )
