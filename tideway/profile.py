"""`tideway profile`: measures models on this machine as an instance of it would run them, and stores their cost models.

Into the data folder always, and into the key-value store of a Tideway that runs on it or that TIDEWAY_NATS_URL names. With
`--hardware FILE` also what they say of the device, as a kind for `tideway simulate`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from shared.bus.interface import Bus
from shared.bus.nats_bus import NatsBus
from shared.costs.model import CostModel
from shared.engine.memory import slab
from shared.messages.cluster import AttentionFacts, InstancePlan, ModelSpec
from shared.models import checkpoint
from shared.models.checkpoint import CheckpointError
from shared.placement.hardware import HARDWARE, USABLE_SHARE, Hardware
from shared.runtime.settings import InstanceSettings, WorkerSettings, load
from tideway.data_folder import DataFolder, OperatorError
from tideway.options import DEFAULT_DATA_DIR
from tideway.preflight import parse_models
from tideway.tree import bus_settings

if TYPE_CHECKING:
    from services.worker.executor.profiled_steps import Extent, Work
    from services.worker.executor.profiler import Profile, ProfiledModel
    from services.worker.node.machine import Machine
    from shared.placement.hardware_fit import Profiled

log = logging.getLogger(__name__)

FOLDER = "cost_models"
"""In the data folder."""
CONNECT_TIMEOUT_S = 5.0
MAX_POOL_BYTES = 2 * 1024**3
POOL_SHARE = 0.25
GOOD_MEDIAN_ERROR, GOOD_P99_ERROR = 0.05, 0.20
"""Share of the memory that the weights leave."""


def profile(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model to profile: NAME=FOLDER or NAME=HUB_ID; repeatable. Default: the demonstration models."
        ),
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Take seconds instead of minutes, as an instance does when it is idle.")
    ] = False,
    instances: Annotated[
        int,
        typer.Option(
            envvar="TIDEWAY_NUM_INSTANCES", min=1, help="Number of instances that will share this machine's cores."
        ),
    ] = 2,
    tensor_parallel: Annotated[
        int,
        typer.Option(envvar="TIDEWAY_TENSOR_PARALLEL", min=1, help="Devices of each instance, as with `tideway up`."),
    ] = 1,
    data_dir: Annotated[
        Path,
        typer.Option(
            "--data-dir",
            envvar="TIDEWAY_DATA_DIR",
            help="Data folder; cost models are written into its folder cost_models.",
        ),
    ] = DEFAULT_DATA_DIR,
    hardware: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a description of this device for `tideway simulate`."),
    ] = None,
    base: Annotated[
        str,
        typer.Option(help="Built-in kind of device that supplies what is not measured. Default: by the device's name."),
    ] = "",
) -> None:
    """Measure step times of models, and store the cost models that instances plan with."""
    # Before torch is imported, as in an instance.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from services.worker.executor.profiled_steps import BRIEF, FULL
        from services.worker.executor.profiler import ProfileError
    except ModuleNotFoundError as error:
        # The images of the other services.
        raise OperatorError(f"{error}: measure where a worker is installed, say in its container.") from None

    if base and base not in HARDWARE:
        raise OperatorError(f"--base {base}: expected one of {', '.join(HARDWARE)}.")
    if hardware is not None and tensor_parallel > 1:
        raise OperatorError("--hardware says what one device does: measure without --tensor-parallel.")
    specs, console = parse_models(model or []), Console()
    data = DataFolder(data_dir)
    data.prepare()
    profiles = []
    try:
        for spec in specs:
            extent = BRIEF if brief else FULL
            measured_model, cost_model = asyncio.run(run(spec, data, instances, tensor_parallel, extent, console))
            profiles.append(profiled(spec, measured_model, cost_model))
    except (CheckpointError, ProfileError) as error:
        raise OperatorError(str(error)) from None
    if hardware is not None:
        from shared.placement.hardware_fit import fitted

        write_hardware(hardware, fitted(this_device(base, instances, hardware.stem), profiles))
        console.print(f"Kind of device {hardware.stem!r} written to {hardware}.", soft_wrap=True)


def profiled(spec: ModelSpec, model: ProfiledModel, cost_model: CostModel) -> Profiled:
    """Blocking. Raises `CheckpointError`."""
    from services.worker.node.machine import survey
    from shared.placement.hardware_fit import Profiled

    shape = checkpoint.describe(checkpoint.resolve(spec.source))
    dtype = checkpoint.run_dtype(spec.dtype, shape.dtype, survey(load(WorkerSettings)).device)
    return Profiled(spec.name, shape, dtype, model.shape.block_size, cost_model)


def this_device(base: str, num_instances: int, name: str) -> Hardware:
    """Hardware of this device with what is not fitted: memory from this machine, the rest from the kind `base`, by default
    that with the device's name."""
    from services.worker.node.machine import survey

    machine = survey(msgspec.structs.replace(load(WorkerSettings), num_instances=num_instances))
    if machine.device == "cpu":
        num_bytes, share, likely = machine.memory_bytes // num_instances, 1.0, "cpu"
    else:
        import torch

        num_bytes, share = torch.cuda.mem_get_info()[1], USABLE_SHARE
        words = torch.cuda.get_device_name().split()
        likely = next((kind for kind in HARDWARE if kind.split("-")[0] in words), "A100-80G")
    of = HARDWARE[base or likely]
    return msgspec.structs.replace(
        of, name=name, memory_bytes=num_bytes, memory_share=share,
        sources={key: f"as {of.name}: {source}" for key, source in of.sources.items()} | {"memory_bytes": "this machine"},
    )  # fmt: skip


