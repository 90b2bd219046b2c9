"""What `tideway simulate` is asked: machines, models, traffic, placement and policies from one TOML file, and several
settings of it to compare. Unknown keys are refused with the nearest known name.

    for setting in read(Path("two_models.toml")):
        problem, batches = build(setting)
"""

from __future__ import annotations

import functools
import os.path
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta
from msgspec import inspect as kinds

from shared.costs.model import CostModel
from shared.messages.requests import RequestClass
from shared.models.checkpoint import ITEMSIZES, CheckpointError, CheckpointShape, describe, resolve
from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.hardware import HARDWARE, RANKS, Hardware
from shared.placement.memory import Memory
from shared.placement.problem import (
    DEFAULT_SLO_SCALE,
    Group,
    ModelFacts,
    NodeFacts,
    Plan,
    Problem,
    Traffic,
)
from shared.placement.replacement import ReplacementSettings
from shared.plugins import PluginError
from shared.policies.catalogue import DISPATCH_POLICIES, ORDERING_POLICIES, TOKEN_BUDGET_POLICIES
from shared.runtime.nearest import nearest
from shared.simulation.deployment import BatchLines, Serving
from shared.simulation.multiplexed import SplitKv
from tideway.bench.arrivals import Arrivals, Closed, Constant, Gamma, Phases, Poisson, Replay
from tideway.bench.lengths import Lengths, Tokens
from tideway.bench.options import parse_arrivals, parse_lengths
from tideway.bench.traces import Trace, TraceError, TraceSource, read_trace
from tideway.bench.workload import PlannedRequest, StreamSpec, Workload, WorkloadError, plan_requests
from tideway.data_folder import OperatorError
from tideway.plan_file import GroupSpec

T = TypeVar("T")

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Placement = Literal["search", "dedicated", "dedicated_by_need", "alpaserve", "muxserve", "groups"]
SearchedBy = Literal["estimate", "simulation"]


class ScenarioError(OperatorError):
    """The file asks for something that cannot be; the message names the key and the limit."""


class _Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the file's tables."""


class NodeSpec(_Spec, frozen=True, kw_only=True):
    """`count` nodes alike; with more than one their names are `name-0` and so on."""

    name: str = "node"
    hardware: str
    """A ready kind, or one of the file's."""
    devices: Count = 8
    count: Count = 1


class ModelSpec(_Spec, frozen=True, kw_only=True):
    """What it is: one of `shape`, `checkpoint` and `numbers`."""

    name: str
    shape: str = ""
    """A ready one: `shared.placement.facts.SHAPES`."""
    checkpoint: str = ""
    """A folder with config.json and safetensors files, or a hub id."""
    numbers: CheckpointShape | None = None
    weights: str = ""
    """Models with the same name here share one copy of weights."""
    dtype: str = "auto"
    max_model_len: Annotated[int, Meta(ge=0)] = 0
    """0: what the model allows."""
    tensor_parallel: tuple[Count, ...] = RANKS
    """Numbers of devices that it may run on."""
    replicas: Count | None = None
    """On so many groups exactly."""
    slo_scale: Positive | None = None
    """Times its mean execution time; default: the scenario's."""
    execution_s: Positive | None = None
    """Its mean execution time; default: what its requests take alone on its least group."""
    costs: dict[str, dict[int, str | CostModel]] = {}
    """Measured cost models by kind of device and number of devices, as tables or as files of `tideway profile`."""


class TrafficSpec(_Spec, frozen=True, kw_only=True):
    """Requests of one kind. Arrivals and lengths are written short, as for `tideway bench`, or as tables."""

    name: str
    models: dict[str, float] | str
    """Name, or names with weights; each request draws its model."""
    request_class: RequestClass = msgspec.field(default=RequestClass.ONLINE, name="class")
    arrivals: str | Arrivals
    start_s: Annotated[float, Meta(ge=0)] = 0.0
    num_requests: Count | None = None
    lengths_from: TraceSource | str | None = None
    prompt_tokens: int | str | Lengths | None = None
    output_tokens: int | str | Lengths | None = None
    max_total_tokens: Tokens | None = None
    """Longer requests are scaled down to it."""


