"""Instances in the pods of a workload, of which the number of replicas is set. A pod is a node: its name is the node id.

A StatefulSet gives up the pod of the highest ordinal, so that one is drained first. Of a Deployment any pod can be: the
drained one is made the cheapest to delete (annotation pod-deletion-cost) before there is one replica less.

Nothing is remembered here: what is still to be done follows from the replicas that the API server has, the nodes that are
registered, and the instances that scaling took out. A new leader goes on where the one before stopped.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from services.placement.backends.api_server import ApiServer
from services.placement.backends.interface import ScalingBackend
from services.placement.fleet import active_by_node, instance_ids, node_of
from shared.bus.interface import ServiceError
from shared.messages.cluster import NodeInfo
from shared.messages.requests import ErrorCode
from shared.runtime.settings import SettingsError

logger = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""Time for setting the replicas, with all repetitions."""
MAX_CONFLICTS = 5
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
CHEAPEST = "-1000"
"""Pods without the annotation cost 0."""


class _Scale(NamedTuple):
    """The scale subresource of the workload."""

    wanted: int
    """Replicas as asked for."""
    existing: int
    """Pods as last counted by the controller."""
    revision: str


class KubernetesBackend(ScalingBackend):
    removes_nodes = True

    def __init__(self, server: ApiServer, workload: str) -> None:
        """`workload`: statefulset/NAME or deployment/NAME, in the server's namespace."""
        match = re.fullmatch(r"(statefulset|deployment)/([a-z0-9]([a-z0-9.-]*[a-z0-9])?)", workload)
        if match is None:
            raise SettingsError(
                f"TIDEWAY_KUBERNETES_WORKLOAD={workload!r}: expected statefulset/NAME or deployment/NAME"
            )
        self._server = server
        self._name = match[2]
        self._is_ordered = match[1] == "statefulset"
        self._path = f"/apis/apps/v1/namespaces/{server.namespace}/{match[1]}s/{match[2]}/scale"

    async def close(self) -> None:
        await self._server.close()

    # ----------------------------------------------------------------------------------------------- decisions

    async def grow(self, num_more: int, nodes: Sequence[NodeInfo], drained: Sequence[str] = ()) -> None:
        per_pod = max((node.num_instances for node in nodes if self._is_own(node.node_id)), default=1)
        num_pods = -(-num_more // max(1, per_pod))

        def wanted(scale: _Scale) -> int:
            own = [node.node_id for node in nodes if self._is_own(node.node_id)]
            if self._is_ordered:
                own = [node_id for node_id in own if self._ordinal(node_id) < scale.wanted]
            # Pods that were asked for and are not registered yet are among those that are wanted.
            return max(scale.wanted, len(own) + num_pods)

        await self._scale(wanted)

    def to_drain(
        self, number: int, nodes: Sequence[NodeInfo], draining: Collection[str], preferred: str = ""
    ) -> list[str]:
        active = {node: ids for node, ids in active_by_node(nodes, draining).items() if ids and self._is_own(node)}
        if self._is_ordered:
            pods = sorted(active, key=self._ordinal, reverse=True)
        else:
            # The preferred one's pod, then those of which most has gone already.
            pods = sorted(active, key=lambda node: (node != node_of(preferred)[0], len(active[node]), node))
        chosen = []
        for pod in pods:
            chosen += sorted(active[pod], key=lambda i: (i == preferred, node_of(i)[1]), reverse=True)
        return chosen[:number]

    async def revivable(self, released: Sequence[str], nodes: Sequence[NodeInfo]) -> list[str]:
        """Those whose pod stays: of a StatefulSet, the ordinal tells; of a Deployment, whether it is marked for deletion."""
        if not released:
            return []
        if self._is_ordered:
            wanted = (await self._read()).wanted
            return [i for i in released if not self._is_own(node := node_of(i)[0]) or self._ordinal(node) < wanted]
        return [i for i in released if not self._is_own(node := node_of(i)[0]) or not await self._is_marked(node)]

    async def release(self, ended: Collection[str], nodes: Sequence[NodeInfo]) -> None:
        own = {node.node_id: instance_ids([node]) for node in nodes if self._is_own(node.node_id)}
        empty = {pod for pod, instances in own.items() if instances and set(instances) <= set(ended)}
        if not empty:
            return
        if self._is_ordered:
            await self._scale(lambda scale: self._without_last(scale.wanted, empty))
            return
        for pod in sorted(empty):
            if await self._is_marked(pod):
                continue
            cost = {"metadata": {"annotations": {DELETION_COST: CHEAPEST}}}
            await self._server.patch(self._pod_path(pod), cost)
            # While the controller is still at work on an earlier change, it is unclear which pods it counts.
            await self._scale(lambda scale: scale.wanted - (1 if scale.wanted == scale.existing else 0))

    def _without_last(self, num_replicas: int, empty: Collection[str]) -> int:
        while num_replicas and f"{self._name}-{num_replicas - 1}" in empty:
            num_replicas -= 1
        return num_replicas

    def _is_own(self, node_id: str) -> bool:
        """A pod of the workload. (Other workers may share the bus; they cannot be scaled from here.)"""
        pattern = r"-(0|[1-9]\d*)" if self._is_ordered else r"-[a-z0-9]+-[a-z0-9]+"
        return re.fullmatch(re.escape(self._name) + pattern, node_id) is not None

    def _ordinal(self, node_id: str) -> int:
        return int(node_id.rpartition("-")[2])

    # --------------------------------------------------------------------------------------------------- calls

    async def _read(self) -> _Scale:
        body = await self._server.get(self._path)
        try:
            # Numbers that are 0 are left out.
            wanted, existing = body["spec"].get("replicas", 0), body.get("status", {}).get("replicas", 0)
            return _Scale(int(wanted), int(existing), str(body["metadata"]["resourceVersion"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServiceError.of(ErrorCode.INTERNAL, f"{self._path} is no Scale: {error!r}") from None

    async def _scale(self, wanted: Callable[[_Scale], int]) -> None:
        """Sets the replicas to a function of what they are; again where somebody else changed them in between."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                for attempt in range(MAX_CONFLICTS):
                    scale = await self._read()
                    if (number := wanted(scale)) == scale.wanted:
                        return
                    try:
                        await self._patch(number, scale.revision)
                    except ServiceError as error:
                        if error.code != ErrorCode.CONFLICT or attempt == MAX_CONFLICTS - 1:
                            raise
                        continue
                    logger.info("%s: %d replicas instead of %d", self._name, number, scale.wanted)
                    return
        except TimeoutError:
            message = f"setting the replicas of {self._name} took longer than {DEADLINE_S:g} s"
            raise ServiceError.of(ErrorCode.DEADLINE, message) from None

    async def _patch(self, number: int, revision: str) -> None:
        body: dict[str, Any] = {"metadata": {"resourceVersion": revision}, "spec": {"replicas": number}}
        await self._server.patch(self._path, body)

    def _pod_path(self, pod: str) -> str:
        return f"/api/v1/namespaces/{self._server.namespace}/pods/{pod}"

    async def _is_marked(self, pod: str) -> bool:
        """Whether the pod is being deleted, or is gone."""
        try:
            body = await self._server.get(self._pod_path(pod))
        except ServiceError as error:
            if error.code == ErrorCode.GONE:
                return True
            raise
        return bool(body.get("metadata", {}).get("deletionTimestamp"))
