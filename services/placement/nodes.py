"""Which nodes count. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from shared.messages.cluster import NodeInfo

GRACE_S = 10.0
"""A node that is missing for less keeps its part of the plan: long enough for a restart of its agent or of NATS, short
enough that its models are soon elsewhere if it is dead. (Its requests are placed again at once, by the scheduler.)"""


class NodePresence:
    def __init__(self) -> None:
        self._missing_since: dict[str, float] = {}

    def view(
        self, registered: Mapping[str, NodeInfo], planned: Collection[str], now: float
    ) -> tuple[list[NodeInfo], frozenset[str]]:
        """The nodes to plan with, and the planned ones that are missing but still in their grace. What an agent reports
        about its progress is left out, so that equal views ask for equal plans.

        While no node is there at all, nothing is gained by giving any up, and the graces begin when the first is back.
        """
        missing = set(planned) - registered.keys()
        if not registered:
            self._missing_since = {}
        self._missing_since = {node: self._missing_since.get(node, now) for node in missing}
        held = frozenset(node for node, since in self._missing_since.items() if now - since < GRACE_S)
        nodes = [msgspec.structs.replace(info, plan_version=0, problem="") for _, info in sorted(registered.items())]
        return nodes, held
