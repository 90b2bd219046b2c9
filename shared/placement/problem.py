"""What a search for a placement is given, and what it answers (SeaLLM, section 4): plain data, without a decision.

A *group* is some devices of one node that compute one instance together, with tensor parallelism over all of them, and the
models that share it; a plan is a set of groups. The live instance of a group has the index of its first device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from shared.costs.model import CostModel
from shared.placement.footprint import Footprint
from shared.placement.plan import DEFAULT_SLO_SCALE as DEFAULT_SLO_SCALE
from shared.placement.plan import Group as Group
from shared.placement.plan import ModelPrediction as ModelPrediction
from shared.placement.plan import Plan as Plan
from shared.placement.plan import Prediction as Prediction
from shared.placement.plan import Proposal as Proposal
from shared.placement.plan import Rejected as Rejected


class ProblemError(Exception):
    """There is nothing to search with, or what was found is not carried out; the message says why."""

    def __init__(self, message: str, cause: str = "") -> None:
        """`cause`: that is counted among those of verdicts; empty: none is."""
        super().__init__(message)
        self.cause = cause


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one kind that are near enough to each other for tensor parallelism."""

    node_id: str
    kind: str
    """Kind of its devices: models cost alike on all of a kind."""
    num_devices: int
    memory_bytes: int
    """Memory of each device, for weights, activations and KV pool."""
    link_bytes_s: float = 8e9
    """Rate to other nodes, for requests that move."""
    load_bytes_s: float = 2e9
    """Rate at which weights are read onto a device."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A model as placement knows it. Bytes are of the whole model; each of p ranks has a p-th."""

    name: str
    weights: str
    """Names with the same weights share one copy of them on an instance."""
    weight_bytes: int
    activation_bytes: int
    """Peak of a step, of each rank. One model of an instance is in a step at a time: the largest counts."""
    block_size: int
    """Tokens of a KV block."""
    block_bytes: int
    """Bytes of a KV block over all layers, keys and values, and all ranks."""
    least_blocks: int
    """A KV pool holds at least so many of them."""
    max_model_len: int
    num_layers: int
    num_kv_heads: int
    """p divides it."""
    costs: dict[tuple[str, int], CostModel]
    """By kind of device and p; it can be placed on no other. Keys are complete: what is not here cannot run."""
    replicas: int | None = None
    """On so many groups exactly; None: as many as pay."""
    on_demand: bool = False
    """Loaded when requests for it come, and put away when it is idle."""
    footprints: dict[tuple[str, int], Footprint] = {}
    """Memory on each device, by kind of device and p, where that is known more exactly than as a p-th."""

    def footprint(self, kind: tuple[str, int]) -> Footprint | None:
        """Memory on each of p devices; None where it is not known to run."""
        if kind not in self.costs:
            return None
        p = kind[1]
        return self.footprints.get(kind) or Footprint(
            -(-self.weight_bytes // p), self.activation_bytes, -(-self.block_bytes // p), self.least_blocks
        )


class Traffic(NamedTuple):
    """Requests in the order of their arrival, as parallel columns of n."""

    models: tuple[str, ...]
    """Models that `model` indexes."""
    model: np.ndarray
    """[n] int32"""
    arrival_s: np.ndarray
    """[n] float64, from the start of the interval."""
    prompt_tokens: np.ndarray
    """[n] int32"""
    output_tokens: np.ndarray
    """[n] int32, at least 1"""
    is_online: np.ndarray
    """[n] bool"""
    interval_s: float
    """Seconds that they cover, with the silent ends."""

    @property
    def num_requests(self) -> int:
        return len(self.model)


class ChangeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What the steps of a change take beside loading weights, which the nodes' `load_bytes_s` says."""

    restart_s: float = 15.0
    """In which a group that is made anew serves nobody, without the time that its weights take."""
    drain_s: float = 15.0
    """Until what is drained or unloaded holds no request any more, at most: that of short requests ends sooner."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One search."""

    nodes: tuple[NodeFacts, ...]
    models: tuple[ModelFacts, ...]
    traffic: Traffic
    asleep: tuple[ModelFacts, ...] = ()
    """Models on demand that are put away: memory is left for them."""
    slo_scale: float = DEFAULT_SLO_SCALE
    slo_scales: dict[str, float] = {}
    """SLO scales of models that have their own."""
    execution_s: dict[str, float] = {}
    """Mean execution time of each model that SLOs and normalised latency are reckoned by; of one that is missing, what its
    requests take alone on its least group."""
    max_models_per_group: int = 0
    """0: as many as fit."""
    incumbent: Plan | None = None
    pools: dict[str, tuple[int, int]] = {}
    """By instance id: bytes of the KV pool that each of the incumbent's groups has, and of a merged block; without, it is as
    large as it can be."""
    evidence: Traffic | None = None
    """What arrived up to now, for longer than the traffic to search with: a change is tried on it. None: on the traffic."""
    times: ChangeTimes = ChangeTimes()

    def slo_scale_of(self, model: str) -> float:
        return self.slo_scales.get(model, self.slo_scale)


def traffic(
    rows: Sequence[tuple[float, str, int, int, bool]], interval_s: float, models: Sequence[str] | None = None
) -> Traffic:
    """Traffic of rows (arrival, model, prompt tokens, output tokens, whether online); sorted here. `models`: those that may
    have no request."""
    rows = sorted(rows)
    names = tuple(sorted({row[1] for row in rows} | set(models or ())))
    index: Mapping[str, int] = {name: number for number, name in enumerate(names)}
    return Traffic(
        names,
        np.array([index[row[1]] for row in rows], np.int32),
        np.array([row[0] for row in rows], np.float64),
        np.array([row[2] for row in rows], np.int32),
        np.array([max(1, row[3]) for row in rows], np.int32),
        np.array([row[4] for row in rows], np.bool_),
        interval_s,
    )
