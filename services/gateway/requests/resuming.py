"""A further connection of a call that another one began: the same answer, from where the client has it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from starlette.requests import Request

from services.gateway.http.errors import ApiError
from services.gateway.openai.parsing import whole_number_of
from services.gateway.requests.answers import event_tag, seen_of
from services.gateway.requests.exchange import Exchange
from services.gateway.requests.kept_calls import EVENT_HEADER, Plan, plan_of
from services.gateway.streams.generation import Generation, Seen
from shared.messages.kept import KeptCall

AFTER = "starting_after"
MAX_AFTER = 999_999


_TAGGED = re.compile(r"(.+)(-[0-9A-Za-z]{6})")


def position_of(request: Request, call_id: str) -> tuple[str, str]:
    """What the client saw last of the call, and where it says so; empty: nothing. Browsers send the header by themselves.
    Raises `ApiError` 409 where it saw another call."""
    text, param = request.headers.get(EVENT_HEADER, ""), EVENT_HEADER
    if request.method == "GET" and (after := request.query_params.get(AFTER)) is not None:
        text, param = after, AFTER
    if (found := _TAGGED.fullmatch(text)) is None:
        return text, param
    if found[2] != event_tag(call_id):
        message = (
            f"The event '{text[:100]}' is of another call than '{call_id}', so the rest of this answer does not fit to it: "
            f"ask again without '{param}' for the whole."
        )
        raise ApiError(409, message, param=param, code="conflict")
    return found[1], param


def seen_by(request: Request, record: KeptCall, plan: Plan) -> list[Seen]:
    """How far the client has a chat's or completion's answer, none of one without events. Raises `ApiError` 400, 409."""
    if not plan.options.is_stream:
        return []
    text, param = position_of(request, record.call_id)
    return seen_of(text, len(plan.prompts) * plan.options.num_choices, param)


def nothing_seen(request: Request, record: KeptCall, plan: Plan) -> tuple[()]:
    """What `attach` takes for answers whose events are counted as they are written."""
    return ()


def num_events_seen(request: Request, record: KeptCall) -> int:
    """How many events, which are numbered from 0, the client has of a response or message. Raises `ApiError` 400, 409."""
    if request.method == "POST" and not plan_of(record).options.is_stream:
        return 0  # it is asked for in one piece
    return num_seen_of(request, record.call_id)


def num_seen_of(request: Request, call_id: str) -> int:
    """How many events the client says that it has of the call. Raises `ApiError` 400, 409."""
    text, param = position_of(request, call_id)
    return whole_number_of({param: text}, param, 0, 0, MAX_AFTER) + 1 if text else 0


async def attach(
    exchange: Exchange,
    record: KeptCall,
    seen: Callable[[Request, KeptCall, Plan], Sequence[Seen]],
    *,
    is_counted: bool = False,
) -> tuple[Generation, Plan, dict[str, str]]:
    """The call's generation, whose tokens come from wherever they are; also how the answer is made, and its headers.
    `is_counted`: the call counts under its key's limits already; else `exchange.key` has to be set. Raises `ApiError`,
    `BusError`."""
    context, plan = exchange.context, plan_of(record)
    client_has = seen(exchange.request, record, plan)
    spec = context.catalog.spec(record.model)
    exchange.resume(record)
    if exchange.ticket is None:
        if not is_counted:
            assert exchange.key is not None
            num_sequences = len(plan.prompts) * plan.options.num_choices
            exchange.ticket = await context.admission.enter(
                exchange.key, num_sequences, plan.options.request_class, plan.options.priority, context.bus.now()
            )
        exchange.watch_client()
    tokenizer = await exchange.unless_gone(context.tokenizers.get(spec))
    generation = await exchange.join(record, plan, tokenizer, client_has)
    return generation, plan, {**exchange.rate_limits(), **exchange.headers()}
