"""Who holds the rows and blocks of an instance, and who gives them up.

The order is that of ranks, then of tenants by service (policies/tenant_shares.py), then that of the ordering policy.

Where blocks are short, lower ranks and later ones in the order are preempted: their blocks are freed (full blocks stay
findable in the prefix cache, checkpointed ones in host memory) and they wait again. Among those that may be preempted, the
one that loses the least work goes first, of online ones that of those that free enough for a while. A sequence that a step
in flight computes is never a victim, because that step still writes its blocks; one of a suspended step only when nothing
else will do, because then that step is lost.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import chain, count
from typing import NamedTuple

from shared.engine.batch import PlannedStep
from shared.engine.counters import EngineCounters
from shared.engine.events import EventLog
from shared.engine.first_tokens import FirstTokens
from shared.engine.memory.blocks import BlockPool
from shared.engine.memory.cache_news import CacheNews
from shared.engine.memory.compaction import Compaction
from shared.engine.memory.copy_times import CopyTimes
from shared.engine.memory.disk import DiskKv
from shared.engine.memory.host import HostKv
from shared.engine.memory.tiers import Tiers
from shared.engine.model_queue import ONLINE_CLASSES, ModelQueue
from shared.engine.plan import CopyKind, KvCopy, ModelShape
from shared.engine.sequence import Handover, PriorityClass, Sequence, State
from shared.messages.requests import PLACEMENT_EPOCHS
from shared.messages.timeline import EventKind
from shared.policies.checkpointing import victim_key
from shared.policies.ordering import OrderingPolicy
from shared.policies.tenant_shares import TenantShares

_ENDED = State.ENDED

GROWTH_STEPS = 32
"""Steps for which the running sequences can grow when one more is admitted."""
DRAFT_POOL_SHARE = 0.75
"""Used share of the pool up to which draft models have KV."""
RELIEF_STEPS = 64
"""Steps for which they can grow when an online sequence is preempted, if one alone frees so much."""


class Demand(NamedTuple):
    """What a sequence from another instance could not have because offline work in flight holds it."""

    model: str
    num_blocks: int
    num_rows: int
    until_s: float


class Allocator:
    """Queues, rows and KV blocks of one instance."""

    def __init__(
        self,
        num_merged: int,
        num_rows: int,
        num_host_merged: int,
        ordering: OrderingPolicy,
        least_share: float,
        *,
        offload: str = "off",
        offload_start: float = 0.75,
    ) -> None:
        """`offload`, `offload_start`: see `EngineConfig`."""
        self.cache_news = CacheNews()
        self.pool = BlockPool(num_merged, self.cache_news)
        self.counters = EngineCounters()
        self.events = EventLog()
        self.queues: dict[str, ModelQueue] = {}
        copy_ids = count()
        self.host = HostKv(self.pool, num_host_merged, self.counters, copy_ids, self.cache_news)
        disk = None
        if offload == "disk" and self.host.pool is not None:
            disk = self.host.disk = DiskKv(self.host.pool, self.counters, copy_ids, self.cache_news)
        self.copy_times = CopyTimes(self.queues)
        self.tiers = Tiers(
            self.pool, self.host, disk, self.queues, self.copy_times, is_on=offload != "off", start_share=offload_start
        )
        self.cache_news.caches = [pool for pool in (self.pool, self.host.pool, disk) if pool is not None]
        self.compaction = Compaction(self.pool, self.queues, self.counters, copy_ids)
        self._least_share = least_share
        self.ordering = ordering
        self._tenants = (TenantShares(), TenantShares())
        """Shares of tenants among offline and among online requests."""
        self.models = TenantShares()
        """The same of models, all alike, among online requests."""
        self.first_tokens = FirstTokens()
        self.suspended: PlannedStep | None = None
        self._discards: list[int] = []
        """Suspended steps given up since the last plan."""
        self.num_rows = num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self.demand: Demand | None = None
        """Kept free of offline work until it is asked for again."""
        self.expected: dict[str, float] = {}
        """Running online sequences that come from other instances, by migration: when they may be here, at the earliest."""
        self._draft_holders: dict[int, Sequence] = {}
        """By number: sequences with KV of a draft model."""
        self.stuck: Sequence | None = None
        """A waiting sequence that lacked room: nobody after it in the order is admitted before it, but of other models
        online ones where these hold less than their least share, and those for whom it waits no longer."""

    @property
    def stuck_online(self) -> Sequence | None:
        """The stuck sequence, if it is online and still waits."""
        stuck = self.stuck
        return stuck if stuck is not None and stuck.is_online and stuck.state == State.WAITING else None

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def free_rows(self) -> tuple[int, ...]:
        return tuple(self._free_rows)

    def pool_of(self, on_host: bool) -> BlockPool:
        pool = self.host.pool if on_host else self.pool
        assert pool is not None
        return pool

    def order_key(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        """Total order over all sequences of the instance: smaller runs first and is preempted last."""
        tenants = self.tenants(sequence)
        served_s = tenants.key(sequence.tenant) if tenants.are_several else 0.0
        return (sequence.priority_class, served_s, *self.ordering.key(sequence, now), sequence.number)

    def tenants(self, sequence: Sequence) -> TenantShares:
        """Those of the sequence's class."""
        return self._tenants[sequence.is_online]

    def tenants_of(self, is_online: bool) -> TenantShares:
        return self._tenants[is_online]

    def sort(self, sequences: list[Sequence], now: float) -> None:
        """Sequences of one model and rank, by `order_key`, in place. Those of a policy whose keys never change stand right,
        as long as there are no tenants among whom it changes."""
        if not sequences:
            return
        tenants = self.tenants(sequences[0])
        if tenants.are_several or not self.ordering.is_static:
            self.ordering.sort(sequences, now)
        if tenants.are_several:
            sequences.sort(key=lambda sequence: tenants.key(sequence.tenant))

    def add_model(self, shape: ModelShape) -> None:
        for pool in (self.pool, self.host):
            pool.add_model(shape.name, shape.block_size, shape.blocks_per_merged)
        if self.host.disk is not None:
            self.host.disk.add_model(shape.name)
        self.tiers.add_model(shape.name)

    def has_copies(self, model: str) -> bool:
        """Whether copies under way read or write blocks of the model."""
        disk = self.host.disk
        is_on_disk = disk is not None and disk.has_copies(model)
        return is_on_disk or self.host.has_copies(model) or self.compaction.has_moves(model)

    def started_copies(self) -> list[KvCopy]:
        """Those begun since the last call, in the order in which they are to be started."""
        disk = [] if self.host.disk is None else self.host.disk.started_copies()
        return self.compaction.started_copies() + self.host.started_copies() + disk

    def learn_copy(self, copy_id: int, seconds: float) -> None:
        """A copy to or from host memory has succeeded, in so many seconds."""
        disk = self.host.disk
        copy = self.host.copy(copy_id) or (None if disk is None else disk.copy(copy_id))
        if copy is not None:
            self.copy_times.learn(copy, seconds)

    def on_copy(self, copy_id: int, ok: bool, now: float) -> bool:
        """A copy has ended. Returns whether it was a move within the device."""
        if self.compaction.on_copy(copy_id, ok):
            return True
        disk = self.host.disk
        if disk is not None and (copy := disk.on_copy(copy_id, ok)) is not None:
            if copy.kind == CopyKind.READ and not ok:
                self._cut_restores(copy, now)
        elif (ended := self.host.on_copy(copy_id, ok)) is not None:
            self.end_restore(*ended, now)
        return False

    def give_up_reads(self, now: float) -> None:
        """Nobody waits for a disk any more, and nothing is known to lie there; reads under way still end some day."""
        disk = self.host.disk
        if disk is not None:
            for copy in disk.give_up_reads():
                self._cut_restores(copy, now)
            disk.clear()

    def _cut_restores(self, copy: KvCopy, now: float) -> None:
        """What was to be read is not there: those that wait for it compute from there on."""
        for sequence in list(self.queues[copy.model].restoring.values()):
            if self.host.cut_restore(sequence, copy.host_blocks[0]):
                self.end_restore(sequence, True, now)

    def remove_model(self, name: str) -> None:
        """Removes a model of which nothing is held."""
        if self.demand is not None and self.demand.model == name:
            self.demand = None
        self.pool.remove_model(name)
        self.host.remove_model(name)
        if self.host.disk is not None:
            self.host.disk.remove_model(name)
        self.tiers.remove_model(name)
        del self.queues[name]

    # ------------------------------------------------------------------------------------------------ queues

    def has_online_work(self) -> bool:
        return any(queue.has_online_work() for queue in self.queues.values())

    def enqueue(self, sequence: Sequence, now: float) -> None:
        sequence.state = State.WAITING
        waiting = self.queues[sequence.model].waiting[sequence.priority_class]
        if self.tenants(sequence).are_several:
            waiting.append(sequence)
            self.sort(waiting, now)
        else:
            insort(waiting, sequence, key=lambda other: self.order_key(other, now))

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of its queue for good; blocks that a step in flight uses are freed when it returns."""
        self._detach(sequence)
        self.queues[sequence.model].handing_over.pop(sequence.number, None)
        sequence.state = State.ENDED
        self.host.release(sequence)
        if not sequence.in_flight:
            self.free(sequence)

    def _detach(self, sequence: Sequence) -> None:
        queue = self.queues[sequence.model]
        if sequence.state == State.WAITING:
            queue.waiting[sequence.priority_class].remove(sequence)
        elif sequence.state == State.RESTORING:
            self.host.abandon_restore(sequence)
            if queue.restored.pop(sequence.number, None) is None:
                del queue.restoring[sequence.number]
        elif sequence.state == State.LEAVING:
            del queue.leaving[sequence.number]
        elif queue.suspended.pop(sequence.number, None) is None:
            del queue.running[sequence.priority_class][sequence.number]

    def free(self, sequence: Sequence) -> None:
        """Gives row and blocks back. Only without a step in flight that computes the sequence."""
        assert not sequence.in_flight
        if sequence.row >= 0:
            self._free_rows.append(sequence.row)
            sequence.row = -1
        if sequence.blocks:
            self.pool.release(sequence.model, sequence.blocks)
            sequence.blocks = []
            sequence.capacity = 0
        self._drop_draft(sequence)

    def make_draft_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for the draft model's KV of so many tokens, while the pool has plenty: nobody gives any up for them."""
        shape = self.queues[sequence.model].shape
        assert shape.draft is not None
        missing = -(-num_tokens // shape.draft.tokens_per_block) - len(sequence.draft_blocks)
        if missing <= 0:
            return True
        share = missing / self.pool.capacity_blocks(sequence.model)
        blocks = None
        if self.pool.used_share + share <= DRAFT_POOL_SHARE:
            blocks = self.pool.allocate(sequence.model, missing)
        if blocks is None:
            return False
        sequence.draft_blocks += blocks
        self._draft_holders[sequence.number] = sequence
        return True

    def drop_drafts(self) -> None:
        """Gives up the draft models' KV of all sequences that are in no step: somebody needs room. It is computed again."""
        for sequence in [held for held in self._draft_holders.values() if not held.in_flight]:
            self._drop_draft(sequence)

    def _drop_draft(self, sequence: Sequence) -> None:
        sequence.num_drafted = 0
        if self._draft_holders.pop(sequence.number, None) is not None:
            self.pool.release(sequence.model, sequence.draft_blocks)
            sequence.draft_blocks = []

    def preempt(self, sequence: Sequence, now: float, cause: str) -> None:
        """Takes blocks and row from a sequence; it waits again (or goes on leaving) and what neither cache nor host memory
        has is computed again."""
        if sequence.num_computed:
            is_checkpointed = sequence.num_checkpointed_blocks >= sequence.num_filled > 0
            self.counters.preemptions[cause, "checkpointed" if is_checkpointed else "recompute"] += 1
            sequence.peak_computed = max(sequence.peak_computed, min(sequence.num_computed, sequence.num_tokens))
            sequence.num_preemptions += 1
            checkpointed = min(sequence.num_computed, len(sequence.host_blocks) * sequence.block_size)
            self.events.add(sequence, EventKind.PREEMPTED, now, cause, (sequence.num_computed, checkpointed))
        if sequence.handover == Handover.PINNED:
            sequence.handover = Handover.LOST
        if sequence.state != State.LEAVING:
            self._detach(sequence)
        self.free(sequence)
        sequence.num_computed = 0
        sequence.total = sequence.num_tokens
        sequence.is_spoilt = False
        sequence.is_silent = True
        if sequence.state != State.LEAVING:
            self.enqueue(sequence, now)

    # --------------------------------------------------------------------------------------------------- moves

    def leave(self, sequence: Sequence, now: float) -> None:
        """A running or waiting sequence is not planned any more; row, blocks and checkpoints stay its own. A suspended step
        that holds it is given up."""
        queue = self.queues[sequence.model]
        if sequence.number in queue.suspended:
            self.discard_suspended(now)
        self._detach(sequence)
        sequence.state = State.LEAVING
        queue.leaving[sequence.number] = sequence

    def come_back(self, sequence: Sequence, now: float) -> None:
        """One that was leaving goes on where it was."""
        self._detach(sequence)
        if sequence.row < 0:
            self.enqueue(sequence, now)
        else:
            sequence.state = State.RUNNING
            self.queues[sequence.model].running[sequence.priority_class][sequence.number] = sequence

    def take_row(self) -> int:
        return self._free_rows.pop()

    def return_row(self, row: int) -> None:
        self._free_rows.append(row)

    def offline_holders(self) -> list[Sequence]:
        """Offline sequences that hold blocks."""
        return [
            sequence
            for queue in self.queues.values()
            for sequence in (
                *queue.running[PriorityClass.OFFLINE].values(),
                *queue.restoring.values(),
                *queue.restored.values(),
                *queue.suspended.values(),
            )
            if not sequence.is_online
        ]

    def serve_demand(self, now: float) -> None:
        """Offline work that no step in flight computes gives way to what is demanded; in vain for too long, it is over."""
        demand = self.demand
        if demand is None:
            return
        if now >= demand.until_s:
            self.demand = None
            return
        if self.num_free_rows < demand.num_rows:
            self.make_row_for_incoming(now)
        if self.pool.num_available(demand.model) < demand.num_blocks:
            self.drop_drafts()
            self.make_room_for_incoming(demand.model, demand.num_blocks, now)

    def lacks_demanded(self) -> bool:
        demand = self.demand
        if demand is None:
            return False
        return self.num_free_rows < demand.num_rows or self.pool.num_available(demand.model) < demand.num_blocks

    def make_room_for_incoming(self, model: str, num_blocks: int, now: float) -> bool:
        """Makes room as `make_room` does, for what comes from another instance: only offline sequences give way to it."""
        victims = [sequence for sequence in self.offline_holders() if not sequence.in_flight]
        return self._give_way(model, victims, num_blocks, True, now)

    def make_row_for_incoming(self, now: float) -> bool:
        return self._give_row([sequence for sequence in self.offline_holders() if not sequence.in_flight], now)

    def num_offline_rows(self) -> int:
        return len(self.offline_holders())

    def could_have(self, model: str, num_blocks: int) -> bool:
        """Whether so many blocks are available or held by offline work, perhaps of a step in flight."""
        return self.reaches(model, self.offline_holders(), num_blocks)

    # -------------------------------------------------------------------------------------------- least shares

    def least_merged(self) -> int:
        """Merged blocks that each model can have for its online requests, whatever the others do."""
        return self._least_of(self.pool.num_merged)

    def _least_of(self, total: int) -> int:
        """A model's least share of so many, rounded down; 0 where it is the only one."""
        num_models = len(self.queues)
        return int(self._least_share * total / num_models) if num_models > 1 else 0

    def _held_blocks(self, priority_class: int = PriorityClass.ONLINE_NORMAL) -> dict[str, int]:
        """Blocks of each model, without those of sequences that come after the rank."""
        blocks = {name: self.pool.num_used(name) for name in self.queues}
        for name, queue in self.queues.items():
            others = (queue.restoring, queue.restored, queue.suspended)
            for sequence in chain(*(of_state.values() for of_state in (*queue.running[priority_class + 1 :], *others))):
                if sequence.priority_class > priority_class:
                    blocks[name] -= len(sequence.blocks)
        return {name: max(0, count) for name, count in blocks.items()}

    def _num_merged(self, model: str, num_blocks: int) -> int:
        return -(-num_blocks // self.queues[model].shape.blocks_per_merged)

    def is_below_share(self, model: str) -> bool:
        """Whether its online requests hold less than its least share."""
        least = self.least_merged()
        return least > 0 and self._num_merged(model, self._held_blocks()[model]) < least

    def share_left_merged(self, queue: ModelQueue, num_blocks: int) -> float:
        """What is left of a model's least share beside so many blocks, and beside what an admission leaves free."""
        least = self.least_merged()
        if not least or num_blocks >= least * queue.shape.blocks_per_merged:
            return 0.0
        kept = self.reserve_blocks(queue, PriorityClass.ONLINE_NORMAL)
        return max(0.0, least - (num_blocks + kept) / queue.shape.blocks_per_merged)

    def may_hold(self, model: str, num_blocks: int, priority_class: int) -> bool:
        """Whether so many blocks more of the model's online requests, up to this rank, leave the others their least shares.
        A model without any may have one request of whatever size."""
        least = self.least_merged()
        if not least:
            return True
        missing = self._num_merged(model, max(0, num_blocks - self.pool.num_own_room(model)))
        if self.pool.num_free_merged() - missing >= least * (len(self.queues) - 1):
            return True
        held = self._held_blocks(priority_class)
        wanted = self._num_merged(model, held[model] + num_blocks)
        if not held[model] or wanted <= least:
            return True
        others = sum(max(least, self._num_merged(name, blocks)) for name, blocks in held.items() if name != model)
        return wanted + others <= self.pool.num_merged

    def beyond_share(self, sequence: Sequence, num_blocks: int, now: float) -> Iterator[Sequence]:
        """Yields victims where a waiting sequence asks for no more than the least share of its model, or its model holds
        nothing: online ones of models that hold more than theirs, all but the first of each; perhaps in flight."""
        least = self.least_merged()
        if not least:
            return
        held = self._held_blocks()
        if held[sequence.model] and self._num_merged(sequence.model, held[sequence.model] + num_blocks) > least:
            return
        for name, queue in self.queues.items():
            if name == sequence.model or self._num_merged(name, held[name]) <= least:
                continue
            running = [other for priority_class in ONLINE_CLASSES for other in queue.running[priority_class].values()]
            running.sort(key=lambda other: self.order_key(other, now))
            yield from (other for other in running[1:] if other.priority_class >= sequence.priority_class)

    def beyond_shares(self, sequence: Sequence, num_blocks: int, now: float) -> Iterator[Sequence]:
        """Online sequences that give way to a waiting one as their model, or their tenant, holds more than its share."""
        yield from self.beyond_share(sequence, num_blocks, now)
        yield from self.beyond_tenant_share(sequence, now, num_blocks=num_blocks)

    # ---------------------------------------------------------------------------------------- tenants' shares

    def beyond_tenant_share(self, sequence: Sequence, now: float, *, num_blocks: int = 0) -> Iterator[Sequence]:
        """Yields victims where a waiting online sequence asks for no more than its tenant's share, by weight, of the pool
        (`num_blocks`) or, without blocks, of the rows: the last ones in the order of tenants that hold more than theirs,
        all but the first of each; perhaps in flight. Whoever takes like this does not come to hold more than its share, so
        nobody takes it back."""
        tenants = self.tenants(sequence)
        if not tenants.are_several:
            return
        by_tenant: dict[str, list[Sequence]] = {}
        for queue in self.queues.values():
            for priority_class in ONLINE_CLASSES:
                for other in queue.running[priority_class].values():
                    by_tenant.setdefault(other.tenant, []).append(other)
        total = self.pool.num_merged if num_blocks else self.num_rows

        def held(tenant: str) -> float:
            own = by_tenant.get(tenant, [])
            return sum(self._merged_share(s.model, len(s.blocks)) for s in own) if num_blocks else len(own)

        asked = self._merged_share(sequence.model, num_blocks) if num_blocks else 1
        if held(sequence.tenant) + asked > tenants.share(sequence.tenant) * total:
            return
        found: list[Sequence] = []
        for tenant, own in by_tenant.items():
            if tenant != sequence.tenant and held(tenant) > tenants.share(tenant) * total:
                own.sort(key=lambda other: self.order_key(other, now))
                found += [other for other in own[1:] if other.priority_class >= sequence.priority_class]
        yield from sorted(found, key=lambda other: self.order_key(other, now), reverse=True)

    def beyond_row_shares(self, sequence: Sequence, now: float) -> Iterator[Sequence]:
        """Online sequences whose rows a waiting online one may have: their model or tenant holds more than its share.
        They may be in flight. A model's least share of the rows is as large as that of the pool."""
        least = self._least_of(self.num_rows)
        held = {name: sum(len(queue.running[one]) for one in ONLINE_CLASSES) for name, queue in self.queues.items()}
        if held[sequence.model] < least:
            for name, queue in self.queues.items():
                if held[name] > least:
                    for priority_class in range(sequence.priority_class, PriorityClass.OFFLINE):
                        yield from queue.running[priority_class].values()
        yield from self.beyond_tenant_share(sequence, now)

    def _merged_share(self, model: str, num_blocks: int) -> float:
        return num_blocks / self.queues[model].shape.blocks_per_merged

    # ---------------------------------------------------------------------------------------- admission

    def count_recomputed(self, sequence: Sequence) -> None:
        """It begins to run. Tokens of a request that another instance has lost had been computed there."""
        request = sequence.request
        if sequence.first_planned_s is None and request.prior and request.epoch % PLACEMENT_EPOCHS == 0:
            num_lost = max(0, sequence.num_tokens - sequence.num_computed)
            sequence.num_recomputed += num_lost
            self.counters.rescued_tokens["kept"] += sequence.num_computed
            self.counters.rescued_tokens["recomputed"] += num_lost
        lost = sequence.peak_computed - sequence.num_computed
        if lost > 0:
            sequence.num_recomputed += lost
            self.counters.recomputed_tokens += lost
            full = sequence.peak_computed // sequence.block_size * sequence.block_size
            self.counters.recomputed_partial_tokens += sequence.peak_computed - max(full, sequence.num_computed)
        sequence.peak_computed = 0

    def allocate_prompt(self, queue: ModelQueue, sequence: Sequence, now: float) -> bool:
        """Blocks for all known tokens, from the prefix cache where it has them; what host memory has begins to be copied
        back (the sequence is then RESTORING). At least one token is computed."""
        page = sequence.block_size
        num_blocks = -(-sequence.total // page)
        num_full = sequence.num_reusable // page
        cached = self.pool.find(queue.name, sequence.extend_hashes(num_full, page, queue.root))
        missing = num_blocks - len(cached)
        needed = missing + self.reserve_blocks(queue, sequence.priority_class)
        # Before the cached ones are its own, so that a model that holds nothing else counts as one without any.
        unused = sum(not self.pool.num_references(queue.name, block) for block in cached)
        may_hold = not sequence.is_online or self.may_hold(queue.name, needed + unused, sequence.priority_class)
        self.pool.retain(queue.name, cached)
        if not may_hold or (self.pool.num_available(queue.name) < needed and not self.make_room(sequence, needed, now)):
            self.pool.release(queue.name, cached)
            return False
        blocks = self.pool.allocate(queue.name, missing)
        assert blocks is not None
        sequence.blocks = cached + blocks
        sequence.capacity = num_blocks * page
        stored = [] if sequence.num_failures else self.tiers.find_back(sequence, len(cached), num_full, now)
        if stored:
            self.events.add(sequence, EventKind.RESTORING, now, numbers=(len(stored),))
            self.host.begin_restore(sequence, len(cached), stored)
        self.set_computed(sequence, len(cached))
        return True

    @staticmethod
    def set_computed(sequence: Sequence, num_blocks: int) -> None:
        """The first blocks hold what they should."""
        sequence.num_computed = num_blocks * sequence.block_size
        sequence.next_register = sequence.num_computed + sequence.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)

    def end_restore(self, sequence: Sequence, ok: bool, now: float) -> None:
        """The last copy of a restore has ended. After a failure the sequence holds nothing and waits again."""
        queue = self.queues[sequence.model]
        if ok:
            del queue.restoring[sequence.number]
            queue.restored[sequence.number] = sequence
            if sequence.num_preemptions == 0:
                num_tokens = sequence.restore[0] * sequence.block_size - sequence.num_computed
                sequence.num_disk_tokens = min(num_tokens, len(sequence.read_hashes) * sequence.block_size)
                sequence.num_host_tokens = num_tokens - sequence.num_disk_tokens
            self.set_computed(sequence, sequence.restore[0])
            self.events.add(sequence, EventKind.RESTORED, now)
        else:
            sequence.num_failures += 1
            self.preempt(sequence, now, "failure")

    def num_wanted_blocks(self, sequence: Sequence) -> int:
        """Blocks that admit a waiting sequence of which nothing is cached."""
        queue = self.queues[sequence.model]
        return -(-sequence.total // sequence.block_size) + self.reserve_blocks(queue, sequence.priority_class)

    def reserve_blocks(self, queue: ModelQueue, priority_class: PriorityClass) -> int:
        """Blocks left free at an admission, so that running sequences of its rank or before can grow a while before somebody
        is preempted."""
        shape, pool = queue.shape, self.pool
        demanded = 0
        if self.demand is not None and priority_class == PriorityClass.OFFLINE:
            demanded = self.demand.num_blocks
            if self.demand.model != queue.name:
                demanded = self._num_merged(self.demand.model, demanded) * shape.blocks_per_merged
        growth, growth_merged, is_alone = 0, 0, True
        for other in self.queues.values():
            if not (num_running := sum(len(of_class) for of_class in other.running[: priority_class + 1])):
                continue
            is_alone = False
            blocks = num_running * GROWTH_STEPS // other.shape.block_size
            if other is queue:
                growth = blocks
            else:
                growth_merged += self._num_merged(other.name, max(0, blocks - pool.num_own_room(other.name)))
        if is_alone:
            return demanded
        if growth_merged and priority_class != PriorityClass.OFFLINE and self.is_below_share(queue.name):
            # For others to grow it need not wait.
            growth_merged = 0
        growth += growth_merged * shape.blocks_per_merged
        return demanded + max(1, pool.capacity_blocks(queue.name) // 100, growth)

    # ----------------------------------------------------------------------------------------- suspended steps

    def suspend(self, step: PlannedStep, share: float, now: float) -> None:
        """The step stopped at a safepoint; its sequences stay as they are until it is resumed or discarded."""
        if not step.is_part:
            self.counters.steps_suspended += 1
            step.interrupted_s = now
        step.done_share, step.suspended_s = share, now
        self.suspended = step
        queue = self.queues[step.plan.model]
        for sequence in step.sequences:
            if not step.is_part:
                sequence.num_suspensions += 1
                self.events.add(sequence, EventKind.SUSPENDED, now)
            if sequence.state == State.RUNNING:
                queue.suspended[sequence.number] = sequence
                del queue.running[sequence.priority_class][sequence.number]

    def take_discards(self) -> tuple[int, ...]:
        """Suspended steps given up since the last call."""
        discards = tuple(self._discards)
        self._discards.clear()
        return discards

    def take_suspended(self) -> PlannedStep:
        """The suspended step goes on, or is over: its sequences run again."""
        step, self.suspended = self.suspended, None
        assert step is not None
        queue = self.queues[step.plan.model]
        for sequence in queue.suspended.values():
            queue.running[sequence.priority_class][sequence.number] = sequence
        queue.suspended.clear()
        return step

    def tell_resumed(self, step: PlannedStep, now: float, cause: str = "") -> None:
        """The suspended step goes on to its end, or is given up."""
        for sequence in step.sequences:
            if sequence.state is not _ENDED:
                self.events.add(sequence, EventKind.RESUMED, now, cause)

    def discard_suspended(self, now: float) -> None:
        """Gives the suspended step up: its planned tokens are computed again."""
        step = self.take_suspended()
        self.counters.steps_discarded += 1
        self.counters.discarded_tokens += int(step.plan.num_tokens * step.done_share)
        self._discards.append(step.plan.step_id)
        self.tell_resumed(step, now, "discarded")
        step.roll_back()
        self.settle(step, now)

    def settle(self, step: PlannedStep, now: float) -> None:
        """The step is over; sequences that waited for that are freed, or preempted."""
        for sequence in step.sequences:
            if sequence.in_flight:
                continue
            if sequence.state is _ENDED:
                self.free(sequence)
            elif sequence.is_spoilt:
                self.preempt(sequence, now, "failure")

    # ------------------------------------------------------------------------------------------------ victims

    def _victims(self, sequence: Sequence, key: tuple[float, ...], now: float) -> Iterator[Sequence]:
        """Those that may have to give way to the sequence. A running sequence may take from anybody after it; a waiting one
        only from lower ranks (online gives way to online only by priority)."""
        first_class = sequence.priority_class + 1 if sequence.state == State.WAITING else sequence.priority_class
        for queue in self.queues.values():
            for priority_class in range(first_class, len(PriorityClass)):
                for victim in queue.running[priority_class].values():
                    if not victim.in_flight and self.order_key(victim, now) > key:
                        yield victim
            for victim in (*queue.restoring.values(), *queue.restored.values()):
                if victim.priority_class >= first_class and self.order_key(victim, now) > key:
                    yield victim

    def make_room(self, sequence: Sequence, num_blocks: int, now: float) -> bool:
        """Preempts until `num_blocks` are available to the sequence's model. Nobody is preempted where all victims together
        would not do."""
        key = self.order_key(sequence, now)
        victims = list(self._victims(sequence, key, now))
        if (
            sequence.is_online
            and sequence.state == State.WAITING
            and not self.reaches(sequence.model, victims, num_blocks)
        ):
            victims += [other for other in self.beyond_shares(sequence, num_blocks, now) if not other.in_flight]
        return self._give_way(sequence.model, victims, num_blocks, sequence.is_online, now)

    def _give_way(self, model: str, victims: list[Sequence], num_blocks: int, may_discard: bool, now: float) -> bool:
        """`may_discard`: the suspended step, if its sequences are needed too."""
        self.drop_drafts()
        if self.reaches(model, [], num_blocks):
            return self.compaction.make_room(model, num_blocks)
        if not self.reaches(model, victims, num_blocks):
            if self.suspended is None or not may_discard:
                return False
            suspended = [held for queue in self.queues.values() for held in queue.suspended.values()]
            if not self.reaches(model, [*victims, *suspended], num_blocks):
                return False
            self.discard_suspended(now)
            victims += [held for held in suspended if held.state == State.RUNNING]
        enough = max(num_blocks / self.queues[model].shape.blocks_per_merged, self._growth_merged(RELIEF_STEPS))
        victims.sort(key=lambda victim: self._victim_key(victim, enough))
        for victim in self._needed(model, victims, num_blocks):
            self.preempt(victim, now, "memory")
        # Others would take what they gave up if the rest came later.
        return self.compaction.make_room(model, num_blocks, at_once=True)

    def reaches(self, model: str, victims: list[Sequence], num_blocks: int) -> bool:
        """Whether the model could have so many blocks if all of the victims were preempted, and blocks moved together. Draft
        models' KV is given up before anybody is asked for room."""
        self.drop_drafts()
        best = self.compaction.best_reach(model)
        for victim in victims:
            best.give_up(victim)
        if best.num_blocks < num_blocks or len(self.queues) == 1:
            return best.num_blocks >= num_blocks
        reach = self.compaction.reach(model, victims)
        for victim in victims:
            reach.give_up(victim)
        return reach.num_blocks >= num_blocks

    def _needed(self, model: str, victims: list[Sequence], num_blocks: int) -> list[Sequence]:
        """The first victims in their order, as many as it takes, without those whose blocks turn out not to help."""
        reach = self.compaction.reach(model, victims)
        chosen: list[Sequence] = []
        for victim in victims:
            if reach.num_blocks >= num_blocks:
                break
            reach.give_up(victim)
            chosen.append(victim)
        for victim in chosen[-2::-1]:
            reach.take_back(victim)
            if reach.num_blocks >= num_blocks:
                chosen.remove(victim)
            else:
                reach.give_up(victim)
        # What is not given up may stand in the way of moving the rest.
        return chosen if self.reaches(model, chosen, num_blocks) else victims

    def _growth_merged(self, num_steps: int) -> float:
        """Merged blocks that the running online sequences fill in so many steps."""
        queues = self.queues.values()
        steps = sum(
            len(q.running[priority_class]) / q.shape.tokens_per_merged
            for q in queues
            for priority_class in ONLINE_CLASSES
        )
        return num_steps * steps

    def _victim_key(self, victim: Sequence, enough_merged: float) -> tuple[float, ...]:
        per_merged = self.queues[victim.model].shape.blocks_per_merged
        return victim_key(victim, victim.block_size, enough_merged * per_merged if victim.is_online else 0.0)

    def make_row(self, sequence: Sequence, now: float) -> bool:
        """A row for a sequence of higher rank than some running one."""
        victims = [
            victim
            for queue in self.queues.values()
            for of_class in (*queue.running[sequence.priority_class + 1 :], queue.restoring, queue.restored)
            for victim in of_class.values()
            if not victim.in_flight and victim.priority_class > sequence.priority_class
        ]
        if sequence.is_online and not victims:
            victims = [other for other in self.beyond_row_shares(sequence, now) if not other.in_flight]
        if self._give_row(victims, now):
            return True
        if self.suspended is None or sequence.priority_class == PriorityClass.OFFLINE:
            return False
        self.discard_suspended(now)
        return self.make_row(sequence, now)

    def _give_row(self, victims: list[Sequence], now: float) -> bool:
        """The last of them in the order waits again."""
        if victims:
            self.preempt(max(victims, key=lambda victim: self.order_key(victim, now)), now, "rows")
        return bool(victims)
