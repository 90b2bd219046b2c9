"""Orders to compare with: round robin and skip-join MLFQ. First come, first served stands in ordering.py."""

from __future__ import annotations

from collections.abc import Iterable

from shared.policies.ordering import ModelView, OrderingPolicy, SequenceView, model_of_first


class RoundRobin(OrderingPolicy):
    """Models take turns, and so do the sequences of a model: the one that has not run for longest goes first."""

    is_static = False

    def key(self, sequence: SequenceView, now: float) -> tuple[float, ...]:
        return (sequence.last_ran_s,)

    def pick_model(self, candidates: list[ModelView], now: float) -> ModelView:
        return min(candidates, key=lambda model: model.last_planned_step)


class _Place:
    """`order_state` of a sequence: its level (0 runs first), since when, and what it used of the level's quantum."""

    __slots__ = ("entered_s", "level", "used_s")

    def __init__(self, level: int, now: float) -> None:
        self.move(level, now)

    def move(self, level: int, now: float) -> None:
        self.level = level
        self.entered_s = now
        self.used_s = 0.0


class SkipJoinMlfq(OrderingPolicy):
    """FastServe (Wu et al. 2023, section 4.1): a multi-level feedback queue, first in, first out within a level.

    The quantum of level i is `quantum_s * 2^i`. A sequence skips the levels whose quantum its prefill would exceed, falls by
    one whenever it has used a quantum up, and is put on level 0 after it has waited for `starvation_s`. `prefill_token_s`
    estimates a prefill from its tokens."""

    is_static = False

    def __init__(
        self,
        *,
        quantum_s: float = 0.05,
        num_levels: int = 10,
        prefill_token_s: float = 5e-4,
        starvation_s: float = 10.0,
    ) -> None:
        self._quanta_s = [quantum_s * 2**level for level in range(num_levels)]
        self._prefill_token_s = prefill_token_s
        self._starvation_s = starvation_s

    def on_arrival(self, sequence: SequenceView, now: float) -> None:
        prefill_s = sequence.num_tokens * self._prefill_token_s
        last = len(self._quanta_s) - 1
        level = next((level for level, quantum_s in enumerate(self._quanta_s) if quantum_s >= prefill_s), last)
        sequence.order_state = _Place(level, now)

    def charge(self, sequences: Iterable[SequenceView], seconds: Iterable[float], now: float) -> None:
        for sequence, execution_s in zip(sequences, seconds, strict=True):
            place: _Place = sequence.order_state
            used_s = place.used_s + execution_s
            level = place.level
            while level + 1 < len(self._quanta_s) and used_s >= self._quanta_s[level]:
                used_s -= self._quanta_s[level]
                level += 1
            if level > place.level:
                place.move(level, now)
            place.used_s = used_s

    def export_state(self, sequence: SequenceView) -> tuple[float, ...]:
        """The level; what it used of its quantum is forgotten."""
        return (float(sequence.order_state.level),)

    def import_state(self, sequence: SequenceView, state: tuple[float, ...], now: float) -> None:
        if len(state) == 1:
            sequence.order_state.move(min(int(state[0]), len(self._quanta_s) - 1), now)

    def key(self, sequence: SequenceView, now: float) -> tuple[float, ...]:
        place: _Place = sequence.order_state
        if place.level and now - max(place.entered_s, sequence.last_ran_s) > self._starvation_s:
            place.move(0, now)
        return (place.level, place.entered_s)

    def pick_model(self, candidates: list[ModelView], now: float) -> ModelView:
        return model_of_first(self, candidates, now)
