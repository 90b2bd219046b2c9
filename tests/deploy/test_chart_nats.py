"""NATS in the Helm chart, rendered; what needs no servers that talk to each other."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from shared.bus.permissions import ROLES
from shared.runtime.settings import BusSettings, load
from tests.conftest import free_port
from tests.deploy.chart import CHART, REPOSITORY, RefusedError, render
from tests.deploy.cluster import CLUSTERS, Cluster, cluster
from tests.deploy.custom_resources import SCHEMAS
from tests.deploy.nats_servers import make_certificates, server_environment, write_configuration
from tests.deploy.test_chart import NEWEST, refusals, services
from tideway.nats_config import chart_permissions
from tideway.preflight import nats_server_binary


def test_the_chart_knows_what_each_role_may_do() -> None:
    kept = (CHART / "files/nats-permissions.json").read_text()
    assert kept == chart_permissions(), "tideway nats-config --chart > deploy/helm/tideway/files/nats-permissions.json"


def test_nats_takes_its_configuration(here: Cluster, tmp_path: Path) -> None:
    file = write_configuration(here, tmp_path, free_port())
    if "tls {" in file.read_text():
        make_certificates(tmp_path)
    call = [nats_server_binary(), "-t", "-c", str(file)]
    result = subprocess.run(call, env=server_environment(here), capture_output=True, text=True)
    assert "is valid" in result.stderr, result.stderr


def test_nats_is_configured_as_in_the_container_stack() -> None:
    def settings(text: str) -> list[str]:
        # The kubelet asks from outside the pod, and servers are named after their pods.
        return [line for line in text.splitlines() if not line.lstrip().startswith(("#", "http:", "server_name:"))]

    here = cluster("one-node")
    inline = here.find("ConfigMap", "tideway-nats")["data"]["nats.conf"]
    assert settings(inline) == settings((REPOSITORY / "deploy/nats/nats.conf").read_text())
    for role in ROLES:
        assert here.environment("tideway-nats")[f"NATS_{role.upper()}_PASSWORD"] == f'"nats-{role}-password"'


def test_servers_of_a_cluster_keep_apart_and_start_together() -> None:
    here = cluster("default")
    workload, pod = here.workloads["tideway-nats"]["spec"], here.pod("tideway-nats")
    assert workload["replicas"] == 3 and workload["podManagementPolicy"] == "Parallel"
    (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"] == workload["selector"]["matchLabels"]
    assert here.find("PodDisruptionBudget", "tideway-nats")["spec"]["maxUnavailable"] == 1
    assert here.find("Service", "tideway-nats")["spec"]["publishNotReadyAddresses"] is True
    alone = cluster("one-node")
    assert "affinity" not in alone.pod("tideway-nats")
    assert not [b for b in alone.of_kind("PodDisruptionBudget") if b["metadata"]["name"] == "tideway-nats"]


def chart_that_sees(document: dict[str, Any], folder: Path) -> Path:
    """The chart, in whose templates each `lookup` finds this document if it is asked for its name."""
    shutil.copytree(CHART, folder / "tideway")
    found = f'ternary (`{json.dumps(document)}` | fromJson) dict (eq "{document["metadata"]["name"]}" SOUGHT)'
    for file in (folder / "tideway/templates").glob("*.yaml"):
        text = re.sub(
            r'lookup "apps/v1" "StatefulSet" \$?\w*\.Release\.Namespace (\(printf [^)]+\)|\$name)',
            lambda match: found.replace("SOUGHT", match[1]),
            file.read_text(),
        )
        assert 'lookup "' not in text
        file.write_text(text)
    return folder / "tideway"


@pytest.mark.parametrize(("had", "wanted"), [(1, 3), (3, 1), (3, 3), (3, 5)])
def test_one_server_is_not_made_three_over_its_claims(had: int, wanted: int, tmp_path: Path) -> None:
    """A cluster lists no stream of a server that was alone."""
    before = Cluster(render({"nats": {"replicas": had}})).workloads["tideway-nats"]
    (claim,) = before["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] in {mount["name"] for mount in nats_mounts(before)}
    chart = chart_that_sees(before, tmp_path)
    if (had > 1) == (wanted > 1):
        after = Cluster(render({"nats": {"replicas": wanted}}, chart)).workloads["tideway-nats"]
        assert after["spec"]["volumeClaimTemplates"] == [claim]
        return
    with pytest.raises(RefusedError, match=rf"claims {claim['metadata']['name']}-tideway-nats-\*.*by a backup"):
        render({"nats": {"replicas": wanted}}, chart)
    after = Cluster(render({"nats": {"replicas": wanted}})).workloads["tideway-nats"]
    assert after["spec"]["volumeClaimTemplates"] != [claim], "the API server refuses the change where nothing is seen"


def nats_mounts(workload: dict[str, Any]) -> list[dict[str, Any]]:
    return workload["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]  # type: ignore[no-any-return]


def test_services_stand_still_while_a_backup_is_restored(tmp_path: Path) -> None:
    values = {**CLUSTERS["mixed-gpus"], "backup": {"enabled": True, "restore": "2026-11-04T03-17-00Z"}}
    here = Cluster(render(values))
    for document in here.documents:
        if document["kind"] not in SCHEMAS:
            kubernetes_validate.validate(document, NEWEST, strict=True)
    assert refusals(here) == []
    assert all(here.workloads[name]["spec"]["replicas"] == 0 for name, _ in services(here)), "they make streams"
    assert here.workloads["tideway-nats"]["spec"]["replicas"] == 3 and not here.of_kind("ScaledObject")
    job = "tideway-restore-2026-11-04t03-17-00z"
    assert here.container(job)["command"][2:] == ["tideway", "restore-streams", "/backup/2026-11-04T03-17-00Z"]
    assert load(BusSettings, here.environment(job)).nats_replicas == 3
    assert here.reaches(job, "tideway-nats", 4222)
    assert here.workloads["tideway-backup"]["spec"]["suspend"] is True
    stopped = chart_that_sees(here.workloads["tideway-worker-l40s"], tmp_path)
    again = Cluster(render(CLUSTERS["mixed-gpus"], stopped))
    assert again.workloads["tideway-worker-l40s"]["spec"]["replicas"] == 4


def test_an_upgrade_leaves_the_number_of_workers_to_what_scales_them(tmp_path: Path) -> None:
    def pool(keda: bool, autoscale: bool, folder: str = "", live: int | None = None) -> int | None:
        values = {
            "workers": {"pools": [{"name": "cpu", "replicas": 2, "keda": {"enabled": keda}}]},
            "scaling": {"pool": "" if keda else "cpu", "autoscale": autoscale},
        }
        now = {"metadata": {"name": "tideway-worker-cpu"}, "spec": {"replicas": live}}
        chart = CHART if live is None else chart_that_sees(now, tmp_path / folder)
        spec: dict[str, int] = Cluster(render(values, chart)).workloads["tideway-worker-cpu"]["spec"]
        return spec.get("replicas")

    assert pool(True, False) is None and pool(False, True) is None, "as Argo CD renders it, at each sync"
    assert pool(False, False) == 2, "nothing else raises it"
    assert pool(True, False, "keda", 0) == 0 and pool(False, True, "autoscale", 5) == 5
    assert pool(False, False, "placement", 5) == 5


def test_a_server_whose_disk_is_full_is_not_restarted_again_and_again() -> None:
    probe = cluster("default").container("tideway-nats")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > 240 + 10
    healthy: set[str] = set()

    class Monitor(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in healthy else 503)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Monitor)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def passes(patience_s: int) -> bool:
        """Asked of this process in place of the container's."""
        (*shell, program) = probe["exec"]["command"]
        for old, new in (
            ("8222", str(server.server_port)),
            ("/proc/1/", f"/proc/{os.getpid()}/"),
            ("240", str(patience_s)),
        ):
            assert old in program
            program = program.replace(old, new)
        return subprocess.run([*shell, program], capture_output=True).returncode == 0

    try:
        assert not passes(0)
        healthy.add("/healthz?js-enabled-only=true")
        assert not passes(100_000), "the next server waits for this one's streams"
        assert passes(-1), "its process is up"
        healthy.add("/healthz")
        assert passes(100_000)
    finally:
        server.shutdown()
        server.server_close()


def test_with_tls_services_check_the_certificate_that_servers_show() -> None:
    here = cluster("mixed-gpus")
    certificate = here.find("Certificate", "tideway-nats")["spec"]
    for name, component in services(here):
        values = here.environment(name)
        (mount,) = [m for m in here.container(name)["volumeMounts"] if m["name"] == "nats-ca"]
        assert values["TIDEWAY_NATS_TLS_CA"] == mount["mountPath"] + "/ca.crt"
        (volume,) = [v["secret"] for v in here.pod(name)["volumes"] if v["name"] == "nats-ca"]
        assert volume["secretName"] == certificate["secretName"]
        assert [item["key"] for item in volume["items"]] == ["ca.crt"], f"{component} has no use for the key"
        for url in values["TIDEWAY_NATS_URL"].split(","):
            host = url.removeprefix("nats://").removesuffix(":4222")
            assert "*." + host.partition(".")[2] in certificate["dnsNames"]
