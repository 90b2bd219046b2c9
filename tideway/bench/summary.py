"""Figures from records. Pure.

As `vllm bench serve` has them: TTFT from arrival to the first token, TPOT over the tokens after the first, ITL between
pieces, E2E to the last token, percentiles by linear interpolation, latencies over successes alone. Normalised latency is
E2E per output token. SLO attainment is over all requests: a failed one missed its objectives, one that the end of the run
cut off counts only if it had missed them already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from tideway.bench.records import RequestRecord

ALL = "all"


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """In the unit of what was given; all 0 where there was nothing."""

    num: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @staticmethod
    def of(values: Iterable[float | None]) -> Distribution:
        known = np.array([value for value in values if value is not None], float)
        if not known.size:
            return Distribution()
        p50, p90, p99 = np.percentile(known, (50, 90, 99))
        return Distribution(
            num=known.size,
            mean=float(known.mean()),
            p50=float(p50),
            p90=float(p90),
            p99=float(p99),
            max=float(known.max()),
        )


class Attainment(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the requests that have the objective; None where none has."""

    ttft: float | None = None
    tpot: float | None = None
    both: float | None = None


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    request_class: str = msgspec.field(name="class")
    """online, offline or all"""
    model: str
    """or all"""
    num_requests: int
    num_succeeded: int
    num_unfinished: int
    failures: dict[str, int]
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    max_itl_s: Distribution = Distribution()
    """Longest gap of each request."""
    latency_s: Distribution
    normalized_latency_s: Distribution
    mean_prompt_tokens: float
    mean_output_tokens: float
    attainment: Attainment
    requests_per_s: float
    """Succeeded within the window."""
    goodput_rps: float
    """Requests per second that met their objectives."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    goodput_tokens_per_s: float
    """Output tokens of requests that succeeded within the window and met their objectives."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    start_s: float
    end_s: float
    groups: list[GroupSummary]

    def group(self, request_class: str = ALL, model: str = ALL) -> GroupSummary:
        """Raises `KeyError` where no request was of it."""
        for group in self.groups:
            if (group.request_class, group.model) == (request_class, model):
                return group
        raise KeyError((request_class, model))


def summarize(records: Sequence[RequestRecord], *, start_s: float = 0.0, end_s: float | None = None) -> Summary:
    """Per class and model, per class, and over all.

    Latencies and attainment are those of requests that arrived at `start_s` or later (a warm-up lies before); throughput
    is what happened in the window from `start_s` to `end_s`, by default the end of the last request.
    """
    if end_s is None:
        end_s = max((record.end_s or record.arrival_s for record in records), default=start_s)
    members: dict[tuple[str, str], list[RequestRecord]] = {}
    for record in records:
        for key in ((record.request_class.value, record.model), (record.request_class.value, ALL), (ALL, ALL)):
            members.setdefault(key, []).append(record)
    keys = sorted((key for key in members if key[1] != ALL), key=lambda key: (key[0] != "online", key))
    keys += [(name, ALL) for name in ("online", "offline") if (name, ALL) in members]
    keys += [(ALL, ALL)] if members else []
    return Summary(
        start_s=start_s,
        end_s=end_s,
        groups=[_group(*key, members[key], start_s, max(end_s, start_s + 1e-9)) for key in keys],
    )


