"""What offline work gateways may submit.

Room for a model, in tokens (prompt and output at most):

    what its instances report - dispatched since - waiting here - granted to gateways and not submitted yet

Each term takes over from the one after it, so no token of room is given away twice and none is lost for longer than a
grant lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from shared.messages.batches import GrantQuery, GrantReply, OfflineDemand
from shared.messages.cluster import FinishedStats
from shared.messages.requests import RequestClass
from shared.policies.harvest import allocate
from shared.scheduling.queue import Outflow

GRANT_EXPIRY_S = 2.0
"""Seconds after which a grant, and what a gateway said it wants, expire. Gateways with work to submit ask more often."""
ASK_AGAIN_S = 0.05
"""The time after which load reports may show new room."""
NOBODY_SERVES_S = 0.5
"""While no instance serves any of the models asked for."""
THROUGHPUT_WINDOW_S = 30.0
THROUGHPUT_EXPIRY_S = 120.0
"""After the last offline request of a model finished, its throughput is not known any more: there was nothing to do."""


@dataclass(slots=True)
class _Gateway:
    asked_s: float
    unmet: list[OfflineDemand]
    """What it wants beyond what it was granted."""
    granted: Counter[str] = field(default_factory=Counter)
    """Tokens of each model that it was granted and has not submitted yet."""


class GrantBook:
    """Who wants to submit offline requests, and what was promised to whom."""

    def __init__(self) -> None:
        self._gateways: dict[str, _Gateway] = {}
        self._throughput: dict[str, Outflow] = {}

    def answer(self, query: GrantQuery, room_tokens: Mapping[str, int | None], now: float) -> GrantReply:
        """Grants for all of a gateway's batches, in place of those it had. `room_tokens`: for each model asked for, what
        instances could take of new submissions, None where no instance serves it."""
        self._expire(now)
        self._gateways.pop(query.gateway_id, None)
        left = {
            model: (room or 0) - sum(gateway.granted[model] for gateway in self._gateways.values())
            for model, room in room_tokens.items()
        }
        # Those of other gateways compete for what is left, so that whoever asks first does not take it all.
        others = [demand for gateway in self._gateways.values() for demand in gateway.unmet]
        tokens_per_s = self.tokens_per_s(now)
        grants = allocate([*query.demands, *others], left, tokens_per_s)[: len(query.demands)]
        granted: Counter[str] = Counter()
        unmet = []
        for demand, grant in zip(query.demands, grants, strict=True):
            granted[demand.model] += grant.tokens
            if (wanted := demand.wanted_tokens - grant.tokens) > 0:
                unmet.append(msgspec.structs.replace(demand, wanted_tokens=wanted))
        self._gateways[query.gateway_id] = _Gateway(now, unmet, granted)
        is_served = any(room is not None for room in room_tokens.values())
        return GrantReply(grants, ASK_AGAIN_S if is_served else NOBODY_SERVES_S, tokens_per_s)

    def on_submitted(self, gateway_id: str, model: str, num_tokens: int) -> None:
        """An offline request arrived, which uses up a part of the gateway's grant."""
        gateway = self._gateways.get(gateway_id)
        if gateway is not None:
            gateway.granted[model] = max(0, gateway.granted[model] - num_tokens)

    def count_finished(self, finished: Sequence[FinishedStats], now: float) -> None:
        for stats in finished:
            if stats.request_class == RequestClass.OFFLINE:
                outflow = self._throughput.get(stats.model)
                if outflow is None or outflow.silent_s(now) > THROUGHPUT_EXPIRY_S:
                    outflow = self._throughput[stats.model] = Outflow(THROUGHPUT_WINDOW_S)
                outflow.count(now, stats.prompt_tokens + stats.output_tokens)

    def tokens_per_s(self, now: float) -> dict[str, float]:
        """Recent offline throughput of each model over the cluster."""
        known = self._throughput.items()
        return {model: o.per_second(now) for model, o in known if o.silent_s(now) <= THROUGHPUT_EXPIRY_S}

    def unmet_tokens(self, now: float) -> Counter[str]:
        """Tokens of each model that gateways would submit and were not granted."""
        self._expire(now)
        unmet: Counter[str] = Counter()
        for gateway in self._gateways.values():
            for demand in gateway.unmet:
                unmet[demand.model] += demand.wanted_tokens
        return unmet

    def pressure(self, now: float) -> dict[str, float]:
        """By model of which batches wait for room: the time that they need at the present throughput, earliest deadline
        first, over the time that the one which is tightest has."""
        self._expire(now)
        tokens_per_s, pressure, needed = self.tokens_per_s(now), dict[str, float](), Counter[str]()
        unmet = [demand for gateway in self._gateways.values() for demand in gateway.unmet]
        for demand in sorted(unmet, key=lambda demand: demand.slack_s):
            rate = tokens_per_s.get(demand.model, 0.0)
            needed[demand.model] += demand.unfinished_tokens
            if rate > 0 and demand.slack_s > 0:
                share = needed[demand.model] / rate / demand.slack_s
                pressure[demand.model] = max(pressure.get(demand.model, 0.0), share)
        return pressure

    def _expire(self, now: float) -> None:
        for gateway_id, gateway in list(self._gateways.items()):
            if now - gateway.asked_s > GRANT_EXPIRY_S:
                del self._gateways[gateway_id]
