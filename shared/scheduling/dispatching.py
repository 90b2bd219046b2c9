"""Matches queued requests with instances: who is next, and where it goes.

A request waits here until an instance that serves its model is free enough, so that order stays a decision over the whole
cluster; an instance holds few waiting requests of a model, just so many that it never runs dry (`candidates`).

Online requests go where the dispatch policy says (`shared.policies.dispatch`), as if no offline request were there:
those yield. One that fits nowhere now may be sent where it waits at the head of the instance's queue: its demand makes
the instance give requests away (`rebalancing`), so that free memory comes together. Meanwhile nobody else is let in
there. Other requests that fit nowhere wait in the queue, and those that fit pass them, but not for long: one that has
waited `OVERDUE_S` goes to an instance in any case. One of high priority sees an instance as if no headroom were kept
there; and an instance with as many waiting requests as it may have takes as many again of high priority, which it lets
in first. So it does for a request whose tenant has much less on the instances than its share, or whose model has no other
request there (`tenants`): it goes to one whatever memory is free, and what others of its class hold beyond their shares
gives way to it there. And so it does for a request that was lost with its instance, if another has copies of most of its
KV.

Offline requests go where the most room for them is reported, minus what was sent there since, and nowhere without any; the
last one may overdraw it, so that a long request is not passed by for ever.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import cast

from shared.messages.cluster import LoadReport, NextMove
from shared.policies.dispatch import GRAIN_S, DispatchPolicy
from shared.policies.ordering import ModelView
from shared.policies.roles import is_apart, is_handed_over, is_short
from shared.scheduling.candidates import CandidateIndex, CandidatesFor, Ranking, Seen
from shared.scheduling.cluster import ClusterView
from shared.scheduling.in_flight import InFlight, InFlightLedger
from shared.scheduling.prefixes import NOT_HELD, Held, PrefixIndex
from shared.scheduling.queue import GlobalQueue, Head, Lane, Outflow, lane_of
from shared.scheduling.requests import TrackedRequest
from shared.scheduling.roles import Roles

LOOKAHEAD = 16
"""How many requests of a lane are tried where the first ones fit on no instance that is free: with pools of different
sizes the head may need the largest, and must not hold up those that do not."""
OVERDUE_S = 5.0
"""A request that fits nowhere is passed by others for so long at most."""
WORK_WINDOW_S = 15.0
"""In which the prompts are counted that are dispatched."""
BACKLOG_S = 30.0
READ_AT_ONCE = 16
READ_WHILE_PICKING = 1
"""Reports of which `catch_up` notes the cached blocks, at most; and while there is more to pick."""
MAX_RANKED = 64
"""Prefill instances that are ranked for each request where they are so few: among many instances, the first of them may come
late."""
MAX_UNREAD = 4096
"""Reports whose cached blocks are not noted yet, at most."""

KEPT_SHARE = 0.5
"""Share of a request's tokens that an instance has which keeps its KV."""
KEEPS_KV = "keeps its KV"
"""Why a request goes to an instance that another one has lost."""
NOBODY_SERVES = "no instance serves the model"
"""Why a request waits."""


