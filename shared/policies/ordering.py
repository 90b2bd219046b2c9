"""Who runs next inside one instance: the order of sequences within a class, and the model of the next iteration.

The planner decides between classes (online before offline, high before normal); a policy only orders within one. A
policy is a function of views, statistics it was told, and `now`. What it remembers of a sequence stands in the sequence's
`order_state`, which nobody else reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

from shared.messages.cluster import ExecutionStatistics


class SequenceView(Protocol):
    """What a policy may read of a sequence; `order_state` it may also write."""

    order_state: Any
    """None until the policy sets it (`on_arrival`)."""

    @property
    def number(self) -> int:
        """Arrival number on this instance."""

    @property
    def model(self) -> str: ...

    @property
    def arrived_s(self) -> float:
        """Arrival at the system, on this instance's clock."""

    @property
    def last_ran_s(self) -> float:
        """End of the last step that computed it; `arrived_s` before the first."""

    @property
    def num_prompt(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Prompt and output known so far."""


class ModelView(Protocol):
    """What a policy may read of a model that has runnable sequences of the class in question."""

    @property
    def name(self) -> str: ...

    @property
    def last_planned_step(self) -> int:
        """Id of the last step planned for the model; -1 before the first."""

    @property
    def pool_share(self) -> float:
        """Share of the KV pool that its sequences use."""

    @property
    def num_short(self) -> int:
        """Its runnable sequences that wait while one of some model lacks room in the pool."""

    def runnable(self) -> Iterable[SequenceView]:
        """Its runnable sequences of that class; O(n)."""

    def streams(self, now: float) -> tuple[float, float]:
        """Time left until the earliest next token of online sequences that have their first one is due
        (inf: it has none; see silence.py), and the time that serving them takes; O(n)."""


class OrderingPolicy(ABC):
    is_static: bool
    """True if a sequence's key never changes; the planner then sorts only on arrival."""
    mixes_phases: bool = True
    """Whether a step may hold decodes and prefill chunks of one model together (SeaLLM batches one phase; with chunked
    prefill both may be mixed)."""
    favours_models: bool = False
    """Whether models that are asked little go before others of their rank (engine/favours.py)."""
    bounds_silence: bool = False
    """Whether `pick_model` serves streams before they have stood still for too long (silence.py); the planner then bounds
    steps so that it can."""

    @abstractmethod
    def key(self, sequence: SequenceView, now: float) -> tuple[float, ...]:
        """Smaller runs first and is preempted last. Ties are broken by arrival number."""

    def sort(self, sequences: list[Any], now: float) -> None:
        """Sorts sequences of one model and class by their keys, in place."""
        sequences.sort(key=lambda sequence: (*self.key(sequence, now), sequence.number))

    @abstractmethod
    def pick_model(self, candidates: list[ModelView], now: float) -> ModelView:
        """The model of an iteration that begins at `now`; `candidates` is not empty and in the order in which models were
        added. Changes nothing: what was picked may turn out to lack room."""

    def on_turn(self, model: ModelView) -> None:  # noqa: B027
        """An iteration was given to the model, one of the candidates of the last `pick_model`."""

    def on_arrival(self, sequence: SequenceView, now: float) -> None:  # noqa: B027
        """Before the first `key` of a sequence."""

    def charge(self, sequences: Iterable[SequenceView], seconds: Iterable[float], now: float) -> None:  # noqa: B027
        """Each sequence has received so much execution time in a step that ended now; they are of one model."""

    def export_state(self, sequence: SequenceView) -> tuple[float, ...]:
        """What it remembers of a sequence, for the instance to which that one moves."""
        return ()

    def import_state(self, sequence: SequenceView, state: tuple[float, ...], now: float) -> None:  # noqa: B027
        """After `on_arrival`: goes on with what the same policy exported elsewhere; another's state, which is of another
        length, changes nothing."""

    def set_statistics(self, statistics: ExecutionStatistics) -> None:  # noqa: B027
        """New execution-time statistics of a model."""

    def budgets(self, sequences: Iterable[SequenceView]) -> tuple[float, float]:
        """Remaining budget of the sequences, seconds: sum and smallest; zeros where the policy has none."""
        return 0.0, 0.0


def model_of_first(policy: OrderingPolicy, candidates: list[ModelView], now: float) -> ModelView:
    """The model whose first sequence comes first of all; O(n) keys. A model without a runnable sequence comes last."""

    def head(model: ModelView) -> tuple[bool, tuple[float, ...], int]:
        keys = ((False, policy.key(sequence, now), sequence.number) for sequence in model.runnable())
        return min(keys, default=(True, (), 0))

    return min(candidates, key=head)


class FirstComeFirstServed(OrderingPolicy):
    """By arrival, over all models."""

    is_static = True

    def key(self, sequence: SequenceView, now: float) -> tuple[float, ...]:
        return (sequence.arrived_s,)

    def pick_model(self, candidates: list[ModelView], now: float) -> ModelView:
        return model_of_first(self, candidates, now)
