"""Records of requests: outcome and times, in seconds since the start of the run, on one monotonic clock."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from shared.messages.requests import RequestClass

UNFINISHED = "unfinished"
"""The run ended before the request did: neither a success nor a failure."""
INTERRUPTED = "interrupted"
"""The same because the person at the keyboard ended the run."""


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    request_id: str
    model: str
    request_class: RequestClass = msgspec.field(default=RequestClass.ONLINE, name="class")
    stream: str = ""
    """Stream of the workload."""
    arrival_s: float
    """Time at which it was to be sent, so that latencies include a slip of the client; in a closed loop, when it was
    sent."""
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float | None = None
    """End of the answer, or of the attempt."""
    token_times: list[float] = []
    """One entry a piece of the answer that carries text; a server may send several tokens in one piece."""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    """Number that the server counts; where it does not (`has_usage`), the number of pieces."""
    has_usage: bool = True
    planned_prompt_tokens: int = 0
    planned_output_tokens: int = 0
    ttft_objective_s: float | None = None
    tpot_objective_s: float | None = None
    finish_reason: str = ""
    error: str = ""
    """A short reason to count by, say http_429; empty for a success."""
    error_message: str = ""

    @property
    def is_success(self) -> bool:
        return not self.error

    @property
    def is_unfinished(self) -> bool:
        return self.error in (UNFINISHED, INTERRUPTED)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, as `vllm bench serve` defines it; None below two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def max_itl_s(self) -> float | None:
        """The longest time that the answer stood still; None below two pieces."""
        return max(self.itl_s, default=None)

    @property
    def latency_s(self) -> float | None:
        """End to end."""
        return None if self.last_token_s is None else self.last_token_s - self.arrival_s

    @property
    def normalized_latency_s(self) -> float | None:
        """End-to-end latency per output token (Orca; SeaLLM)."""
        return None if self.latency_s is None or not self.output_tokens else self.latency_s / self.output_tokens

    @property
    def has_objective(self) -> bool:
        return self.ttft_objective_s is not None or self.tpot_objective_s is not None

    def met_ttft(self) -> bool | None:
        """None: no objective, or the run ended before this was known."""
        if self.ttft_objective_s is None:
            return None
        if self.ttft_s is not None and not (self.error and not self.is_unfinished):
            return self.ttft_s <= self.ttft_objective_s
        if not self.is_unfinished:
            return False
        waited_s = (self.end_s or self.arrival_s) - self.arrival_s
        return False if waited_s > self.ttft_objective_s else None

    def met_tpot(self) -> bool | None:
        """Whether its TPOT objective was met, like `met_ttft`; an answer of one token meets it."""
        if self.tpot_objective_s is None or self.is_unfinished:
            return None
        return self.is_success and (self.tpot_s is None or self.tpot_s <= self.tpot_objective_s)

    def met_objectives(self) -> bool | None:
        """Both. None: neither objective is set, or the run ended before this was known."""
        met = [m for m, objective in ((self.met_ttft(), self.ttft_objective_s), (self.met_tpot(), self.tpot_objective_s))
               if objective is not None]  # fmt: skip
        if False in met:
            return False
        return None if None in met or not met else True