class BatchSpec(_Spec, frozen=True, kw_only=True):
    """Lines of work that may wait."""

    name: str
    model: str
    at_s: Annotated[float, Meta(ge=0)] = 0.0
    num_requests: Count
    window_s: Positive = 86400.0
    lengths_from: TraceSource | str | None = None
    prompt_tokens: int | str | Lengths | None = None
    output_tokens: int | str | Lengths | None = None
    max_total_tokens: Tokens | None = None


class ReplacementSpec(_Spec, frozen=True, kw_only=True):
    """Another placement is looked for from time to time, by what came lately (SeaLLM, section 4.3)."""

    interval_s: Positive = 600.0
    """Interval at first."""
    is_fixed: bool = False
    """Else the interval shrinks and grows."""
    least_s: Positive = 60.0
    most_s: Positive = 6 * 3600.0
    beta: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    search_s: Annotated[float, Meta(ge=0)] = 10.0
    """Seconds that a search takes."""

    def settings(self) -> ReplacementSettings:
        least_s, most_s = (self.interval_s, self.interval_s) if self.is_fixed else (self.least_s, self.most_s)
        return ReplacementSettings(initial_s=self.interval_s, least_s=least_s, most_s=most_s, beta=self.beta)


class Scenario(_Spec, frozen=True, kw_only=True):
    duration_s: Positive = 120.0
    seed: Annotated[int, Meta(ge=0)] = 0
    patience_s: Positive = 600.0
    """After the last arrival, for online requests to end; those that have not missed their SLO."""
    slo_scale: Positive = DEFAULT_SLO_SCALE
    rate_scale: Positive = 1.0
    """Factor on all online arrivals; replays of arrivals play so much faster."""
    nodes: Annotated[list[NodeSpec], Meta(min_length=1)]
    hardware: dict[str, dict[str, Any]] = {}
    """Own kinds: a Hardware's fields, `base` (what is not said is as there) and `file` (of `tideway profile`)."""
    models: Annotated[list[ModelSpec], Meta(min_length=1)]
    traffic: list[TrafficSpec] = []
    batches: list[BatchSpec] = []
    placement: Placement = "search"
    search_by: SearchedBy = "estimate"
    """What tells plans apart: the fast estimate alone, or the simulation of the best by it."""
    max_models_per_group: Annotated[int, Meta(ge=0)] = 0
    """0: as many as fit."""
    groups: list[GroupSpec] = []
    """Groups for the placement "groups"."""
    serving: Serving = Serving()
    split_kv: SplitKv = SplitKv()
    """Splitting of KV in the placement "muxserve"."""
    replacement: ReplacementSpec | None = None
    """None: the placement stays."""


class Setting(NamedTuple):
    name: str
    scenario: Scenario
    folder: Path
    """Folder at which relative paths begin, if the file is there."""


class Built(NamedTuple):
    """A setting, ready to run."""

    problem: Problem
    batches: tuple[BatchLines, ...]


# ---------------------------------------------------------------------------------------------------------- reading


def read(file: Path, changes: Mapping[str, Any] | None = None) -> list[Setting]:
    """The settings of a file; one, named after the file, where it names none. `changes`: to the file's keys. Raises
    `ScenarioError`."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ScenarioError(f"{file}: {error}") from None
    content |= changes or {}
    overrides = content.pop("settings", [])
    if not isinstance(overrides, list) or not all(isinstance(one, dict) for one in overrides):
        raise ScenarioError("settings: expected tables, [[settings]]")
    if not overrides:
        return [Setting(file.stem, parse(content), file.parent)]
    settings = []
    for number, override in enumerate(overrides):
        override = dict(override)
        name = str(override.pop("name", f"setting {number + 1}"))
        try:
            settings.append(Setting(name, parse(merged(content, override)), file.parent))
        except ScenarioError as error:
            # What the file itself has wrong is no setting's.
            is_own = str(error) != _complaint(content)
            raise ScenarioError(f"setting {name!r}: {error}" if is_own else str(error)) from None
    if len({setting.name for setting in settings}) < len(settings):
        raise ScenarioError("settings: two have the same name")
    return settings


def _complaint(content: Mapping[str, Any]) -> str:
    try:
        parse(content)
    except ScenarioError as error:
        return str(error)
    return ""


def merged(content: Mapping[str, Any], override: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A file's keys with a setting's: tables key by key, lists of tables with names by name. Raises `ScenarioError`."""
    result = dict(content)
    for key, value in override.items():
        known, at = content.get(key), f"{path}{key}"
        if isinstance(known, dict) and isinstance(value, dict) and "kind" not in value:
            result[key] = merged(known, value, f"{at}.")
        elif isinstance(known, list) and isinstance(value, dict):
            names = [str(one.get("name", "")) for one in known]
            for name in value:
                _known(name, names, f"{at}.{name}")
            result[key] = [
                merged(one, value[name], f"{at}.{name}.") if name in value else one
                for one, name in zip(known, names, strict=True)
            ]
        else:
            result[key] = value
    return result


