"""`tideway status`: processes as the supervisor sees them, instances, models and queues as the bus knows them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping, Set
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from msgspec.structs import asdict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.bus.interface import BusError
from shared.messages.catalogue import LEASES, SCHEDULER_STATISTICS
from shared.messages.cluster import (
    InstanceInfo,
    NodeInfo,
    PlacementPlan,
    StatisticsReport,
)
from shared.runtime.settings import BusSettings, load
from tideway import preflight
from tideway.cluster import ClusterView, no_jetstream, view_model
from tideway.console import count_sources, fit
from tideway.data_folder import DataFolder, OperatorError, State
from tideway.operations import drained_and_gone
from tideway.readiness import answers, nats_greets
from tideway.tree import bus_settings

CONNECT_TIMEOUT_S = 10.0
LEADERS = ("scheduler", "placement")
STATISTICS_TIMEOUT_S = 2.0
"""The scheduler publishes its statistics each second."""


async def show_status(data: DataFolder, console: Console, *, as_json: bool = False) -> None:
    """Shows the Tideway that runs on `data`, else of the one whose NATS the environment names (TIDEWAY_NATS_URL).
    `as_json`: one object instead of tables."""
    state = data.running_state()
    answering: Set[str] = frozenset()
    if state is not None:
        answering = await _answering(state)
        state = as_seen(state, answering)
        if not as_json:
            console.print(f"data folder: {escape(str(data.path))}")
            console.print(fit(_processes(state, answering), console, ("starts",)))
    elif not os.environ.get("TIDEWAY_NATS_URL"):
        raise OperatorError(f"Nothing runs on {data.path}. Start it with `tideway up` (make up).")
    settings = bus_settings(data, state)
    view = await ClusterView.connect(settings, CONNECT_TIMEOUT_S)
    try:
        leases = await (await view.bus.key_value(LEASES)).entries()
        leaders: dict[str, str] = {role: leases[role].value.scheduler_id for role in LEADERS if role in leases}
        plan = await view.plan()
        if as_json:
            told = _as_json(data, state, answering, leaders, plan, view, await _num_queued(view))
            console.print(told, soft_wrap=True, markup=False, emoji=False)
            return
        for role in LEADERS:
            console.print(f"{role}: {leaders.get(role, 'none is active')}")
        instances = instances_table(view.instances, view.nodes)
        console.print(fit(instances, console, ("device", "KV moves", "metrics", "KV pool")))
        console.print(
            fit(_models(plan, view.instances, await _num_queued(view)), console, ("step times", "queued", "instances"))
        )
        if gone := drained_and_gone(plan.draining if plan else (), view.instances):
            console.print(gone)
    except BusError as error:
        raise no_jetstream(settings, error) from None
    finally:
        await view.close()


async def _num_queued(view: ClusterView) -> Mapping[str, int] | None:
    """By model, from the scheduler's next report, which leaves out models without traffic. None if none comes in time."""
    first: asyncio.Future[StatisticsReport] = asyncio.get_running_loop().create_future()
    subscription = await view.bus.subscribe(
        SCHEDULER_STATISTICS, lambda report: None if first.done() else first.set_result(report)
    )
    try:
        return {model.model: model.num_queued for model in (await asyncio.wait_for(first, STATISTICS_TIMEOUT_S)).models}
    except TimeoutError:
        return None
    finally:
        await subscription.stop()


def _as_json(
    data: DataFolder,
    state: State | None,
    answering: Set[str],
    leaders: Mapping[str, str],
    plan: PlacementPlan | None,
    view: ClusterView,
    num_queued: Mapping[str, int] | None,
) -> str:
    def model(name: str) -> dict[str, Any]:
        queued = None if num_queued is None else num_queued.get(name, 0)
        return {"name": name, **dataclasses.asdict(view_model(name, plan, view.instances)), "num_queued": queued}

    told = {
        "data_dir": None if state is None else str(data.path),
        "supervisor": state,
        "answering": sorted(answering),
        **{role: leaders.get(role) for role in LEADERS},
        "instances": [
            {**asdict(info), "models": [asdict(one) for one in info.models]}
            for _, info in sorted(view.instances.items())
        ],
        "nodes": [asdict(node) for _, node in sorted(view.nodes.items())],
        "models": [model(name) for name in _names(plan)],
        "plan": plan,
    }
    return msgspec.json.encode(told).decode()


