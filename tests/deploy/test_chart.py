"""The Helm chart, rendered for each kind of cluster in its examples, held against the code, the images and each other. Needs
no cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.worker.node.processes import KILL_TIMEOUT_S, STOP_MARGIN_S
from shared.runtime.settings import (
    GatewaySettings,
    InstanceSettings,
    PlacementSettings,
    SchedulerSettings,
    WorkerSettings,
    load,
)
from tests.deploy.chart import CHART, EXAMPLES, NAMESPACE, REPOSITORY, RefusedError, lint, render
from tests.deploy.cluster import CLUSTERS, Cluster, cluster
from tests.deploy.custom_resources import SCHEMAS, check
from tests.deploy.metrics import every_metric
from tideway.tree import gateway_stop_s

TAG = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
SETTINGS: dict[str, Any] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "placement": PlacementSettings,
    "worker": WorkerSettings,
}
ALL_FIELDS = {
    "TIDEWAY_" + name.upper() for kind in (*SETTINGS.values(), InstanceSettings) for name in kind.__struct_fields__
}
OLDEST, NEWEST = "1.30", "1.37"
"""Schemas that the documents are held against."""


def services(here: Cluster) -> list[tuple[str, str]]:
    """(workload, component) of Tideway's own services."""
    return [(name, here.component(name)) for name in here.workloads if here.component(name) in SETTINGS]


# ------------------------------------------------------------------------------------------------------ the chart


@pytest.mark.parametrize("name", CLUSTERS)
def test_helm_s_linter_finds_no_fault(name: str) -> None:
    assert lint(CLUSTERS[name]) == []


@pytest.mark.parametrize("kubernetes", [OLDEST, NEWEST])
def test_documents_are_of_kubernetes_schema(here: Cluster, kubernetes: str) -> None:
    """Strictly: no field that the schema does not have. Custom resources against what this project knows of them."""
    for document in here.documents:
        if document["kind"] in SCHEMAS:
            check(document)
        else:
            kubernetes_validate.validate(document, kubernetes, strict=True)


def test_the_rest_of_the_values_makes_documents_too() -> None:
    """Those that no example has."""
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    toleration = {"key": "a", "operator": "Exists"}
    pool = {
        "name": "odd",
        "instances": 2,
        "affinity": affinity,
        "podAnnotations": {"example.org/b": "1"},
        "rdma": {"enabled": True, "resource": "rdma/ib", "count": 2, "networks": "ib-net"},
        "settings": {"TIDEWAY_PROMPT_LOOKUP": 4, "TIDEWAY_DETERMINISTIC": True},
        "memoryBytes": 80 << 30,
    }
    values = {
        "podAnnotations": {"example.org/a": "yes"},
        "nats": {"antiAffinity": "soft", "nodeSelector": {"disk": "ssd"}, "tolerations": [toleration]},
        "gateway": {"service": {"type": "LoadBalancer", "annotations": {"example.org/lb": "internal"}}},
        "models": {
            "huggingFace": {"endpoint": "https://hub.internal"},
            "cache": {"kind": "shared", "existingClaim": "mine"},
        },
        "workers": {"pools": [pool]},
        "scaling": {"pool": "odd"},
        "networkPolicy": {"egress": {"restricted": True, "more": [{"ports": [{"port": 4318}]}]}},
        "backup": {"enabled": True, "existingClaim": "backups"},
    }
    here = Cluster(render(values))
    for document in here.documents:
        kubernetes_validate.validate(document, NEWEST, strict=True)
    assert refusals(here) == []
    annotations = here.template("tideway-worker-odd")["metadata"]["annotations"]
    assert (
        annotations.items()
        >= {"example.org/a": "yes", "example.org/b": "1", "k8s.v1.cni.cncf.io/networks": "ib-net"}.items()
    )
    environment = here.environment("tideway-worker-odd")
    settings = load(InstanceSettings, environment)
    assert (settings.prompt_lookup, settings.deterministic) == (4, True)
    assert load(WorkerSettings, environment).memory_bytes == 80 << 30, "and no 8.589934592e+10"
    assert environment["HF_ENDPOINT"] == "https://hub.internal"
    assert here.of_kind("PersistentVolumeClaim") == [], "they are there"
    assert "preferredDuringSchedulingIgnoredDuringExecution" in here.pod("tideway-nats")["affinity"]["podAntiAffinity"]


LABEL = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"