def _group(request_class: str, model: str, records: list[RequestRecord], start_s: float, end_s: float) -> GroupSummary:
    width_s = end_s - start_s
    arrived = [record for record in records if record.arrival_s >= start_s]
    succeeded = [record for record in arrived if record.is_success]
    ended = [r for r in records if r.is_success and r.last_token_s is not None and start_s <= r.last_token_s <= end_s]
    good = [record for record in ended if record.met_objectives() is not False]
    num_unfinished = sum(record.is_unfinished for record in arrived)
    failures = Counter(record.error for record in arrived if record.error and not record.is_unfinished)
    return GroupSummary(
        request_class=request_class,
        model=model,
        num_requests=len(arrived),
        num_succeeded=len(succeeded),
        num_unfinished=num_unfinished,
        failures=dict(failures.most_common()),
        ttft_s=Distribution.of(record.ttft_s for record in succeeded),
        tpot_s=Distribution.of(record.tpot_s for record in succeeded),
        itl_s=Distribution.of(value for record in succeeded for value in record.itl_s),
        max_itl_s=Distribution.of(record.max_itl_s for record in succeeded),
        latency_s=Distribution.of(record.latency_s for record in succeeded),
        normalized_latency_s=Distribution.of(record.normalized_latency_s for record in succeeded),
        mean_prompt_tokens=Distribution.of(record.prompt_tokens for record in succeeded).mean,
        mean_output_tokens=Distribution.of(record.output_tokens for record in succeeded).mean,
        attainment=Attainment(
            ttft=_share(record.met_ttft() for record in arrived if record.ttft_objective_s is not None),
            tpot=_share(record.met_tpot() for record in arrived if record.tpot_objective_s is not None),
            both=_share(record.met_objectives() for record in arrived if record.has_objective),
        ),
        requests_per_s=len(ended) / width_s,
        goodput_rps=len(good) / width_s,
        prompt_tokens_per_s=sum(
            r.prompt_tokens for r in records if r.first_token_s is not None and start_s <= r.first_token_s <= end_s
        )
        / width_s,
        output_tokens_per_s=sum(tokens_within(record, start_s, end_s) for record in records) / width_s,
        goodput_tokens_per_s=sum(record.output_tokens for record in good) / width_s,
    )


def _share(met: Iterable[bool | None]) -> float | None:
    known = [value for value in met if value is not None]
    return sum(known) / len(known) if known else None


def tokens_within(record: RequestRecord, start_s: float, end_s: float) -> float:
    """Output tokens that came in the window, those of an unfinished answer too: its pieces each stand for as many tokens
    as they do on average, or, without the pieces' times, they came evenly from the first token to the last."""
    if record.first_token_s is None or record.last_token_s is None:
        return 0.0
    if record.token_times:
        times = np.asarray(record.token_times)
        share = float(((times >= start_s) & (times <= end_s)).sum()) / times.size
    else:
        width_s = record.last_token_s - record.first_token_s
        if width_s <= 0:
            share = float(start_s <= record.first_token_s <= end_s)
        else:
            overlap_s = min(end_s, record.last_token_s) - max(start_s, record.first_token_s)
            share = max(0.0, overlap_s) / width_s
    return record.output_tokens * share


def throughput(records: Sequence[RequestRecord], width_s: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """(starts of the windows, output tokens per second in each), from 0 to the last token."""
    end_s = max((record.last_token_s or 0.0 for record in records), default=0.0)
    edges = np.arange(0.0, end_s + width_s, width_s)
    if edges.size < 2:
        edges = np.array([0.0, width_s])
    counts = np.zeros(edges.size - 1)
    for record in records:
        if record.first_token_s is None or record.last_token_s is None:
            continue
        times = np.asarray(
            record.token_times or np.linspace(record.first_token_s, record.last_token_s, record.output_tokens)
        )
        if times.size:
            counts += np.histogram(times, edges)[0] * (record.output_tokens / times.size)
    return edges[:-1], counts / width_s


def in_flight(records: Sequence[RequestRecord]) -> tuple[np.ndarray, np.ndarray]:
    """(times, requests between sending and end from that time on): steps, by time."""
    ended = [record for record in records if record.end_s is not None]
    starts = np.array([record.arrival_s if record.sent_s is None else record.sent_s for record in ended])
    ends = np.array([record.end_s for record in ended], float)
    times = np.concatenate((starts, ends))
    changes = np.concatenate((np.ones(starts.size), -np.ones(ends.size)))
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(changes[order])