def parse(content: Mapping[str, Any]) -> Scenario:
    """Raises `ScenarioError`."""
    _refuse_unknown(content, kinds.type_info(Scenario), "")
    for key, choices in (("placement", Placement), ("search_by", SearchedBy)):
        if isinstance(value := content.get(key), str):
            _known(value, get_args(choices), key)
    scenario = convert(content, Scenario)
    serving = scenario.serving
    for key, value, known in (
        ("interruption", serving.interruption, ("suspend", "discard", "off")),
        ("migration", serving.migration, ("auto", "off")),
    ):
        _known(value, known, f"serving.{key}")
    for key, value, registry in (
        ("order_policy", serving.order_policy, ORDERING_POLICIES),
        ("dispatch_policy", serving.dispatch_policy, DISPATCH_POLICIES),
        ("co_serving", serving.co_serving, TOKEN_BUDGET_POLICIES),
    ):
        try:
            registry.find(value)
        except PluginError as error:
            raise ScenarioError(f"serving.{key}: {error}") from None
    if scenario.groups and "placement" not in content:
        scenario = msgspec.structs.replace(scenario, placement="groups")
    if (scenario.placement == "groups") != bool(scenario.groups):
        raise ScenarioError('placement: "groups" needs [[groups]], and these need it')
    if scenario.placement == "muxserve":
        _refuse_beside_muxserve(scenario)
    names = [model.name for model in scenario.models]
    for what, used in (("models", names), ("traffic", [one.name for one in scenario.traffic])):
        if len(set(used)) < len(used):
            raise ScenarioError(f"{what}: two have the same name")
    for index, traffic in enumerate(scenario.traffic):
        for name in weights_of(traffic):
            _known(name, names, f"traffic[{index}].models")
    for index, batch in enumerate(scenario.batches):
        _known(batch.model, names, f"batches[{index}].model")
    if not scenario.traffic and not scenario.batches:
        raise ScenarioError("traffic: there is none, and no batches")
    return scenario


def _refuse_beside_muxserve(scenario: Scenario) -> None:
    if scenario.replacement is not None:
        raise ScenarioError('replacement: the placement "muxserve" stays')
    is_offline = any(one.request_class is RequestClass.OFFLINE for one in scenario.traffic) or scenario.batches
    if is_offline and scenario.serving.offline:
        raise ScenarioError('placement: "muxserve" has no offline requests; serving.offline = false leaves them out')


def convert(content: Any, kind: type[T], at: str = "") -> T:
    """Raises `ScenarioError` that names the key."""
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        key = (at + path.rstrip("`")).lstrip(".")
        raise ScenarioError(f"{key or 'the file'}: {text[:1].lower()}{text[1:]}") from None


def _known(name: str, known: Iterable[str], key: str) -> None:
    known = list(known)
    if name not in known:
        raise ScenarioError(f"{key}: {name!r} is unknown{nearest(name, known)}")