def refusals(here: Cluster) -> list[str]:
    """What the API server refuses beyond its schemas (k8s.io/kubernetes/pkg/apis/core/validation), of what the chart has."""
    found = []
    for name, workload in here.workloads.items():
        container, pod = here.container(name), here.pod(name)
        labels = {**workload["metadata"]["labels"], **here.template(name)["metadata"]["labels"]}
        found += [f"{name}: label {value}" for value in labels.values() if not re.fullmatch(LABEL, value)]
        ports = [port["name"] for port in container.get("ports", ())]
        found += [
            f"{name}: port {port}" for port in ports if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?", port)
        ]
        for what, names in (
            ("port", ports),
            ("variable", [variable["name"] for variable in container["env"]]),
            ("volume", [volume["name"] for volume in pod["volumes"]]),
            ("mount", [mount["mountPath"] for mount in container["volumeMounts"]]),
        ):
            found += [f"{name}: {what} {each} twice" for each in set(names) if names.count(each) > 1]
        for resource, limit in container["resources"]["limits"].items():
            request = container["resources"]["requests"].get(resource, limit)
            if "/" in resource and request != limit:
                found.append(f"{name}: {resource} is not as requested")
        # Its revisions are a label of its pods: the name, a dash and ten digits.
        if workload["kind"] == "StatefulSet" and len(name) > 52:
            found.append(f"{name}: too long")
    return found


def test_the_api_server_would_take_it(here: Cluster) -> None:
    assert refusals(here) == []


def test_names_that_would_be_too_long_are_refused() -> None:
    pool = {"name": "a-pool-with-a-long-nam", "replicas": 1}
    assert refusals(Cluster(render({"workers": {"pools": [pool]}, "scaling": {"pool": ""}}))) == []
    long = Cluster(render({"workers": {"pools": [{"name": "cpu"}]}}, release="r" * 30))
    assert refusals(long) == []
    with pytest.raises(RefusedError, match="52 characters"):
        render({"workers": {"pools": [pool]}, "scaling": {"pool": ""}}, release="r" * 30)