def write_hardware(file: Path, hardware: Hardware) -> None:
    """Writes TOML, every number with its source beside it. Raises `OperatorError`."""
    plain = msgspec.to_builtins(hardware)
    sources, measured = plain.pop("sources"), plain.pop("measured")
    # what JSON writes of strings and numbers, TOML reads
    lines = [
        f"{key} = {json.dumps(value)}" + (f"  # {sources[key]}" if key in sources else "")
        for key, value in plain.items()
    ]
    for name, by_ranks in measured.items():
        for ranks, cost in by_ranks.items():
            lines += ["", f"[measured.{json.dumps(name)}.{ranks}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in cost.items()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise OperatorError(f"--hardware {file}: {error.strerror}") from None


async def run(
    spec: ModelSpec, data: DataFolder, num_instances: int, tensor_parallel: int, extent: Extent, console: Console
) -> tuple[ProfiledModel, CostModel]:
    """Measures one model, prints the table, stores the result. Raises `CheckpointError` and `ProfileError`."""
    from services.worker.instance.cost_models import CostModelStore

    with console.status(f"{spec.name}: measuring, {extent.time_s:.0f} s at most") as status:
        model, measured = await asyncio.to_thread(
            measure, spec, num_instances, tensor_parallel, extent, lambda text: status.update(f"{spec.name}: {text}")
        )
    console.print(table(spec.name, measured))
    cost_model = measured.cost_model
    console.print(
        f"{spec.name} on {model.key}: median error {cost_model.median_error:.1%}, p99 {cost_model.p99_error:.1%} "
        f"over {len(measured.held_out)} held-out steps",
        soft_wrap=True,
    )
    if doubt := doubt_about(cost_model):
        console.print(doubt, soft_wrap=True)
    bus = await _connect(data)
    try:
        places = await CostModelStore(bus, data.path / FOLDER).put(model.key, cost_model)
    finally:
        if bus is not None:
            await bus.close()
    if not places:
        raise OperatorError("The cost model could be stored nowhere.")
    console.print(f"Stored in {' and '.join(places)}.", soft_wrap=True)
    return model, cost_model


def doubt_about(cost_model: CostModel) -> str:
    """What to tell of a cost model whose errors are large; empty: they are not."""
    if cost_model.median_error <= GOOD_MEDIAN_ERROR and cost_model.p99_error <= GOOD_P99_ERROR:
        return ""
    return (
        f"! The errors are larger than {GOOD_MEDIAN_ERROR:.0%} (median) or {GOOD_P99_ERROR:.0%} (p99), as they are where "
        "the machine does other work meanwhile: measure again when it is idle."
    )


def measure(
    spec: ModelSpec, num_instances: int, tensor_parallel: int, extent: Extent, tell: Callable[[str], None]
) -> tuple[ProfiledModel, Profile]:
    """Blocking. Raises `CheckpointError`, `ProfileError`, and `SettingsError` for devices that are not here."""
    import torch

    from services.worker.executor import profiler
    from services.worker.instance.building import make_executor, max_step_tokens, pool_merged
    from services.worker.instance.cost_models import profiled_model
    from services.worker.node.machine import survey
    from services.worker.ranks.starting import start_ranks

    wanted = {"num_instances": num_instances, "tensor_parallel": tensor_parallel}
    machine = survey(msgspec.structs.replace(load(WorkerSettings), **wanted))
    plan = plan_of(spec, machine)
    settings = load(InstanceSettings)
    settings = msgspec.structs.replace(settings, device=machine.device, num_threads=machine.num_threads)
    other_ranks = start_ranks(plan.group)
    if machine.device == "cpu":
        torch.set_num_threads(machine.num_threads)
    executor = make_executor(settings, plan, 0, other_ranks)
    try:
        tell("loading")
        prepared: Any = executor.prepare_model(spec)
        shape = executor.add_model(prepared)
        model = profiled_model(spec, shape, executor.device, plan.group)
        num_done = 0

        def on_step() -> None:
            nonlocal num_done
            num_done += 1
            tell(f"{num_done} steps measured, {extent.time_s:.0f} s at most")

        blocks = range(pool_merged(plan) * shape.blocks_per_merged)
        return model, profiler.profile(executor, model, blocks, max_step_tokens(settings), extent, on_step=on_step)
    finally:
        executor.close()


def plan_of(spec: ModelSpec, machine: Machine) -> InstancePlan:
    """An instance of the model alone, on the machine's first devices, with some of the memory that its weights leave."""
    group = machine.groups[0]
    stored = checkpoint.describe(checkpoint.resolve(spec.source))
    dtype = checkpoint.run_dtype(spec.dtype, stored.dtype, machine.device)
    block_size = next(
        facts.block_sizes[0] for facts in (*machine.attention, AttentionFacts()) if facts.runs(stored.head_dim, dtype)
    )
    part = stored.kv_geometry(dtype, group.stage_size, group.num_stages).block_bytes(block_size)
    merged_bytes = slab.choose_merged_bytes([part]) * group.num_ranks
    free_bytes = machine.memory_bytes // machine.most_instances - stored.weight_bytes
    pool_bytes = max(merged_bytes, min(MAX_POOL_BYTES, int(POOL_SHARE * free_bytes)))
    return InstancePlan("profile-0", "profile", [spec], pool_bytes, merged_bytes, group)


def table(name: str, measured: Profile) -> Table:
    """Measured against predicted, held-out steps last."""
    result = Table("step", "measured ms", "predicted ms", "error", title=f"Steps of {name}")
    for title, works in (("fitted", measured.fitted), ("held out", measured.held_out)):
        result.add_section()
        result.add_row(f"[bold]{title}")
        for work, seconds in works:
            predicted_s = measured.cost_model.predict(work.shape)
            error = predicted_s / seconds - 1
            result.add_row(describe(work), f"{1e3 * seconds:.2f}", f"{1e3 * predicted_s:.2f}", f"{error:+.1%}")
    return result


def describe(work: Work) -> str:
    shape = work.shape
    chunks = [f"{count} after {start}" for start, count in zip(work.starts, work.counts, strict=True) if count > 1]
    parts = [f"chunks {', '.join(chunks)}"] if chunks else []
    if shape.num_decodes:
        mean = shape.decode_context_tokens / shape.num_decodes
        parts.insert(0, f"{shape.num_decodes} decodes after {mean:.0f}")
    return "; ".join(parts)


async def _connect(data: DataFolder) -> Bus | None:
    """The bus of the Tideway that runs on `data`, else that of the environment; None without one that answers."""
    state = data.running_state()
    if state is None and not os.environ.get("TIDEWAY_NATS_URL"):
        return None
    settings = bus_settings(data, state)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await NatsBus.connect(settings, "tideway", "profile")
    except TimeoutError:
        log.error("NATS at %s does not answer: the cost model is stored in %s alone.", settings.nats_url, data.path)
        return None