def _refuse_unknown(value: Any, kind: kinds.Type, path: str) -> None:
    """Walks the content along the types of its fields."""
    match kind:
        case kinds.UnionType():
            structs = [one for one in kind.types if isinstance(one, kinds.StructType | kinds.DictType)]
            if isinstance(value, dict) and len(structs) > 1:
                structs = [one for one in structs if getattr(one, "tag", None) == value.get("kind")]
            for one in structs[:1]:
                _refuse_unknown(value, one, path)
        case kinds.ListType() | kinds.VarTupleType() if isinstance(value, list):
            for number, item in enumerate(value):
                _refuse_unknown(item, kind.item_type, f"{path}[{number}]")
        case kinds.DictType() if isinstance(value, dict):
            for key, item in value.items():
                _refuse_unknown(item, kind.value_type, f"{path}.{key}")
        case kinds.StructType() if isinstance(value, dict):
            fields = {field.encode_name: field.type for field in kind.fields}
            tag = {kind.tag_field} if kind.tag_field else set()
            for key, item in value.items():
                at = f"{path}.{key}".lstrip(".")
                if key not in fields and key not in tag:
                    raise ScenarioError(f"{at}: no such key{nearest(key, fields)}")
                if key in fields:
                    _refuse_unknown(item, fields[key], at)
        case kinds.Metadata():
            _refuse_unknown(value, kind.type, path)


# ---------------------------------------------------------------------------------------------------------- building


def build(setting: Setting) -> Built:
    """Reads traces and checkpoints (blocking). Raises `ScenarioError`."""
    scenario, folder = setting.scenario, setting.folder
    hardware = hardware_of(scenario, folder)
    nodes = _nodes(scenario, hardware)
    used = [hardware[name] for name in dict.fromkeys(node.hardware for node in scenario.nodes)]
    models = [_model(model, index, used, folder) for index, model in enumerate(scenario.models)]
    problem = Problem(
        nodes=nodes, models=tuple(models), traffic=traffic_of(scenario, folder), slo_scale=scenario.slo_scale,
        slo_scales={model.name: model.slo_scale for model in scenario.models if model.slo_scale is not None},
        execution_s={model.name: model.execution_s for model in scenario.models if model.execution_s is not None},
        max_models_per_group=scenario.max_models_per_group,
    )  # fmt: skip
    return Built(problem, tuple(_batch(batch, scenario, folder) for batch in scenario.batches))


def hardware_of(scenario: Scenario, folder: Path) -> dict[str, Hardware]:
    """All kinds that the scenario's nodes may name."""
    known = dict(HARDWARE)
    for name, content in scenario.hardware.items():
        content = {"name": name} | content
        base: dict[str, Any] = {}
        if file := content.pop("file", ""):
            base = hardware_file(path_of(file, folder))
        if of := content.pop("base", ""):
            _known(of, known, f"hardware.{name}.base")
            base = msgspec.to_builtins(known[of]) | base
        content = base | content
        _refuse_unknown(content, kinds.type_info(Hardware), f"hardware.{name}")
        known[name] = convert(content, Hardware, f"hardware.{name}")
    for index, node in enumerate(scenario.nodes):
        _known(node.hardware, known, f"nodes[{index}].hardware")
    return known


def hardware_file(file: Path) -> dict[str, Any]:
    """Table that `tideway profile --hardware` writes. Raises `ScenarioError`."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ScenarioError(f"{file}: {error}") from None


def path_of(text: str, folder: Path) -> Path:
    """Beside the scenario's file, else from where one is."""
    path = Path(os.path.expanduser(text))
    return folder / path if not path.is_absolute() and (folder / path).exists() else path


def _nodes(scenario: Scenario, hardware: Mapping[str, Hardware]) -> tuple[NodeFacts, ...]:
    nodes = []
    for spec in scenario.nodes:
        for number in range(spec.count):
            name = spec.name if spec.count == 1 else f"{spec.name}-{number}"
            nodes.append(node_facts(name, hardware[spec.hardware], spec.devices))
    if len({node.node_id for node in nodes}) < len(nodes):
        raise ScenarioError("nodes: two have the same name")
    return tuple(nodes)


