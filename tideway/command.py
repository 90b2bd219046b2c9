"""The operator's command, `tideway`. Each subcommand is a few lines here and its work in a module of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from shared.messages.cluster import TOOL_FORMATS
from shared.messages.timeline import LEAST_SLO_INTERVAL_S, MAX_REQUESTS_LISTED, MAX_SLO_INTERVAL_S
from shared.messages.traffic import DEFAULT_INTERVAL_S, LEAST_INTERVAL_S, MAX_INTERVAL_S
from shared.recording import ReplayMismatch, header_of
from shared.runtime import engine_environments as environments
from shared.runtime.service import OPERATOR_ERROR_EXIT_CODE
from shared.runtime.settings import SettingsError
from tideway import completion, model_commands, operations, requests, routes
from tideway import plan as plans
from tideway.backup import backup, restore
from tideway.bench.command import bench
from tideway.bootstrap import Progress, phase_of
from tideway.console import Reporter, TableConsole
from tideway.data_folder import DataFolder, OperatorError
from tideway.models import show_models
from tideway.nats_config import nats_config
from tideway.nats_replicas import nats_replicas
from tideway.operations import AdminClient
from tideway.options import DEFAULT_DATA_DIR, AdminKey, AsJson, DataDir, GatewayUrl, is_default
from tideway.plan_file import read_groups, why_not_set, write_plan
from tideway.preflight import (
    check_engines,
    check_otlp,
    check_roles,
    check_specs,
    check_tensor_parallel,
    parse_adapters,
    parse_models,
    with_drafts,
    with_engines,
)
from tideway.profile import profile
from tideway.simulate import simulate
from tideway.status import show_status
from tideway.stream_backup import backup_streams, restore_streams
from tideway.tenants import show_tenants
from tideway.top import show_top
from tideway.tree import UpOptions, down_timeout_s
from tideway.up import Up

POLL_INTERVAL_S = 0.1
START, OPERATE, LOOK = "Start and stop", "Models, instances and placement", "Requests and load"
MEASURE, KEEP = "Measure, simulate, replay", "NATS and backups"
"""Groups of commands, as --help shows them."""

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)


def _version() -> str:
    try:
        return version("tideway")
    except PackageNotFoundError:
        return "not installed"


def _say_version(is_asked: bool) -> None:
    if is_asked:
        print(_version())
        raise typer.Exit


@app.callback()
def tideway(
    _: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serve several LLMs to interactive users and batch jobs on one pool of GPUs or CPUs."""


engine_app = typer.Typer(no_args_is_help=True, help="Install other engines, each in an environment of its own.")
app.add_typer(engine_app, name="engine", rich_help_panel=OPERATE)


@engine_app.command("install")
def install_engine(
    name: Annotated[str, typer.Argument(help="Engine to install: vllm.")],
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: cuda if an NVIDIA driver is installed, otherwise cpu.")
    ] = "auto",
) -> None:
    """Install an engine on this machine, in pinned versions, in an environment of its own."""
    if device == "auto":
        device = "cuda" if shutil.which("nvidia-smi") else "cpu"
    print(f"Installing {name} for {device} into {environments.engines_folder() / name}", flush=True)
    progress = Progress(environments.engines_folder() / name / "venv")

    def say(line: str) -> None:
        if phase := phase_of(line):
            progress.show(phase)

    try:
        progress.show("making the environment")
        python = environments.install(name, device, say=say)
    except environments.EngineEnvironmentError as error:
        raise OperatorError(str(error)) from None
    finally:
        progress.end()
    print(f"{name} for {device} is installed: {python}")


