"""The problem that a search is given, from what placement knows of the live cluster. Pure.

Step times are those that instances measured (COST_MODELS), on GPUs of the node's kind where it tells that. Of a group size
that was not measured they are the hardware profile's, scaled by how much a measured one of the model differs from it.
Devices that were drained, and those behind them on their node, are left out; while an instance is planned there, nothing
is searched for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from services.placement.fleet import node_of, num_ranks, num_stages
from services.placement.footprint import ConfiguredModel, DeviceFacts, device_bytes
from shared.costs.model import CostModel
from shared.messages.cluster import InstancePlan, NodeInfo, StoredCostModel
from shared.messages.traffic import ModelTraffic
from shared.models.checkpoint import cost_key, run_dtype
from shared.placement.facts import model_facts
from shared.placement.hardware import A100_80G, CPU, HARDWARE, RANKS, Hardware, cost_models
from shared.placement.places import pools
from shared.placement.plan import group_of, plan_of
from shared.placement.problem import ModelFacts, ModelPrediction, NodeFacts, Prediction, Problem, ProblemError, Traffic

_NOTHING = ModelPrediction(
    num_requests=0, attainment=1.0, normalised_latency=0.0, mean_latency_s=0.0, p99_latency_s=0.0
)


def live_problem(
    models: Sequence[ConfiguredModel],
    nodes: Sequence[NodeInfo],
    places: Iterable[InstancePlan],
    draining: Collection[str],
    stored: Iterable[StoredCostModel],
    traffic: Traffic,
    execution_s: Mapping[str, float],
    *,
    gpu: str = "",
    slo_scale: float,
    max_models_per_group: int,
    max_ranks: int,
    evidence: Traffic | None = None,
) -> Problem:
    """`models`: memory is left for those that are put away. `places`: of the plan that runs. `stored`: of COST_MODELS.
    `gpu`: name of a hardware profile. `evidence`: see `Problem`. Raises `ProblemError`."""
    if staged := [node.node_id for node in nodes if num_stages(node, num_ranks(node)) > 1]:
        told = "are pipelines (TIDEWAY_PIPELINE_PARALLEL), whose step times a search does not know"
        raise ProblemError(f"instances of {', '.join(staged)} {told}", "pipelines")
    models, asleep = [one for one in models if not one.asleep], [one for one in models if one.asleep and one.shape]
    if unread := [model.spec.name for model in models if model.shape is None]:
        raise ProblemError(f"the checkpoint of {', '.join(unread)} is not known")
    if foreign := [model.spec.name for model in models if not model.spec.is_native]:
        raise ProblemError(f"{', '.join(foreign)} run on engines whose step times a search does not know", "engines")
    if not traffic.num_requests:
        raise ProblemError(f"no request came in the last {traffic.interval_s:.0f} s: there is nothing to search by")
    if gpu and gpu not in HARDWARE:
        raise ProblemError(f"TIDEWAY_HARDWARE={gpu!r}: expected one of {', '.join(HARDWARE)}")
    measured = sorted(stored, key=lambda entry: entry.profiled_s)
    kinds = {node.node_id: _hardware(node, gpu, measured) for node in nodes}
    facts = [
        node_facts for node in nodes if (node_facts := _node_facts(node, kinds[node.node_id], draining)).num_devices
    ]
    if not facts:
        raise ProblemError("no device is there")
    within, places = {node.node_id: node.num_devices for node in facts}, list(places)
    if beyond := sorted(
        place.instance_id
        for place in places
        if node_of(place.instance_id)[1] + place.group.num_ranks > within.get(place.node_id, 0)
    ):
        raise ProblemError(f"{', '.join(beyond)}: its node is away, or one before it there was drained")
    largest = min(max_ranks, max(node.num_devices for node in facts))
    return Problem(
        nodes=tuple(facts),
        models=tuple(_model_facts(model, nodes, kinds, measured, largest) for model in models),
        asleep=tuple(_model_facts(model, nodes, kinds, measured, largest) for model in asleep),
        traffic=traffic,
        slo_scale=slo_scale,
        slo_scales={model.spec.name: model.spec.slo_scale for model in models if model.spec.slo_scale},
        execution_s=dict(execution_s),
        max_models_per_group=max_models_per_group,
        incumbent=plan_of(map(group_of, places)),
        pools=pools(places),
        evidence=evidence,
    )


def measured_prediction(traffic: Mapping[str, ModelTraffic], bases: Mapping[str, str]) -> Prediction:
    """What was measured, in the form of what is predicted. `bases`: of adapters, the models whose requests theirs are."""
    measured: dict[str, list[ModelPrediction]] = {}
    for name, online in ((name, one.online) for name, one in traffic.items()):
        model = ModelPrediction(
            num_requests=online.num_decided,
            attainment=1.0 if online.attainment is None else online.attainment,
            normalised_latency=online.normalised_latency,
            mean_latency_s=online.latency_s.mean,
            p99_latency_s=online.latency_s.p99,
            mean_ttft_s=online.ttft_s.mean,
            p99_ttft_s=online.ttft_s.p99,
            mean_tpot_s=online.tpot_s.mean,
        )
        measured.setdefault(bases.get(name, name), []).append(model)
    models = {name: _merged(parts) for name, parts in measured.items()}
    every = _merged(list(models.values()))
    return Prediction(attainment=every.attainment, normalised_latency=every.normalised_latency, models=models)


def _merged(parts: Sequence[ModelPrediction]) -> ModelPrediction:
    """Means over all of their requests, of latencies over those of which any is known; a P99 is the highest."""
    num = sum(part.num_requests for part in parts)
    if not num:
        return parts[0] if parts else _NOTHING
    served = [part for part in parts if part.normalised_latency > 0 and part.num_requests]
    num_served = max(1, sum(part.num_requests for part in served))

    def mean(name: str) -> float:
        total: float = sum(getattr(part, name) * part.num_requests for part in served)
        return total / num_served

    return ModelPrediction(
        num_requests=num,
        attainment=sum(part.attainment * part.num_requests for part in parts) / num,
        normalised_latency=mean("normalised_latency"),
        mean_latency_s=mean("mean_latency_s"),
        p99_latency_s=max(part.p99_latency_s for part in parts),
        mean_ttft_s=mean("mean_ttft_s"),
        p99_ttft_s=max(part.p99_ttft_s for part in parts),
        mean_tpot_s=mean("mean_tpot_s"),
    )


def _hardware(node: NodeInfo, gpu: str, measured: Sequence[StoredCostModel]) -> Hardware:
    """By the name of the node's GPUs. Where it tells none, the newest cost model that was measured on a known kind of GPU
    says which the cluster has. An unknown kind is taken to be like an A100."""
    if not node.device.startswith("cuda"):
        return CPU
    names = [node.device_name] if node.device_name else [entry.key for entry in reversed(measured)]
    profile = HARDWARE[gpu] if gpu else next(filter(None, map(_profile, names)), A100_80G)
    return msgspec.structs.replace(profile, name=node.device_name or profile.name)


def _profile(name: str) -> Hardware | None:
    words = re.split(r"[^A-Za-z0-9]+", name)
    gpus = (hardware for hardware in HARDWARE.values() if hardware.device == "cuda")
    return next((hardware for hardware in gpus if hardware.name.partition("-")[0] in words), None)


def _node_facts(node: NodeInfo, hardware: Hardware, draining: Collection[str]) -> NodeFacts:
    size = num_ranks(node)
    num_devices = node.num_instances * size
    out = [node_of(instance_id)[1] for instance_id in draining if node_of(instance_id)[0] == node.node_id]
    return NodeFacts(
        node_id=node.node_id,
        kind=hardware.name,
        num_devices=min([num_devices, *out]),
        memory_bytes=device_bytes(node),
        link_bytes_s=hardware.link_bytes_s,
        load_bytes_s=hardware.load_bytes_s,
    )


def _model_facts(
    model: ConfiguredModel,
    nodes: Iterable[NodeInfo],
    kinds: Mapping[str, Hardware],
    measured: Sequence[StoredCostModel],
    largest: int,
) -> ModelFacts:
    spec, shape = model.spec, model.shape
    assert shape is not None
    hardware, footprints = {}, {}
    ranks = [p for p in RANKS if p <= largest]
    costs: dict[tuple[str, int], CostModel] = {}
    for node in nodes:
        kind, facts = kinds[node.node_id], DeviceFacts.of(node)
        dtype = run_dtype(spec.dtype, shape.dtype, facts.kind)
        block_size = facts.block_size(shape.head_dim, dtype)
        kind = msgspec.structs.replace(kind, block_size=block_size, step_tokens=facts.step_tokens)
        hardware[kind.name] = kind
        for p in ranks:
            size = model.footprint(facts._replace(num_ranks=p, num_stages=num_stages(node, p)))
            if size is not None:
                footprints[kind.name, p] = size
        known = _measured(cost_key(shape, dtype, block_size), node.device_name, measured)
        reckoned = cost_models(kind, spec.name, shape, dtype=dtype, ranks=ranks)
        factors = [_decode_s(known[p]) / _decode_s(reckoned[p]) for p in sorted(known) if p in reckoned]
        factor = factors[0] if factors else 1.0
        costs |= {(kind.name, p): known.get(p, cost.scaled(factor)) for p, cost in reckoned.items()}
    try:
        made = model_facts(
            spec.name, shape, hardware.values(), weights=" ".join(map(str, model.weights)), dtype=spec.dtype,
            max_model_len=spec.max_model_len or 0, ranks=ranks, replicas=spec.replicas,
        )  # fmt: skip
    except ValueError as error:
        raise ProblemError(str(error)) from None
    return msgspec.structs.replace(made, costs=costs, on_demand=spec.on_demand, footprints=footprints)


def _measured(prefix: str, device: str, measured: Sequence[StoredCostModel]) -> dict[int, CostModel]:
    """By number of ranks; of several the newest. `device`: its name; empty: of any."""
    found: dict[int, CostModel] = {}
    for entry in measured:
        measured_on, _, ranks = entry.key.rpartition("/tp")
        model, _, name = measured_on.partition("/")
        if model == prefix and device in ("", name.removesuffix("-deterministic")) and ranks.isdecimal():
            try:
                found[int(ranks)] = msgspec.json.decode(entry.cost_model, type=CostModel)
            except msgspec.MsgspecError:
                continue  # of another version
    return found


def _decode_s(cost: CostModel) -> float:
    return cost.fixed_s + cost.decode_s