def _model(spec: ModelSpec, index: int, hardware: list[Hardware], folder: Path) -> ModelFacts:
    at = f"models[{index}]"
    if (bool(spec.shape), bool(spec.checkpoint), spec.numbers is not None).count(True) != 1:
        raise ScenarioError(f"{at}: {spec.name!r} needs one of shape, checkpoint and numbers")
    if spec.dtype != "auto":
        _known(spec.dtype, ITEMSIZES, f"{at}.dtype")
    if spec.numbers is not None:
        shape = spec.numbers
    elif spec.shape:
        _known(spec.shape, SHAPES, f"{at}.shape")
        shape = SHAPES[spec.shape]
    else:
        try:
            shape = describe(resolve(str(path_of(spec.checkpoint, folder))))
        except CheckpointError as error:
            raise ScenarioError(f"{at}.checkpoint: {error}") from None
    try:
        facts = model_facts(
            spec.name, shape, hardware, weights=spec.weights, dtype=spec.dtype, max_model_len=spec.max_model_len,
            ranks=spec.tensor_parallel, replicas=spec.replicas,
        )  # fmt: skip
    except ValueError as error:
        raise ScenarioError(f"{at}.tensor_parallel: {error}") from None
    given = {}
    for kind, by_ranks in spec.costs.items():
        _known(kind, [one.name for one in hardware], f"{at}.costs")
        of = next(one.kind for one in hardware if one.name == kind)
        for p, cost in by_ranks.items():
            given[of, p] = cost if isinstance(cost, CostModel) else _stored(path_of(cost, folder), f"{at}.costs.{kind}")
    return msgspec.structs.replace(facts, costs=facts.costs | given)


def _stored(file: Path, key: str) -> CostModel:
    try:
        return msgspec.json.decode(file.read_bytes(), type=CostModel)
    except (OSError, msgspec.MsgspecError) as error:
        raise ScenarioError(f"{key}: {file}: {error}") from None


# ----------------------------------------------------------------------------------------------------------- traffic


def weights_of(spec: TrafficSpec) -> dict[str, float]:
    return {spec.models: 1.0} if isinstance(spec.models, str) else spec.models


def traffic_of(scenario: Scenario, folder: Path) -> Traffic:
    """Drawn by the scenario's seed. Raises `ScenarioError`."""
    names = tuple(sorted(model.name for model in scenario.models))
    planned = _planned([_stream(spec, scenario, folder) for spec in scenario.traffic], scenario)
    index = {name: number for number, name in enumerate(names)}
    return Traffic(
        names,
        np.array([index[request.model] for request in planned], np.int32),
        np.array([request.at_s for request in planned], np.float64),
        np.array([request.prompt_tokens for request in planned], np.int32),
        np.array([request.output_tokens for request in planned], np.int32),
        np.array([request.request_class is RequestClass.ONLINE for request in planned], np.bool_),
        scenario.duration_s,
    )


def _planned(streams: list[StreamSpec], scenario: Scenario) -> list[PlannedRequest]:
    if not streams:
        return []
    workload = Workload(streams=streams, duration_s=scenario.duration_s, seed=scenario.seed)
    traces: dict[str, Trace] = {}
    for stream in streams:
        sources = [stream.lengths_from, stream.arrivals.trace if isinstance(stream.arrivals, Replay) else None]
        traces |= {source.path: _trace(source.path, stream.name) for source in sources if source is not None}
    try:
        return plan_requests(workload, traces)
    except WorkloadError as error:
        raise ScenarioError(f"traffic: {error}") from None


def _trace(path: str, name: str) -> Trace:
    try:
        return _read_trace(path)
    except (TraceError, OSError) as error:
        raise ScenarioError(f"traffic {name!r}: {error}") from None


@functools.lru_cache(maxsize=16)
def _read_trace(path: str) -> Trace:
    return read_trace(Path(path))


def _stream(spec: TrafficSpec, scenario: Scenario, folder: Path) -> StreamSpec:
    key = f"traffic {spec.name!r}"
    arrivals = _short(spec.arrivals, parse_arrivals, f"{key}, arrivals")
    if isinstance(arrivals, Closed):
        raise ScenarioError(f"{key}, arrivals: a closed loop is not simulated; say so with [[batches]]")
    if isinstance(arrivals, Replay):
        arrivals = msgspec.structs.replace(arrivals, trace=_source(arrivals.trace, folder))
    if spec.request_class is RequestClass.ONLINE:
        arrivals = _scaled(arrivals, scenario.rate_scale, spec.name)
    return StreamSpec(
        name=spec.name, request_class=spec.request_class, models=weights_of(spec), arrivals=arrivals,
        start_s=spec.start_s, num_requests=spec.num_requests, max_total_tokens=spec.max_total_tokens,
        **_lengths(spec, arrivals, key, folder),
    )  # fmt: skip


