"""The Kubernetes manifests, held against the code, the images and each other. Needs no cluster."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.worker.processes import KILL_TIMEOUT_S, STOP_MARGIN_S
from shared.bus.permissions import ROLES
from shared.settings import (
    GatewaySettings,
    InstanceSettings,
    PlacementSettings,
    SchedulerSettings,
    WorkerSettings,
    load,
)
from tideway.tree import gateway_stop_s

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "deploy/kubernetes"
BASE = FOLDER / "base"
SETTINGS: dict[str, Any] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "placement": PlacementSettings,
    "worker": WorkerSettings,
}
ALL_FIELDS = {"TIDEWAY_" + name.upper() for kind in SETTINGS.values() for name in kind.__struct_fields__}
KUBERNETES = "1.32"
"""The schema that the manifests are held against."""
FIELD_PATHS = {"metadata.name": "worker-0"}
SECRET = {**{f"nats-{role}-password": role[0] for role in ROLES}, "api-keys": "k", "admin-api-key": "a"}


@functools.cache
def documents() -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    assert {f"{p.name}" for p in BASE.glob("*.yaml")} - {"kustomization.yaml"} == set(kustomization["resources"])
    return [d for name in kustomization["resources"] for d in yaml.safe_load_all((BASE / name).read_text())]


def find(kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in documents() if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


WORKLOADS = {d["metadata"]["name"]: d for d in documents() if d["kind"] in ("Deployment", "StatefulSet")}


def pod(name: str) -> dict[str, Any]:
    return WORKLOADS[name]["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    return only  # type: ignore[no-any-return]


def environment(name: str) -> dict[str, str]:
    """As the kubelet would make it; fails for a reference to something that is not there."""
    values: dict[str, str] = {}
    for source in container(name).get("envFrom", ()):
        values |= find("ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container(name)["env"]:
        origin = variable.get("valueFrom", {})
        if "secretKeyRef" in origin:
            assert origin["secretKeyRef"]["name"] == "tideway"
            values[variable["name"]] = SECRET[origin["secretKeyRef"]["key"]]
        elif "fieldRef" in origin:
            values[variable["name"]] = FIELD_PATHS[origin["fieldRef"]["fieldPath"]]
        else:
            values[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], variable["value"])
    assert all(isinstance(value, str) for value in values.values())
    return values


def test_every_service_has_a_workload() -> None:
    assert WORKLOADS.keys() == {"nats", *SETTINGS}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_environment_is_what_the_service_reads(name: str) -> None:
    values = environment(name)
    assert {key for key in values if key.startswith("TIDEWAY_")} <= ALL_FIELDS
    own = {variable["name"] for variable in container(name)["env"]}
    assert own <= {"TIDEWAY_" + field.upper() for field in SETTINGS[name].__struct_fields__}
    settings = load(SETTINGS[name], values)
    assert (settings.nats_url, settings.nats_user) == ("nats://nats:4222", name)
    assert settings.nats_password == name[0]
    assert (settings.metrics_host, settings.metrics_port) == ("0.0.0.0", 9100)
    if name == "placement":
        assert [spec.source for spec in settings.model_specs()] == [
            f"/app/{folder.relative_to(REPOSITORY)}"
            for folder in sorted((REPOSITORY / "models").glob("tideway-demo-*"))
        ]


def test_kubernetes_sets_no_variables_of_its_own() -> None:
    """Its links to a service named tideway would set TIDEWAY_PORT."""
    assert all(pod(name)["enableServiceLinks"] is False for name in WORKLOADS)


@pytest.mark.parametrize("name", WORKLOADS)
def test_probes_ask_ports_and_paths_that_are_served(name: str) -> None:
    ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
    paths = {"http": {"/health", "/ready"}, "metrics": {"/health", "/live", "/ready"}, "monitor": {"/healthz"}}
    probes = {key: value for key, value in container(name).items() if key.endswith("Probe")}
    assert {"readinessProbe", "livenessProbe"} <= probes.keys()
    for probe in probes.values():
        asked = probe.get("httpGet") or probe["tcpSocket"]
        assert asked["port"] in ports
        if "path" in asked:
            assert asked["path"].partition("?")[0] in paths[asked["port"]]
    if name != "nats":
        asked = probes["livenessProbe"].get("httpGet", {})
        assert (asked.get("port"), asked.get("path")) != ("metrics", "/health"), "an outage of NATS restarts no pod"
        assert ports["metrics"] == int(environment(name)["TIDEWAY_METRICS_PORT"])


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_run_without_privileges_and_within_limits(name: str) -> None:
    assert container(name)["securityContext"]["readOnlyRootFilesystem"] is True
    if name != "nats":
        assert {"name": "tmp", "mountPath": "/tmp"} in container(name)["volumeMounts"], (
            "UCX, for one, makes files there"
        )
    assert "memory" in container(name)["resources"]["limits"]
    mounts = {mount["name"] for mount in container(name).get("volumeMounts", ())}
    volumes = {volume["name"] for volume in pod(name).get("volumes", ())}
    volumes |= {claim["metadata"]["name"] for claim in WORKLOADS[name]["spec"].get("volumeClaimTemplates", ())}
    assert mounts == volumes


@pytest.mark.parametrize("document", documents(), ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_manifests_are_of_kubernetes_schema(document: dict[str, Any]) -> None:
    """Strictly: no field that the schema does not have."""
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def violations(spec: dict[str, Any]) -> list[str]:
    """Of a pod's spec against the Pod Security Standard `restricted`, with all of `baseline`
    (https://kubernetes.io/docs/concepts/security/pod-security-standards/, Linux pods)."""
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    found += [f"volume {kind}" for volume in spec.get("volumes", ()) for kind in volume.keys() - {"name"} - allowed]
    of_pod = spec.get("securityContext", {})
    found += [f"sysctl {sysctl['name']}" for sysctl in of_pod.get("sysctls", ())]
    for key in ("initContainers", "containers", "ephemeralContainers"):
        for one in spec.get(key, ()):
            context = {**of_pod, **one.get("securityContext", {})}
            capabilities = context.get("capabilities", {})
            rules = {
                "privileged": not context.get("privileged"),
                "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
                "runAsNonRoot": context.get("runAsNonRoot") is True,
                "runAsUser": context.get("runAsUser") != 0,
                "seccompProfile": context.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
                "appArmorProfile": context.get("appArmorProfile", {}).get("type") != "Unconfined",
                "seLinuxOptions": not context.get("seLinuxOptions", {}).keys() & {"user", "role"},
                "procMount": context.get("procMount", "Default") == "Default",
                "capabilities": capabilities.get("drop") == ["ALL"]
                and set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"},
                "hostPort": not any(port.get("hostPort") for port in one.get("ports", ())),
            }
            found += [f"{one['name']}: {rule}" for rule, holds in rules.items() if not holds]
    return found


@pytest.mark.parametrize("name", WORKLOADS)
def test_pod_security_restricted_admits_every_pod(name: str) -> None:
    assert violations(pod(name)) == []
    assert find("Namespace", "tideway")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_what_restricted_does_not_admit_is_found() -> None:
    bare = {"hostPID": True, "volumes": [{"name": "root", "hostPath": {"path": "/"}}], "containers": [{"name": "c"}]}
    assert violations(bare) == [
        "hostPID",
        "volume hostPath",
        *(f"c: {rule}" for rule in ("allowPrivilegeEscalation", "runAsNonRoot", "seccompProfile", "capabilities")),
    ]


@pytest.mark.parametrize("name", SETTINGS)
def test_replicas_are_spread_and_go_one_at_a_time(name: str) -> None:
    labels = WORKLOADS[name]["spec"]["selector"]
    assert find("PodDisruptionBudget", name)["spec"] == {"maxUnavailable": 1, "selector": labels}
    (spread,) = pod(name)["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["labelSelector"]) == ("kubernetes.io/hostname", labels)


def reaches(source: str, target: str, port: int) -> bool:
    """Whether the network policies let a pod of `source` (an app here, else a namespace) reach this port of `target`."""

    def selects(selector: dict[str, Any], app: str) -> bool:
        return {"app": app}.items() >= selector.get("matchLabels", {}).items() and all(
            app in expression["values"] for expression in selector.get("matchExpressions", ())
        )

    def is_from(peer: dict[str, Any]) -> bool:
        if "namespaceSelector" in peer:
            return peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] == source
        return source in WORKLOADS and selects(peer["podSelector"], source)

    names = {named["name"]: named["containerPort"] for named in container(target)["ports"]}
    policies = [d["spec"] for d in documents() if d["kind"] == "NetworkPolicy"]
    rules = [rule for spec in policies if selects(spec["podSelector"], target) for rule in spec.get("ingress", ())]
    return any(
        all_or_one(rule.get("from"), is_from)
        and all_or_one(
            rule.get("ports"),
            lambda p: (first := names.get(p["port"], p["port"])) <= port <= p.get("endPort", first),
        )
        for rule in rules
    )


def all_or_one(items: list[dict[str, Any]] | None, holds: Callable[[dict[str, Any]], bool]) -> bool:
    """A rule without a list holds for all."""
    return items is None or any(map(holds, items))


def test_who_reaches_whom() -> None:
    for policy in (d["spec"] for d in documents() if d["kind"] == "NetworkPolicy"):
        assert policy["policyTypes"] == ["Ingress"]
    assert find("NetworkPolicy", "default")["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}, "nobody, else"
    assert all(reaches(name, "nats", 4222) for name in SETTINGS) and not reaches("elsewhere", "nats", 4222)
    assert not any(reaches(name, "nats", 8222) for name in (*SETTINGS, "elsewhere"))
    assert reaches("elsewhere", "gateway", 8000) and not reaches("elsewhere", "gateway", 9100)
    assert all(reaches("monitoring", name, 9100) for name in SETTINGS)
    assert reaches("monitoring", "worker", 9101), "an instance's metrics"
    first, last = map(int, load(InstanceSettings, environment("worker")).kv_ports.split("-"))
    for port, is_open in ((first - 1, False), (first, True), (last, True), (last + 1, False)):
        assert reaches("worker", "worker", port) == is_open, "moves of KV"
        assert not any(reaches(name, "worker", port) for name in ("gateway", "scheduler", "placement", "monitoring"))


@pytest.mark.parametrize("name", SETTINGS)
def test_images_are_those_of_the_dockerfiles(name: str) -> None:
    text = (REPOSITORY / f"services/{name}/Dockerfile").read_text()
    (uid,) = re.findall(r"useradd --uid (\d+)", text)
    assert pod(name)["securityContext"]["runAsUser"] == int(uid)
    compose = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    assert container(name)["image"] == compose["services"][name]["image"]


def test_selectors_labels_and_services_agree() -> None:
    for name, workload in WORKLOADS.items():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert workload["spec"].get("serviceName", name) == name
    for service in (d for d in documents() if d["kind"] == "Service"):
        name = service["spec"]["selector"]["app"]
        ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
        for port in service["spec"]["ports"]:
            assert port.get("targetPort", port["port"]) in {*ports, *ports.values()}


def test_nats_is_configured_as_in_the_container_stack() -> None:
    def settings(text: str) -> list[str]:
        # The kubelet asks from outside the pod.
        return [line for line in text.splitlines() if not line.startswith(("#", "http:"))]

    inline = find("ConfigMap", "nats")["data"]["nats.conf"]
    assert settings(inline) == settings((REPOSITORY / "deploy/nats/nats.conf").read_text())
    for role in ROLES:
        assert environment("nats")[f"NATS_{role.upper()}_PASSWORD"] == f'"{role[0]}"'
    users = find("ConfigMap", "nats-users")["data"]["users.conf"]
    assert users == (REPOSITORY / "deploy/nats/users.conf").read_text()


def test_only_placement_may_use_the_api_server_and_only_for_the_workers() -> None:
    assert all(pod(name).get("automountServiceAccountToken") is False for name in WORKLOADS if name != "placement")
    account = pod("placement")["serviceAccountName"]
    binding = find("RoleBinding", "placement")
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": find("ServiceAccount", account)["metadata"]["name"]}
    ]
    assert binding["roleRef"]["name"] == find("Role", "placement")["metadata"]["name"]
    (rule,) = find("Role", "placement")["rules"]
    kind, _, workload = environment("placement")["TIDEWAY_KUBERNETES_WORKLOAD"].partition("/")
    assert kind == WORKLOADS[workload]["kind"].lower()
    assert (rule["apiGroups"], rule["resources"]) == (["apps"], [f"{kind}s/scale"])
    assert (rule["resourceNames"], rule["verbs"]) == ([workload], ["get", "patch"]), "as the back end calls it"
    assert environment("placement")["TIDEWAY_SCALING_BACKEND"] == "kubernetes"


def test_bounds_of_the_number_of_workers() -> None:
    settings = load(SchedulerSettings, environment("scheduler"))
    assert not settings.autoscale, "asked for, not the rule"
    assert settings.min_instances <= WORKLOADS["worker"]["spec"]["replicas"] <= settings.max_instances
    budget = find("PodDisruptionBudget", "worker")["spec"]
    assert budget["selector"] == WORKLOADS["worker"]["spec"]["selector"]


def test_workers_are_left_the_time_to_give_their_requests_away() -> None:
    needed_s = InstanceSettings().drain_grace_s + STOP_MARGIN_S + KILL_TIMEOUT_S
    assert pod("worker")["terminationGracePeriodSeconds"] > needed_s
    compose = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    assert float(compose["services"]["worker"]["stop_grace_period"].removesuffix("s")) > needed_s


def test_gateways_are_left_the_time_for_their_streams() -> None:
    settings = load(GatewaySettings, environment("gateway"))
    probe = container("gateway")["readinessProbe"]
    assert settings.leave_s > probe["periodSeconds"], "it is seen that it leaves"
    assert pod("gateway")["terminationGracePeriodSeconds"] > gateway_stop_s(settings)
    gateway = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]["gateway"]
    assert float(gateway["stop_grace_period"].removesuffix("s")) > gateway_stop_s(GatewaySettings())
    memory_bytes = settings.text_processes * settings.text_memory_bytes
    assert container("gateway")["resources"]["limits"]["memory"] == "2Gi" and gateway["mem_limit"] == "2g"
    assert memory_bytes <= 2**30, "half of it is the gateway's own"


def test_the_gpu_overlay_changes_the_worker_only() -> None:
    overlay = yaml.safe_load((FOLDER / "gpu/kustomization.yaml").read_text())
    assert overlay["resources"] == ["../base"]
    (patch,) = [yaml.safe_load(item["patch"]) for item in overlay["patches"]]
    assert (patch["kind"], patch["metadata"]["name"]) == ("StatefulSet", "worker")
    (changed,) = patch["spec"]["template"]["spec"]["containers"]
    assert changed["name"] == container("worker")["name"]
    assert {variable["name"] for variable in changed["env"]} <= ALL_FIELDS
    assert overlay["images"][0]["name"] == container("worker")["image"]


def test_the_secret_of_the_readme_has_every_key() -> None:
    keys = set(re.findall(r"--from-literal=([\w-]+)=", (FOLDER / "README.md").read_text()))
    assert keys == SECRET.keys()
