"""What was dispatched and is in no load report yet, and what will be handed over to an instance when its prompt is computed.

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
    """Tokens at most."""


class InFlightLedger:
    """Requests dispatched to each instance that no report of it has named yet. A request is in flight to one instance at
    most. Few online entries an instance (the bound on waiting requests), so their sums are taken afresh and cannot drift."""

    def __init__(self) -> None:
        self._instance_of: dict[str, str] = {}
        self._online: dict[str, dict[str, InFlight]] = {}
        self._offline: dict[str, dict[str, InFlight]] = {}
        self._decoder_of: dict[str, str] = {}
        """By request: the instance that is to decode it."""
        self._coming: dict[str, dict[str, float]] = {}
        """By that instance and request: the merged blocks that it takes there."""
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

    def promise(self, request_id: str, instance_id: str, demand_merged: float) -> None:
        """The instance is to decode a request that is being computed elsewhere."""
        assert request_id not in self._decoder_of, f"{request_id} is promised to another already"
        self._decoder_of[request_id] = instance_id
        self._coming.setdefault(instance_id, {})[request_id] = demand_merged

    def end_promise(self, request_id: str) -> str | None:
        """It is there, or will not come. The instance that was to decode it, or None if none was."""
        instance_id = self._decoder_of.pop(request_id, None)
        if instance_id is not None:
            del self._coming[instance_id][request_id]
            if not self._coming[instance_id]:
                del self._coming[instance_id]
        return instance_id

    def where(self, request_id: str) -> str | None:
        return self._instance_of.get(request_id)

    def is_in_flight(self, instance_id: str) -> bool:
        """Whether anything is in flight to it."""
        return instance_id in self._online or instance_id in self._offline

    def has_load(self, instance_id: str) -> bool:
        """Whether anything is in flight to it, or will be handed over to it."""
        return instance_id in self._online or instance_id in self._coming or instance_id in self._offline

    def num_requests(self, instance_id: str) -> int:
        return self.num_online(instance_id) + len(self._offline.get(instance_id, ()))

    def num_online(self, instance_id: str) -> int:
        """Online requests in flight to it, and those that will be handed over to it."""
        return len(self._online.get(instance_id, ())) + len(self._coming.get(instance_id, ()))

    def num_waiting(self, instance_id: str, model: str) -> int:
        """Online entries of a model: they count as waiting there."""
        entries = self._online.get(instance_id)
        return len([entry for entry in entries.values() if entry.model == model]) if entries else 0

    def demand_merged(self, instance_id: str) -> float:
        """Merged blocks that the online requests of `num_online` will take (offline work is not load)."""
        entries, coming = self._online.get(instance_id), self._coming.get(instance_id)
        in_flight = sum([entry.demand_merged for entry in entries.values()]) if entries else 0.0
        return in_flight + sum(coming.values()) if coming else in_flight

    def demand_merged_of(self, instance_id: str, model: str) -> float:
        """Merged blocks that the online entries of a model will take."""
        entries = self._online.get(instance_id, {}).values()
        return sum([entry.demand_merged for entry in entries if entry.model == model])

    def prompts_s(self, instance_id: str) -> float:
        """Predicted time of the online entries' prompts."""
        entries = self._online.get(instance_id)
        return sum([entry.prompt_s for entry in entries.values()]) if entries else 0.0

    def offline_tokens(self, instance_id: str, model: str) -> int:
        """Tokens of a model's offline entries."""
        return self._offline_tokens[instance_id, model]
