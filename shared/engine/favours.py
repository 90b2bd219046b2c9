"""Which tenants go first on an instance beyond the order of sequences, so that one that asks little hardly notices another
that floods.

    behind      has at most half of its share, by weight, of the requests here
    favoured    is behind, and nobody who is not behind was served less (policies/tenant_shares.py)
    dominant    has several requests here, and far more than its share even if all that are expected came back

The prompt of a favoured tenant shares its step with nobody else's prompt, nor with others' streams while these may stand
still for so long (silence.py). A favoured head that lacks memory or a row gets what others hold beyond their shares. And
where one tenant is dominant, steps with prompts are kept short for the sake of those that may come back: such a step is what
their next request will find. For how long a tenant is expected, the gaps between its requests tell. For the sake of
strangers steps are kept from getting very long where named tenants ask more than can be done: where a prompt is late, and
one of them would be dominant beside a stranger.

Models are favoured likewise, whoever asks them, all with equal shares: one that is asked far less than its share goes before
others of its rank with its prompts, and with streams that are behind pace. While a prompt is late, any that is behind goes
first with its prompts, and steps with prompts are kept short for the sake of models too. A model that nobody asks is a
stranger. Only models that were served rarely of late are favoured: near an instance's capacity most have few requests beside
the one whose requests take longest, and that one has to be served as well.
"""

from __future__ import annotations

from math import exp, inf
from typing import NamedTuple

from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ModelQueue
from shared.engine.sequence import PriorityClass, Sequence
from shared.policies.silence import PLANNED_SHARE, allowed_silence_s
from shared.policies.tenant_shares import BEHIND_SHARE, TenantShares

MOST_EXPECTED_S = 30.0
"""After its last request a tenant is expected for so long at most, and while too little is known of it."""
LEAST_EXPECTED_S = 1.0
"""The same at least, however close together its requests came."""
EXPECTED_GAPS = 3.0
"""Multiple of the longest recent gap between its requests for which a tenant is expected. Of requests that come at random
times, less than 1 % come later."""
GAP_FADING = 0.1
"""Share of the time that passes by which that gap gets shorter: requests at once leave it as it is."""
WATCHED = 2.0
"""Multiple of the time for which a tenant would be expected, after which enough is known of its gaps."""
WAIT_SHARE = 0.25
"""Share of the longest prompts that an expected tenant had lately: what all steps in flight may take before its next one."""
FADING = 0.9
"""Factor by which the longest prompt fades with each prompt."""
LEAST_PROGRESS = 0.5
"""Multiple of a step's fixed time: for so long the steps in flight go on with prompts in any case, beside their streams."""
LONG_STEP_S = 0.015
"""Seconds of a step after which the next one is planned when it has ended: the device then waits for the host, for a
small part of that."""
STRANGER_SHARE = 0.05
"""Share of the TTFT objective: what prompts may add to a step where a stranger might come beside a flood."""
EXPECTED_SHARE = 0.03
"""Share of the TTFT objective: what prompts may add to a step where another model is expected. With much less they would not
get their part of the steps beside many streams: their model could not do what it is asked, and ever more would be late."""
MAX_KNOWN = 256
FEW = 4
"""Requests: with fewer nobody is dominant."""
DOMINANT_SHARE = 1.5
"""Times its share that a dominant tenant has."""
LITTLE_SHARE = 0.125
"""Part of its share of the requests that a model has at most which is asked far less."""
RECENT_S = 30.0
"""Time in which the service of a model fades to 1/e."""


class _Served(NamedTuple):
    """Seconds of the steps that online work of a model led, faded."""

    seconds: float
    at_s: float

    def at(self, now: float) -> float:
        return self.seconds * exp((self.at_s - now) / RECENT_S)


