"""The KV pool's tiers below the device, for blocks of ended requests: what goes down as room gets short, and what comes back
for a prompt that begins alike.

    device cache --copy--> host cache --write--> disk      `start`, beside each step, in the order in which requests ended
    device <--restore-- host <--read-- disk                `find_back`, when a prompt is admitted; `start` reads ahead for
                                                           prompts that wait

A block goes down while its tier has less than a share of blank room, so before it is evicted; what is cached in a tier
leaves it as anywhere else, the least recently used first. Whether a copy is worth its time: policies/kv_tiers.py. Off, or
without host memory, it finds what checkpoints left and does nothing else.
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
from shared.policies.kv_tiers import BlockKind, HitRates, is_worth_keeping, is_worth_reading

MAX_NOTED = 1 << 16
"""Blocks of ended requests that wait to be looked at; the oldest are forgotten, as they are evicted first."""
MAX_COPYING = 64
"""Blocks on their way to host memory."""
MAX_WRITING = 16
"""Blocks on their way to disk."""
MAX_LOOKED = 256
"""Blocks that are looked at beside a step."""
MAX_READING = 512
"""Blocks on their way from disk, of all prompts."""
FIRST_BLOCKS = 8
"""Blocks that are copied at once while nobody knows how long one takes."""
DISK_HORIZON = 1 << 16
"""Blocks that a disk holds, as far as the share of blocks that are found again asks for it."""

Key = tuple[str, bytes]
"""Model and hash of a block."""


class _Noted(NamedTuple):
    """A block of a request that has ended."""

    num_chained: int
    """Full blocks of that request."""
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
        self._noted: OrderedDict[Key, _Noted] = OrderedDict()
        """On the device, in the order in which they are evicted."""
        self._on_host: OrderedDict[Key, _Noted] = OrderedDict()
        self._rates: dict[str, HitRates] = {}
        self._arrived: list[Sequence] = []
        """Those for which nothing was read ahead yet."""
        self.is_flushing = False
        """All goes down that is worth it, whatever room there is: the instance is about to end."""

    @property
    def is_settled(self) -> bool:
        """Nothing is left that goes down."""
        num_moving = self._host.num_checkpointing_blocks + (0 if self.disk is None else self.disk.num_writing)
        return not self._noted and not (self._on_host and self.disk is not None) and not num_moving

    def add_model(self, name: str) -> None:
        if self.is_on:
            assert self._host.pool is not None
            self._rates[name] = HitRates(
                self._host.pool.capacity_blocks(name) + (0 if self.disk is None else DISK_HORIZON)
            )

    def remove_model(self, name: str) -> None:
        self._rates.pop(name, None)
        for noted in (self._noted, self._on_host):
            for key in [key for key in noted if key[0] == name]:
                del noted[key]
        self._arrived = [sequence for sequence in self._arrived if sequence.model != name]

    # ------------------------------------------------------------------------------------------------ going down

    def note_ended(self, sequence: Sequence) -> None:
        """What the sequence filled can be found until somebody needs the room."""
        if not self.is_on:
            return
        num_found_again = sequence.num_cached_tokens // sequence.block_size
        hashes = sequence.hashes[: max(sequence.num_filled, len(sequence.host_blocks))]
        # The last first, as the pool lets go of them.
        for index in range(len(hashes) - 1, -1, -1):
            key = (sequence.model, hashes[index])
            before = self._noted.pop(key, None) or self._on_host.get(key)
            kind = BlockKind(sequence.is_online, index < num_found_again or (before is not None and before.kind[1]))
            num_chained = max(len(hashes), 0 if before is None else before.num_chained)
            self._noted[key] = _Noted(num_chained, kind)
        while len(self._noted) > MAX_NOTED:
            self._noted.popitem(last=False)

    def start(self, budget_s: float) -> None:
        """Begins copies, of which those from the device may take so many seconds."""
        if not self.is_on:
            return
        self._read_ahead()
        self._copy_down(budget_s)
        self._write_down()

    def _is_short(self, pool: BlockPool) -> bool:
        return self.is_flushing or pool.blank_share <= self._blank_share

    def _is_worth(self, key: Key, noted: _Noted, out: CopyKind, back: tuple[CopyKind, ...]) -> bool:
        model = key[0]
        return is_worth_keeping(
            self._rates[model].rate(noted.kind),
            self._compute_s(model, 0, noted.num_chained) / noted.num_chained,
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

    def _copy_down(self, budget_s: float) -> None:
        host, pool = self._host, self._host.pool
        assert pool is not None
        if not self._noted or not self._is_short(self._device):
            return
        block_s = self._times.slowest(CopyKind.CHECKPOINT)
        most = FIRST_BLOCKS if block_s is None else int(budget_s / block_s) if block_s > 0 else MAX_COPYING
        # One at least: else none would go down beside steps that are shorter than a copy.
        num_under_way = host.num_checkpointing_blocks
        left = min(max(most, 0 if num_under_way else 1), MAX_COPYING - num_under_way)
        chosen: dict[str, list[tuple[bytes, int]]] = {}
        full: set[str] = set()
        for key, noted in list(islice(self._noted.items(), MAX_LOOKED)):
            model, block_hash = key
            if left <= 0:
                break
            if model in full:
                continue
            block = self._device.find_one(model, block_hash)
            is_below = pool.find_one(model, block_hash) is not None or host.is_offloading(model, block_hash)
            if block is not None and not is_below:
                self._rates[model].leaves(block_hash, noted.kind)
                if self._is_worth(key, noted, CopyKind.CHECKPOINT, (CopyKind.RESTORE,)):
                    if len(chosen.get(model, ())) >= pool.num_available(model):
                        full.add(model)
                        continue
                    chosen.setdefault(model, []).append((block_hash, block))
                    left -= 1
                    is_below = True
            del self._noted[key]
            if is_below:
                self._on_host.pop(key, None)
                self._on_host[key] = noted
                if len(self._on_host) > MAX_NOTED:
                    self._on_host.popitem(last=False)
        for model, blocks in chosen.items():
            # Models have room in common, of which those before it have taken theirs.
            if blocks := blocks[: pool.num_available(model)]:
                host.offload(model, blocks)

    def _write_down(self) -> None:
        disk, pool = self.disk, self._host.pool
        if disk is None or pool is None or not self._is_short(pool):
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
            elif block is not None and self._is_worth(key, noted, CopyKind.WRITE, (CopyKind.READ, CopyKind.RESTORE)):
                disk.write(model, block_hash, block)

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
            self._read(sequence, run, self._num_worth(sequence, first, run))

    def find_back(self, sequence: Sequence, first_block: int, num_blocks: int) -> list[int]:
        """Host blocks, each with a reference for the sequence, of the longest run of its blocks from `first_block` on, of
        the first `num_blocks`, that is worth copying back. Those on disk begin to be read."""
        if self._host.pool is None:
            return []
        if self.is_on and not sequence.num_preemptions:
            rates = self._rates[sequence.model]
            for block_hash in sequence.hashes[:first_block]:
                rates.stays(block_hash)
            for block_hash in sequence.hashes[first_block:num_blocks]:
                rates.is_wanted(block_hash)
        run = self._run(sequence, first_block, num_blocks)
        return self._read(sequence, run, self._num_worth(sequence, first_block, run), holds=True)

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
        return num_on_disk + num_reading <= MAX_READING and is_worth_reading(
            num_blocks,
            self._compute_s(model, first_block, num_blocks),
            num_blocks * restore_s + num_on_disk * read_s,
            self._host.num_restoring_blocks * restore_s + num_reading * read_s,
            is_busy=any(queue.num_running for queue in self._queues.values()),
        )

    def _read(self, sequence: Sequence, run: _Run, num_blocks: int, *, holds: bool = False) -> list[int]:
        """Begins to read those of the first blocks of the run that are on disk, as far as there is room. Returns the host
        blocks of all, each with a reference, where `holds`."""
        pool, model, disk = self._host.pool, sequence.model, self.disk
        assert pool is not None
        blocks = run.blocks[:num_blocks]
        here = [block for block in blocks if block is not None]
        pool.retain(model, here)  # what is read takes no room from them
        found: list[int] = []
        for block, block_hash in zip(blocks, run.hashes, strict=False):
            if block is None:
                assert disk is not None
                if (block := disk.read(model, block_hash)) is None:
                    break
                pool.retain(model, [block])
            if disk is not None and disk.is_unread(model, block):
                sequence.read_hashes.add(block_hash)
            found.append(block)
        taken = set(found)
        pool.release(model, [block for block in here if block not in taken] + ([] if holds else found))
        return found if holds else []