@app.command(rich_help_panel=START)
def up(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model to serve: NAME=FOLDER or NAME=HUB_ID; repeatable. Default: the two demonstration models. With "
            "NAME=FOLDER,on-demand or NAME=FOLDER,idle=SECONDS it is loaded when a request arrives, and unloaded after "
            "SECONDS (300) without requests."
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="LoRA adapter to serve: NAME=MODEL=FOLDER or NAME=MODEL=HUB_ID; repeatable."),
    ] = None,
    quantization: Annotated[
        str,
        typer.Option(
            envvar="TIDEWAY_QUANTIZATION",
            help="Quantise the layer weights of all models given here: int8, int4 or fp8.",
        ),
    ] = "",
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="Draft model for speculative decoding, with the same tokenizer: FOLDER or HUB_ID for all models, or "
            "NAME=FOLDER or NAME=HUB_ID for one; repeatable.",
        ),
    ] = None,
    tool_format: Annotated[
        list[str] | None,
        typer.Option(
            help="Format of tool calls, for models whose chat templates do not determine it: FORMAT for all models, or "
            f"NAME=FORMAT for one; repeatable. Formats: {', '.join(TOOL_FORMATS)}.",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Engine that runs the models: native or vllm, or NAME=ENGINE for one model; repeatable."),
    ] = None,
    engine_args: Annotated[
        list[str] | None,
        typer.Option(help="Flags for the engine, quoted as in a shell, or NAME=FLAGS for one model; repeatable."),
    ] = None,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(help="URL of a running server that serves the models, or NAME=URL for one model; repeatable."),
    ] = None,
    host: Annotated[str, typer.Option(envvar="TIDEWAY_HOST", help="Address the gateway listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="TIDEWAY_PORT", min=1, max=65535, help="Port of the gateway.")] = 8000,
    instances: Annotated[
        int, typer.Option(envvar="TIDEWAY_NUM_INSTANCES", min=1, help="Number of instances on this machine.")
    ] = 2,
    max_instances: Annotated[
        int,
        typer.Option(
            envvar="TIDEWAY_MAX_NODE_INSTANCES",
            min=0,
            help="Maximum number of instances that `tideway scale` may reach; 0: no growth.",
        ),
    ] = 0,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            envvar="TIDEWAY_TENSOR_PARALLEL",
            min=1,
            help="Devices per instance (GPUs, or shares of the CPU's cores); a power of two.",
        ),
    ] = 1,
    pipeline_parallel: Annotated[
        int,
        typer.Option(
            envvar="TIDEWAY_PIPELINE_PARALLEL",
            min=1,
            help="Pipeline stages per instance, each with part of the layers and its own devices.",
        ),
    ] = 1,
    role: Annotated[
        str,
        typer.Option(
            envvar="TIDEWAY_INSTANCE_ROLES",
            help="Roles of the instances in their order, comma-separated: prefill, decode, both, auto.",
        ),
    ] = "",
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            envvar="TIDEWAY_DETERMINISTIC",
            help="Make a request's tokens independent of other requests, to the last bit. May be slower.",
        ),
    ] = False,
    schedulers: Annotated[
        int, typer.Option(min=1, help="Number of schedulers: one is active, the others stand by.")
    ] = 1,
    gateways: Annotated[
        int, typer.Option(min=1, max=16, help="Number of gateways, on --port and the ports after it.")
    ] = 1,
    nats_url: Annotated[
        str, typer.Option(envvar="TIDEWAY_NATS_URL", help="URL of a NATS server to use instead of starting one.")
    ] = "",
    nats_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the bundled NATS server; 0 picks a free one.")
    ] = 0,
    otlp: Annotated[
        str,
        typer.Option(
            envvar="TIDEWAY_OTLP_ENDPOINT", help="Send traces to this OTLP endpoint, such as http://127.0.0.1:4318."
        ),
    ] = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait until everything is ready.")] = 600.0,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when everything is ready; `tideway down` stops it.")
    ] = False,
) -> None:
    """Start Tideway on this machine and keep it running until Ctrl-C."""
    if detach:
        _up_in_background(DataFolder(data_dir))
        return
    if 0 < max_instances < instances:
        raise OperatorError(f"--max-instances {max_instances} is fewer than --instances {instances}.")
    check_tensor_parallel(tensor_parallel)
    check_roles(role)
    check_otlp(otlp)
    specs = with_drafts(parse_models(model or [], quantization, tool_format or []), draft or [])
    specs = with_engines(specs, engine or [], engine_args or [], engine_url or [])
    adapters = parse_adapters(adapter or [], specs)
    check_specs(specs, adapters)
    check_engines(specs)
    options = UpOptions(
        models=specs,
        adapters=adapters,
        data_dir=data_dir,
        host=host,
        port=port,
        num_instances=instances,
        max_instances=max_instances,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        roles=role,
        deterministic=deterministic,
        num_schedulers=schedulers,
        num_gateways=gateways,
        nats_url=nats_url,
        nats_port=nats_port,
        otlp_endpoint=otlp,
        timeout_s=timeout,
    )
    asyncio.run(Up(options, Reporter()).run())


def _up_in_background(data: DataFolder) -> None:
    """Runs the same command in a session of its own and repeats what it prints until it is ready."""
    data.prepare()
    data.check_free()  # before its log is begun anew
    arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
    log_path = data.logs / "up.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tideway", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    with log_path.open("rb") as log:
        try:
            while True:
                code = process.poll()
                state = data.read_state()
                is_ready = state is not None and state.pid == process.pid and state.phase == "ready"
                sys.stdout.write(log.read().decode(errors="replace"))
                sys.stdout.flush()
                if code is not None:
                    raise typer.Exit(code)
                if is_ready:
                    print(f"It runs in the background (process {process.pid}); `tideway down` (make down) stops it.")
                    return
                time.sleep(POLL_INTERVAL_S)
        except KeyboardInterrupt:
            process.terminate()
            process.wait(down_timeout_s())
            raise


