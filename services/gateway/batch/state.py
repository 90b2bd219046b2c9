"""What a batch is and how far it has come: its states, its lines, and when it will be done. Pure: time is an argument.

    validating --> in_progress --> finalizing --> completed, or expired where the window was over
        |              |
        `--------------+--> cancelling --> cancelled

and from each of these `failed`: a wrong line, a lost input, or a run that breaks off again and again. What is finished when
a batch expires, is cancelled or loses its input is kept.

A batch is written by the gateway that owns it, and by whoever cancels it; both through `advance`, by compare-and-set.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from shared.messages.batches import BatchLineResult, BatchProblem, BatchRecord
from shared.messages.requests import ErrorCode

TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})
_NEXT = {
    "validating": {"in_progress", "failed", "cancelling"},
    "in_progress": {"finalizing", "failed", "cancelling"},
    "finalizing": {"completed", "expired", "failed"},
    "cancelling": {"cancelled", "failed"},
}

MAX_WINDOW_S = 30 * 86400
_WINDOW = re.compile(r"(?:([0-9]{1,5})d)?(?:([0-9]{1,5})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,7})s)?")
_UNITS_S = (86400, 3600, 60, 1)


def window_s(text: str) -> int | None:
    """Seconds of a completion window such as "24h", "10m" or "1h30m"; None: not one, or over 30 days."""
    found = _WINDOW.fullmatch(text)
    if found is None:
        return None
    seconds = sum(int(number or 0) * unit for number, unit in zip(found.groups(), _UNITS_S, strict=True))
    return seconds if 0 < seconds <= MAX_WINDOW_S else None


def is_terminal(record: BatchRecord) -> bool:
    return record.status in TERMINAL


def advance(record: BatchRecord, status: str, now_s: float) -> BatchRecord:
    """`record` in its next state, entered at `now_s` (Unix seconds), in which it waits for nothing yet; unchanged where that
    state cannot follow."""
    if status not in _NEXT.get(record.status, ()):
        return record
    status_s = {**record.status_s, status: now_s}
    return msgspec.structs.replace(record, status=status, status_s=status_s, waiting_for=None)


def expire(record: BatchRecord, now_s: float) -> BatchRecord:
    """The window is over: `record` is finalized, and will then be expired."""
    changed = advance(record, "finalizing", now_s)
    if changed.status != "finalizing" or has_expired(changed):
        return record
    return msgspec.structs.replace(changed, status_s={**changed.status_s, "expired": now_s})


@dataclass(frozen=True)
class BatchFiles:
    """What a batch leaves: the ids of its files (empty: there is none), and how many lines they have."""

    output_file_id: str = ""
    error_file_id: str = ""
    num_completed: int = 0
    num_failed: int = 0

    def of(self, record: BatchRecord) -> BatchRecord:
        return msgspec.structs.replace(
            record,
            output_file_id=self.output_file_id,
            error_file_id=self.error_file_id,
            num_completed=self.num_completed,
            num_failed=self.num_failed,
            predicted_finish_s=None,
        )


def conclude(record: BatchRecord, files: BatchFiles, now_s: float) -> BatchRecord:
    """All that there will be of the batch is in these files."""
    status = "cancelled" if record.status == "cancelling" else "expired" if has_expired(record) else "completed"
    changed = advance(record, status, now_s)
    return changed if changed is record else files.of(changed)


def has_expired(record: BatchRecord) -> bool:
    return "expired" in record.status_s


def failed(
    record: BatchRecord, problems: list[BatchProblem], now_s: float, files: BatchFiles | None = None
) -> BatchRecord:
    """It does not go on, because of these. `files`: what was done before, if anything."""
    changed = advance(record, "failed", now_s)
    if changed is record:
        return record
    return msgspec.structs.replace((files or BatchFiles()).of(changed), errors=problems)


# ------------------------------------------------------------------------------------------------------- lines


@dataclass(frozen=True)
class LinePlan:
    """What validation found in a batch's lines, by index (blank lines are not counted)."""

    models: list[str]
    model_of: array[int]
    """Index into `models`."""
    tokens: array[int]
    """Estimate of prompt and output together."""

    @classmethod
    def of_lost_input(cls, record: BatchRecord) -> LinePlan:
        """What the record still says."""
        return cls([record.model], array("H", [0]) * record.num_total, array("i", [0]) * record.num_total)


