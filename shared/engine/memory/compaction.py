"""Merged blocks for a model that lacks them: who would have to give up its blocks, and which blocks are moved together.

A merged block can be had by another model only when nothing in it is used. Of a model whose N used blocks lie scattered,
blocks are moved from the emptiest merged blocks into the fullest that have room, until it keeps no more than

    max(ceil(N / blocks per merged block), merged blocks with a block that cannot be moved)

Only blocks can be moved that running sequences hold and nobody else: not those that a copy, a transport, a reservation or a
suspended step uses, nor those of an offline sequence in flight, because its step may be suspended with its block table.
Steps in flight do no harm: moves take place between them and the steps that are planned later (`KvCopy`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from shared.engine.counters import EngineCounters
from shared.engine.memory.blocks import BlockPool
from shared.engine.model_queue import ModelQueue
from shared.engine.plan import CopyKind, KvCopy
from shared.engine.sequence import Sequence

MOVED_SHARE = 1 / 16
"""Share of the pool that may be moved for one step: on a device a few milliseconds' worth (a GPU moves 1 GB in less than
two)."""


_Holders = dict[int, list[tuple[Sequence, int]]]


class Reach:
    """What a model could have if some sequences gave up their blocks and what others hold were moved together."""

    def __init__(self, pool: BlockPool, model: str, per_merged: Mapping[str, int], fixed: Mapping[str, int]) -> None:
        """`per_merged`: blocks per merged block of each model; `fixed`: merged blocks of each that cannot be emptied."""
        self._pool = pool
        self._model = model
        self._per_merged = per_merged
        self._fixed = fixed
        self._used = {name: pool.num_used(name) for name in per_merged}
        self._given_up: Counter[tuple[str, int]] = Counter()

    def give_up(self, victim: Sequence) -> None:
        name, references = victim.model, self._pool.num_references
        for block in victim.blocks:
            self._given_up[name, block] += 1
            # Not those that copies, or others with the same prefix, hold too.
            self._used[name] -= self._given_up[name, block] == references(name, block)

    def take_back(self, victim: Sequence) -> None:
        name, references = victim.model, self._pool.num_references
        for block in victim.blocks:
            self._used[name] += self._given_up[name, block] == references(name, block)
            self._given_up[name, block] -= 1

    @property
    def num_blocks(self) -> int:
        own = self._per_merged[self._model]
        others = sum(
            max(self._fixed.get(name, 0), -(-self._used[name] // per_merged))
            for name, per_merged in self._per_merged.items()
            if name != self._model
        )
        return (self._pool.num_merged - others) * own - self._used[self._model]


class _Packing:
    """The blocks of one model on their way from the emptiest merged blocks to those that cannot be emptied, then to the
    fullest of the others."""

    def __init__(self, pool: BlockPool, name: str, per_merged: int, holders: _Holders) -> None:
        self.name = name
        self.blocks: list[int] = []
        self.targets: list[int] = []
        self.tables: list[tuple[int, int, int]] = []
        self._pool = pool
        self._per_merged = per_merged
        self._holders = holders
        order: list[tuple[bool, int, int]] = sorted(
            (not all(self._is_movable(block) for block in pool.used_blocks(name, merged)), num_used, merged)
            for num_used, merged in pool.busy_merged(name)
        )
        self._sources = [(num_used, merged) for is_fixed, num_used, merged in reversed(order) if not is_fixed]
        """The next one last."""
        self._fillable = [[self._per_merged - num_used, merged] for _, num_used, merged in order]
        """Merged blocks that can be filled, with their room, the next one last."""
        self._keep(self._fillable[-1][1])

    def _keep(self, merged: int) -> None:
        """It is to be filled: sources end before it."""
        if self._sources and self._sources[0][1] == merged:
            del self._sources[0]

    def _is_movable(self, block: int) -> bool:
        return len(self._holders.get(block, ())) == self._pool.num_references(self.name, block)

    @property
    def can_free_one(self) -> bool:
        return bool(self._sources) and self._pool.num_own_room(self.name) >= self._per_merged

    @property
    def least_share(self) -> float:
        """What the next one takes to be emptied, as a share of a merged block."""
        return self._sources[-1][0] / self._per_merged

    def free_one(self) -> None:
        """Empties the next merged block."""
        _, source = self._sources.pop()
        for block in self._pool.used_blocks(self.name, source):
            while not self._fillable[-1][0]:
                self._fillable.pop()
                self._keep(self._fillable[-1][1])
            self._fillable[-1][0] -= 1
            target = self._pool.move(self.name, block, self._fillable[-1][1])
            self.blocks.append(block)
            self.targets.append(target)
            for sequence, index in self._holders[block]:
                sequence.blocks[index] = target
                self.tables.append((sequence.row, index, target))


class Compaction:
    """Finds out what can be moved, and moves it."""

    def __init__(
        self, pool: BlockPool, queues: Mapping[str, ModelQueue], counters: EngineCounters, copy_ids: Iterator[int]
    ) -> None:
        self._pool = pool
        self._queues = queues
        self._counters = counters
        self._copy_ids = copy_ids
        self._started: list[KvCopy] = []
        self._moves: dict[int, KvCopy] = {}
        """Under way: each target block has one more reference."""
        self._targets: dict[str, set[int]] = {}
        """Target blocks of these moves, by model."""
        self._left = 0.0
        """Merged blocks' worth of blocks that may still be moved before the next step; below 0 after one that took more."""

    def begin_step(self) -> None:
        bound = max(1.0, MOVED_SHARE * self._pool.num_merged)
        self._left = min(bound, self._left + bound)

    # ------------------------------------------------------------------------------------------- what could be

    def num_kept(self, name: str) -> int:
        """Merged blocks that hold used blocks of the model when all that can be moved has been."""
        per_merged = self._queues[name].shape.blocks_per_merged
        if self._pool.num_own_room(name) < per_merged:
            return self._pool.num_used_merged(name)
        return max(self._pool.least_merged(name), self._num_fixed(name, ()))

    def reach(self, model: str, victims: Collection[Sequence] = ()) -> Reach:
        """What moves of blocks can open to a model. `victims`: the blocks of these are not in the way."""
        per_merged = {name: queue.shape.blocks_per_merged for name, queue in self._queues.items()}
        touched = {victim.model for victim in victims}
        fixed = {
            name: self._num_fixed(name, victims)
            for name, per in per_merged.items()
            if name != model and (name in touched or self._pool.num_own_room(name) >= per)
        }
        return Reach(self._pool, model, per_merged, fixed)

    def best_reach(self, model: str) -> Reach:
        """Upper bound of `reach`, quickly found: as if every block could be moved."""
        return Reach(
            self._pool, model, {name: queue.shape.blocks_per_merged for name, queue in self._queues.items()}, {}
        )

    def _num_fixed(self, name: str, victims: Collection[Sequence]) -> int:
        """Merged blocks of the model with a block that others hold than the victims and those whose blocks can be moved."""
        held: Counter[int] = Counter()
        movable = self._movable(name)
        for sequence in movable.values():
            held.update(sequence.blocks)
        for victim in victims:
            if victim.model == name and movable.get(victim.number) is not victim:
                held.update(victim.blocks)
        references = self._pool.num_references
        return sum(
            any(held[block] != references(name, block) for block in self._pool.used_blocks(name, merged))
            for _, merged in self._pool.busy_merged(name)
        )

    def _movable(self, name: str) -> dict[int, Sequence]:
        """By number: running sequences that are not on their way to a suspension."""
        return {
            number: sequence
            for of_class in self._queues[name].running
            for number, sequence in of_class.items()
            if not sequence.is_spoilt and (sequence.is_online or not sequence.in_flight)
        }

    # --------------------------------------------------------------------------------------------- what is done

    def make_room(self, model: str, num_blocks: int, at_once: bool = False) -> bool:
        """Frees merged blocks of other models until so many blocks are available; False: that is not possible, or too much
        for one step. `at_once`: it is not too much, and later ones wait for it. Asked only for what `reach` promises."""
        pool = self._pool
        packings = [
            _Packing(pool, name, queue.shape.blocks_per_merged, self._holders(name))
            for name, queue in self._queues.items()
            if name != model and pool.num_own_room(name) >= queue.shape.blocks_per_merged
        ]
        while pool.num_available(model) < num_blocks:
            packing = min((p for p in packings if p.can_free_one), key=lambda p: p.least_share, default=None)
            if packing is None or (packing.least_share > self._left and not at_once):
                break
            self._left -= packing.least_share
            self._counters.freed_merged += 1
            packing.free_one()
        for packing in packings:
            if packing.blocks:
                blocks, targets, tables = packing.blocks, packing.targets, packing.tables
                self._start(KvCopy(next(self._copy_ids), CopyKind.MOVE, packing.name, blocks, [], targets, tables))
        return pool.num_available(model) >= num_blocks

    def _holders(self, name: str) -> _Holders:
        """By block that can perhaps be moved: the sequences that hold it, and where in their block tables."""
        found: _Holders = {}
        for sequence in self._movable(name).values():
            for index, block in enumerate(sequence.blocks):
                found.setdefault(block, []).append((sequence, index))
        return found

    def _start(self, move: KvCopy) -> None:
        self._pool.retain(move.model, move.target_blocks)
        self._moves[move.copy_id] = move
        self._targets.setdefault(move.model, set()).update(move.target_blocks)
        self._started.append(move)
        self._counters.moved_blocks[move.model] += len(move.target_blocks)

    def started_copies(self) -> list[KvCopy]:
        """Those begun since the last call."""
        started, self._started = self._started, []
        return started

    def on_copy(self, copy_id: int, ok: bool) -> bool:
        """Whether it was a move that has ended. `RuntimeError` if it failed: nobody knows what its blocks hold."""
        move = self._moves.pop(copy_id, None)
        if move is None:
            return False
        if not ok:
            raise RuntimeError(f"blocks of {move.model!r} could not be moved within the KV pool")
        self._targets[move.model].difference_update(move.target_blocks)
        self._pool.release(move.model, move.target_blocks)
        return True

    def num_settled(self, sequence: Sequence, end: int) -> int:
        """How many of its first `end` blocks come before the first one that is being moved."""
        targets = self._targets.get(sequence.model)
        if not targets or targets.isdisjoint(sequence.blocks[:end]):
            return min(end, len(sequence.blocks))
        return next(index for index, block in enumerate(sequence.blocks) if block in targets)

    def are_moving(self, model: str, blocks: list[int]) -> bool:
        """Whether what one of the blocks is to hold is still being moved into it."""
        return not self._targets.get(model, set()).isdisjoint(blocks)

    def has_moves(self, model: str) -> bool:
        return any(move.model == model for move in self._moves.values())

    def references(self) -> Iterator[tuple[str, int]]:
        """(model, block) of every reference held by moves; for tests."""
        for move in self._moves.values():
            for block in move.target_blocks:
                yield move.model, block