class Dispatcher:
    def __init__(
        self,
        cluster: ClusterView,
        queue: GlobalQueue,
        policy: DispatchPolicy,
        *,
        max_waiting_per_model: int,
        growth_steps: float,
        roles: Roles,
    ) -> None:
        """`growth_steps`: decode steps for which all that runs on an instance is to have room to grow."""
        self._roles = roles
        self._long_s = Outflow(WORK_WINDOW_S)
        """Predicted seconds of long prompts of online requests that were dispatched."""
        self.queue = queue
        self.ledger = InFlightLedger()
        self.ranking = Ranking(cluster, self.ledger, policy, max_waiting_per_model)
        self._cluster = cluster
        self._policy = policy
        self._growth_steps = growth_steps
        self._prefixes = PrefixIndex() if policy.asks_for_cached else None
        self._unread: deque[tuple[LoadReport, bool]] = deque()
        """Reports whose cached blocks are not noted yet, each with whether there was a gap before it."""
        self._defragmenting: set[str] = set()
        """Instances where a request waits for memory."""
        self._held_back: dict[Lane, tuple[int, int]] = {}
        """Since `picks` began: of the lane's last request that is to wait, its tokens, now and at most."""
        self.has_more = False
        """Whether `picks` ended at its limit, and is to be asked again."""
        self._num_picked = 0
        self._prompts_s: dict[str, Outflow] = {}
        """Predicted, of each model's online requests that were dispatched; likewise how many these were."""
        self._num_dispatched: dict[str, Outflow] = {}
        self._last_pick: dict[str, int] = {}
        """Number of each model's last pick."""

    def enqueue(self, tracked: TrackedRequest, now: float) -> None:
        self.queue.push(tracked, now)
        self.ranking.wake(lane_of(tracked))

    def on_report(self, instance_id: str, report: LoadReport, has_gap: bool = False) -> None:
        """`has_gap`: reports before it were missed, or it is the first. What it says of cached blocks, most of the work
        that a report makes, is left to `catch_up`."""
        if self._prefixes is not None:
            self._unread.append((report, has_gap))
            if len(self._unread) > MAX_UNREAD:
                self._read_one(self._prefixes)
        if report.dispatch_freeness < 0 and any(load.num_waiting_online for load in report.models):
            self._defragmenting.add(instance_id)
        elif instance_id in self._defragmenting and not self.ledger.is_in_flight(instance_id):
            self._defragmenting.remove(instance_id)
        self.ranking.on_report(instance_id, report)

    def catch_up(self) -> None:
        """Notes the cached blocks of the next few reports: all, unless they came faster than they can be noted while
        requests wait to be dispatched."""
        if self._prefixes is not None:
            limit = READ_WHILE_PICKING if self.has_more else READ_AT_ONCE
            for _ in range(min(limit, len(self._unread))):
                self._read_one(self._prefixes)

    @property
    def has_unread(self) -> bool:
        """Whether cached blocks of some reports are still to be noted."""
        return bool(self._unread)

    def _read_one(self, prefixes: PrefixIndex) -> None:
        report, has_gap = self._unread.popleft()
        if self._cluster.get(report.instance_id) is not None:
            prefixes.on_report(report, has_gap)

    def touch(self, instance_id: str, before: Iterable[str] = ()) -> None:
        """See `Ranking.touch`."""
        if self._cluster.get(instance_id) is None:
            self._defragmenting.discard(instance_id)
            if self._prefixes is not None:
                self._prefixes.forget(instance_id)
        self.ranking.touch(instance_id, before)

    @property
    def num_known_blocks(self) -> int:
        """Blocks of which it is known which instances have them."""
        return 0 if self._prefixes is None else len(self._prefixes)

    def held_of(self, move: NextMove, now: float) -> Held:
        """Tokens of a request that may move which each instance likely has in its prefix cache."""
        return NOT_HELD if self._prefixes is None else self._prefixes.held_of(move, now)

    def offline_room(self, models: Iterable[str]) -> dict[str, int | None]:
        """Tokens of new offline submissions that instances could take, below 0 if more wait here than they can; None for
        a model that nobody serves."""
        wanted = dict.fromkeys(models)
        room: Counter[str] = Counter()
        for instance_id, state in self._cluster:
            if state.is_candidate and state.report is not None:
                for model in state.ready:
                    if model not in room and model in wanted:
                        room[model] = 0
                # Of the report itself: what else is derived from one is not worth it for this alone.
                for load in state.report.models:
                    if load.offline_room_tokens > 0 and load.model in wanted and load.model in state.ready:
                        sent = self.ledger.offline_tokens(instance_id, load.model)
                        room[load.model] += max(0, load.offline_room_tokens - sent)
        return {m: room[m] - self.queue.num_tokens(Lane(m, False)) if m in room else None for m in wanted}

    def prompt_work(self, now: float) -> dict[str, float]:
        """By model, the predicted seconds of prompts of online requests that are dispatched each second lately, and
        those that wait here, as they are to be worked off within `BACKLOG_S`; with what caches spare them."""
        lengths, work = self.queue.lengths(), {}
        for model, outflow in self._prompts_s.items():
            per_s = outflow.per_second(now)
            mean_s = per_s / max(1e-9, self._num_dispatched[model].per_second(now))
            work[model] = per_s + lengths.get(Lane(model, True), 0) * mean_s / BACKLOG_S
        return work

    def long_work(self, now: float) -> float:
        """Predicted seconds of long prompts (`roles.is_short`) that are dispatched each second lately, of all models; 0
        unless roles follow the load."""
        return self._long_s.per_second(now)

    def picks(self, now: float, limit: int | None = None) -> Iterator[tuple[TrackedRequest, str]]:
        """Decides on every dispatch that is possible now, or the first `limit` (`has_more`), best place in the queue first
        over all woken lanes. A request leaves the queue and enters the ledger before it is yielded. One whose time is over
        is left in the queue."""
        self.has_more = False
        if not len(self.queue):
            return
        lanes = [lane for lane in self.ranking.woken() if lane in self.queue and self._has_candidates(lane, now)]
        self._held_back.clear()
        num_picked = 0
        while lanes and num_picked != limit:
            head = None
            if len(lanes) > 1:
                head = cast(Head, self.queue.order.pick_model(self._heads(lanes, now), now))
            lane = lanes[0] if head is None else head.lane
            pick = self._pick(lane, now)
            if pick is not None:
                num_picked += 1
                if head is not None:
                    self.queue.order.on_turn(head)
                yield pick
            if pick is None or lane not in self.queue:
                lanes.remove(lane)
        self.ranking.wake_again(lanes)
        self.has_more = bool(lanes)

    # ------------------------------------------------------------------------------------------------ one pick

    def _heads(self, lanes: list[Lane], now: float) -> list[ModelView]:
        """Lanes of the best class in which something waits."""
        heads = [Head(lane, self.queue.first(lane, now)[0], self._last_pick.get(lane.model, -1)) for lane in lanes]
        best = min(head.rank() for head in heads)
        return [head for head in heads if head.rank() == best]

    def _pick(self, lane: Lane, now: float) -> tuple[TrackedRequest, str] | None:
        for limit in (1, LOOKAHEAD):
            for tracked in self.queue.first(lane, now, limit)[limit > 1 :]:
                is_behind = self.queue.tenants.is_behind(tracked) or self._is_kept(tracked, now)
                index = self.ranking.index(lane, tracked.is_high, is_behind)
                if tracked.deadline_s > now and (chosen := self._choose(tracked, index, is_behind, now)) is not None:
                    self._take(tracked, chosen, now)
                    return tracked, chosen.instance_id
                if index.is_empty():
                    return None  # whoever has no room for this one has none for those after it
        return None

    def _choose(self, tracked: TrackedRequest, index: CandidateIndex, is_behind: bool, now: float) -> Seen | None:
        may_wait = now - tracked.submitted_s <= OVERDUE_S and not is_behind
        if may_wait and self._is_held_back(tracked):
            return None
        candidates = CandidatesFor(
            tracked,
            index,
            self._cluster,
            self.ranking,
            self.ledger,
            self._prefixes,
            growth_steps=self._growth_steps,
            num_defragmenting=len(self._defragmenting),
            may_wait=may_wait,
            now=now,
        )
        return self._choice(tracked, candidates)

    def _choice(self, tracked: TrackedRequest, candidates: CandidatesFor) -> Seen | None:
        best = candidates.first(1)
        if not best:
            return None
        if not tracked.is_online:
            kept = next(iter(candidates.cached(1)), None) if tracked.is_rescued else None
            place = kept or best[0]
            why = "has the most room for offline tokens" if kept is None else KEEPS_KV
            tracked.chosen_for = (why, place.state.freeness(False).freeness)
            return place
        tracked.decoder, tracked.fetch = "", None
        if self._roles.is_split:
            chosen = self._choice_by_phase(tracked, candidates)
        else:
            chosen = cast(Seen | None, self._policy.choose(tracked, candidates))
        if chosen is not None:
            tracked.fetch = chosen.fetch
        if chosen is None:
            self._held_back[lane_of(tracked)] = (tracked.num_tokens, tracked.num_tokens_at_most)
        elif tracked.decoder:
            tracked.chosen_for = (f"computes its prompt, which {tracked.decoder} decodes", chosen.view.freeness)
        else:
            tracked.chosen_for = (self._why(tracked, chosen, best[0]), chosen.state.freeness(tracked.is_high).freeness)
        return chosen

    def _choice_by_phase(self, tracked: TrackedRequest, candidates: CandidatesFor) -> Seen | None:
        """The instance that computes its prompt, where some do so for others; names the one that decodes it then, if that
        is another."""
        roles = self._roles
        candidates.narrow(roles.is_decoder)
        here = self._choice_of(tracked, candidates)
        candidates.narrow(roles.is_prefill, roles.prefills if len(roles.prefills) <= MAX_RANKED else None)
        there = self._choice_of(tracked, candidates)
        if here is None or there is None or not is_apart(here, there, here.step_s, here.ttft_s):
            return here or there
        candidates.narrow(lambda name: self._may_decode(name, there))
        tokens_left = tracked.num_tokens_at_most - tracked.num_tokens
        decoder = next(iter(candidates.first(1)), None) if there.state.is_reachable else None
        if decoder is not None and is_handed_over(decoder, tokens_left):
            tracked.decoder = decoder.instance_id
            self.ledger.promise(tracked.request_id, decoder.instance_id, decoder.demand_merged)
            self.ranking.worsen(decoder.instance_id, decoder.state)
        return there

    def _is_kept(self, tracked: TrackedRequest, now: float) -> bool:
        """Whether some instance has most of the KV of a request that another one has lost."""
        if self._prefixes is None or tracked.request is None or not tracked.is_rescued:
            return False
        ways, _ = self._cluster.ways(tracked.model)
        held = (
            next(self._prefixes.held_tokens(tracked.request, block_size, now).longest(), None)
            for block_size in {way.block_size for way in ways}
        )
        return any(most is not None and most[1] >= KEPT_SHARE * tracked.num_tokens for most in held)

    def _may_decode(self, instance_id: str, there: Seen) -> bool:
        """Whether a request can be handed over to it that is computed there."""
        state = self._cluster.get(instance_id)
        is_alike = state is not None and state.can_take and state.info.engine == there.state.info.engine
        return is_alike and self._roles.is_decoder(instance_id)

    def _choice_of(self, tracked: TrackedRequest, candidates: CandidatesFor) -> Seen | None:
        """The policy's choice, where there are any."""
        return cast(Seen | None, self._policy.choose(tracked, candidates)) if candidates.first(1) else None

    def _why(self, tracked: TrackedRequest, chosen: Seen, first: Seen) -> str:
        """In words for whoever asks why it went there."""
        if tracked.fetch is not None:
            return f"fetches its prompt's beginning from {tracked.fetch.holder_id}"
        if tracked.is_rescued and chosen.cached_tokens >= KEPT_SHARE * tracked.num_tokens:
            return KEEPS_KV
        if chosen.missing_merged > 0:
            return "waits there for memory to come together"
        if chosen.instance_id == first.instance_id:
            return "the freest" if self._policy.ranks_by_freeness else "next by the dispatch policy"
        if chosen.cached_tokens > first.cached_tokens:
            return "has its prompt's beginning in its cache"
        if first.missing_merged > 0:
            return "has the memory that freer ones lack"
        if 0.0 < chosen.token_s < first.token_s and first.start_s <= chosen.start_s + GRAIN_S:
            return "its tokens cost less there than on freer ones"
        return "begins its prompt sooner than freer ones"

    def num_serving(self, model: str) -> int:
        """Instances that serve the model."""
        return self._cluster.num_serving(model)

    def why_waiting(self, tracked: TrackedRequest, now: float) -> str:
        """In words, of one that `picks` left in the queue."""
        lane = lane_of(tracked)
        if not self.num_serving(tracked.model):
            return "its model is being loaded" if self._cluster.ways(tracked.model)[1] else NOBODY_SERVES
        if tracked.is_unfit:
            return "it is too long for what serves the model now"
        if self.ranking.index(lane, tracked.is_high).is_empty():
            what = "has room for another that waits" if tracked.is_online else "has room for offline tokens"
            return f"no instance {what}"
        is_first = self.queue.first(lane, now)[0] is tracked
        return "no instance has the memory for it" if is_first else "others of its model are before it"

    def _is_held_back(self, tracked: TrackedRequest) -> bool:
        """Room only gets less while requests are picked: who needs no less than another that found none finds none."""
        least = self._held_back.get(lane_of(tracked))
        return least is not None and tracked.num_tokens >= least[0] and tracked.num_tokens_at_most >= least[1]

    def _take(self, tracked: TrackedRequest, chosen: Seen, now: float) -> None:
        self.queue.remove(tracked)
        self._num_picked += 1
        instance_id, state = chosen.instance_id, chosen.state
        state.last_turn = self._last_pick[tracked.model] = self._num_picked
        if tracked.is_online and chosen.missing_merged > 0:
            self._defragmenting.add(instance_id)
        entry = InFlight(
            tracked.model, tracked.is_online, chosen.demand_merged, chosen.prompt_s, tracked.num_tokens_at_most
        )
        self.ledger.add(tracked.request_id, instance_id, entry)
        self.queue.tenants.place(tracked, entry.prompt_s)
        if tracked.is_online:
            if self._roles.follow_load and not is_short(entry.prompt_s, chosen.step_s):
                self._long_s.count(now, entry.prompt_s)
            for outflows, amount in (self._prompts_s, entry.prompt_s), (self._num_dispatched, 1.0):
                outflows.setdefault(tracked.model, Outflow(WORK_WINDOW_S)).count(now, amount)
        if self._prefixes is not None and tracked.is_online and tracked.request is not None:
            block_size = state.ready[tracked.model].block_size
            self._prefixes.on_dispatch(tracked.request, block_size, instance_id, now)
        self.ranking.worsen(instance_id, state)

    def _has_candidates(self, lane: Lane, now: float) -> bool:
        if not self.ranking.index(lane, False).is_empty():
            return True
        may_be_behind = self.queue.tenants.may_be_behind(lane.model, is_online=lane.is_online)
        first = self.queue.first(lane, now) if may_be_behind or self.queue.has_rescued(lane) else []
        is_behind = any(self.queue.tenants.is_behind(one) or self._is_kept(one, now) for one in first)
        if is_behind and not self.ranking.index(lane, False, True).is_empty():
            return True
        return self.queue.has_high(lane) and not self.ranking.index(lane, True).is_empty()
