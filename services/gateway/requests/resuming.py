"""A further connection of a call that another one began: the same answer, from where the client has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.requests import Request

from services.gateway.openai.parsing import whole_number_of
from services.gateway.requests.answers import seen_of
from services.gateway.requests.exchange import Exchange
from services.gateway.requests.kept_calls import EVENT_HEADER, Plan, plan_of
from services.gateway.streams.generation import Generation, Seen
from shared.messages.kept import KeptCall

AFTER = "starting_after"
MAX_AFTER = 999_999


def position_of(request: Request) -> tuple[str, str]:
    """What the client saw last, and where it says so; empty: nothing. Browsers send the header by themselves."""
    if (text := request.query_params.get(AFTER)) is not None:
        return text, AFTER
    return request.headers.get(EVENT_HEADER, ""), EVENT_HEADER


def seen_by(request: Request, plan: Plan) -> list[Seen]:
    """How far the client has a chat's or completion's answer. Raises `ApiError` 400."""
    text, param = position_of(request)
    return seen_of(text, len(plan.prompts) * plan.options.num_choices, param)


def nothing_seen(request: Request, plan: Plan) -> tuple[()]:
    """What `attach` takes for answers whose events are counted as they are written."""
    return ()


def num_events_seen(request: Request) -> int:
    """How many events, which are numbered from 0, the client has of a response or message. Raises `ApiError` 400."""
    text, param = position_of(request)
    return whole_number_of({param: text}, param, 0, 0, MAX_AFTER) + 1 if text else 0


async def attach(
    exchange: Exchange,
    record: KeptCall,
    seen: Callable[[Request, Plan], Sequence[Seen]],
    *,
    is_counted: bool = False,
) -> tuple[Generation, Plan, dict[str, str]]:
    """The call's generation, whose tokens come from wherever they are; also how the answer is made, and its headers.
    `is_counted`: the call counts under its key's limits already; else `exchange.key` has to be set. Raises `ApiError`,
    `BusError`."""
    context, plan = exchange.context, plan_of(record)
    client_has = seen(exchange.request, plan)
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