def _names(plan: PlacementPlan | None) -> list[str]:
    names = {spec.name for instance in (plan.instances if plan else []) for spec in instance.models}
    return sorted(names | set(plan.unplaced if plan else ()))


async def _answering(state: State) -> set[str]:
    """The processes that answer now, whatever the supervisor last wrote of them."""
    host = preflight.local_host(load(BusSettings).metrics_host)
    async with httpx.AsyncClient(trust_env=False) as http:
        checks = {
            process.name: answers(http, f"http://{host}:{process.metrics_port}/live")
            if process.metrics_port
            else nats_greets(urlsplit(state.nats_url).port or 0)
            for process in state.processes
            if process.pid
        }
        details = await asyncio.gather(*(check() for check in checks.values()))
    return {name for name, detail in zip(checks, details, strict=True) if detail is not None}


def as_seen(state: State, answering: Set[str]) -> State:
    """What the supervisor wrote, but not "ready" where a process is silent."""
    is_silent = any(process.name not in answering for process in state.processes)
    return msgspec.structs.replace(state, phase="not ready") if state.phase == "ready" and is_silent else state


def _processes(state: State, answering: Set[str]) -> Table:
    """`answering`: the names of those that do."""
    title = f"Tideway is {state.phase} on {state.address}"
    table = Table("process", "pid", "answers", "starts", "metrics", title=title)
    for process in state.processes:
        port = f"http://127.0.0.1:{process.metrics_port}/metrics" if process.metrics_port else ""
        is_live = "yes" if process.name in answering else "no"
        table.add_row(process.name, str(process.pid or "down"), is_live, str(process.num_starts), port)
    return table


def instances_table(instances: Mapping[str, InstanceInfo], nodes: Mapping[str, NodeInfo]) -> Table:
    columns = ("instance", "state", "device", "KV pool", "KV moves", "metrics", "models (run+wait)")
    table = Table(*columns, title="Instances")
    for instance_id, info in sorted(instances.items()):
        models = ", ".join(
            f"{m.name} ({m.num_running}+{m.num_waiting})" if m.state == "ready" else f"{m.name} ({m.state})"
            for m in info.models
        )
        pool_bytes = info.num_merged * info.merged_bytes
        pool = f"{pool_bytes / 2**20:,.0f} MiB" if pool_bytes else "-"  # where another engine does not tell
        port = f":{info.metrics_port}" if info.metrics_port else ""
        num_devices = info.group.num_ranks
        device = info.device if num_devices == 1 else f"{num_devices} x {info.device}"
        if info.group.num_stages > 1:
            device += f", {info.group.num_stages} stages"
        table.add_row(instance_id, info.state, device, pool, "yes" if info.kv_address else "no", port, models)
    for node_id, node in sorted(nodes.items()):
        if node.problem:
            table.add_row(node_id, "problem", node.device, "", "", "", escape(node.problem))
    return table


def _models(
    plan: PlacementPlan | None, instances: Mapping[str, InstanceInfo], num_queued: Mapping[str, int] | None
) -> Table:
    table = Table("model", "state", "instances", "queued", "step times", "note", title="Models")
    for name in _names(plan):
        model = view_model(name, plan, instances)
        queued = "?" if num_queued is None else str(num_queued.get(name, 0))
        sources = count_sources(
            one.cost_model for info in instances.values() for one in info.models if one.name == name
        )
        ready = f"{model.num_ready} of {model.num_planned}"
        table.add_row(name, model.state, ready, queued, sources, escape(model.reason))
    return table
