"""The files of the container stack, held against the code and against each other. Needs no container engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from services.worker.attention.flashinfer_modules import _arch
from shared.bus.permissions import ROLES
from shared.runtime.settings import GatewaySettings, PlacementSettings, SchedulerSettings, WorkerSettings, load
from tests.conftest import free_port
from tests.deploy.metrics import every_metric
from tideway.nats_config import users_file
from tideway.preflight import nats_server_binary

REPOSITORY = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "scheduler", "placement", "worker")
SETTINGS = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "placement": PlacementSettings,
    "worker": WorkerSettings,
}


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    return yaml.safe_load((REPOSITORY / name).read_text())  # type: ignore[no-any-return]


def environment_of(service: dict[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in service.get("environment", {}).items()}


# ---------------------------------------------------------------------------------------------------- dashboard


def expressions() -> Iterator[str]:
    dashboard = json.loads((REPOSITORY / "deploy/grafana/dashboards/tideway.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        yield variable["query"]["query"]


@pytest.fixture(scope="module")
def registry() -> CollectorRegistry:
    """Every metric that the dashboard may name."""
    return every_metric()


def test_every_metric_of_the_dashboard_is_one_of_the_code(registry: CollectorRegistry) -> None:
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    known = {family.name + suffix for family in registry.collect() for suffix in suffixes.get(family.type, ())}
    named = {name for text in expressions() for name in re.findall(r"(?:tideway_|vllm:)\w+", text)}
    assert len(named) > 20
    assert named - known == set()


def test_every_label_of_the_dashboard_is_one_of_its_metric(registry: CollectorRegistry) -> None:
    given_by_prometheus = {"le", "service", "instance", "job", "namespace"}
    labels_of: dict[str, set[str]] = {}
    for collector, names in registry._collector_to_names.items():
        labels = set(getattr(collector, "_labelnames", getattr(collector, "_labels", ())))
        # A collector of one's own that does not describe itself is known by its samples alone; those here are histograms.
        labels_of.update(dict.fromkeys(names or [getattr(collector, "_name", "") + "_bucket"], labels))
    num_checked = 0
    for text in expressions():
        for metric in re.findall(r"((?:tideway_|vllm:)\w+)", text):
            by = {label.strip() for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(",")}
            by |= set(re.findall(r"(\w+)=~", text))
            assert by <= labels_of[metric] | given_by_prometheus, text
            num_checked += len(by)
    assert num_checked > 20


# Rules of promtool's linter (prometheus/client_golang, prometheus/testutil/promlint).
NOT_BASE_UNITS = [
    "milliseconds",
    "microseconds",
    "nanoseconds",
    "minutes",
    "hours",
    "days",
    "weeks",
    "kilobytes",
    "megabytes",
    "gigabytes",
    "kibibytes",
    "mebibytes",
    "gibibytes",
    "bits",
    "percent",
    "celsius_degrees",
]
ABBREVIATED_UNITS = ["s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"]
TYPES = ["counter", "gauge", "histogram", "summary", "untyped", "info"]
VLLM_NAMES = re.compile("vllm:.*")
"""What is named as vLLM names it keeps that name: routers and dashboards look for it."""


def complaints(family: Metric, labels: set[str]) -> list[str]:
    words = family.name.split("_")
    found = [f"unit {word}" for word in words if word in NOT_BASE_UNITS or word in ABBREVIATED_UNITS]
    if not family.documentation.strip():
        found.append("no help")
    if not re.fullmatch("[a-z][a-z0-9_]*", family.name) or not all(re.fullmatch("[a-z][a-z0-9_]*", x) for x in labels):
        found.append("not snake_case")
    if family.name.endswith(("_total", "_bucket", "_count", "_sum")):
        found.append("a suffix of other types")
    found += [f"type {word}" for word in words if word in TYPES[:5] or (word == "info" and family.type != "gauge")]
    found += [f"label {label}" for label in labels & {"le", "quantile", *TYPES}]
    return found


def test_names_and_labels_are_what_promtool_wants(registry: CollectorRegistry) -> None:
    wrong = {}
    for collector in registry._collector_to_names:
        labels = set(getattr(collector, "_labelnames", getattr(collector, "_labels", ())))
        for family in collector.collect():
            if not VLLM_NAMES.fullmatch(family.name) and (found := complaints(family, labels)):
                wrong[family.name] = found
    assert wrong == {}


def test_panels_do_not_overlap() -> None:
    dashboard = json.loads((REPOSITORY / "deploy/grafana/dashboards/tideway.json").read_text())
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


# -------------------------------------------------------------------------------------------------- Dockerfiles


def test_the_base_stage_is_one() -> None:
    stages = set()
    for service in SERVICES:
        text = (REPOSITORY / "services" / service / "Dockerfile").read_text()
        before, base, *_, final = re.split(r"^FROM ", text, flags=re.MULTILINE)
        assert not re.search(r"^(?!#|ARG )\S", before, re.MULTILINE)
        assert final.startswith("base\n")
        stages.add("\n".join(line for line in base.splitlines() if not line.startswith("#")).rstrip())
        assert f"COPY services/{service} services/{service}" in final
        assert f'CMD ["python", "-m", "services.{service}"]' in final
        assert "\nUSER tideway\n" in final
    assert len(stages) == 1


def test_a_worker_s_image_has_cuda_only_where_it_is_asked_for() -> None:
    text = (REPOSITORY / "services/worker/Dockerfile").read_text()
    (default,) = re.findall(r"^ARG TORCH_INDEX_URL=(\S+)$", text, re.MULTILINE)
    assert default.endswith("/whl/cpu")
    arguments = compose()["services"]["worker"]["build"]["args"]
    assert arguments["TORCH_INDEX_URL"] == "${TORCH_INDEX_URL-" + default + "}"
    on_gpu = compose("docker-compose.gpu.yml")["services"]["worker"]["build"]["args"]
    assert on_gpu["EXTRA"] == "cuda" and on_gpu["TORCH_INDEX_URL"] == "${TORCH_INDEX_URL:-}"
    defaults = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    for name in set(on_gpu) - {"EXTRA", "TORCH_INDEX_URL"}:
        assert re.fullmatch(r"\$\{(TIDEWAY_)?" + name + ":-" + re.escape(defaults[name]) + r"\}", on_gpu[name]), name
    assert set(on_gpu) >= {"CUDA", "CUDA_ARCHS", "NVCC_IMAGE", "FLASHINFER_ONLY"}


def test_kernels_are_compiled_in_a_stage_of_their_own_and_never_where_the_worker_runs() -> None:
    text = (REPOSITORY / "services/worker/Dockerfile").read_text()
    stages = {stage.split("\n")[0]: stage for stage in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]}
    assert list(stages)[1:] == ["${NVCC_IMAGE} AS nvcc", "base AS modules", "base"]
    modules, final = stages["base AS modules"], stages["base"]
    assert "python -m services.worker.attention.flashinfer_modules" in modules
    archs = re.findall(r'^ARG CUDA_ARCHS="(.*)"$', modules, re.MULTILINE)[0].split()
    assert {arch.split(".")[0] for arch in archs} == {"8", "9", "10", "12"} and all(
        _arch(arch) == arch for arch in archs
    )
    assert "nvcc" not in final and "g++" not in final
    assert "apt-get purge --yes --auto-remove gcc" in final
    assert "COPY --from=modules /modules /opt/flashinfer" in final
    assert re.search(r"^ENV FLASHINFER_DISABLE_JIT=1 FLASHINFER_USE_CUDA_NORM=1$", final, re.MULTILINE)
    # An image without CUDA compiles and downloads nothing for it.
    for run in re.findall(r"^RUN (.*(?:\\\n.*)*)", modules, re.MULTILINE):
        assert '[ "$EXTRA" = cuda ] || exit 0;' in run.split("apt-get")[0].split("export")[0]


@pytest.mark.parametrize(("extra", "cuda", "ucx"), [("worker", 13, 12), ("cuda", 12, 12), ("cuda", 13, 13)])
def test_ucx_is_that_of_the_image_s_cuda(extra: str, cuda: int, ucx: int, tmp_path: Path) -> None:
    """And torch comes with the versions of the lock that follows it."""
    text = (REPOSITORY / "services/worker/Dockerfile").read_text()
    (command,) = re.findall(r"^RUN (.*mv locks/.*\\\n.*)$", text, re.MULTILINE)
    shutil.copytree(REPOSITORY / "locks", tmp_path / "locks")
    environment = {**os.environ, "EXTRA": extra, "CUDA": str(cuda)}
    subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=environment, check=True)
    lock, constraints = (tmp_path / "locks/image.lock").read_text(), (tmp_path / "locked.txt").read_text()
    for name in ("ucxx", "libucx"):
        assert re.findall(rf"^{name}-cu(\d+)==", lock, re.MULTILINE) == [str(ucx)]
    assert [line.split(" ")[0] for line in constraints.splitlines()] == re.findall(
        r"^[a-z0-9]\S+==\S+", lock, re.MULTILINE
    )
    assert "hash" not in constraints and "\\" not in constraints


def test_the_command_finds_the_gateway_of_its_container() -> None:
    text = (REPOSITORY / "services/gateway/Dockerfile").read_text()
    (url,) = re.findall(r"^ENV TIDEWAY_URL=(\S+)$", text, re.MULTILINE)
    assert url == f"http://127.0.0.1:{GatewaySettings().port}"


def test_clients_reach_the_gateways_through_a_proxy_that_leaves_out_those_that_are_not_ready() -> None:
    services, port = compose()["services"], GatewaySettings().port
    proxy, gateway = services["proxy"], services["gateway"]
    assert proxy["ports"] == [f"${{TIDEWAY_PUBLISH:-127.0.0.1:8000}}:{port}"] and "ports" not in gateway
    assert "networks" not in proxy, "it does not reach the bus"
    assert proxy["read_only"] and proxy["cap_drop"] == ["ALL"]
    config = (REPOSITORY / "deploy/haproxy/haproxy.cfg").read_text()
    assert re.search(rf"^ *bind :{port}$", config, re.MULTILINE)
    ((most, address),) = re.findall(r"server-template gateway 1-(\d+) (\S+)", config)
    assert address == f"gateway:{port}" and 2 <= gateway["scale"] <= int(most)
    ((interval_s, fall),) = re.findall(r"check inter (\d+)s fall (\d+)", config)
    environment = environment_of(gateway)
    leave_s, grace_s = float(environment["TIDEWAY_LEAVE_S"]), GatewaySettings().stop_grace_s
    assert leave_s > 2 * int(interval_s) * int(fall) and "httpchk GET /ready" in config
    assert leave_s + grace_s + 8 <= float(gateway["stop_grace_period"].removesuffix("s"))
    for side in ("client", "server"):
        (silence_s,) = re.findall(rf"timeout {side} (\d+)s", config)
        assert float(silence_s) > GatewaySettings().request_timeout_s, "the gateway's error comes first"
        assert float(silence_s) > 2 * GatewaySettings().stream_keep_alive_s, "a stream that waits says so in time"
    # It comes from one address, with all that clients open.
    assert environment["TIDEWAY_MAX_CLIENT_CONNECTIONS"] == str(GatewaySettings().max_connections)


def test_what_the_images_copy_is_in_the_build_context() -> None:
    kept = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for service in SERVICES:
        for line in (REPOSITORY / "services" / service / "Dockerfile").read_text().splitlines():
            if line.startswith("COPY "):
                for source in [] if "--from=" in line else line.split()[1:-1]:
                    assert source.split("/")[0] in kept and (REPOSITORY / source).exists(), line


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_has_what_its_service_and_the_command_import(service: str) -> None:
    text = (REPOSITORY / "services" / service / "Dockerfile").read_text()
    absent = {f"services.{other}" for other in SERVICES if f"COPY services/{other} " not in text}
    if service != "worker":
        absent |= {"torch", "ucxx"}
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name in {absent!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}')\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"import services.{service}.__main__, tideway.command\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True)


# ------------------------------------------------------------------------------------------------------ compose


def test_services_in_compose_are_bounded_private_and_start_after_the_bus() -> None:
    services = compose()["services"]
    for name, service in services.items():
        assert service["restart"] == "unless-stopped", name
        assert service["mem_limit"], name
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
    for name in SERVICES:
        assert services[name]["depends_on"]["nats"] == {"condition": "service_healthy"}
        assert services[name]["networks"] == ["default", "bus"]
        assert services[name]["read_only"] and services[name]["tmpfs"][0].startswith("/tmp:")
        assert services[name]["build"]["dockerfile"] == f"services/{name}/Dockerfile"
    assert services["nats"]["networks"] == ["bus"] and compose()["networks"]["bus"] == {"internal": True}
    for name, service in services.items():
        for port in service.get("ports", ()):
            assert port.startswith(("127.0.0.1:", "${TIDEWAY_PUBLISH:-127.0.0.1:")), name


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.gpu.yml"])
def test_every_setting_in_compose_exists(file: str) -> None:
    num_checked = 0
    for name, kind in SETTINGS.items():
        fields = {"TIDEWAY_" + field.name.upper() for field in msgspec.structs.fields(kind)}
        for variable in environment_of(compose(file)["services"].get(name, {})):
            if variable.startswith("TIDEWAY_") and variable != "TIDEWAY_CONFIG":
                assert variable in fields, f"{file}: {name} has no {variable}"
                num_checked += 1
    assert num_checked >= 2


def test_any_setting_may_stand_in_the_file_of_settings(tmp_path: Path) -> None:
    text = (REPOSITORY / "deploy/settings.toml").read_text()
    assert tomllib.loads(text) == {}, "the defaults are the code's"
    file = tmp_path / "settings.toml"
    file.write_text(re.sub(r"^#   ", "", text, flags=re.MULTILINE))
    for name, kind in SETTINGS.items():
        service = compose()["services"][name]
        mounted = service["environment"]["TIDEWAY_CONFIG"]
        assert f"${{TIDEWAY_SETTINGS:-./deploy/settings.toml}}:{mounted}:ro" in service["volumes"]
        load(kind, {"TIDEWAY_CONFIG": str(file)})
    assert load(GatewaySettings, {"TIDEWAY_CONFIG": str(file)}).max_in_flight == 4096


def test_the_default_models_are_in_the_image() -> None:
    text = environment_of(compose()["services"]["placement"])["TIDEWAY_MODELS"]
    default = text.removeprefix("${TIDEWAY_MODELS:-").removesuffix("}")
    specs = PlacementSettings(models=default).model_specs()
    assert len(specs) == 2
    for spec in specs:
        assert (REPOSITORY / spec.source.removeprefix("/app/") / "config.json").is_file()


def test_prometheus_and_grafana_know_their_targets() -> None:
    services = compose()["services"]
    prometheus = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text())
    jobs = prometheus["scrape_configs"]
    mounted = [volume.split(":")[1] for volume in services["prometheus"]["volumes"]]
    assert set(prometheus["rule_files"]) <= set(mounted)
    names = {name for job in jobs for target in job["dns_sd_configs"] for name in target["names"]}
    assert names == set(SERVICES)
    source = yaml.safe_load((REPOSITORY / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090" and "prometheus" in services
    for service in services.values():
        for volume in service.get("volumes", ()):
            if volume.startswith("./"):
                assert (REPOSITORY / volume.split(":")[0]).exists(), volume


def test_every_instance_of_a_worker_is_scraped() -> None:
    _, instances = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    ports = [discovery["port"] for discovery in instances["dns_sd_configs"]]
    exposed = re.findall(r"^EXPOSE (\d+)-(\d+)$", (REPOSITORY / "services/worker/Dockerfile").read_text(), re.MULTILINE)
    assert ports == list(range(int(exposed[0][0]) + 1, int(exposed[0][0]) + 9)) and ports[-1] <= int(exposed[0][1])


def test_images_of_others_are_of_one_release_and_may_be_named_by_digest() -> None:
    services = compose()["services"]
    for name in services.keys() - set(SERVICES):
        variable, image = re.fullmatch(r"\$\{(\w+):-(.+)\}", services[name]["image"]).groups()  # type: ignore[union-attr]
        assert variable == f"{name.upper()}_IMAGE"
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+(-alpine)?", image), "a tag that does not move"


def test_workers_may_share_a_gpu() -> None:
    worker = compose("docker-compose.gpu.yml")["services"]["worker"]
    assert worker["scale"] == 1 and worker["environment"]["TIDEWAY_MEMORY_BYTES"] == "${TIDEWAY_GPU_MEMORY_BYTES:-0}"


def test_each_service_is_its_role_on_nats_and_its_monitoring_port_is_closed() -> None:
    services = compose()["services"]
    for name in SERVICES:
        environment = environment_of(services[name])
        assert environment["TIDEWAY_NATS_USER"] == name
        assert environment["TIDEWAY_NATS_PASSWORD"] == f"${{NATS_{name.upper()}_PASSWORD:-{name}}}"
    assert 'http: "127.0.0.1:8222"' in (REPOSITORY / "deploy/nats/nats.conf").read_text()
    assert "ports" not in services["nats"]


@pytest.mark.parametrize("password", ["tideway", "123", "12e5", "true", "a$b#c"])
def test_nats_takes_its_configuration_and_any_password(tmp_path: Path, password: str) -> None:
    nats = compose()["services"]["nats"]
    variables = {name: value for name, value in environment_of(nats).items() if name.startswith("NATS_")}
    assert variables == {
        f"NATS_{role.upper()}_PASSWORD": f'"${{NATS_{role.upper()}_PASSWORD:-{role}}}"' for role in ROLES
    }
    users = (REPOSITORY / "deploy/nats/users.conf").read_text()
    assert users == users_file([]), "tideway nats-config > deploy/nats/users.conf"
    (tmp_path / "users.conf").write_text(users)
    config = (REPOSITORY / "deploy/nats/nats.conf").read_text()
    # Only what cannot be had outside a container is changed.
    config = config.replace("0.0.0.0:4222", f"127.0.0.1:{free_port()}").replace('"/data"', f'"{tmp_path}"')
    (tmp_path / "nats.conf").write_text(config)
    result = subprocess.run(
        [nats_server_binary(), "-t", "-c", str(tmp_path / "nats.conf")],
        env={**os.environ, **dict.fromkeys(variables, f'"{password}"')},
        capture_output=True,
        text=True,
    )
    assert "is valid" in result.stderr, result.stderr