@app.command(rich_help_panel=START)
def down(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Stop the Tideway that runs on a data folder."""
    data = DataFolder(data_dir)
    pid = data.holder_pid()
    if pid is None:
        print(f"Nothing runs on {data.path}.")
        return
    os.kill(pid, signal.SIGTERM)
    timeout_s = down_timeout_s()
    deadline_s = time.monotonic() + timeout_s
    while data.holder_pid() == pid:
        if time.monotonic() >= deadline_s:
            # Its children die with it.
            os.kill(pid, signal.SIGKILL)
            print(f"Process {pid} on {data.path} did not stop within {timeout_s:.0f} s and was killed.")
            return
        time.sleep(POLL_INTERVAL_S)
    print(f"Stopped what ran on {data.path}.")


@app.command(rich_help_panel=START)
def status(as_json: AsJson = False, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show processes, instances, models and queues."""
    asyncio.run(show_status(DataFolder(data_dir), TableConsole(), as_json=as_json))


Timeout = Annotated[float, typer.Option(min=1.0, help="Maximum seconds to wait.")]


@app.command(rich_help_panel=OPERATE)
def drain(
    instance: Annotated[
        str,
        typer.Argument(
            help="Instance to drain, as `tideway status` and `tideway top` name it.",
            autocompletion=completion.instances,
        ),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Take the instance back.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Drain the last instance too; requests then wait until their deadlines.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the instance is gone; with --undo, until it is ready.")
    ] = False,
    timeout: Timeout = 600.0,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Drain an instance: its requests move to others or finish, then it exits. Requests that remain after the worker's
    TIDEWAY_DRAIN_GRACE_S (15 s) are placed again on other instances."""
    if undo and force:
        raise OperatorError("--undo and --force exclude each other.")
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        print(client.place)
        wait_s = timeout if wait else None
        operations.drain(client, instance, is_undone=undo, is_forced=force, wait_s=wait_s, say=print)


@app.command(rich_help_panel=OPERATE)
def role(
    instance: Annotated[
        str,
        typer.Argument(help="Instance, as `tideway top` names it.", autocompletion=completion.instances),
    ],
    role: Annotated[str, typer.Argument(help="prefill, decode, both, or auto (the scheduler chooses).")],
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Set an instance's role until it ends: `prefill` instances compute long prompts, which other instances decode."""
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        print(client.place)
        client.set_role(instance, role)
        print(f"The role of {instance} is {'left to the scheduler' if role == 'auto' else role}.")


def _is_count(text: str) -> bool:
    return bool(re.fullmatch(r"[1-9][0-9]{0,9}", text))


@app.command(rich_help_panel=OPERATE)
def scale(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]", help="Model to scale, with N.", show_default=False, autocompletion=completion.models
        ),
    ] = "",
    number: Annotated[
        str, typer.Argument(metavar="[N]", help="Number of instances for the model, or `all`.", show_default=False)
    ] = "",
    instances: Annotated[
        int | None, typer.Option(min=1, help="Number of instances over all nodes, in place of MODEL and N.")
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait until everything planned is ready and removed instances have moved their requests."
        ),
    ] = False,
    timeout: Timeout = 600.0,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Set how many instances hold a model, or how many instances there are."""
    if model and instances is not None:
        raise OperatorError("MODEL N and --instances N exclude each other: give one of them.")
    if not number and instances is None:
        raise OperatorError("Give MODEL and N (1 or more, or all), or --instances N.")
    if number and number != "all" and not (_is_count(number)):
        raise OperatorError(
            f"{number!r} is not a valid instance count: use 1 or more, or all (or --instances N for all models)."
        )
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        print(client.place)
        wait_s = timeout if wait else None
        if instances is not None:
            operations.scale_instances(client, instances, wait_s=wait_s, say=print)
        else:
            replicas = None if number == "all" else int(number)
            operations.scale_model(client, model, replicas, wait_s=wait_s, say=print)


@app.command(rich_help_panel=OPERATE)
def models(
    interval: Annotated[
        int,
        typer.Option(min=int(LEAST_INTERVAL_S), max=int(MAX_INTERVAL_S), help="Look-back window in seconds."),
    ] = int(DEFAULT_INTERVAL_S),
    as_json: AsJson = False,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show the models' recent traffic: rates, lengths, execution times, latencies, SLO attainment."""
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        show_models(client, TableConsole(), interval_s=interval, as_json=as_json)


