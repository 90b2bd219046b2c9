"""What was dispatched and is in no load report yet.

Without the ledger (Llumnix's dispatch-time local account) a burst between two reports lands on one instance.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class InFlight(NamedTuple):
    """One ledger entry."""

    model: str
    is_online: bool
    demand_merged: float
    prompt_s: float = 0.0
    """Predicted time of its prompt there."""
    num_tokens: int = 0
    """At most."""


class InFlightLedger:
    """Requests dispatched to each instance that no report of it has named yet. A request is in flight to one instance at
    most. Few online entries an instance (the bound on waiting requests), so their sums are taken afresh and cannot drift."""

    def __init__(self) -> None:
        self._instance_of: dict[str, str] = {}
        self._online: dict[str, dict[str, InFlight]] = {}
        self._offline: dict[str, dict[str, InFlight]] = {}
        self._offline_tokens: Counter[tuple[str, str]] = Counter()
        """By instance and model."""

    def __len__(self) -> int:
        return len(self._instance_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._instance_of

    def add(self, request_id: str, instance_id: str, entry: InFlight) -> None:
        assert request_id not in self._instance_of, f"{request_id} is in flight already"
        self._instance_of[request_id] = instance_id
        side = self._online if entry.is_online else self._offline
        side.setdefault(instance_id, {})[request_id] = entry
        if not entry.is_online:
            self._offline_tokens[instance_id, entry.model] += entry.num_tokens

    def remove(self, request_id: str) -> str | None:
        """The instance to which it was in flight, or None if it was to none."""
        instance_id = self._instance_of.pop(request_id, None)
        if instance_id is None:
            return None
        side = self._online if request_id in self._online.get(instance_id, ()) else self._offline
        entry = side[instance_id].pop(request_id)
        if not side[instance_id]:
            del side[instance_id]
        if not entry.is_online:
            self._offline_tokens[instance_id, entry.model] -= entry.num_tokens
            if not self._offline_tokens[instance_id, entry.model]:
                del self._offline_tokens[instance_id, entry.model]
        return instance_id

    def where(self, request_id: str) -> str | None:
        return self._instance_of.get(request_id)

    def num_requests(self, instance_id: str) -> int:
        return len(self._online.get(instance_id, ())) + len(self._offline.get(instance_id, ()))

    def num_online(self, instance_id: str) -> int:
        return len(self._online.get(instance_id, ()))

    def num_waiting(self, instance_id: str, model: str) -> int:
        """Online entries of a model: they count as waiting there."""
        entries = self._online.get(instance_id)
        return len([entry for entry in entries.values() if entry.model == model]) if entries else 0

    def demand_merged(self, instance_id: str) -> float:
        """Merged blocks that the online entries will take (offline work is not load)."""
        entries = self._online.get(instance_id)
        return sum([entry.demand_merged for entry in entries.values()]) if entries else 0.0

    def prompts_s(self, instance_id: str) -> float:
        """Predicted time of the online entries' prompts."""
        entries = self._online.get(instance_id)
        return sum([entry.prompt_s for entry in entries.values()]) if entries else 0.0

    def offline_tokens(self, instance_id: str, model: str) -> int:
        """Tokens of a model's offline entries."""
        return self._offline_tokens[instance_id, model]
