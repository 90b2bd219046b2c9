"""`tideway model`: adds, removes and lists models while everything runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from shared.messages.admin import ModelState
from shared.messages.cluster import DEFAULT_IDLE_S
from tideway import completion
from tideway.console import LOOK, TableConsole, show_listing
from tideway.data_folder import DataFolder
from tideway.operations import AdminClient, source_told
from tideway.options import DEFAULT_DATA_DIR, AdminKey, AsJson, DataDir, GatewayUrl

app = typer.Typer(no_args_is_help=True, help="Add, remove and list models.")


@app.command("list")
def list_models(
    as_json: AsJson = False,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show all models and their state; for unloaded ones, where their weights are."""
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        states = client.models()
    empty = "There is no model; tideway model add NAME SOURCE adds one."
    dispensable = {"least_wanted": ("on demand", "source"), "wrapped": ("source",)}
    show_listing(TableConsole(), states, _table(states.models), as_json=as_json, empty=empty, **dispensable)


def _table(models: list[ModelState]) -> Table:
    table = Table("model", "state", "instances", "on demand", "run+wait+queued", "source", "note", **LOOK)
    for model in models:
        num_ready = sum(state == "ready" for state in model.instances.values())
        cells = (
            model.name,
            model.state,
            str(num_ready),
            f"idle {model.idle_s:g} s" if model.on_demand else "no",
            f"{model.num_running}+{model.num_waiting}+{'?' if model.num_queued is None else model.num_queued}",
            model.source,
            model.failure or model.unplaced or (model.why_asleep if model.why_asleep != "idle" else ""),
        )
        table.add_row(*map(escape, cells))
    return table


@app.command("add")
def add_model(
    name: Annotated[str, typer.Argument(help="Model name exposed to clients.")],
    source: Annotated[str, typer.Argument(help="Folder in Hugging Face format, as the workers see it, or a hub id.")],
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="Load it when a request arrives, and unload it when it is idle.")
    ] = False,
    idle: Annotated[
        float | None,
        typer.Option(
            min=0,
            help=f"Seconds without requests after which it is unloaded (default {DEFAULT_IDLE_S:g}). Implies --on-demand.",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of instances that hold it. Default: all; one group once a placement was chosen."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Data type: auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str, typer.Option(help="Quantise its layer weights: int8, int4 or fp8.")] = "",
    draft: Annotated[
        str, typer.Option(help="Folder or hub id of a draft model with the same tokenizer, for speculative decoding.")
    ] = "",
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens of prompt and output together. Default: what the model allows."),
    ] = None,
    ttft_ms: Annotated[float, typer.Option(min=0, help="TTFT objective in milliseconds; 0: the default.")] = 0.0,
    tpot_ms: Annotated[float, typer.Option(min=0, help="TPOT objective in milliseconds; 0: the default.")] = 0.0,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Add a model to those that are served."""
    wanted: dict[str, Any] = {
        "source": source_told(source),
        "draft": source_told(draft),
        "dtype": dtype if dtype != "auto" else None,
        "quantization": quantization,
        "max_model_len": max_model_len,
        "replicas": replicas,
        "ttft_ms": ttft_ms,
        "tpot_ms": tpot_ms,
        "on_demand": on_demand or idle is not None,
    }
    body = {"name": name} | {field: value for field, value in wanted.items() if value}
    if idle is not None:
        body["idle_s"] = idle
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        print(client.place)
        plan = client.add_model(body)
    if body.get("on_demand"):
        print(f"{name} is loaded when the first request for it comes.")
    elif name in plan.unplaced:
        print(f"{name} is added, but on no instance yet: {plan.unplaced[name]}")
    else:
        num = sum(any(spec.name == name for spec in place.models) for place in plan.instances)
        print(f"{name} is being loaded on {num} instance{'s' * (num != 1)}.")


@app.command("remove")
def remove_model(
    name: Annotated[
        str, typer.Argument(help="Model to remove, as `tideway model list` names it.", autocompletion=completion.models)
    ],
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Remove a model. Running requests may finish; waiting ones are refused."""
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        print(client.place)
        client.remove_model(name)
        print(f"Model {name} is removed.")
        routes = [one.name for one in client.routes().routes if name in {*one.arms, *one.mirrors, *one.fallbacks}]
        if routes:
            print(f"Routes that still name it: {', '.join(routes)}. Their other models answer; see tideway route list.")
