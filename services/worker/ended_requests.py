"""What an instance remembers of requests that ended, so that a gateway that missed the last frame can ask again."""

from __future__ import annotations

from collections import OrderedDict

from shared.messages.requests import TokenEntry


class EndedRequests:
    """Bounded in number and age; time is an argument. Each entry holds a request's whole output with its end."""

    def __init__(self, max_requests: int = 4096, keep_s: float = 60.0) -> None:
        self._max_requests = max_requests
        self._keep_s = keep_s
        self._entries: OrderedDict[str, tuple[float, TokenEntry]] = OrderedDict()

    def add(self, entry: TokenEntry, now: float) -> None:
        """`entry`: offset 0, all output tokens, the finish reason."""
        self._entries.pop(entry.request_id, None)
        self._entries[entry.request_id] = (now, entry)
        while self._entries:
            oldest_id, (added_s, _) = next(iter(self._entries.items()))
            if len(self._entries) <= self._max_requests and now - added_s <= self._keep_s:
                break
            del self._entries[oldest_id]

    def get(self, request_id: str) -> TokenEntry | None:
        found = self._entries.get(request_id)
        return found[1] if found else None
