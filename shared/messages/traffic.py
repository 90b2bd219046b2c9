"""Requests as the service monitor knows them: what the scheduler tells placement of each, what placement stores of them, and
what it says of a model's traffic."""

from __future__ import annotations

from enum import IntEnum
from hashlib import blake2b

import msgspec

from shared.messages.requests import Amount, Count, Number, Seconds


def request_number(request_id: str) -> int:
    """48 bits that are the same in every process, and as good as random."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=6).digest(), "little")


class Outcome(IntEnum):
    """How a request ended, for the monitor."""

    PENDING = 0
    """It has not, as far as is known."""
    FINISHED = 1
    CANCELLED = 2
    """By its client."""
    LATE = 3
    """Its deadline passed."""
    FAILED = 4
    REFUSED = 5
    """Refused for want of room, on its arrival."""


class RequestRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request, over its whole life: placed again or moved, it is one row. Told at its arrival and again at its end."""

    number: Count
    """Number of its id: `request_number`."""
    model: Count
    """Index of its name in what the row comes with."""
    is_online: bool
    age_s: Seconds
    """Since its arrival at the gateway, at the time of what the row comes with."""
    prompt_tokens: Count
    outcome: Outcome = Outcome.PENDING
    output_tokens: Count = 0
    latency_s: Seconds = 0.0
    """Arrival to end."""
    ttft_s: Seconds = -1.0
    """Arrival to first token; below 0: it had none."""
    execution_s: Seconds = 0.0
    """What it takes alone on its instance; 0: not known as a whole."""
    is_ttft_met: bool | None = None
    """None: it has no such objective, or says nothing of it."""
    is_tpot_met: bool | None = None
    max_itl_s: Seconds = 0.0
    """The longest time between two of its tokens."""


class RequestRows(msgspec.Struct, frozen=True, array_like=True):
    """Scheduler to placement, about once a second, until it is acknowledged."""

    scheduler_id: str
    models: list[str]
    rows: list[RequestRow]
    num_dropped: Count = 0
    """Rows that there was no room to keep until they could be told."""


class Moments(msgspec.Struct, array_like=True):
    """A sample whose mean and deviation are exact, however many there were."""

    count: Count = 0
    total: Number = 0.0
    squares: Number = 0.0
    """Sum of them."""


class ClassSums(msgspec.Struct, array_like=True):
    """Sums over one model's requests of one class, in one slot of time. Arrivals count when they arrive, the rest when it
    ends."""

    arrived: Count = 0
    refused: Count = 0
    finished: Count = 0
    cancelled: Count = 0
    failed: Count = 0
    """Deadlines too."""
    prompt_tokens: Moments = msgspec.field(default_factory=Moments)
    """Prompt tokens of requests that arrived; the fields after it are of those that finished."""
    output_tokens: Moments = msgspec.field(default_factory=Moments)
    execution_s: Moments = msgspec.field(default_factory=Moments)
    latency_s: Moments = msgspec.field(default_factory=Moments)
    ttft_s: Moments = msgspec.field(default_factory=Moments)
    tpot_s: Moments = msgspec.field(default_factory=Moments)
    """TPOT of requests with several tokens."""
    ttft_met: tuple[Count, Count] = (0, 0)
    """Requests that met their objective, and those that have one."""
    tpot_met: tuple[Count, Count] = (0, 0)
    max_itl_s: Moments = msgspec.field(default_factory=Moments)
    """Longest gap of each request with several tokens."""


class StoredTraffic(msgspec.Struct, frozen=True, array_like=True):
    """A part of one slot of the request log."""

    at_s: Seconds
    """Unix time that the rows' ages are from."""
    began_s: Seconds
    """Time from which on the log has heard of requests."""
    slot: Amount
    level: Count
    """Each arrival stands for 2 ** level."""
    models: list[str]
    arrived: list[RequestRow]
    ended: list[RequestRow]
    sums: list[tuple[Count, bool, ClassSums]] = []
    """(model, whether online, sums); in the slot's first part."""


class MeanStd(msgspec.Struct, frozen=True):
    """Zeros where there is nothing."""

    mean: float = 0.0
    std: float = 0.0


class Spread(msgspec.Struct, frozen=True):
    """Zeros where there is nothing."""

    mean: float = 0.0
    std: float = 0.0
    p50: float = 0.0
    p99: float = 0.0


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A model's requests of one class in an interval: those that arrived in it, and those that ended in it."""

    interval_s: float
    num_arrived: int = 0
    num_refused: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    arrivals_per_s: float = 0.0
    prompt_tokens: MeanStd = MeanStd()
    output_tokens: MeanStd = MeanStd()
    execution_s: MeanStd = MeanStd()
    """What a request takes alone on its instance."""
    latency_s: Spread = Spread()
    ttft_s: Spread = Spread()
    tpot_s: Spread = Spread()
    max_itl_s: Spread = Spread()
    """Longest gaps between two tokens, one of each request with several tokens: TPOT is a request's mean."""
    normalised_latency: float = 0.0
    """Mean latency over the mean execution time that SLOs are reckoned by (SeaLLM, equation 1), or of `slo_s`
    where some missed that and none finished; 0: not known, or offline."""
    slo_s: float = 0.0
    """Latency that a request is to have at most; 0: not known, as nothing has finished yet, or offline."""
    attainment: float | None = None
    """Share of requests that ended within it, of those that ended in the interval or whose `slo_s` passed in it; None: there
    were none."""
    num_decided: int = 0
    """Requests that it is the share of."""
    ttft_attainment: float | None = None
    """Share that met their objective for the time to first token; likewise for the time per output token."""
    tpot_attainment: float | None = None


class ModelTraffic(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    online: ModelSummary
    offline: ModelSummary


DEFAULT_INTERVAL_S = 600.0
LEAST_INTERVAL_S, MAX_INTERVAL_S = 10.0, 6 * 3600.0
"""One slot of the log, and how long it is kept."""


class GetTraffic(msgspec.Struct, frozen=True):
    interval_s: Seconds = DEFAULT_INTERVAL_S
    """Up to now; from `LEAST_INTERVAL_S` to `MAX_INTERVAL_S`."""


class TrafficReply(msgspec.Struct, frozen=True):
    models: list[ModelTraffic]
