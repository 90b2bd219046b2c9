"""Instances as processes of the registered nodes: their agents start and end them. A node runs `num_instances` and could
run `max_instances`; an instance that was drained leaves its place free, so a node is never made smaller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

import msgspec

from services.placement.backends.interface import ScalingBackend
from services.placement.fleet import active_by_node
from shared.bus.interface import Bus, BusError, ServiceError
from shared.messages.admin import ScaleNode
from shared.messages.catalogue import NODE_SCALE
from shared.messages.cluster import NodeInfo
from shared.messages.requests import ErrorCode

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3.0


def spread(num_more: int, nodes: Sequence[NodeInfo], drained: Sequence[str] = ()) -> dict[str, int]:
    """Node id -> instances that it should have, for the nodes that get more: one after the other where the fewest are.
    CONFLICT if the nodes cannot run so many, those that are drained by hand (`drained`) among them."""
    sizes = {node.node_id: node.num_instances for node in nodes}
    room = {node.node_id: node.max_instances - node.num_instances for node in nodes}
    for _ in range(num_more):
        free = sorted(node_id for node_id in sizes if room[node_id] > 0)
        if not free:
            most = sum(max(node.num_instances, node.max_instances) for node in nodes)
            message = (
                f"the registered nodes run at most {most} instances in all (TIDEWAY_MAX_NODE_INSTANCES of each worker)"
            )
            if drained:
                message += f", among them {', '.join(drained)}, drained by hand"
                message += f": `tideway drain {drained[0]} --undo` brings {drained[0]} back"
            raise ServiceError.of(ErrorCode.CONFLICT, message, "num_instances")
        chosen = min(free, key=lambda node_id: sizes[node_id])
        sizes[chosen] += 1
        room[chosen] -= 1
    return {node.node_id: sizes[node.node_id] for node in nodes if sizes[node.node_id] > node.num_instances}


class LocalBackend(ScalingBackend):
    removes_nodes = False

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def grow(self, num_more: int, nodes: Sequence[NodeInfo], drained: Sequence[str] = ()) -> None:
        """What a node that does not answer should have got, others get. If that does not suffice, its error is raised."""
        sizes = spread(num_more, nodes, drained)
        while sizes:
            answers = await asyncio.gather(*(self._ask(node_id, number) for node_id, number in sizes.items()))
            failed = {node_id for node_id, error in zip(sizes, answers, strict=True) if error is not None}
            refused = next((error for error in reversed(answers) if error is not None), None)
            missing = sum(sizes[node.node_id] - node.num_instances for node in nodes if node.node_id in failed)
            nodes = [
                msgspec.structs.replace(node, num_instances=sizes.get(node.node_id, node.num_instances))
                for node in nodes
                if node.node_id not in failed
            ]
            try:
                sizes = spread(missing, nodes)
            except ServiceError:
                assert refused is not None
                raise ServiceError(refused.info) from None

    async def _ask(self, node_id: str, num_instances: int) -> BusError | None:
        """Why the node will not run so many."""
        try:
            await self._bus.request(NODE_SCALE.at(node_id=node_id), ScaleNode(num_instances), timeout_s=CALL_TIMEOUT_S)
        except BusError as error:
            logger.warning("node %s was not made larger: %s", node_id, error)
            return error
        return None

    def to_drain(
        self, number: int, nodes: Sequence[NodeInfo], draining: Collection[str], preferred: str = ""
    ) -> list[str]:
        active = active_by_node(nodes, draining)
        chosen = [preferred] if number and any(preferred in instances for instances in active.values()) else []
        for instances in active.values():
            instances[:] = [i for i in instances if i not in chosen]
        while len(chosen) < number and any(active.values()):
            fullest = max(active, key=lambda node_id: (len(active[node_id]), node_id))
            chosen.append(active[fullest].pop())
        return chosen

    async def revivable(self, released: Sequence[str], nodes: Sequence[NodeInfo]) -> list[str]:
        return list(released)

    async def release(self, ended: Collection[str], nodes: Sequence[NodeInfo]) -> None:
        pass

    async def close(self) -> None:
        pass