def test_names_are_unique_and_in_the_release_s_namespace(here: Cluster) -> None:
    names = [(d["kind"], d["metadata"]["name"]) for d in here.documents]
    assert len(names) == len(set(names))
    assert all(d["metadata"]["namespace"] == NAMESPACE for d in here.documents)
    assert all(re.fullmatch(r"tideway(-[a-z0-9-]+)?", name) and len(name) < 53 for _, name in names)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"bogus": 1}, "bogus"),
        ({"nats": {"replicas": "three"}}, "replicas"),
        ({"nats": {"replicas": 2}}, "no majority"),
        ({"models": {"cache": {"kind": "hostPath"}}}, "kind"),
        ({"models": {"warmUp": {"enabled": True}}}, "models.cache.kind shared"),
        ({"settings": {"TIDEWAY_NATS_URL": "nats://elsewhere"}}, "TIDEWAY_NATS_URL"),
        ({"image": {"digests": {"tideway-worker": "latest"}}}, "sha256"),
        ({"workers": {"pools": []}}, "pools"),
        ({"workers": {"pools": [{"name": "cpu", "podsPerInstance": 2}]}}, "processes of one pod"),
        ({"workers": {"pools": [{"name": "cpu", "device": "cuda"}]}}, "needs gpus"),
        ({"workers": {"pools": [{"name": "cpu", "gpus": 1}]}}, "gpus with device cpu"),
        ({"workers": {"pools": [{"name": "cpu", "device": "cuda", "gpus": 3, "tensorParallel": 2}]}}, "do not divide"),
        (
            {
                "workers": {
                    "pools": [{"name": "cpu", "device": "cuda", "gpus": 2, "gpuResource": "nvidia.com/mig-1g.5gb"}]
                }
            },
            "one MIG slice",
        ),
        ({"workers": {"pools": [{"name": "cpu", "ownNatsUsers": True}]}}, "StatefulSet of its own"),
        ({"workers": {"pools": [{"name": "cpu", "keda": {"enabled": True}}]}}, "either KEDA or placement"),
        ({"workers": {"pools": [{"name": "gpu"}]}}, "none of workers.pools"),
        ({"scaling": {"pool": "", "autoscale": True}}, "scaling.autoscale needs"),
        ({"gateway": {"hpa": {"enabled": True}, "keda": {"enabled": True}}}, "either hpa or keda"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"secret": {"external": {"enabled": True}}}, "store.name"),
        ({"backup": {"restore": "2026-11-04T03-17-00Z"}}, "needs backup.enabled"),
        ({"backup": {"enabled": True, "restore": "yesterday"}}, "restore"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_cannot_work_are_refused_with_the_reason(values: dict[str, Any], why: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(why)):
        render(values)


def test_the_schema_knows_every_value_and_its_defaults_are_those_of_the_code() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def unknown(value: Any, known: dict[str, Any], path: str) -> list[str]:
        known = schema["definitions"][known["$ref"].rpartition("/")[2]] if "$ref" in known else known
        if not isinstance(value, dict) or known.get("additionalProperties") is not False:
            return []
        missing = [f"{path}.{key}" for key in known["properties"].keys() - value.keys() - {"name", "global"}]
        return missing + [
            each for key, inner in value.items() for each in unknown(inner, known["properties"][key], f"{path}.{key}")
        ]

    assert unknown(values, schema, "") == [], "a value without a default is one that nobody finds"
    defaults = values["workers"]["defaults"]
    for name, value in (("tensor_parallel", "tensorParallel"), ("pipeline_parallel", "pipelineParallel")):
        assert getattr(WorkerSettings(), name) == defaults[value]
    assert InstanceSettings().drain_grace_s == defaults["drainGraceSeconds"]
    version = re.search(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version[1]


# ----------------------------------------------------------------------------------------------------- environment


def test_the_environment_is_what_the_service_reads(here: Cluster) -> None:
    for name, component in services(here):
        values = here.environment(name)
        assert {key for key in values if key.startswith("TIDEWAY_")} <= ALL_FIELDS
        own = {v["name"] for v in here.container(name)["env"] if v["name"].startswith("TIDEWAY_")}
        fields = {
            *SETTINGS[component].__struct_fields__,
            *(InstanceSettings.__struct_fields__ if component == "worker" else ()),
        }
        assert own <= {"TIDEWAY_" + field.upper() for field in fields}
        settings = load(SETTINGS[component], values)
        assert settings.nats_user.partition("-")[0] == component
        assert settings.nats_password == f"nats-{settings.nats_user}-password"
        assert (settings.metrics_host, settings.metrics_port) == ("0.0.0.0", 9100)
        servers = here.find("StatefulSet", "tideway-nats")["spec"]["replicas"]
        assert settings.nats_url.split(",") == [f"nats://tideway-nats-{i}.tideway-nats:4222" for i in range(servers)]
        assert values["TIDEWAY_NATS_REPLICAS"] == str(min(servers, 3))
        attributes = dict(item.split("=") for item in values["OTEL_RESOURCE_ATTRIBUTES"].split(","))
        assert attributes["k8s.pod.name"] == f"{name}-0" and attributes["k8s.namespace.name"] == NAMESPACE


def test_models_reach_placement() -> None:
    settings = load(PlacementSettings, cluster("default").environment("tideway-placement"))
    assert [spec.source for spec in settings.model_specs()] == [
        f"/app/{folder.relative_to(REPOSITORY)}" for folder in sorted((REPOSITORY / "models").glob("tideway-demo-*"))
    ]
    values = {
        "models": {
            "initial": [{"name": "m", "source": "org/m", "quantization": "int8"}],
            "adapters": [{"name": "a", "base": "m", "source": "org/a"}],
        }
    }
    settings = load(PlacementSettings, Cluster(render(values)).environment("tideway-placement"))
    (spec,) = settings.model_specs()
    assert (spec.name, spec.source, spec.quantization) == ("m", "org/m", "int8")
    (adapter,) = settings.adapter_specs()
    assert (adapter.name, adapter.base, adapter.source) == ("a", "m", "org/a")


def test_settings_reach_all_services_or_one_and_roll_its_pods() -> None:
    plain, changed = cluster("default"), Cluster(render({"settings": {"TIDEWAY_LOG_LEVEL": "DEBUG"}}))
    of_one = Cluster(render({"gateway": {"settings": {"TIDEWAY_MAX_IN_FLIGHT": 64}}}))
    renewed = Cluster(render({"secret": {"revision": 2}}))
    for name, component in services(plain):
        assert load(SETTINGS[component], changed.environment(name)).log_level == "DEBUG"
        assert changed.template(name) != plain.template(name), "pods roll"
        assert (of_one.template(name) != plain.template(name)) == (component == "gateway")
        assert renewed.template(name) != plain.template(name)
    assert load(GatewaySettings, of_one.environment("tideway-gateway")).max_in_flight == 64
    assert changed.template("tideway-nats") == plain.template("tideway-nats"), "but the bus stays"
    other = Cluster(render({"nats": {"maxFileStore": "8GB"}}))
    assert other.template("tideway-nats") != plain.template("tideway-nats")


def test_a_setting_is_the_chart_s_or_the_operator_s(here: Cluster) -> None:
    """Never both: Kubernetes refuses a variable that stands there twice."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    refused = set(schema["definitions"]["settings"]["propertyNames"]["not"]["enum"])
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    free = {"TIDEWAY_LOG_LEVEL", "TIDEWAY_LOG_FORMAT", *values["gateway"]["settings"], "UCX_NET_DEVICES"}
    for name, _ in services(here):
        variables = [variable["name"] for variable in here.container(name)["env"]]
        assert len(variables) == len(set(variables))
        made = {key for key in here.environment(name) if key.startswith(("TIDEWAY_", "HF_", "UCX_"))}
        assert made - free <= refused


def test_a_new_version_of_the_chart_alone_rolls_nothing(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "tideway")
    file = tmp_path / "tideway/Chart.yaml"
    file.write_text(re.sub(r"^version: .*$", "version: 99.9.9", file.read_text(), flags=re.MULTILINE))
    newer, here = Cluster(render(EXAMPLES["mixed-gpus"], tmp_path / "tideway")), cluster("mixed-gpus")
    assert newer.documents != here.documents
    for name in here.workloads.keys() - {"tideway-test"}:
        assert newer.template(name) == here.template(name)


def test_kubernetes_sets_no_variables_of_its_own(here: Cluster) -> None:
    """Its links to a service named tideway would set TIDEWAY_PORT."""
    assert all(here.pod(name)["enableServiceLinks"] is False for name in here.workloads)


# ------------------------------------------------------------------------------------------------------------ pods


def test_probes_ask_ports_and_paths_that_are_served(here: Cluster) -> None:
    paths = {"http": {"/health", "/ready"}, "metrics": {"/health", "/live", "/ready"}, "monitor": {"/healthz"}}
    for name in here.workloads:
        if here.component(name) in ("warm-up", "backup", "test"):
            continue
        container = here.container(name)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = {
            key: value["httpGet"] for key, value in container.items() if key.endswith("Probe") and "exec" not in value
        }
        assert {"readinessProbe", "livenessProbe"} <= probes.keys()
        for asked in probes.values():
            assert asked["port"] in ports and asked["path"].partition("?")[0] in paths[asked["port"]]
        if here.component(name) != "nats":
            asked = probes["livenessProbe"]
            assert (asked["port"], asked["path"]) == ("metrics", "/live"), "an outage of NATS restarts no pod"
            assert ports["metrics"] == int(here.environment(name)["TIDEWAY_METRICS_PORT"])


def test_pods_run_without_privileges_and_within_limits(here: Cluster) -> None:
    for name, workload in here.workloads.items():
        container = here.container(name)
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        if here.component(name) != "nats":
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"], "UCX, for one, makes files there"
        assert "memory" in container["resources"]["limits"]
        mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
        volumes = {volume["name"] for volume in here.pod(name).get("volumes", ())}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
        assert mounts == volumes
        for volume in here.pod(name)["volumes"]:
            assert volume.get("emptyDir", {"sizeLimit": 1}).get("sizeLimit"), "a node's disk is not without limit"


def violations(spec: dict[str, Any]) -> list[str]:
    """Violations of a pod's spec against the Pod Security Standard `restricted`, with all of `baseline`
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


def test_pod_security_restricted_admits_every_pod_but_those_with_rdma(here: Cluster) -> None:
    for name in here.workloads:
        pins_memory = here.container(name)["securityContext"]["capabilities"].get("add") == ["IPC_LOCK"]
        assert violations(here.pod(name)) == (["worker: capabilities"] if pins_memory else [])
        assert pins_memory == ("rdma/hca" in here.container(name)["resources"]["limits"])


def test_what_restricted_does_not_admit_is_found() -> None:
    bare = {"hostPID": True, "volumes": [{"name": "root", "hostPath": {"path": "/"}}], "containers": [{"name": "c"}]}
    assert violations(bare) == [
        "hostPID",
        "volume hostPath",
        *(f"c: {rule}" for rule in ("allowPrivilegeEscalation", "runAsNonRoot", "seccompProfile", "capabilities")),
    ]


def test_replicas_are_spread_and_go_one_at_a_time(here: Cluster) -> None:
    budgets = here.of_kind("PodDisruptionBudget")
    for name, _ in services(here):
        labels = here.template(name)["metadata"]["labels"]
        (own,) = [b for b in budgets if b["spec"]["selector"]["matchLabels"].items() <= labels.items()]
        assert own["spec"]["maxUnavailable"] == 1
        (spread,) = here.pod(name)["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


def test_selectors_labels_and_services_agree(here: Cluster) -> None:
    names = {service["metadata"]["name"] for service in here.of_kind("Service")}
    for name, workload in here.workloads.items():
        if workload["kind"] in ("Deployment", "StatefulSet"):
            labels = here.template(name)["metadata"]["labels"]
            assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
            others = [o for o in here.workloads if o != name]
            taken = [here.template(o)["metadata"]["labels"] for o in others]
            assert not any(workload["spec"]["selector"]["matchLabels"].items() <= t.items() for t in taken)
            assert workload["spec"].get("serviceName", "tideway-nats") in names
    for service in here.of_kind("Service"):
        (target, *_) = here.of_component(service["spec"]["selector"]["app.kubernetes.io/component"])
        ports = {port["name"]: port["containerPort"] for port in here.container(target)["ports"]}
        for port in service["spec"]["ports"]:
            assert port.get("targetPort", port["port"]) in {*ports, *ports.values()}


@pytest.mark.parametrize("component", SETTINGS)
def test_images_are_those_of_the_dockerfiles(component: str) -> None:
    here = cluster("default")
    (name,) = here.of_component(component)
    text = (REPOSITORY / f"services/{component}/Dockerfile").read_text()
    (uid,) = re.findall(r"useradd --uid (\d+)", text)
    assert here.pod(name)["securityContext"]["runAsUser"] == int(uid)
    compose = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    assert here.container(name)["image"] == f"{compose[component]['image']}:{TAG}"
    (nats,) = re.findall(r":-(.+)\}", compose["nats"]["image"])
    assert here.container("tideway-nats")["image"] == nats


def test_images_of_a_registry_by_tag_or_digest() -> None:
    digest = "sha256:" + "ab" * 32
    image = {"registry": "r.example.org/x/", "tag": "1.2", "digests": {"tideway-worker": digest}, "pullSecrets": ["r"]}
    here = Cluster(render({"image": image}))
    assert here.container("tideway-gateway")["image"] == "r.example.org/x/tideway-gateway:1.2"
    assert here.container("tideway-worker-cpu")["image"] == f"r.example.org/x/tideway-worker@{digest}"
    assert all(here.pod(name)["imagePullSecrets"] == [{"name": "r"}] for name in here.workloads)
    gpu = yaml.safe_load((REPOSITORY / "docker-compose.gpu.yml").read_text())["services"]["worker"]["image"]
    closed = EXAMPLES["closed-network"]["image"]["digests"]
    assert cluster("closed-network").container("tideway-worker-gpu-0")["image"].endswith(f"/{gpu}@{closed[gpu]}")


def test_workers_are_left_the_time_to_give_their_requests_away(here: Cluster) -> None:
    for name in here.of_component("worker"):
        grace_s = load(InstanceSettings, here.environment(name)).drain_grace_s
        assert here.pod(name)["terminationGracePeriodSeconds"] > grace_s + STOP_MARGIN_S + KILL_TIMEOUT_S
    compose = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    needed_s = InstanceSettings().drain_grace_s + STOP_MARGIN_S + KILL_TIMEOUT_S
    assert float(compose["services"]["worker"]["stop_grace_period"].removesuffix("s")) > needed_s


def test_gateways_are_left_the_time_for_their_streams(here: Cluster) -> None:
    settings = load(GatewaySettings, here.environment("tideway-gateway"))
    probe = here.container("tideway-gateway")["readinessProbe"]
    assert settings.leave_s > probe["periodSeconds"], "it is seen that it leaves"
    assert here.pod("tideway-gateway")["terminationGracePeriodSeconds"] > gateway_stop_s(settings)
    gateway = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]["gateway"]
    assert float(gateway["stop_grace_period"].removesuffix("s")) > gateway_stop_s(GatewaySettings())
    memory_bytes = settings.text_processes * settings.text_memory_bytes
    assert here.container("tideway-gateway")["resources"]["limits"]["memory"] == "2Gi" and gateway["mem_limit"] == "2g"
    assert memory_bytes <= 2**30, "half of it is the gateway's own"
    assert settings.max_client_connections == settings.max_connections, "all clients may come from one proxy"


# --------------------------------------------------------------------------------------------------------- workers


def test_a_pool_has_the_engines_that_it_names() -> None:
    model = {"name": "fast", "source": "/checkpoints/fast", "engine": "vllm", "engine_args": "--max-num-seqs 64"}
    pools = [{"name": "cpu"}, {"name": "vllm", "engines": ["vllm"]}]
    here = Cluster(render({"models": {"initial": [model]}, "workers": {"pools": pools}, "scaling": {"pool": ""}}))
    assert "initContainers" not in here.pod("tideway-worker-cpu")
    (made,) = here.pod("tideway-worker-vllm")["initContainers"]
    assert made["command"] == ["python", "-m", "tideway", "engine", "install", "vllm", "--device", "cpu"]
    mounts = {mount["mountPath"] for mount in made["volumeMounts"]}
    assert "/cache" in mounts and {v["name"]: v["value"] for v in made["env"]}["TMPDIR"] == "/cache", (
        "some GB, unpacked"
    )
    mirrored = {"name": "vllm", "engines": ["vllm"], "enginesEnv": {"PIP_INDEX_URL": "https://mirror.internal/simple"}}
    other = Cluster(render({"workers": {"pools": [mirrored]}, "scaling": {"pool": ""}}))
    (made,) = other.pod("tideway-worker-vllm")["initContainers"]
    assert {"name": "PIP_INDEX_URL", "value": "https://mirror.internal/simple"} in made["env"]
    assert (REPOSITORY / "services/worker/Dockerfile").read_text().count("ENV TIDEWAY_ENGINES_DIR=/cache/engines") == 1
    assert json.loads(here.environment("tideway-placement")["TIDEWAY_MODELS"]) == [model]


def test_pools_of_several_kinds_of_gpu() -> None:
    here = cluster("mixed-gpus")
    names = ["tideway-worker-h100", "tideway-worker-l40s", "tideway-worker-a100-slices"]
    assert here.of_component("worker") == names
    gpus = {name: here.container(name)["resources"]["limits"] for name in names}
    assert gpus[names[0]]["nvidia.com/gpu"] == 8 and gpus[names[1]]["nvidia.com/gpu"] == 1
    assert gpus[names[2]]["nvidia.com/mig-3g.40gb"] == 1 and "nvidia.com/gpu" not in gpus[names[2]]
    for name, (instances, ranks) in zip(names, [(2, 4), (1, 1), (1, 1)], strict=True):
        settings = load(WorkerSettings, here.environment(name))
        assert (settings.device, settings.num_instances, settings.tensor_parallel) == ("cuda", instances, ranks)
        pod = here.pod(name)
        assert pod["nodeSelector"].keys() == {"nvidia.com/gpu.product"} and pod["tolerations"]
        assert (pod["runtimeClassName"], pod["priorityClassName"]) == ("nvidia", "inference")
        (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
        assert shm == {"medium": "Memory", "sizeLimit": "8Gi"}
        # As the node agent numbers them: after the first device of each.
        ports = {port["name"]: port["containerPort"] for port in here.container(name)["ports"]}
        assert [ports[f"instance-{k}"] for k in range(instances)] == [9101 + k * ranks for k in range(instances)]
    assert here.environment(names[0])["UCX_NET_DEVICES"] == "mlx5_0:1,eth0"
    assert here.container(names[0])["image"] == f"tideway-worker-cuda:{TAG}"


def test_each_worker_may_be_a_user_of_its_own_on_nats() -> None:
    here = cluster("closed-network")
    names = here.of_component("worker")
    assert names == [f"tideway-worker-gpu-{i}" for i in range(3)]
    for name in names:
        assert here.workloads[name]["spec"]["replicas"] == 1
        environment = here.environment(name)
        assert environment["TIDEWAY_NATS_USER"] == "worker-" + environment["TIDEWAY_NODE_ID"]
        assert here.secrets(name)["TIDEWAY_NATS_PASSWORD"] == f"nats-worker-{name}-0-password"
    assert "nats-worker-password" not in here.secrets("tideway-nats").values()


# --------------------------------------------------------------------------------------------------------- network


def test_who_reaches_whom(here: Cluster) -> None:
    names = [name for name, _ in services(here)]
    workers = here.of_component("worker")
    default = here.find("NetworkPolicy", "tideway-default")["spec"]
    assert "ingress" not in default and "Ingress" in default["policyTypes"], "nobody, else"
    assert all(here.reaches(name, "tideway-nats", 4222) for name in names)
    assert not here.reaches("elsewhere", "tideway-nats", 4222)
    assert not any(here.reaches(name, "tideway-nats", port) for name in (*names, "elsewhere") for port in (6222, 8222))
    if here.workloads["tideway-nats"]["spec"]["replicas"] > 1:
        assert here.reaches("tideway-nats", "tideway-nats", 6222)
    assert not here.reaches("elsewhere", "tideway-gateway", 9100)
    assert all(here.reaches("monitoring", name, 9100) for name in names)
    first, last = map(int, load(InstanceSettings, here.environment(workers[0])).kv_ports.split("-"))
    for worker in workers:
        for port in here.container(worker)["ports"]:
            assert here.reaches("monitoring", worker, port["containerPort"]), "an instance's metrics"
        for port, is_open in ((first - 1, False), (first, True), (last, True), (last + 1, False)):
            assert all(here.reaches(other, worker, port) == is_open for other in workers), "moves of KV"
            assert not any(
                here.reaches(n, worker, port) for n in ("tideway-gateway", "tideway-scheduler", "monitoring")
            )


def test_the_api_is_open_to_all_or_to_named_namespaces() -> None:
    assert cluster("default").reaches("elsewhere", "tideway-gateway", 8000)
    closed = cluster("closed-network")
    assert closed.reaches("ingress-nginx", "tideway-gateway", 8000)
    assert not closed.reaches("elsewhere", "tideway-gateway", 8000)


def test_a_closed_network_has_no_way_out() -> None:
    here = cluster("closed-network")
    (rules,) = [p["spec"]["egress"] for p in here.of_kind("NetworkPolicy") if "Egress" in p["spec"]["policyTypes"]]
    own, names = rules
    assert own["to"] == [{"podSelector": here.find("NetworkPolicy", "tideway-default")["spec"]["podSelector"]}]
    assert "to" not in names and {port["port"] for port in names["ports"]} == {53}
    images = {here.container(name)["image"] for name in here.workloads}
    assert all(image.startswith("registry.internal/") for image in images)
    for name in here.of_component("worker"):
        assert here.environment(name)["HF_HUB_OFFLINE"] == "1"
    sources = [spec.source for spec in load(PlacementSettings, here.environment("tideway-placement")).model_specs()]
    assert sources and all(source.startswith("/checkpoints/") for source in sources)
    for name, component in services(here):
        mounts = {m["mountPath"]: m for m in here.container(name)["volumeMounts"]}
        if component != "scheduler":
            assert mounts["/checkpoints"]["readOnly"] is True


# ----------------------------------------------------------------------------------------------- scaling, API server


def test_only_placement_may_use_the_api_server_and_only_for_one_pool(here: Cluster) -> None:
    others = [name for name in here.workloads if here.component(name) != "placement"]
    assert all(here.pod(name).get("automountServiceAccountToken") is False for name in others)
    account = here.find("ServiceAccount", here.pod("tideway-placement")["serviceAccountName"])
    environment = here.environment("tideway-placement")
    if "TIDEWAY_KUBERNETES_WORKLOAD" not in environment:
        assert account["automountServiceAccountToken"] is False and not here.of_kind("Role")
        return
    binding = here.find("RoleBinding", "tideway-placement")
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["metadata"]["name"], NAMESPACE)
    assert binding["roleRef"]["name"] == here.find("Role", "tideway-placement")["metadata"]["name"]
    (rule,) = here.find("Role", "tideway-placement")["rules"]
    kind, _, workload = environment["TIDEWAY_KUBERNETES_WORKLOAD"].partition("/")
    assert kind == here.workloads[workload]["kind"].lower()
    assert (rule["apiGroups"], rule["resources"]) == (["apps"], [f"{kind}s/scale"])
    assert (rule["resourceNames"], rule["verbs"]) == ([workload], ["get", "patch"]), "as the back end calls it"
    assert environment["TIDEWAY_SCALING_BACKEND"] == "kubernetes"


def test_bounds_of_the_number_of_workers() -> None:
    assert not load(SchedulerSettings, cluster("default").environment("tideway-scheduler")).autoscale, "asked for"
    here = cluster("mixed-gpus")
    settings = load(SchedulerSettings, here.environment("tideway-scheduler"))
    assert settings.autoscale
    (pool,) = [pool for pool in EXAMPLES["mixed-gpus"]["workers"]["pools"] if pool["name"] == "l40s"]
    assert settings.min_instances <= pool["replicas"] <= settings.max_instances


def scaled_queries(here: Cluster) -> list[str]:
    return [t["metadata"]["query"] for d in here.of_kind("ScaledObject") for t in d["spec"]["triggers"]]


def test_scalers_ask_for_metrics_that_are_there() -> None:
    here = cluster("mixed-gpus")
    families = {family.name: family for family in every_metric().collect()}
    queries = scaled_queries(here)
    assert len(queries) == 2
    for query in queries:
        named = re.findall(r"((?:tideway_|vllm:)\w+)\{", query)
        assert named and all(families[name].type == "gauge" for name in named), query
        assert query.count(f'namespace="{NAMESPACE}"') == len(named)
    pods = re.findall(r'pod=~"([^"]+)"', " ".join(queries))
    assert pods and all(re.fullmatch(pattern, "tideway-worker-a100-slices-0") for pattern in pods)
    for scaled in here.of_kind("ScaledObject"):
        target = scaled["spec"]["scaleTargetRef"]
        assert here.workloads[target["name"]]["kind"] == target["kind"]
    assert "replicas" not in here.workloads["tideway-gateway"]["spec"], "else each upgrade would set them back"


def test_scalers_remove_nothing_while_prometheus_tells_nothing() -> None:
    """An empty answer would count as no load."""
    scalers = cluster("mixed-gpus").of_kind("ScaledObject")
    assert len(scalers) == 2
    for scaler in scalers:
        fallback = scaler["spec"]["fallback"]
        assert fallback["behavior"] == "currentReplicasIfHigher" and fallback["replicas"] >= 1
        for trigger in scaler["spec"]["triggers"]:
            assert trigger["metadata"]["ignoreNullValues"] == "false"
            assert trigger["metricType"] == "AverageValue", "KEDA has a fallback for nothing else"


def test_gateways_scale_by_cpu() -> None:
    here = Cluster(render({"gateway": {"hpa": {"enabled": True, "minReplicas": 3}}}))
    (scaler,) = here.of_kind("HorizontalPodAutoscaler")
    kubernetes_validate.validate(scaler, NEWEST, strict=True)
    assert here.workloads[scaler["spec"]["scaleTargetRef"]["name"]]["kind"] == "Deployment"
    assert scaler["spec"]["minReplicas"] == 3 and "replicas" not in here.workloads["tideway-gateway"]["spec"]


# ------------------------------------------------------------------------------------------------- models and secrets


def test_a_shared_cache_is_one_claim_and_is_filled_by_a_job_of_its_models() -> None:
    here = cluster("mixed-gpus")
    claim = here.find("PersistentVolumeClaim", "tideway-cache")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    (job,) = here.of_component("warm-up")
    for name in (job, "tideway-gateway", "tideway-placement", *here.of_component("worker")):
        (cache,) = [volume for volume in here.pod(name)["volumes"] if volume["name"] == "cache"]
        assert cache["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert here.secrets(name)["HF_TOKEN"] == "hf-token"
    sources = [model["source"] for model in EXAMPLES["mixed-gpus"]["models"]["initial"]]
    command = here.container(job)["command"]
    assert command[3:] == sources
    compile(command[2], "the job's program", "exec")
    other = {
        **CLUSTERS["mixed-gpus"],
        "models": {**EXAMPLES["mixed-gpus"]["models"], "initial": [{"name": "x", "source": "o/x"}]},
    }
    assert Cluster(render(other)).of_component("warm-up") != [job], "jobs cannot be changed"


def test_the_warm_up_s_program_runs_here(tmp_path: Path) -> None:
    here = cluster("mixed-gpus")
    (job,) = here.of_component("warm-up")
    program = here.container(job)["command"][2]
    model = REPOSITORY / "models/tideway-demo-opt"
    result = subprocess.run(
        [sys.executable, "-c", program, str(model)], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert result.stdout == f"{model} is in {model}\n"


def test_a_cache_a_worker() -> None:
    here = Cluster(render({"models": {"cache": {"kind": "perWorker", "size": "80Gi"}}}))
    (claim,) = here.workloads["tideway-worker-cpu"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert claim["spec"]["resources"] == {"requests": {"storage": "80Gi"}}


def test_the_secret_of_the_readme_has_every_key(here: Cluster) -> None:
    wanted = {key for name in here.workloads for key in here.secrets(name).values()}
    readme = set(re.findall(r"--from-literal=([\w-]+)=", (CHART / "README.md").read_text()))
    assert readme >= wanted - {k for k in wanted if k.startswith("nats-worker-tideway-")} - {"nats-backup-password"}
    for external in here.of_kind("ExternalSecret"):
        made = [item["secretKey"] for item in external["spec"]["data"]]
        assert set(made) == wanted - {"hf-token"} and len(made) == len(set(made))
        assert external["spec"]["target"]["name"] == "tideway"


# ------------------------------------------------------------------------------------------------ entry, monitoring


def test_the_way_in() -> None:
    closed, mixed = cluster("closed-network"), cluster("mixed-gpus")
    (ingress,) = closed.of_kind("Ingress")
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    service = closed.find("Service", backend["name"])
    assert backend["port"]["name"] in [port["name"] for port in service["spec"]["ports"]]
    certificate = closed.find("Certificate", "tideway-gateway")["spec"]
    assert certificate["secretName"] == ingress["spec"]["tls"][0]["secretName"]
    assert certificate["dnsNames"] == ingress["spec"]["tls"][0]["hosts"] == [ingress["spec"]["rules"][0]["host"]]
    (route,) = mixed.of_kind("HTTPRoute")
    (reference,) = route["spec"]["rules"][0]["backendRefs"]
    assert reference["port"] in [p["port"] for p in mixed.find("Service", reference["name"])["spec"]["ports"]]
    timeout_s = float(route["spec"]["rules"][0]["timeouts"]["request"].removesuffix("s"))
    assert timeout_s >= GatewaySettings().request_timeout_s


def test_behind_an_endpoint_picker() -> None:
    values = {
        "httpRoute": {"enabled": True, "host": "x.example.org", "parentRefs": [{"name": "g"}]},
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    }
    here = Cluster(render(values))
    (pool,) = here.of_kind("InferencePool")
    (route,) = here.of_kind("HTTPRoute")
    check(pool)
    check(route)
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
    labels = here.template("tideway-gateway")["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = [port["containerPort"] for port in here.container("tideway-gateway")["ports"]]
    assert pool["spec"]["targetPorts"][0]["number"] in ports


def test_every_port_of_metrics_is_scraped_under_the_dashboard_s_labels() -> None:
    here = cluster("mixed-gpus")
    (monitor,) = here.of_kind("PodMonitor")
    endpoints = {e["port"]: e["relabelings"] for e in monitor["spec"]["podMetricsEndpoints"]}
    for name, _ in services(here):
        ports = {port["name"] for port in here.container(name)["ports"]} - {"http"}
        assert ports <= endpoints.keys()
        labels = here.template(name)["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (by_component,) = endpoints["metrics"]
    label = by_component["sourceLabels"][0].removeprefix("__meta_kubernetes_pod_label_")
    assert label == re.sub(r"\W", "_", "app.kubernetes.io/component") and by_component["targetLabel"] == "service"
    assert endpoints["instance-0"] == [{"targetLabel": "service", "replacement": "instance"}]


def test_rules_and_dashboard_are_those_of_the_files() -> None:
    values = {
        **CLUSTERS["mixed-gpus"],
        "monitoring": {"rules": {"enabled": True, "runbook": "https://wiki/run"}, "dashboard": {"enabled": True}},
    }
    here = Cluster(render(values))
    groups = here.find("PrometheusRule", "tideway")["spec"]["groups"]
    (own,) = yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"]
    assert [rule["alert"] for rule in groups[0]["rules"]] == [rule["alert"] for rule in own["rules"]]
    for rule in groups[0]["rules"]:
        assert rule["annotations"]["runbook_url"] == f"https://wiki/run#{rule['alert'].lower()}"
    dashboard = here.find("ConfigMap", "tideway-dashboard")["data"]["tideway.json"]
    assert json.loads(dashboard) == json.loads((REPOSITORY / "deploy/grafana/dashboards/tideway.json").read_text())
    assert len(dashboard) < 2**20, "a ConfigMap's limit"
