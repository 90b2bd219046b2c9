"""Who runs next inside one instance: the order of sequences within a class, and the model of the next iteration.

The planner decides between classes (online before offline, high before normal); a policy only orders within one. A
policy is a function of read-only views and `now`; it keeps no reference to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol


class SequenceView(Protocol):
    """What a policy may read of a sequence."""

    @property
    def number(self) -> int:
        """Arrival number on this instance."""

    @property
    def arrived_s(self) -> float:
        """Arrival at the system, on this instance's clock."""

    @property
    def num_tokens(self) -> int: ...


class ModelView(Protocol):
    """What a policy may read of a model that has runnable sequences of the class in question."""

    @property
    def name(self) -> str: ...

    @property
    def last_planned_step(self) -> int:
        """Id of the last step planned for the model; -1 before the first."""


class OrderingPolicy(ABC):
    is_static: bool
    """True if a sequence's key never changes; the planner then sorts only on arrival."""

    @abstractmethod
    def key(self, sequence: SequenceView, now: float) -> tuple[float, ...]:
        """Smaller runs first and is preempted last. Ties are broken by arrival number."""

    @abstractmethod
    def pick_model(self, candidates: list[ModelView], now: float) -> ModelView:
        """The model of the next iteration; `candidates` is not empty and in the order in which models were added."""


class FirstComeFirstServed(OrderingPolicy):
    """By arrival; models take turns, so that one model's long outputs do not shut out the others."""

    is_static = True

    def key(self, sequence: SequenceView, now: float) -> tuple[float, ...]:
        return (sequence.arrived_s,)

    def pick_model(self, candidates: list[ModelView], now: float) -> ModelView:
        return min(candidates, key=lambda model: model.last_planned_step)


ORDERING_POLICIES: dict[str, type[OrderingPolicy]] = {"fcfs": FirstComeFirstServed}
"""By the name that settings use."""