@app.command("load-adapter", rich_help_panel=OPERATE)
def load_adapter(
    name: Annotated[str, typer.Argument(help="Model name exposed to clients.")],
    source: Annotated[str, typer.Argument(help="Folder in PEFT's format, as the workers see it, or a hub id.")],
    base: Annotated[str, typer.Option(help="Base model of the adapter.")],
    ttft_ms: Annotated[float, typer.Option(min=0, help="TTFT objective in milliseconds; 0: the base model's.")] = 0.0,
    tpot_ms: Annotated[float, typer.Option(min=0, help="TPOT objective in milliseconds; 0: the base model's.")] = 0.0,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Serve a LoRA adapter as a model of its own."""
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        client.load_adapter(name, operations.source_told(source), base, ttft_ms, tpot_ms)
        print(f"{name} is served on the base model {base}.")


@app.command("unload-adapter", rich_help_panel=OPERATE)
def unload_adapter(
    name: Annotated[str, typer.Argument(help="Adapter to unload, as `tideway models` names it.")],
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Unload a LoRA adapter. Running requests finish; new ones are refused."""
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        client.unload_adapter(name)
        print(f"{name} is unloaded; requests that use it may finish.")


@app.command(rich_help_panel=OPERATE)
def plan(
    search: Annotated[bool, typer.Option("--search", help="Search for a better plan first.")] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Apply the proposed plan; search first if there is none.")
    ] = False,
    rollback: Annotated[
        bool,
        typer.Option("--rollback", help="Roll back the change in progress, or the last one, which may be a rollback."),
    ] = False,
    to_set: Annotated[
        Path | None,
        typer.Option(
            "--set",
            help="Apply your own plan: a TOML file with \\[\\[groups]] of node, devices and models, as --write writes it.",
        ),
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Write the running plan to a file that --set can read.")] = None,
    timeout: Timeout = 3600.0,
    as_json: AsJson = False,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show, search for, apply or roll back a placement plan: which models are on which instances.

    Plans are compared by the share of requests that meet their SLO, and by mean latency over mean execution time.
    """
    if search + apply + rollback + (to_set is not None) + (write is not None) > 1:
        raise OperatorError("--search, --apply, --set, --write and --rollback exclude each other.")
    groups = read_groups(to_set) if to_set is not None else []
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        say = print if not as_json else lambda _: None
        if search:
            plans.search(client, wait_s=timeout, say=say)
        if write is not None:
            running = client.plan()
            write_plan(running, write)
            say(f"The running plan is in {write}.")
            for reason in why_not_set(running, client.models().models):
                say(f"tideway: {reason}.")
        action = "apply" if apply else "roll_back" if rollback else "set" if groups else ""
        if action:
            plans.carry_out(client, action, groups, wait_s=timeout, say=say)
        if as_json or not (action or write):
            plans.show_plan(client.shown_plan(), TableConsole(), as_json=as_json)


@app.command(rich_help_panel=LOOK)
def request(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="[ID]",
            help="Id of an answer (`chatcmpl-...`) or of one of its sequences, or an `x-request-id`.",
            show_default=False,
            autocompletion=completion.requests,
        ),
    ] = "",
    limit: Annotated[
        int, typer.Option(min=1, max=MAX_REQUESTS_LISTED, help="Without ID: number of requests to list, newest first.")
    ] = 20,
    model: Annotated[
        str, typer.Option(help="Without ID: only requests of this model.", autocompletion=completion.models)
    ] = "",
    missed: Annotated[
        bool, typer.Option("--missed", help="Without ID: only requests that missed an objective.")
    ] = False,
    running: Annotated[bool, typer.Option("--running", help="Without ID: only running requests.")] = False,
    as_json: AsJson = False,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show a request's timeline and where its time went; without ID, list the requests of the last minutes."""
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        if request_id:
            requests.show_request(client, TableConsole(), request_id, as_json=as_json)
        else:
            requests.list_requests(
                client, TableConsole(), limit=limit, model=model, missed=missed, running=running, as_json=as_json
            )


@app.command(rich_help_panel=LOOK)
def explain(
    slo: Annotated[
        bool, typer.Option("--slo", help="Explain missed objectives; the default, and the only explanation.")
    ] = True,
    interval: Annotated[
        int,
        typer.Option(min=LEAST_SLO_INTERVAL_S, max=MAX_SLO_INTERVAL_S, help="Look-back window in seconds."),
    ] = 300,
    as_json: AsJson = False,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Explain where the time of requests went that missed their objectives."""
    del slo
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        requests.explain_slo(client, TableConsole(), interval_s=interval, as_json=as_json)


@app.command(rich_help_panel=LOOK)
def top(
    context: typer.Context,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit; the default if stdout is not a terminal.")
    ] = False,
    as_json: AsJson = False,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Watch instances, KV pools, queues and moves until Ctrl-C. If nothing runs on the default data folder and no --url is
    given, it asks http://127.0.0.1:8000."""
    signal.signal(signal.SIGTERM, _leave)
    may_guess = is_default(context, "data_dir")
    with AdminClient.of(DataFolder(data_dir), url, api_key, may_guess=may_guess) as client:
        show_top(client, TableConsole(), once=once, as_json=as_json)


def _leave(number: int, _: object) -> NoReturn:
    """Through all that puts the terminal in order again."""
    sys.exit(128 + number)


app.add_typer(model_commands.app, name="model", rich_help_panel=OPERATE)
app.add_typer(routes.app, name="route", rich_help_panel=OPERATE)


@app.command(rich_help_panel=LOOK)
def tenants(
    as_json: AsJson = False,
    url: GatewayUrl = "",
    api_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show tenants: weights, recent service, running and waiting requests, and use of the limits of API keys."""
    with AdminClient.of(DataFolder(data_dir), url, api_key) as client:
        show_tenants(client, TableConsole(), as_json=as_json)


@app.command(rich_help_panel=MEASURE)
def replay(
    file: Annotated[Path, typer.Argument(help="Recording that a scheduler or instance wrote to TIDEWAY_RECORD_FILE.")],
) -> None:
    """Replay a recording of a scheduler, engine or migrations, and check that every decision is the same."""
    # Scheduler and engine, which no other command needs.
    from shared.engine import recording
    from shared.migration import recording as migration
    from shared.scheduling import recording as scheduling

    try:
        recorded = file.read_bytes()
        match header_of(recorded, recording.Configuration | scheduling.Configuration | migration.Configuration):
            case recording.Configuration():
                engine, number = recording.replay(recorded)
                what = f"{number} plans, all as recorded; requests open at the end: {len(engine.all_held())}"
            case scheduling.Configuration():
                core, number = scheduling.replay(recorded)
                what = (
                    f"asked {number} times for actions, all as recorded; requests open at the end: {len(core.requests)}"
                )
            case _:
                moves, number = migration.replay(recorded)
                num_open = moves.num_migrating_out + moves.num_migrating_in
                what = f"{number} times commands, all as recorded; migrations in progress at the end: {num_open}"
    except OSError as error:
        raise OperatorError(f"{file}: {error.strerror}") from None
    except ReplayMismatch as error:
        raise OperatorError(f"{file}: {error}") from None
    print(f"{what}.")


app.command(rich_help_panel=MEASURE)(bench)
app.command(rich_help_panel=MEASURE)(profile)
app.command(rich_help_panel=MEASURE)(simulate)
app.command(rich_help_panel=KEEP)(nats_config)
app.command(rich_help_panel=KEEP)(nats_replicas)
app.command(rich_help_panel=KEEP)(backup)
app.command(rich_help_panel=KEEP)(restore)
app.command(rich_help_panel=KEEP)(backup_streams)
app.command(rich_help_panel=KEEP)(restore_streams)


@app.command("version", rich_help_panel=START)
def show_version() -> None:
    """Show the version."""
    print(_version())


def _check_encoding(arguments: Iterable[str]) -> None:
    """Raises `OperatorError` for bytes that are no text: neither JSON nor a URL can hold them."""
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise OperatorError(f"{argument!r} is not UTF-8.")


def main() -> NoReturn:
    """Runs the command. Exit code 2 and one sentence where the operator must change something; that of SIGPIPE, which other
    programs end with, where nobody reads on (behind `| head`): what the command was doing may not be done."""
    # The console's lines are made in this package; a library's warnings would run into them.
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    try:
        _check_encoding(sys.argv[1:])
        app()
    except (OperatorError, SettingsError) as error:
        print(f"tideway: {error}", file=sys.stderr)
        sys.exit(OPERATOR_ERROR_EXIT_CODE)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "shared", "services", "tideway"):
            raise
        print(f"tideway: {error.name} is not installed here: pip install 'tideway[worker,bench]'", file=sys.stderr)
        sys.exit(OPERATOR_ERROR_EXIT_CODE)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        raise
    sys.exit(0)