class Known:
    """What is known of a tenant, or a model, that had a request here lately."""

    __slots__ = ("first_s", "gap_s", "prompt_s", "seen_s", "weight")

    def __init__(self, now: float) -> None:
        self.first_s = self.seen_s = now
        self.gap_s = self.prompt_s = 0.0
        self.weight = 1.0

    def note(self, prompt_s: float, weight: float, now: float) -> None:
        """A prompt of it, which takes so long, is begun."""
        passed_s = now - self.seen_s
        gap_s = min(passed_s, MOST_EXPECTED_S / EXPECTED_GAPS)
        self.gap_s = max(gap_s, self.gap_s - GAP_FADING * passed_s)
        self.prompt_s = max(prompt_s, FADING * self.prompt_s)
        self.seen_s, self.weight = now, weight

    def is_expected(self, now: float) -> bool:
        expected_s = max(LEAST_EXPECTED_S, EXPECTED_GAPS * self.gap_s)
        if self.seen_s - self.first_s < WATCHED * expected_s:
            expected_s = MOST_EXPECTED_S
        return now - self.seen_s <= expected_s


class Favours:
    """Which tenants' online requests an instance favours."""

    def __init__(self, memory: Allocator, steps_in_flight: int) -> None:
        self._memory = memory
        self._steps_in_flight = steps_in_flight
        self._known: dict[str, Known] = {}
        """Tenants that had a request here lately, the last seen last."""
        self._known_models: dict[str, Known] = {}
        """Models that had a request here lately, the last seen last."""
        self._served: dict[str, _Served] = {}
        """Models that led steps here, the last one last."""

    @property
    def _tenants(self) -> TenantShares:
        return self._memory.tenants_of(True)

    def note(self, sequence: Sequence, prompt_s: float, now: float) -> None:
        """Its prompt, which takes so long, is begun."""
        weight = sequence.request.tenant_weight
        noted = [(self._known, sequence.tenant, weight)]
        if self._memory.ordering.favours_models:
            noted.append((self._known_models, sequence.model, 1.0))
        for all_known, name, its_weight in noted:
            known = all_known.pop(name, None) or Known(now)
            known.note(prompt_s, its_weight, now)
            all_known[name] = known
            if len(all_known) > MAX_KNOWN:
                del all_known[next(iter(all_known))]

    def favoured(self) -> set[str]:
        """Tenants."""
        return self._tenants.favoured()

    def models(self, now: float) -> tuple[set[str], set[str]]:
        """Models whose prompts go first, and those whose streams do so where they are behind pace; none where the order of
        requests does not favour any."""
        models = self._memory.models
        if not self._memory.ordering.favours_models or not models.are_several:
            return set(), set()
        busy = self._busy_models(now)
        little = models.favoured(LITTLE_SHARE) - busy
        is_one_late = self._memory.first_tokens.is_one_late(now)
        return (models.favoured(BEHIND_SHARE) - busy if is_one_late else little), little

    def _busy_models(self, now: float) -> set[str]:
        """Models that had more than 1/n² of the time lately, where n have requests: all that are favoured lead at most a
        quarter of it."""
        served = {name: served.at(now) for name, served in self._served.items()}
        most_s = sum(served.values()) / self._memory.models.num_tenants**2
        return {name for name, seconds in served.items() if seconds > most_s}

    def serve(self, model: str, seconds: float, now: float) -> None:
        """Online work of the model leads a step that takes so long."""
        before = self._served.pop(model, None)
        self._served[model] = _Served(seconds + (before.at(now) if before else 0.0), now)
        if len(self._served) > MAX_KNOWN:
            del self._served[next(iter(self._served))]

    def prompts(self, queue: ModelQueue, priority_class: PriorityClass) -> list[Sequence]:
        """Online sequences of the model and rank whose prompts are favoured."""
        favoured = self.favoured() if priority_class != PriorityClass.OFFLINE else set()
        if not favoured:
            return []
        return [
            sequence
            for sequence in queue.runnable(priority_class)
            if sequence.tenant in favoured and sequence.total - sequence.num_computed > 1
        ]

    def make_room(self, queue: ModelQueue, prompts: list[Sequence], now: float) -> None:
        """Makes room for the first of the prompts that waits, while its victims are in no step."""
        memory = self._memory
        waiting = [sequence for sequence in prompts if sequence.row < 0]
        if not waiting:
            return
        memory.sort(waiting, now)
        head, running = waiting[0], queue.running[waiting[0].priority_class].values()
        if not memory.num_free_rows:
            memory.make_row(head, now)
        growing = sum(sequence.num_computed >= sequence.capacity for sequence in running)
        needed = memory.num_wanted_blocks(head) + growing
        if memory.pool.num_available(queue.name) < needed:
            memory.make_room(head, needed, now)

    def may_be_left_out(self, sequence: Sequence, prompts: list[Sequence], step_s: float, now: float) -> bool:
        """Whether a stream may miss a step with these prompts that takes so long."""
        if any(sequence.tenant == prompt.tenant for prompt in prompts):
            return False
        silent_s = now - sequence.last_ran_s + step_s
        return silent_s <= PLANNED_SHARE * allowed_silence_s(sequence.tpot_objective_s) / 2

    def waits_for(self, step_s: float, now: float) -> bool:
        """Whether a step in flight that takes so long is to end before the next one is planned: the prompt of an expected
        tenant, or a stranger's beside a flood, would find both."""
        is_expected = _shortest_s(self._tenants, self._known, now) < inf or self._expects_model(now)
        return step_s >= LONG_STEP_S and (is_expected or self._is_flooded(now))

    def step_limit_s(self, queue: ModelQueue, now: float) -> float:
        """How long a step of the model with prompts may take."""
        cost = queue.cost_model
        if cost is None:
            return inf
        decodes_s = cost.predict(queue.online_shape(0))
        shortest_s = _shortest_s(self._tenants, self._known, now)
        if shortest_s < inf:
            least_s = decodes_s + LEAST_PROGRESS * cost.fixed_s / self._steps_in_flight
            return max(WAIT_SHARE * shortest_s / self._steps_in_flight, least_s)
        if self._expects_model(now, queue.name):
            return decodes_s + EXPECTED_SHARE * queue.ttft_objective_s
        return decodes_s + STRANGER_SHARE * queue.ttft_objective_s if self._is_flooded(now) else inf

    def _is_flooded(self, now: float) -> bool:
        """Whether more is asked than can be done in time, and a stranger would be a tenant, or a model, that asks little."""
        tenants, models = self._tenants, self._memory.models
        may_come = "" not in tenants and tenants.has_dominant(FEW, DOMINANT_SHARE, tenants.mean_weight)
        has_strangers = self._memory.ordering.favours_models and any(name not in models for name in self._memory.queues)
        if not may_come and has_strangers:
            may_come = models.has_dominant(FEW, DOMINANT_SHARE, 1.0)
        return may_come and self._memory.first_tokens.is_one_late(now)

    def _expects_model(self, now: float, but: str = "") -> bool:
        """Whether a model is expected beside a dominant one while a prompt is late, and `but` is not expected itself."""
        known = _shortest_s(self._memory.models, self._known_models, now, but)
        return known < inf and self._memory.first_tokens.is_one_late(now)


def _shortest_s(shares: TenantShares, known: dict[str, Known], now: float, but: str = "") -> float:
    """Seconds of the shortest among the longest recent prompts of those that are expected beside a dominant one; inf: there
    are none, or `but` is expected itself."""
    expected = {
        name: one
        for name, one in known.items()
        if one.is_expected(now) and (name not in shares or shares.is_behind(name))
    }
    away = sum(one.weight for name, one in expected.items() if name not in shares)
    if not expected or but in expected or not shares.has_dominant(FEW, DOMINANT_SHARE, away):
        return inf
    return min(one.prompt_s for one in expected.values())
