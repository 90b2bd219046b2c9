"""How fast KV blocks may leave and how fast they do. Pure: time is an argument, in seconds of any monotonic clock."""

from __future__ import annotations


class TokenBucket:
    """Limits bytes per second over all transfers that share it. Whoever takes goes into debt and waits until the debt is
    paid, so destinations are served in their order and a chunk may exceed the burst."""

    def __init__(self, rate_bytes_s: float | None, burst_bytes: float) -> None:
        """`rate_bytes_s` None: no limit."""
        if (rate_bytes_s is not None and rate_bytes_s <= 0) or burst_bytes < 0:
            raise ValueError(f"a bucket of {burst_bytes} bytes cannot fill at {rate_bytes_s} bytes/s")
        self.rate_bytes_s = rate_bytes_s
        self.burst_bytes = burst_bytes
        self._tokens = burst_bytes
        self._at: float | None = None

    def set_rate(self, rate_bytes_s: float | None, now: float) -> None:
        self._fill(now)
        self.rate_bytes_s = rate_bytes_s

    def take(self, num_bytes: int, now: float) -> float:
        """Seconds to wait before these bytes may go."""
        if self.rate_bytes_s is None:
            return 0.0
        self._fill(now)
        self._tokens -= num_bytes
        return max(0.0, -self._tokens / self.rate_bytes_s)

    def _fill(self, now: float) -> None:
        if self._at is not None and self.rate_bytes_s is not None:
            self._tokens = min(self.burst_bytes, self._tokens + max(0.0, now - self._at) * self.rate_bytes_s)
        self._at = now if self._at is None else max(self._at, now)


class Bandwidth:
    """Bytes per second to one peer, over about the last `window_bytes`, without the waits that the rate limit imposed."""

    def __init__(self, window_bytes: int = 256 << 20) -> None:
        self._window_bytes = window_bytes
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        if num_bytes <= 0 or seconds <= 0:
            return
        keep = max(0.0, 1.0 - num_bytes / self._window_bytes)
        self._bytes = self._bytes * keep + num_bytes
        self._seconds = self._seconds * keep + seconds

    @property
    def bytes_s(self) -> float | None:
        return self._bytes / self._seconds if self._seconds else None
