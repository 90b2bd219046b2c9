"""The KV pool's tiers below the device, for blocks of ended requests: what goes down as room gets short, and what comes back
for a prompt that begins alike.

    device cache --copy--> host cache --write--> disk      `start`, beside each step, in the order in which requests ended
    device <--restore-- host <--read-- disk                `find_back`, when a prompt is admitted; `start` reads ahead for
                                                           prompts that wait

A block goes down while its tier has less than a share of blank room, so before it is evicted. Whether a copy is worth its
time, and what gives way to it: policies/kv_tiers.py.

| where nothing gives way | in host memory | on disk |
|---|---|---|
| without a disk | it does not go down | |
| with a disk | it passes: it is written, and its host block is free again | it is not written |
| it is read for a prompt | it passes: when the prompt has it, its host block is free again | it stays |

Of a chain the first blocks go down where not all have room, since without those before it a block is of no use.

Off, or without host memory, it finds what checkpoints left and does nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from shared.costs.model import prompt_s
from shared.engine.memory.blocks import BlockPool
from shared.engine.memory.copy_times import CopyTimes
from shared.engine.memory.disk import DiskKv
from shared.engine.memory.host import HostKv
from shared.engine.model_queue import ModelQueue
from shared.engine.plan import CopyKind
from shared.engine.sequence import Sequence, State
from shared.policies.kv_tiers import BlockKind, ReuseTimes, is_worth_keeping, is_worth_reading

MAX_NOTED = 1 << 16
"""Blocks of ended requests that wait to be looked at; the oldest are forgotten, as they are evicted first."""
MAX_COPYING = 64
"""Blocks on their way to host memory."""
MAX_WRITING = 64
"""Blocks on their way to disk."""
MAX_LOOKED = 256
"""Blocks of a model that are looked at beside a step."""
READING_SHARE = 0.5
"""Share of host memory that blocks on their way from disk may take, of all prompts."""
PASSING_SHARE = 0.25
"""Share of host memory for blocks that only pass."""
FIRST_BLOCKS = 8
"""Blocks that are copied at once while nobody knows how long one takes."""
HORIZON = 1 << 16
"""A block that so many others followed, beside those that host memory holds, counts as not found again."""

NEW = BlockKind(is_online=True, is_reused=False)
Key = tuple[str, bytes]
"""Model and hash of a block."""


class _Chain(NamedTuple):
    """Full blocks of a request that has ended."""

    hashes: list[bytes]
    ended_s: float


class _Noted(NamedTuple):
    """A block of a request that has ended."""

    chain: _Chain
    depth: int
    """Blocks of the chain before it."""
    kind: BlockKind


class _Run(NamedTuple):
    """Blocks of a prompt that can come back: in host memory, or on their way there, or (None) on disk."""

    blocks: list[int | None]
    hashes: list[bytes]

    @property
    def num_on_disk(self) -> int:
        return self.blocks.count(None)

    @property
    def first_on_disk(self) -> int:
        """Blocks before it."""
        return self.blocks.index(None) if None in self.blocks else len(self.blocks)


class Tiers:
    def __init__(
        self,
        device: BlockPool,
        host: HostKv,
        disk: DiskKv | None,
        queues: Mapping[str, ModelQueue],
        times: CopyTimes,
        *,
        is_on: bool = False,
        start_share: float = 0.75,
    ) -> None:
        """`is_on`: blocks of ended requests are kept in host memory, and on `disk` if there is one. `start_share`: of a
        tier, with something in it, from which on blocks go to the next one."""
        self._device = device
        self._host = host
        self.disk = disk
        self._queues = queues
        self._times = times
        self.is_on = is_on and host.pool is not None
        self._blank_share = 1.0 - start_share
        self._noted: dict[str, OrderedDict[bytes, _Noted]] = {}
        """On the device, by model and hash, in the order in which they are evicted."""
        self._on_host: OrderedDict[Key, _Noted] = OrderedDict()
        self._passing: OrderedDict[Key, None] = OrderedDict()
        """In host memory until they are written, or restored."""
        self._reuse: dict[str, ReuseTimes] = {}
        self._arrived: list[Sequence] = []
        """Those for which nothing was read ahead yet."""
        self.is_flushing = False
        """All goes down that is worth it, whatever room there is: the instance is about to end."""

    @property
    def is_settled(self) -> bool:
        """Nothing is left that goes down."""
        num_moving = self._host.num_checkpointing_blocks + (0 if self.disk is None else self.disk.num_writing)
        has_noted = any(self._noted.values())
        return not has_noted and not (self._on_host and self.disk is not None) and not num_moving

    def add_model(self, name: str) -> None:
        if self.is_on:
            assert self._host.pool is not None
            self._reuse[name] = ReuseTimes(self._host.pool.capacity_blocks(name) + HORIZON)
            self._noted[name] = OrderedDict()

    def remove_model(self, name: str) -> None:
        self._reuse.pop(name, None)
        self._noted.pop(name, None)
        self._host.kept_since_s.pop(name, None)
        keyed: tuple[OrderedDict[Key, _Noted] | OrderedDict[Key, None], ...] = (self._on_host, self._passing)
        for of_models in keyed:
            for key in [key for key in of_models if key[0] == name]:
                del of_models[key]
        self._arrived = [sequence for sequence in self._arrived if sequence.model != name]

    # ------------------------------------------------------------------------------------------------ going down

    def note_ended(self, sequence: Sequence, now: float) -> None:
        """What the sequence filled can be found until somebody needs the room."""
        if not self.is_on:
            return
        model = sequence.model
        noted = self._noted[model]
        num_found_again = sequence.num_cached_tokens // sequence.block_size
        chain = _Chain(sequence.hashes[: max(sequence.num_filled, len(sequence.host_blocks))], now)
        # The last first, as the pool lets go of them.
        for index in range(len(chain.hashes) - 1, -1, -1):
            block_hash = chain.hashes[index]
            before = noted.pop(block_hash, None) or self._on_host.get((model, block_hash))
            is_reused = index < num_found_again or (before is not None and before.kind.is_reused)
            longest = chain if before is None or len(before.chain.hashes) < len(chain.hashes) else before.chain
            kind = BlockKind(sequence.is_online, is_reused, len(longest.hashes).bit_length())
            noted[block_hash] = _Noted(longest._replace(ended_s=now), index, kind)
        while len(noted) > MAX_NOTED:
            noted.popitem(last=False)

    def start(self, budget_s: float, now: float) -> None:
        """Begins copies, of which those from the device may take so many seconds."""
        if not self.is_on:
            return
        for model, reuse in self._reuse.items():
            if gives_way_s := reuse.gives_way_s(NEW):
                self._host.kept_since_s[model] = now - gives_way_s
            else:
                self._host.kept_since_s.pop(model, None)
        self._read_ahead()
        self._let_pass()
        self._copy_down(budget_s, now)
        self._write_down()

    def _is_short(self, pool: BlockPool) -> bool:
        return self.is_flushing or pool.blank_share <= self._blank_share

    def _is_worth(self, model: str, noted: _Noted, out: CopyKind, back: tuple[CopyKind, ...], other_s: float) -> bool:
        """`other_s`: what brings the block back if it is not copied, 0: only computing."""
        num_chained = len(noted.chain.hashes)
        compute_s = self._compute_s(model, 0, num_chained) / num_chained
        return is_worth_keeping(
            self._reuse[model].rate(noted.kind),
            min(compute_s, other_s) if other_s else compute_s,
            sum(self._times.of_model(kind, model) or 0.0 for kind in back),
            self._times.of_model(out, model) or 0.0,
        )

    def _compute_s(self, model: str, first_block: int, num_blocks: int) -> float:
        """Seconds of computing so many blocks again; 0: not known."""
        queue = self._queues[model]
        if queue.cost_model is None or not queue.is_cost_known:
            return 0.0
        page = queue.shape.block_size
        return prompt_s(queue.cost_model.prompt_cost, num_blocks * page, first_block * page)

    def _max_passing(self, model: str) -> int:
        return 0 if self.disk is None else int(PASSING_SHARE * self._pool.capacity_blocks(model))

    @property
    def _pool(self) -> BlockPool:
        """The blocks of host memory."""
        assert self._host.pool is not None
        return self._host.pool

    def _num_admitted(self, model: str, chain: _Chain, kind: BlockKind, num_taken: int) -> int:
        """How many of the chain's first blocks are to be in host memory, of which `num_taken` others take room."""
        gives_way_s = 0.0 if self.is_flushing else self._reuse[model].gives_way_s(kind)
        num_chained = len(chain.hashes)
        if not gives_way_s:
            return num_chained
        here = self._pool.find(model, chain.hashes)
        num_here = sum((model, block_hash) not in self._passing for block_hash in chain.hashes[: len(here)])
        num_kept_free = num_taken + max(0, self._max_passing(model) - len(self._passing))
        most = num_chained - num_here + num_kept_free
        return num_here + max(0, self._pool.num_idle(model, chain.ended_s - gives_way_s, most) - num_kept_free)

    def _copy_down(self, budget_s: float, now: float) -> None:
        host = self._host
        if not self._is_short(self._device):
            return
        block_s = self._times.slowest(CopyKind.CHECKPOINT)
        most = FIRST_BLOCKS if block_s is None else int(budget_s / block_s) if block_s > 0 else MAX_COPYING
        # One at least: else none would go down beside steps that are shorter than a copy.
        num_under_way = host.num_checkpointing_blocks
        left = min(max(most, 0 if num_under_way else 1), MAX_COPYING - num_under_way)
        oldest = sorted(
            (next(iter(noted.values())).chain.ended_s, model) for model, noted in self._noted.items() if noted
        )
        for _, model in oldest:
            if left <= 0:
                return
            if blocks := self._choose_down(model, left, now):
                left -= len(blocks)
                host.offload(model, blocks)

    def _choose_down(self, model: str, most: int, now: float) -> list[tuple[bytes, int]]:
        """Blocks that are to be copied now, by hash, as far as there is room for them."""
        host, pool, disk, noted = self._host, self._pool, self.disk, self._noted[model]
        most = min(most, pool.num_available(model))
        chosen: list[tuple[bytes, int]] = []
        chain, num_admitted = None, 0
        for block_hash, one in list(islice(noted.items(), MAX_LOOKED)):
            block, below = self._device.find_one(model, block_hash), pool.find_one(model, block_hash)
            is_below = below is not None or host.is_offloading(model, block_hash)
            if block is not None:
                self._reuse[model].leaves(block_hash, one.kind, one.chain.ended_s, now)
            if block is not None and (chain is None or one.chain.hashes is not chain.hashes):
                chain = one.chain
                num_admitted = self._num_admitted(model, chain, one.kind, len(chosen))
            is_passing = one.depth >= num_admitted
            if below is not None:
                pool.touch(model, below)
                if block is not None and not is_passing:
                    self._passing.pop((model, block_hash), None)
            elif block is not None and not is_below:
                if len(chosen) >= most:
                    break
                is_on_disk = disk is not None and disk.holds(model, block_hash)
                if (
                    is_passing
                    and disk is not None
                    and not is_on_disk
                    and len(self._passing) >= self._max_passing(model)
                ):
                    break
                read_s = self._read_block_s(model) if is_on_disk else 0.0
                if (not is_passing or (disk is not None and not is_on_disk)) and self._is_worth(
                    model, one, CopyKind.CHECKPOINT, (CopyKind.RESTORE,), read_s
                ):
                    chosen.append((block_hash, block))
                    is_below = True
                    if is_passing:
                        self._passing[model, block_hash] = None
            del noted[block_hash]
            if is_below:
                self._on_host.pop((model, block_hash), None)
                self._on_host[model, block_hash] = one
                if len(self._on_host) > MAX_NOTED:
                    self._on_host.popitem(last=False)
        return chosen

    def _read_block_s(self, model: str) -> float:
        """Seconds of bringing a block back from disk."""
        return sum(self._times.of_model(kind, model) or 0.0 for kind in (CopyKind.READ, CopyKind.RESTORE))

    def _write_down(self) -> None:
        disk, pool = self.disk, self._host.pool
        if disk is None or pool is None or not (self._passing or self._is_short(pool)):
            return
        for key, noted in list(islice(self._on_host.items(), MAX_LOOKED)):
            model, block_hash = key
            if disk.num_writing >= MAX_WRITING:
                break
            if self._host.is_offloading(model, block_hash):
                continue
            del self._on_host[key]
            block = pool.find_one(model, block_hash)
            if disk.holds(model, block_hash):
                disk.touch(model, block_hash)
            elif block is not None and self._is_worth(
                model, noted, CopyKind.WRITE, (CopyKind.READ, CopyKind.RESTORE), 0.0
            ):
                gives_way_s = self._reuse[model].gives_way_s(noted.kind)
                disk.write(model, block_hash, block, noted.depth, gives_way_s)

    def _let_pass(self) -> None:
        """Host blocks of those that have been written, or restored, are free again."""
        disk = self.disk
        for key in list(islice(self._passing, MAX_LOOKED)):
            model, block_hash = key
            is_wanted = key in self._on_host or self._host.is_offloading(model, block_hash)
            if is_wanted or (disk is not None and (disk.is_leaving(*key) or disk.coming(*key) is not None)):
                continue
            block = self._pool.find_one(model, block_hash)
            if block is not None and self._pool.num_references(model, block):
                continue
            del self._passing[key]
            if block is not None:
                self._pool.drop(model, block)

    # ------------------------------------------------------------------------------------------------ coming back

    def on_arrival(self, sequence: Sequence) -> None:
        """It waits: what it will need of the disk can be read meanwhile."""
        if self.disk is not None and self.disk.has_any(sequence.model):
            self._arrived.append(sequence)

    def _read_ahead(self) -> None:
        arrived, self._arrived = self._arrived, []
        for sequence in arrived:
            if sequence.state != State.WAITING or sequence.num_failures:
                continue
            queue, page = self._queues[sequence.model], sequence.block_size
            num_full = sequence.num_reusable // page
            hashes = sequence.extend_hashes(num_full, page, queue.root)
            first = len(self._device.find(queue.name, hashes))
            run = self._run(sequence, first, num_full)
            self._read(sequence, first, run, self._num_worth(sequence, first, run))

    def find_back(self, sequence: Sequence, first_block: int, num_blocks: int, now: float) -> list[int]:
        """Host blocks, each with a reference for the sequence, of the longest run of its blocks from `first_block` on, of
        the first `num_blocks`, that is worth copying back. Those on disk begin to be read."""
        if self._host.pool is None:
            return []
        if self.is_on and not sequence.num_preemptions:
            reuse = self._reuse[sequence.model]
            for block_hash in sequence.hashes[:first_block]:
                reuse.stays(block_hash)
            for block_hash in sequence.hashes[first_block:num_blocks]:
                reuse.is_wanted(block_hash, now)
        run = self._run(sequence, first_block, num_blocks)
        return self._read(sequence, first_block, run, self._num_worth(sequence, first_block, run), holds=True)

    def num_found(self, model: str, hashes: list[bytes]) -> int:
        """How many of the first of these blocks are on the device, and behind those below it."""
        host, disk = self._host.pool, self.disk
        count = len(self._device.find(model, hashes))
        for block_hash in hashes[count:]:
            is_below = host is not None and host.find_one(model, block_hash) is not None
            if not is_below and (disk is None or not disk.is_known(model, block_hash)):
                break
            count += 1
        return count

    def _run(self, sequence: Sequence, first_block: int, num_blocks: int) -> _Run:
        pool, disk, model = self._host.pool, self.disk, sequence.model
        assert pool is not None
        blocks: list[int | None] = list(sequence.host_blocks[first_block:num_blocks])
        hashes = sequence.hashes[first_block:num_blocks]
        for block_hash in hashes[len(blocks) :]:
            block = pool.find_one(model, block_hash)
            if block is None and disk is not None:
                block = disk.coming(model, block_hash)
            if block is None and (disk is None or not disk.is_known(model, block_hash)):
                break
            blocks.append(block)
        return _Run(blocks, hashes[: len(blocks)])

    def _num_worth(self, sequence: Sequence, first_block: int, run: _Run) -> int:
        """How many blocks of the run come back: all, those before the first on disk, or none."""
        num_blocks, num_before = len(run.blocks), run.first_on_disk
        if not self.is_on or sequence.num_preemptions or sequence.host_blocks:
            # Its own, of which it may have given up the device's for others.
            least = num_before
        elif num_before and self._is_worth_reading(sequence, first_block, num_before, 0):
            least = num_before
        else:
            least = 0
        num_on_disk = run.num_on_disk
        if num_on_disk and self._is_worth_reading(sequence, first_block + least, num_blocks - least, num_on_disk):
            return num_blocks
        return least

    def _is_worth_reading(self, sequence: Sequence, first_block: int, num_blocks: int, num_on_disk: int) -> bool:
        model, times = sequence.model, self._times
        restore_s = times.of_model(CopyKind.RESTORE, model) or 0.0
        read_s = times.of_model(CopyKind.READ, model) or 0.0
        num_reading = 0 if self.disk is None else self.disk.num_reading
        max_reading = READING_SHARE * self._pool.capacity_blocks(model)
        return num_on_disk + num_reading <= max_reading and is_worth_reading(
            num_blocks,
            self._compute_s(model, first_block, num_blocks),
            num_blocks * restore_s + num_on_disk * read_s,
            self._host.num_restoring_blocks * restore_s + num_reading * read_s,
            is_busy=any(queue.num_running for queue in self._queues.values()),
        )

    def _read(
        self, sequence: Sequence, first_block: int, run: _Run, num_blocks: int, *, holds: bool = False
    ) -> list[int]:
        """Begins to read those of the first blocks of the run that are on disk, as far as there is room. Returns the host
        blocks of all, each with a reference, where `holds`."""
        pool, model, disk = self._host.pool, sequence.model, self.disk
        assert pool is not None
        blocks = run.blocks[:num_blocks]
        here = [block for block in blocks if block is not None]
        pool.retain(model, here)  # what is read takes no room from them
        found: list[int] = []
        passes = None in blocks and self._passes(sequence)
        for depth, (block, block_hash) in enumerate(zip(blocks, run.hashes, strict=False), first_block):
            if block is None:
                assert disk is not None
                if (block := disk.read(model, block_hash, depth)) is None:
                    break
                pool.retain(model, [block])
                if passes:
                    self._passing[model, block_hash] = None
            if disk is not None and disk.is_unread(model, block):
                sequence.read_hashes.add(block_hash)
            found.append(block)
        taken = set(found)
        pool.release(model, [block for block in here if block not in taken] + ([] if holds else found))
        return found if holds else []

    def _passes(self, sequence: Sequence) -> bool:
        """Whether what is read for the sequence leaves host memory after it: more recent blocks are worth no more there."""
        return self.is_on and self._reuse[sequence.model].gives_way_s(BlockKind(sequence.is_online, True)) > 0
