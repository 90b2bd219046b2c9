"""Who starts and ends instances.

Only the placement that leads calls a back end, and never two methods at once. What the methods do shows in the nodes'
registry entries later; they may be called again before it does, and then have no further effect. They refuse with a typed
`ServiceError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from shared.messages.cluster import NodeInfo


class ScalingBackend(ABC):
    removes_nodes: bool
    """Whether `release` has anything to do."""

    @abstractmethod
    async def grow(self, num_more: int, nodes: Sequence[NodeInfo], drained: Sequence[str] = ()) -> None:
        """So many instances more than the nodes have room for. CONFLICT, with nothing done, if there cannot be so many.
        `drained`: those that operators took out, which keep their places."""

    @abstractmethod
    def to_drain(
        self, number: int, nodes: Sequence[NodeInfo], draining: Collection[str], preferred: str = ""
    ) -> list[str]:
        """Which of the instances that are not draining to drain (at most `number`), so that what runs them can go when
        they are empty; `preferred` if that makes no difference."""

    @abstractmethod
    async def revivable(self, released: Sequence[str], nodes: Sequence[NodeInfo]) -> list[str]:
        """Those of them that can simply be started again."""

    @abstractmethod
    async def release(self, ended: Collection[str], nodes: Sequence[NodeInfo]) -> None:
        """These were detached by scaling, and have ended: what ran them may go. Called each second while there are any."""

    @abstractmethod
    async def close(self) -> None:
        """Frees connections. May be called twice."""