def _lengths(spec: TrafficSpec | BatchSpec, arrivals: Arrivals, key: str, folder: Path) -> dict[str, Any]:
    found = {
        "lengths_from": None if spec.lengths_from is None else _source(spec.lengths_from, folder),
        "prompt_tokens": _short(spec.prompt_tokens, parse_lengths, f"{key}, prompt_tokens"),
        "output_tokens": _short(spec.output_tokens, parse_lengths, f"{key}, output_tokens"),
    }
    has_pairs = found["lengths_from"] is not None or isinstance(arrivals, Replay)
    for name in ("prompt_tokens", "output_tokens"):
        if found[name] is None and not has_pairs:
            raise ScenarioError(f"{key}: {name} are missing, and no trace has them")
    return found


def _short(value: Any, parse_text: Any, key: str) -> Any:
    """Written short, or not."""
    if not isinstance(value, str | int):
        return value
    try:
        return parse_text(str(value))
    except OperatorError as error:
        raise ScenarioError(f"{key}: {error}") from None


def _source(source: TraceSource | str, folder: Path) -> TraceSource:
    source = TraceSource(path=source) if isinstance(source, str) else source
    return msgspec.structs.replace(source, path=str(path_of(source.path, folder)))


def _scaled(arrivals: Arrivals, factor: float, name: str) -> Arrivals:
    match arrivals:
        case Poisson() | Gamma() | Constant():
            return msgspec.structs.replace(arrivals, rate_rps=arrivals.rate_rps * factor)
        case Phases():
            phases = [msgspec.structs.replace(phase, rate_rps=phase.rate_rps * factor) for phase in arrivals.phases]
            return msgspec.structs.replace(arrivals, phases=phases)
        case Replay(trace=source) if _trace(source.path, name).rates:
            scaled = msgspec.structs.replace(source, rate_scale=source.rate_scale * factor)
            return msgspec.structs.replace(arrivals, trace=scaled)
        case Replay(trace=source):
            faster = msgspec.structs.replace(source, time_scale=source.time_scale / factor)
            return msgspec.structs.replace(arrivals, trace=faster)
    return arrivals


def _batch(spec: BatchSpec, scenario: Scenario, folder: Path) -> BatchLines:
    key = f"batch {spec.name!r}"
    arrivals = Closed(concurrency=1)
    stream = StreamSpec(
        name=spec.name, request_class=RequestClass.OFFLINE, models={spec.model: 1.0}, arrivals=arrivals,
        num_requests=spec.num_requests, max_total_tokens=spec.max_total_tokens, **_lengths(spec, arrivals, key, folder),
    )  # fmt: skip
    lines = [(line.model, line.prompt_tokens, line.output_tokens) for line in _planned([stream], scenario)]
    return BatchLines(spec.at_s, lines, spec.window_s)


# ---------------------------------------------------------------------------------------------------------- placement


def explicit_plan(scenario: Scenario, problem: Problem) -> Plan:
    """Plan of the file's groups. Raises `ScenarioError`."""
    nodes = {node.node_id: node for node in problem.nodes}
    models = {model.name: model for model in problem.models}
    taken: set[tuple[str, int]] = set()
    groups, memory = [], Memory(problem)
    for index, spec in enumerate(scenario.groups):
        at = f"groups[{index}]"
        _known(spec.node, nodes, f"{at}.node")
        for name in spec.models:
            _known(name, models, f"{at}.models")
        node, devices = nodes[spec.node], tuple(sorted(spec.devices))
        if devices != tuple(range(devices[0], devices[0] + len(devices))) or devices[-1] >= node.num_devices:
            raise ScenarioError(f"{at}.devices: expected consecutive ones below {node.num_devices}, not {spec.devices}")
        if twice := sorted(taken & {(spec.node, device) for device in devices}):
            raise ScenarioError(f"{at}.devices: {twice[0][1]} of {spec.node} is in another group too")
        taken |= {(spec.node, device) for device in devices}
        if reason := memory.why_not(spec.models, node, len(devices)):
            raise ScenarioError(f"{at}: {reason}")
        groups.append(Group(spec.node, devices, tuple(sorted(set(spec.models)))))
    return Plan(tuple(sorted(groups)))
