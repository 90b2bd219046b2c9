"""The processes of one `tideway up`, and their settings. Starts nothing."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shared.messages.cluster import AdapterSpec, ModelSpec
from shared.runtime.settings import BusSettings, GatewaySettings, InstanceSettings, default_id, load
from tideway.data_folder import Credentials, DataFolder, State
from tideway.nats_config import nats_users
from tideway.preflight import REPOSITORY, free_ports, local_host
from tideway.supervisor import KILL_WAIT_S, ProcessSpec

MAX_GPUS = 16
NATS_FILE_BYTES, NATS_LARGE_FILE_BYTES = 4 * 1024**3, 8 * 1024**3
"""What JetStream may set aside: the streams' sizes together, and as much again where the disk has twice that free, so that
streams of an earlier version, which may be larger, find room beside new ones until they are resized."""
NATS_SYNC_INTERVAL = "1s"
"""How much of what was acknowledged a power loss may take; two minutes by default. A crash of processes takes nothing."""
NATS_MEMORY_BYTES = 256 * 1024**2
SERVICE_STOP_S = 8.0
NATS_STOP_S = 5.0
DOWN_MARGIN_S = 5.0
WORKER_STOP_MARGIN_S = 10.0
"""Longer than the node agent waits, beyond the instances' grace, before it kills them."""
GATEWAY_STOP_MARGIN_S = 8.0
"""Longer than a gateway waits, beyond its graces, for what is left to end."""
GATEWAY_PHASE, SERVICES_PHASE, NATS_PHASE = 0, 1, 2
"""The order of stopping: no new requests, then those who answer, then the bus they answer on."""


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    models: list[ModelSpec]
    data_dir: Path
    adapters: list[AdapterSpec] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 8000
    has_tls: bool = False
    num_instances: int = 2
    max_instances: int = 0
    """Number of instances to which it may grow, by hand or by itself (TIDEWAY_AUTOSCALE); memory is divided over so many.
    0: not at all."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    """Stages of each instance, each of `tensor_parallel` devices."""
    roles: str = ""
    """Value of TIDEWAY_INSTANCE_ROLES."""
    deterministic: bool = False
    num_schedulers: int = 1
    num_gateways: int = 1
    """On `port` and the ports after it."""
    nats_url: str = ""
    """A NATS server that runs already; empty: start one."""
    nats_port: int = 0
    """Port of the NATS server that is started; 0: any free port."""
    otlp_endpoint: str = ""
    timeout_s: float = 600.0
    """Until everything is ready."""

    @property
    def address(self) -> str:
        """URL of the first gateway."""
        return self.addresses["gateway"]

    @property
    def addresses(self) -> dict[str, str]:
        """URLs of all gateways, by the names of their processes."""
        scheme = f"http{'s' if self.has_tls else ''}"
        return {
            f"gateway-{number + 1}" if number else "gateway": f"{scheme}://{local_host(self.host)}:{self.port + number}"
            for number in range(self.num_gateways)
        }


@dataclass(frozen=True)
class Service:
    """One of our own processes: it serves /health and /live on `metrics_port`."""

    spec: ProcessSpec
    metrics_port: int


MakeServices = Callable[[UpOptions, dict[str, str], Mapping[str, str]], list[Service]]
"""(options, common environment, passwords on NATS by role) -> the services, in the order of starting. Without passwords all
are the user that the environment names."""


def nats_config(data: DataFolder, credentials: Credentials, port: int, monitor_port: int) -> str:
    """JSON is valid in NATS's own format, and quotes what needs quoting.

    Reachable from this machine only, with a user per role.
    """
    has_space = shutil.disk_usage(data.path).free >= 2 * NATS_LARGE_FILE_BYTES
    config = {
        "server_name": "tideway",
        "listen": f"127.0.0.1:{port}",
        "http": f"127.0.0.1:{monitor_port}",
        "max_payload": 1024 * 1024,
        "authorization": {"users": nats_users(credentials.nats_passwords, {"worker": node_id()})},
        "jetstream": {
            "store_dir": str(data.jetstream),
            "sync_interval": NATS_SYNC_INTERVAL,
            "max_file_store": NATS_LARGE_FILE_BYTES if has_space else NATS_FILE_BYTES,
            "max_memory_store": NATS_MEMORY_BYTES,
        },
    }
    return json.dumps(config, indent=2) + "\n"


def nats_spec(binary: str, data: DataFolder) -> ProcessSpec:
    return ProcessSpec("nats", [binary, "-c", str(data.nats_config)], stop_phase=NATS_PHASE, stop_grace_s=NATS_STOP_S)


def bus_environment(nats_url: str, user: str, password: str) -> dict[str, str]:
    return {"TIDEWAY_NATS_URL": nats_url, "TIDEWAY_NATS_USER": user, "TIDEWAY_NATS_PASSWORD": password}


def operator_environment(nats_url: str, credentials: Credentials) -> dict[str, str]:
    """Environment of the commands that look at a Tideway which runs on a data folder."""
    return bus_environment(nats_url, "operator", credentials.nats_passwords["operator"])


def bus_settings(data: DataFolder, state: State | None) -> BusSettings:
    """Settings of the NATS that the environment names (TIDEWAY_NATS_URL), else of the Tideway that runs on the data
    folder."""
    environment = dict(os.environ)
    if state is not None and not environment.get("TIDEWAY_NATS_URL"):
        environment |= operator_environment(state.nats_url, data.credentials())
    # A command says what is wrong at once.
    return msgspec.structs.replace(load(BusSettings, environment), nats_wait_s=0.0)


def node_id() -> str:
    """The same at each start, so that the placement plan of the last one still holds."""
    return os.environ.get("TIDEWAY_NODE_ID") or default_id("node").rpartition("-")[0]


def services(options: UpOptions, bus: dict[str, str], passwords: Mapping[str, str]) -> list[Service]:
    """The four services, settings by environment. Whatever else TIDEWAY_* this process was given reaches them too."""
    models = msgspec.json.encode(options.models).decode()
    common = {**bus, "PYTHONUNBUFFERED": "1"}
    # A checkout that is not installed works too.
    common["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    if options.otlp_endpoint:
        common["TIDEWAY_OTLP_ENDPOINT"] = options.otlp_endpoint
    replicas: list[tuple[str, str, dict[str, str]]] = [
        ("scheduler" if number == 1 else f"scheduler-{number}", "scheduler", {})
        for number in range(1, options.num_schedulers + 1)
    ]
    replicas += [
        (
            "placement",
            "placement",
            {
                "TIDEWAY_MODELS": models,
                **({"TIDEWAY_ADAPTERS": msgspec.json.encode(options.adapters).decode()} if options.adapters else {}),
                "TIDEWAY_MODELS_FILE": str(options.data_dir.absolute() / "models.json"),
            },
        ),
        *(
            (
                name,
                "gateway",
                {
                    "TIDEWAY_HOST": options.host,
                    "TIDEWAY_PORT": str(options.port + number),
                    # One that is set is the first one's.
                    **({"TIDEWAY_GATEWAY_ID": ""} if number else {}),
                },
            )
            for number, name in enumerate(options.addresses)
        ),
        (
            "worker",
            "worker",
            {
                "TIDEWAY_NUM_INSTANCES": str(options.num_instances),
                "TIDEWAY_MAX_NODE_INSTANCES": str(options.max_instances),
                "TIDEWAY_TENSOR_PARALLEL": str(options.tensor_parallel),
                "TIDEWAY_PIPELINE_PARALLEL": str(options.pipeline_parallel),
                **({"TIDEWAY_INSTANCE_ROLES": options.roles} if options.roles else {}),
                **({"TIDEWAY_DETERMINISTIC": "true"} if options.deterministic else {}),
                "TIDEWAY_NODE_ID": node_id(),
                "TIDEWAY_COST_MODELS_DIR": str(options.data_dir.absolute() / "cost_models"),
            },
        ),
    ]
    # The worker is last because its instances take the ports after its own for metrics, one for each device.
    num_devices = (
        max(options.num_instances, options.max_instances) * options.tensor_parallel * options.pipeline_parallel
    )
    ports = free_ports(len(replicas) + max(num_devices, MAX_GPUS))
    result = []
    for (name, service, own), port in zip(replicas, ports, strict=False):
        environment = {**common, **own, "TIDEWAY_METRICS_PORT": str(port)}
        if passwords:
            environment |= {"TIDEWAY_NATS_USER": service, "TIDEWAY_NATS_PASSWORD": passwords[service]}
        command = [sys.executable, "-m", f"services.{service}"]
        phase = GATEWAY_PHASE if service == "gateway" else SERVICES_PHASE
        grace_s = {"worker": worker_stop_s, "gateway": gateway_stop_s}.get(service, lambda: SERVICE_STOP_S)()
        result.append(Service(ProcessSpec(name, command, environment, stop_phase=phase, stop_grace_s=grace_s), port))
    return result


def down_timeout_s() -> float:
    """More than the supervisor takes to stop everything, with force where needed."""
    graces_s = (gateway_stop_s(), max(SERVICE_STOP_S, worker_stop_s()), NATS_STOP_S)
    return sum(grace_s + KILL_WAIT_S for grace_s in graces_s) + DOWN_MARGIN_S


def worker_stop_s() -> float:
    """Instances that hold requests may take all of their grace; without any the worker ends in a second."""
    return load(InstanceSettings).drain_grace_s + WORKER_STOP_MARGIN_S


def gateway_stop_s(settings: GatewaySettings | None = None) -> float:
    """Streams that are open may take all of its graces; without any it ends when it has left."""
    settings = settings or load(GatewaySettings)
    return settings.leave_s + settings.stop_grace_s + GATEWAY_STOP_MARGIN_S