class LineBook:
    """Which lines are done, and what they came to. A few bytes of memory a line."""

    def __init__(self, plan: LinePlan) -> None:
        self.plan = plan
        self.num_completed = 0
        self.num_failed = 0
        self.input_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self._done = bytearray(len(plan.tokens))
        self._remaining = [0] * len(plan.models)
        for model, tokens in zip(plan.model_of, plan.tokens, strict=True):
            self._remaining[model] += tokens
        self._estimated = 0
        """Estimated cost of the completed lines, before they ran."""

    def __len__(self) -> int:
        return len(self._done)

    def is_done(self, index: int) -> bool:
        return bool(self._done[index])

    @property
    def num_open(self) -> int:
        return len(self) - self.num_completed - self.num_failed

    def note(self, index: int, result: BatchLineResult) -> bool:
        """The line has this result. False: that is known already."""
        if self._done[index]:
            return False
        self._done[index] = 1
        self._remaining[self.plan.model_of[index]] -= self.plan.tokens[index]
        if result.is_success:
            self.num_completed += 1
            self._estimated += self.plan.tokens[index]
        else:
            self.num_failed += 1
        self.input_tokens += result.input_tokens
        self.cached_tokens += result.cached_tokens
        self.output_tokens += result.output_tokens
        return True

    def remaining(self, model: int) -> int:
        """Estimate for the open lines of a model, as it was before any ran."""
        return self._remaining[model]

    def unfinished_tokens(self, model: int) -> int:
        """Estimate for the open lines of a model, corrected by what the finished ones came to (weighted as if a few
        thousand tokens had come out as estimated, so that the first lines do not decide alone)."""
        prior = 4096
        actual = self.input_tokens + self.output_tokens
        return int(self._remaining[model] * (actual + prior) / (self._estimated + prior))

    def counted(self, record: BatchRecord) -> BatchRecord:
        """`record` with this book's figures; they never go down."""
        return msgspec.structs.replace(
            record,
            num_total=len(self),
            num_completed=max(record.num_completed, self.num_completed),
            num_failed=max(record.num_failed, self.num_failed),
            input_tokens=max(record.input_tokens, self.input_tokens),
            cached_tokens=max(record.cached_tokens, self.cached_tokens),
            output_tokens=max(record.output_tokens, self.output_tokens),
        )


PACE_WINDOW_S = 120.0


class Pace:
    """How fast a batch's lines get done, from what remained of them in the last minutes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, list[int]]] = deque()

    def sample(self, book: LineBook, now_s: float) -> None:
        self._samples.append((now_s, [book.remaining(model) for model in range(len(book.plan.models))]))
        while now_s - self._samples[0][0] > PACE_WINDOW_S:
            self._samples.popleft()

    def seconds_left(self, model: int) -> float | None:
        """None: nothing was done lately."""
        if not self._samples:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        num_done = first[model] - last[model]
        return last[model] * (last_s - first_s) / num_done if num_done > 0 else None


def predicted_finish_s(book: LineBook, pace: Pace, tokens_per_s: Mapping[str, float], now_s: float) -> float | None:
    """Unix seconds; the slowest model decides. `tokens_per_s`: what the batch may hope for of each model, where it has no
    pace of its own yet. None: neither is known."""
    latest_s = now_s
    for index, model in enumerate(book.plan.models):
        if (tokens := book.unfinished_tokens(index)) > 0:
            seconds = pace.seconds_left(index)
            if seconds is None:
                if not (rate := tokens_per_s.get(model, 0.0)) > 0:
                    return None
                seconds = tokens / rate
            latest_s = max(latest_s, now_s + seconds)
    return latest_s


# ----------------------------------------------------------------------------------------------------- retries

NOBODY_CODES = frozenset(
    {
        ErrorCode.UNAVAILABLE,
        ErrorCode.GONE,
        ErrorCode.DRAINING,
        ErrorCode.NOT_LEADER,
        ErrorCode.OVERLOADED,
        ErrorCode.BUSY,
        ErrorCode.DEADLINE,
    }
)
"""Nobody could take the line, which says nothing about it: it is tried until the batch's window is over."""
MAX_COUNTED_FAILURES = 3
"""Most failures of kinds that the line itself may cause."""
MAX_LOAD_FAILURES = 30
"""Most attempts that could not load the model's tokenizer: several minutes."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 15.0


@dataclass
class Attempts:
    """The failures of one line so far."""

    num_failures: int = 0
    num_counted: int = 0

    def backoff_s(self, code: ErrorCode, jitter: float, limit: int | None = None) -> float | None:
        """How long to wait after another failure; None: it is final. `jitter`: 0 to 1. `limit`: of failures that count;
        None: by the code."""
        if limit is None and code in (ErrorCode.INTERNAL, ErrorCode.NOT_FINITE):  # perhaps the instance is at fault
            limit = MAX_COUNTED_FAILURES
        if limit is not None:
            self.num_counted += 1
            if self.num_counted >= limit:
                return None
        elif code not in NOBODY_CODES:
            return None
        self.num_failures += 1
        return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * float(1 << min(10, self.num_failures - 1))) * (0.5 + 0.5 * jitter)
