"""`tideway status`: processes as the supervisor sees them, instances, models and queues as the bus knows them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

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
from shared.settings import BusSettings, load
from tideway.cluster import ClusterView, view_model
from tideway.console import count_sources, fit
from tideway.data_folder import DataFolder, OperatorError, State
from tideway.operations import drained_and_gone
from tideway.tree import operator_environment

CONNECT_TIMEOUT_S = 5.0
STATISTICS_TIMEOUT_S = 2.0
"""The scheduler publishes its statistics each second."""


async def show_status(data: DataFolder, console: Console) -> None:
    """Of the Tideway that runs on `data`, else of the one whose NATS the environment names (TIDEWAY_NATS_URL)."""
    environment = dict(os.environ)
    state = data.read_state() if data.holder_pid() else None
    if state is not None:
        if not os.environ.get("TIDEWAY_NATS_URL"):
            environment |= operator_environment(state.nats_url, data.credentials())
        console.print(fit(_processes(state), console, ("starts",)))
    elif not os.environ.get("TIDEWAY_NATS_URL"):
        raise OperatorError(f"Nothing runs on {data.path}. Start it with `tideway up` (make up).")
    settings = load(BusSettings, environment)
    try:
        view = await ClusterView.connect(settings, CONNECT_TIMEOUT_S)
    except TimeoutError:
        raise OperatorError(f"NATS at {settings.nats_url} does not answer.") from None
    except BusError as error:
        raise OperatorError(f"NATS at {settings.nats_url} answers, but not its JetStream: {error}.") from None
    try:
        leases = await (await view.bus.key_value(LEASES)).entries()
        for role in ("scheduler", "placement"):
            console.print(f"{role}: {leases[role].value.scheduler_id if role in leases else 'none is active'}")
        plan = await view.plan()
        instances = _instances(view.instances, view.nodes)
        console.print(fit(instances, console, ("device", "KV moves", "metrics", "KV pool")))
        console.print(
            fit(_models(plan, view.instances, await _num_queued(view)), console, ("step times", "queued", "instances"))
        )
        if gone := drained_and_gone(plan.draining if plan else (), view.instances):
            console.print(gone)
    except BusError as error:
        raise OperatorError(f"NATS at {settings.nats_url} answers, but not its JetStream: {error}.") from None
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


def _processes(state: State) -> Table:
    table = Table("process", "pid", "starts", "metrics", title=f"Tideway is {state.phase} on {state.address}")
    for process in state.processes:
        port = f"http://127.0.0.1:{process.metrics_port}/metrics" if process.metrics_port else ""
        table.add_row(process.name, str(process.pid or "down"), str(process.num_starts), port)
    return table


def _instances(instances: Mapping[str, InstanceInfo], nodes: Mapping[str, NodeInfo]) -> Table:
    columns = ("instance", "state", "device", "KV pool", "KV moves", "metrics", "models (running+waiting)")
    table = Table(*columns, title="Instances")
    for instance_id, info in sorted(instances.items()):
        models = ", ".join(
            f"{m.name} ({m.num_running}+{m.num_waiting})" if m.state == "ready" else f"{m.name} ({m.state})"
            for m in info.models
        )
        pool = f"{info.num_merged * info.merged_bytes / 2**20:,.0f} MiB"
        port = f":{info.metrics_port}" if info.metrics_port else ""
        table.add_row(instance_id, info.state, info.device, pool, "yes" if info.kv_address else "no", port, models)
    for node_id, node in sorted(nodes.items()):
        if node.problem:
            table.add_row(node_id, "problem", node.device, "", "", "", escape(node.problem))
    return table


def _models(
    plan: PlacementPlan | None, instances: Mapping[str, InstanceInfo], num_queued: Mapping[str, int] | None
) -> Table:
    table = Table("model", "state", "instances", "queued", "step times", "note", title="Models")
    names = {spec.name for instance in (plan.instances if plan else []) for spec in instance.models}
    for name in sorted(names | set(plan.unplaced if plan else ())):
        model = view_model(name, plan, instances)
        queued = "?" if num_queued is None else str(num_queued.get(name, 0))
        sources = count_sources(
            one.cost_model for info in instances.values() for one in info.models if one.name == name
        )
        ready = f"{model.num_ready} of {model.num_planned}"
        table.add_row(name, model.state, ready, queued, sources, escape(model.reason))
    return table
