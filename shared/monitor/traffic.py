"""The requests of a log as a search for a placement is given them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shared.messages.traffic import Outcome
from shared.monitor.request_log import SLOT_S, LoggedRequest, RequestLog
from shared.placement.lengths import drawn_like
from shared.placement.problem import Traffic
from shared.policies.predicted_statistics import OUTPUT_TOKENS

LENGTHS_S = 1800.0
"""Seconds of the log from which lengths of outputs are known; in a shorter window few of the long ones have ended."""


def traffic(
    log: RequestLog,
    since_s: float,
    until_s: float,
    models: Iterable[str] | None = None,
    bases: Mapping[str, str] | None = None,
) -> Traffic:
    """All that arrived in the interval, those too that were refused or have not ended. How long the output of one that did
    not finish would be is not known: it is drawn from the lengths of its model's outputs in the last `LENGTHS_S`, among
    which those that are not over count with what they have (lengths.py), with a fixed seed. Where requests
    were left out, those of their model that the slot kept become as many as arrived in it, spread evenly. `models`: only
    of these. `bases`: of what was asked for under other names (adapters), the model that computed it."""
    since_s = max(since_s, log.began_s)
    requests = sorted(log.arrived(since_s, until_s), key=lambda request: request.arrived_s)
    names = tuple(sorted({request.model for request in requests} if models is None else set(models)))
    index = {name: number for number, name in enumerate(names)}
    index |= {name: index[base] for name, base in (bases or {}).items() if base in index}
    requests = [request for request in requests if request.model in index]
    before = log.arrived(max(log.began_s, until_s - LENGTHS_S), since_s)
    known = [*(request for request in before if request.model in index), *requests]
    copies_of = _copies(log, since_s, until_s)
    weights = np.array([copies_of[request.row.number] for request in requests], np.int64)
    gaps = np.array(_gaps(requests, until_s), np.float64)
    copies = np.arange(weights.sum()) - np.repeat(weights.cumsum() - weights, weights)
    arrival_s = np.array([request.arrived_s - since_s for request in requests], np.float64)
    arrival_s = np.repeat(arrival_s, weights) + copies * np.repeat(gaps / np.maximum(1, weights), weights)
    order = np.argsort(arrival_s, kind="stable")

    def column(values: Iterable[int], dtype: type[np.generic]) -> np.ndarray:
        return np.repeat(np.array(list(values), dtype), weights)[order]

    return Traffic(
        models=names,
        model=column((index[request.model] for request in requests), np.int32),
        arrival_s=arrival_s[order],
        prompt_tokens=column((request.row.prompt_tokens for request in requests), np.int32),
        output_tokens=column(_output_tokens(requests, known, until_s), np.int32),
        is_online=column((request.row.is_online for request in requests), np.bool_),
        interval_s=until_s - since_s,
    )


def _copies(log: RequestLog, since_s: float, until_s: float) -> dict[int, int]:
    """By number. What arrived in a slot that kept none of its model is made up for in the next one that did."""
    copies: dict[int, int] = {}
    owed: dict[tuple[str, bool], int] = {}
    for slot in log.slots(since_s, until_s):
        kept: dict[tuple[str, bool], list[int]] = {}
        for number, request in slot.arrived.items():
            kept.setdefault((request.model, request.row.is_online), []).append(number)
        for key, sums in slot.sums.items():
            num, numbers = owed.pop(key, 0) + sums.arrived, kept.get(key, [])
            if not numbers:
                owed[key] = num
            for position, number in enumerate(numbers):
                copies[number] = (position + 1) * num // len(numbers) - position * num // len(numbers)
    return copies


def _gaps(requests: list[LoggedRequest], until_s: float) -> list[float]:
    """Gap after each request until the next of its model, or the end of its slot."""
    gaps = [0.0] * len(requests)
    next_s: dict[str, float] = {}
    for position in range(len(requests) - 1, -1, -1):
        request = requests[position]
        ends_s = min(until_s, (request.slot.index + 1) * SLOT_S)
        gaps[position] = max(0.0, min(ends_s, next_s.get(request.model, ends_s)) - request.arrived_s)
        next_s[request.model] = request.arrived_s
    return gaps


def _output_tokens(requests: Sequence[LoggedRequest], known: Sequence[LoggedRequest], until_s: float) -> list[int]:
    """Rows of `requests`, all of which are among `known`."""
    drawn: dict[int, int] = {}
    models: dict[str, list[LoggedRequest]] = {}
    for request in known:
        models.setdefault(request.model, []).append(request)
    rng = np.random.default_rng(0)
    for _, own in sorted(models.items()):
        tokens = np.array([request.row.output_tokens for request in own], np.int64)
        has_ended = np.array([request.row.outcome == Outcome.FINISHED for request in own], np.bool_)
        if has_ended.any():
            like = drawn_like(np.array([_lasted_s(request, until_s) for request in own]), has_ended, rng)
            tokens = np.maximum(tokens, tokens[like])
        else:
            tokens = np.maximum(tokens, OUTPUT_TOKENS)
        drawn |= {request.row.number: many for request, many in zip(own, tokens.tolist(), strict=True)}
    return [max(1, drawn[request.row.number]) for request in requests]


def _lasted_s(request: LoggedRequest, until_s: float) -> float:
    """Up to now. Rows tell tokens at the end only, so outputs are compared by the time that they take. One that was refused
    says nothing."""
    match request.row.outcome:
        case Outcome.FINISHED:
            return request.row.latency_s
        case Outcome.PENDING:
            return max(0.0, until_s - request.arrived_s)
        case _:
            return 0.0
