"""Placements to compare with: dedicated devices, AlpaServe's greedy choice and MuxServe's units. Pure.

`Evaluate` predicts a plan under the problem's traffic (`estimator.estimate` does, quickly).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shared.costs.model import CostModel, StepShape
from shared.placement.memory import Memory, Pool
from shared.placement.plan import plan_of
from shared.placement.problem import Group, ModelFacts, NodeFacts, Plan, Prediction, Problem
from shared.policies.multiplexing import Units

Evaluate = Callable[[Problem, Plan], Prediction]


class NoPlacement(Exception):
    """There is none; the message says for which model."""


def _sizes(problem: Problem) -> list[int]:
    """Powers of two up to the devices of the largest node."""
    most = max(node.num_devices for node in problem.nodes)
    return [1 << power for power in range(most.bit_length())]


def _cut(first: int, num: int, size: int) -> list[tuple[int, ...]]:
    """Consecutive groups of at most `size` (a power of two, as each is) of `num` devices from `first` on."""
    groups = []
    while num:
        length = min(size, 1 << (num.bit_length() - 1))
        groups.append(tuple(range(first, first + length)))
        first, num = first + length, num - length
    return groups


# ---------------------------------------------------------------------------------------------- dedicated devices


def dedicated(problem: Problem, evaluate: Evaluate) -> Plan:
    """Gives each model as many devices (SeaLLM's vLLM baseline), as instances of the size with the best attainment, then the
    least normalised latency. Devices beyond an even share are not used. Raises `NoPlacement`."""
    devices = [(node, index) for node in problem.nodes for index in range(node.num_devices)]
    share, memory = len(devices) // len(problem.models), Memory(problem)
    chosen: list[Group] = []
    options: dict[str, list[tuple[tuple[float, float], list[Group]]]] = {model.name: [] for model in problem.models}
    for size in _sizes(problem):
        groups = {
            model.name: _own_groups(model, devices[number * share : (number + 1) * share], size, memory)
            for number, model in enumerate(problem.models)
        }
        predictions = evaluate(problem, plan_of(itertools.chain(*groups.values()))).models
        for name, own in groups.items():
            if own:
                one = predictions[name]
                options[name].append(((-one.attainment, one.normalised_latency), own))
    for name, found in options.items():
        if not found:
            raise NoPlacement(f"{name!r} does not fit its {share} devices")
        chosen += min(found, key=lambda option: option[0])[1]
    return plan_of(chosen)


def _own_groups(model: ModelFacts, devices: Sequence[tuple[NodeFacts, int]], size: int, memory: Memory) -> list[Group]:
    groups = []
    for _, part in itertools.groupby(devices, key=lambda device: device[0].node_id):
        run = list(part)
        node = run[0][0]
        for indices in _cut(run[0][1], len(run), size):
            if not memory.why_not([model.name], node, len(indices)):
                groups.append(Group(node.node_id, indices, (model.name,)))
    return groups


def dedicated_by_need(problem: Problem, evaluate: Evaluate) -> Plan:
    """Gives models devices of their own by need, as an operator would who knows the load: AlpaServe's greedy choice with one
    model a group. Raises `NoPlacement`."""
    return _best_greedy(problem, evaluate, may_share=False)


# ------------------------------------------------------------------------------------------------------ AlpaServe


def alpaserve(problem: Problem, evaluate: Evaluate) -> Plan:
    """AlpaServe's greedy choice (Li et al. 2023, section 4.2): for each size of group, again and again a replica of the
    model with the most requests that are not served in time, to the group with the least use that has memory for it. The
    best plan met on the way wins. Raises `NoPlacement`."""
    return _best_greedy(problem, evaluate, may_share=True)


def _best_greedy(problem: Problem, evaluate: Evaluate, *, may_share: bool) -> Plan:
    best: tuple[tuple[float, float], Plan] | None = None
    why = ""
    for size in _sizes(problem):
        try:
            slots = _slots(problem, size, may_share)
        except NoPlacement as missing:
            why = why or str(missing)
            continue
        why = "not all models fit together"
        for plan, prediction in _greedy(problem, slots, evaluate, may_share):
            score = (-prediction.attainment, prediction.normalised_latency)
            is_whole = len({name for group in plan.groups for name in group.models}) == len(problem.models)
            if is_whole and (best is None or score < best[0]):
                best = (score, plan)
    if best is None:
        raise NoPlacement(why)
    return best[1]


def _slots(problem: Problem, size: int, may_share: bool) -> list[tuple[NodeFacts, tuple[int, ...]]]:
    """All groups of a size; where models need larger ones, one of those that they share, or one for each."""
    memory = Memory(problem)
    slots = [(node, indices) for node in problem.nodes for indices in _cut(0, node.num_devices, size)]
    merged_slots: list[tuple[NodeFacts, tuple[int, ...]]] = []
    for model in problem.models:
        usable = slots if may_share else [slot for slot in slots if slot not in merged_slots]
        if any(not memory.why_not([model.name], node, len(indices)) for node, indices in usable):
            continue
        merged = next(
            (
                (node, tuple(range(start, start + larger)))
                for larger in _sizes(problem)
                if larger > size
                for node in problem.nodes
                for start in range(0, node.num_devices - larger + 1, larger)
                if not memory.why_not([model.name], node, larger)
                and not any(node is other and {*own} & {*range(start, start + larger)} for other, own in merged_slots)
            ),
            None,
        )
        if merged is None:
            raise NoPlacement(f"{model.name!r} fits no group of the nodes")
        node, indices = merged
        slots = [(other, own) for other, own in slots if other is not node or not set(own) & set(indices)]
        slots.append(merged)
        merged_slots.append(merged)
    return slots


def _greedy(
    problem: Problem, slots: Sequence[tuple[NodeFacts, tuple[int, ...]]], evaluate: Evaluate, may_share: bool
) -> Iterator[tuple[Plan, Prediction]]:
    models = {model.name: model for model in problem.models}
    counts = np.bincount(problem.traffic.model, minlength=len(problem.traffic.models))
    requests = dict(zip(problem.traffic.models, counts.tolist(), strict=True))
    held: list[list[str]] = [[] for _ in slots]
    memory = Memory(problem)
    while True:
        groups = [
            Group(node.node_id, indices, tuple(sorted(names)))
            for (node, indices), names in zip(slots, held, strict=True)
            if names
        ]
        plan = plan_of(groups)
        prediction = evaluate(problem, plan)
        yield plan, prediction
        placed = {name for names in held for name in names}
        unserved = {
            name: requests.get(name, 0) * (1 - prediction.models[name].attainment if name in placed else 1)
            for name in models
        }
        use = [
            prediction.use.get(f"{node.node_id}-{indices[0]}", 0.0) if names else -1.0
            for (node, indices), names in zip(slots, held, strict=True)
        ]
        # Where all are served in time, devices that are left go to the busiest.
        busiest = {
            name: max((use[number] for number, names in enumerate(held) if name in names), default=0.0)
            for name in models
        }
        for name in sorted(models, key=lambda one: (one in placed, -unserved[one], -busiest[one])):
            fitting = [
                number
                for number, (node, indices) in enumerate(slots)
                if (name not in held[number] if may_share else not held[number])
                and not memory.why_not([name, *held[number]], node, len(indices))
            ]
            if fitting:
                held[min(fitting, key=lambda number: (use[number], len(slots[number][1])))].append(name)
                break
        else:
            return


PLACEMENTS: dict[str, Callable[[Problem, Evaluate], Plan]] = {
    "dedicated": dedicated, "dedicated_by_need": dedicated_by_need, "alpaserve": alpaserve,
}  # fmt: skip
"""Baselines that are plans of groups, by their names."""

# ------------------------------------------------------------------------------------------------------- MuxServe

PREFILL_UNITS = 8
"""Compute units of every model's prompts. MuxServe gives large ones 9 or all 10, beside which their decodes stand still:
worse by far."""
DECODE_UNITS = (3, 4)
"""The fewest with which the rate is met; more gain nothing (shared/simulation/spatial.py)."""
MAX_BATCH = 256


class Unit(NamedTuple):
    """A group of MuxServe's: the models of a mesh, and the compute units of each model's jobs."""

    group: Group
    units: dict[str, Units]


class Needs(NamedTuple):
    """A model's requests: rate and mean lengths."""

    rate_rps: float
    prompt_tokens: float
    output_tokens: float


def muxserve(problem: Problem) -> list[Unit]:
    """MuxServe's placement (Duan et al. 2024, section 3.2): the meshes into which nodes can be cut; the models by rate times
    size, each to the mesh where the estimated throughput gains most; the whole with the highest throughput, of equals the
    one that leaves most to spare. Each model has one mesh. Raises `NoPlacement`."""
    needs, memory = needs_of(problem), Memory(problem)
    ordered = sorted(problem.models, key=lambda model: -needs[model.name].rate_rps * model.weight_bytes)
    known: dict[tuple[int, int, tuple[str, ...]], tuple[float, float, dict[str, Units]] | None] = {}
    by_name = {model.name: model for model in problem.models}
    kinds = {(node.kind, node.memory_bytes): number for number, node in enumerate(problem.nodes)}

    def estimated(node: NodeFacts, size: int, names: tuple[str, ...]) -> tuple[float, float, dict[str, Units]] | None:
        key = (kinds[node.kind, node.memory_bytes], size, names)
        if key not in known:
            models = [by_name[name] for name in names]
            known[key] = None
            if not memory.why_not(names, node, size):
                known[key] = _throughput(models, node, size, needs, memory.pool(names, node, size))
        return known[key]

    best: tuple[tuple[float, float], list[Unit]] | None = None
    for meshes in _all_meshes(problem):
        held: list[tuple[str, ...]] = [() for _ in meshes]
        value = [(0.0, 0.0)] * len(meshes)
        for model in ordered:
            gains = []
            for number, (node, indices) in enumerate(meshes):
                names = tuple(sorted((*held[number], model.name)))
                if (found := estimated(node, len(indices), names)) is not None:
                    gains.append((round(found[0] - value[number][0], 6), found[1], -number))
            if not gains:
                break
            number = -max(gains)[2]
            held[number] = tuple(sorted((*held[number], model.name)))
            node, indices = meshes[number]
            found = estimated(node, len(indices), held[number])
            assert found is not None
            value[number] = found[:2]
        else:
            score = (
                round(sum(served for served, _ in value), 6),
                min(spare for (_, spare), names in zip(value, held, strict=True) if names),
            )
            if best is None or score > best[0]:
                units = []
                for (node, indices), names in zip(meshes, held, strict=True):
                    if names:
                        found = estimated(node, len(indices), names)
                        assert found is not None
                        units.append(Unit(Group(node.node_id, indices, names), found[2]))
                best = (score, units)
    if best is None:
        raise NoPlacement("no way to cut the nodes into meshes holds all models")
    return best[1]


def needs_of(problem: Problem) -> dict[str, Needs]:
    traffic, needs = problem.traffic, {}
    for model in problem.models:
        own = traffic.model == traffic.models.index(model.name) if model.name in traffic.models else np.zeros(0, bool)
        count = int(own.sum())
        needs[model.name] = Needs(
            count / traffic.interval_s if traffic.interval_s else 0.0,
            float(traffic.prompt_tokens[own].mean()) if count else 1.0,
            float(traffic.output_tokens[own].mean()) if count else 1.0,
        )
    return needs


def _all_meshes(problem: Problem) -> Iterator[list[tuple[NodeFacts, tuple[int, ...]]]]:
    """Each node cut into groups of powers of two; nodes that are alike in any order once."""
    alike: dict[tuple[str, int, int], list[NodeFacts]] = {}
    for node in problem.nodes:
        alike.setdefault((node.kind, node.memory_bytes, node.num_devices), []).append(node)
    ways = [
        [
            list(zip(nodes, choice, strict=True))
            for choice in itertools.combinations_with_replacement(_partitions(num), len(nodes))
        ]
        for (_, _, num), nodes in alike.items()
    ]
    for combined in itertools.product(*ways):
        meshes = []
        for node, sizes in itertools.chain(*combined):
            first = 0
            for size in sizes:
                meshes.append((node, tuple(range(first, first + size))))
                first += size
        yield meshes


def _partitions(num: int, most: int = 0) -> list[tuple[int, ...]]:
    """Partitions of `num` into powers of two, none larger than the one before."""
    if not num:
        return [()]
    top = 1 << (num.bit_length() - 1)
    sizes = [size for size in (1 << power for power in range(top.bit_length())) if size <= min(num, most or num)]
    return [(size, *rest) for size in reversed(sizes) for rest in _partitions(num - size, size)]


def _throughput(
    models: Sequence[ModelFacts], node: NodeFacts, size: int, needs: Mapping[str, Needs], pool: Pool
) -> tuple[float, float, dict[str, Units]] | None:
    """Requests per second that a mesh serves, of those that come, and what it could beyond; None: not enough memory.

    Prefills of the models exclude each other, decodes do not: model i serves B_i / (sum of prefills + outputs_i * decode_i)
    with batches B, which grow for the model that is served the least until all are served or the KV pool is full."""
    left = float(pool.merged_bytes * pool.num_merged)
    costs = {model.name: model.costs[node.kind, size] for model in models}
    batch = dict.fromkeys(costs, 1)
    bytes_of = {model.name: _kv_bytes(model, needs[model.name]) for model in models}
    left -= sum(bytes_of.values())
    open_models = set(costs)

    def rates(units: Mapping[str, int]) -> dict[str, float]:
        prefills = sum(_prefill_s(costs[name], needs[name], batch[name]) for name in costs)
        return {
            name: batch[name]
            / (
                prefills
                + needs[name].output_tokens
                * _decode_s(costs[name], needs[name], batch[name])
                * max(1.0, DECODE_UNITS[-1] / units[name])
            )
            for name in costs
        }

    least_units = dict.fromkeys(costs, DECODE_UNITS[-1])
    while open_models:
        served = rates(least_units)
        name = min(open_models, key=lambda one: served[one] / max(needs[one].rate_rps, 1e-9))
        step = max(1, batch[name] // 4)
        if batch[name] + step > MAX_BATCH or left < step * bytes_of[name]:
            open_models.discard(name)
            continue
        batch[name] += step
        left -= step * bytes_of[name]
    served = rates(least_units)
    units = {}
    for model in models:
        enough = (
            few
            for few in DECODE_UNITS
            if rates({**least_units, model.name: few})[model.name] >= needs[model.name].rate_rps
        )
        units[model.name] = Units(PREFILL_UNITS, next(enough, DECODE_UNITS[-1]))
    within = sum(min(rate, needs[name].rate_rps) for name, rate in served.items())
    spare = min(rate / max(needs[name].rate_rps, 1e-9) for name, rate in served.items())
    return within, spare, units


def _kv_bytes(model: ModelFacts, needs: Needs) -> float:
    return (needs.prompt_tokens + needs.output_tokens) / model.block_size * model.block_bytes


def _prefill_s(cost: CostModel, needs: Needs, batch: int) -> float:
    tokens = batch * needs.prompt_tokens
    return cost.predict(StepShape(int(tokens), tokens * needs.prompt_tokens / 2))


def _decode_s(cost: CostModel, needs: Needs, batch: int) -> float:
    return cost.predict(StepShape(0, 0.0, batch, int(batch * (needs.prompt_tokens + needs.output_tokens / 2))))
