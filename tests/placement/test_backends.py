"""Who starts and ends instances: node agents, and Kubernetes on a scripted API server."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placement.backends import api_server as api_server_module
from services.placement.backends import kubernetes as kubernetes_module
from services.placement.backends.api_server import ApiServer
from services.placement.backends.kubernetes import KubernetesBackend
from services.placement.backends.local import LocalBackend, spread
from shared.bus.interface import BusError, ServiceError
from shared.messages.admin import Done, ScaleNode
from shared.messages.channels import Endpoint
from shared.messages.cluster import NodeInfo
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.runtime.settings import SettingsError
from tests.placement.api_server import COST, ScriptedApiServer


def node(node_id: str, num_instances: int = 1, max_instances: int = 0) -> NodeInfo:
    return NodeInfo(
        node_id=node_id, hostname="host", num_instances=num_instances, memory_bytes=1 << 30, max_instances=max_instances
    )


# ------------------------------------------------------------------------------------------------- local


def test_more_instances_go_where_the_fewest_are() -> None:
    nodes = [node("a", 2, 4), node("b", 1, 4), node("c", 1, 1)]
    assert spread(1, nodes) == {"b": 2}
    assert spread(3, nodes) == {"a": 3, "b": 3}
    assert spread(5, nodes) == {"a": 4, "b": 4}
    assert spread(0, nodes) == {}
    with pytest.raises(ServiceError, match="run at most 9 instances") as caught:
        spread(6, nodes)
    assert (caught.value.code, caught.value.info.param) == (ErrorCode.CONFLICT, "num_instances")
    with pytest.raises(ServiceError, match=r"at most 9 .* b-0, c-0, drained by hand: `tideway drain b-0 --undo`"):
        spread(6, nodes, ["b-0", "c-0"])


def test_the_fullest_node_gives_its_last_instance() -> None:
    local = LocalBackend(ScriptedBus())  # type: ignore[arg-type]
    nodes = [node("a", 3), node("b", 2)]
    assert local.to_drain(1, nodes, []) == ["a-2"]
    assert local.to_drain(3, nodes, ["a-2"]) == ["b-1", "a-1", "b-0"]
    assert local.to_drain(1, nodes, [], "b-0") == ["b-0"]
    assert local.to_drain(2, nodes, [], "a-0") == ["a-0", "b-1"]
    assert local.to_drain(1, nodes, ["a-2"], "a-2") == ["b-1"], "it drains already"
    assert len(local.to_drain(9, nodes, [])) == 5


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=6), st.integers(0, 30))
def test_growing_is_even_and_within_what_the_nodes_allow(sizes: list[tuple[int, int]], num_more: int) -> None:
    nodes = [node(f"n{k}", number, most) for k, (number, most) in enumerate(sizes)]
    room = sum(max(0, n.max_instances - n.num_instances) for n in nodes)
    if num_more > room:
        with pytest.raises(ServiceError):
            spread(num_more, nodes)
        return
    after = {n.node_id: n.num_instances for n in nodes} | spread(num_more, nodes)
    assert sum(after.values()) == sum(n.num_instances for n in nodes) + num_more
    assert all(after[n.node_id] <= max(n.num_instances, n.max_instances) for n in nodes)
    grown = [n for n in nodes if after[n.node_id] > n.num_instances]
    growable = [n for n in nodes if after[n.node_id] < n.max_instances]
    if grown and growable:
        assert max(after[n.node_id] for n in grown) <= min(after[n.node_id] for n in growable) + 1


class ScriptedBus:
    """Node agents, of which some do not answer."""

    def __init__(self, *deaf: str) -> None:
        self.deaf = deaf
        self.sizes: dict[str, int] = {}

    async def request(self, endpoint: Endpoint[ScaleNode, Done], query: ScaleNode, *, timeout_s: float) -> Done:
        node_id = endpoint.subject.split(".")[-2]
        if node_id in self.deaf:
            raise BusError(ErrorInfo(ErrorCode.UNAVAILABLE, f"nobody serves {node_id}"))
        self.sizes[node_id] = query.num_instances
        return Done()


async def test_what_a_node_that_does_not_answer_should_get_others_get() -> None:
    nodes = [node("a", 1, 3), node("b", 1, 3), node("c", 1, 3)]
    bus = ScriptedBus("a")
    await LocalBackend(bus).grow(3, nodes)  # type: ignore[arg-type]
    assert bus.sizes == {"b": 3, "c": 2}
    bus = ScriptedBus("a", "c")
    with pytest.raises(ServiceError, match="nobody serves c"):
        await LocalBackend(bus).grow(3, nodes)  # type: ignore[arg-type]
    bus = ScriptedBus()
    with pytest.raises(ServiceError, match="at most 9"):
        await LocalBackend(bus).grow(7, nodes)  # type: ignore[arg-type]
    assert bus.sizes == {}


async def test_nodes_are_asked_side_by_side() -> None:
    class SlowBus(ScriptedBus):
        meeting = asyncio.Barrier(3)

        async def request(self, endpoint: Endpoint[ScaleNode, Done], query: ScaleNode, *, timeout_s: float) -> Done:
            async with asyncio.timeout(2):
                await self.meeting.wait()
            return await super().request(endpoint, query, timeout_s=timeout_s)

    bus = SlowBus()
    await LocalBackend(bus).grow(3, [node(name, 1, 2) for name in "abc"])  # type: ignore[arg-type]
    assert bus.sizes == dict.fromkeys("abc", 2)


# -------------------------------------------------------------------------------------------- Kubernetes


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("t0\n")
    return file


@asynccontextmanager
async def backend(api: ScriptedApiServer, token_file: Path) -> AsyncIterator[KubernetesBackend]:
    with api.serving() as url:
        made = KubernetesBackend(ApiServer(url, "tide", token_file), f"{api.kind}/{api.name}")
        try:
            yield made
        finally:
            await made.close()


def pods(*numbers: int, num_instances: int = 1) -> list[NodeInfo]:
    return [node(f"worker-{k}", num_instances) for k in numbers]


async def test_more_replicas_and_none_twice_for_pods_that_are_on_their_way(token_file: Path) -> None:
    api = ScriptedApiServer(replicas=2)
    async with backend(api, token_file) as kubernetes:
        await kubernetes.grow(1, pods(0, 1))
        assert api.replicas == 3
        await kubernetes.grow(1, pods(0, 1))
        assert api.replicas == 3, "worker-2 is not registered yet"
        await kubernetes.grow(2, [*pods(0, 1, 2), node("another-machine")])
        assert api.replicas == 5
        await kubernetes.grow(3, pods(0, 1, 2, 3, 4, num_instances=2))
        assert api.replicas == 7, "two instances in a pod"


async def test_a_stateful_set_gives_up_its_last_pods(token_file: Path) -> None:
    api = ScriptedApiServer(replicas=12)
    nodes = [*pods(*range(12)), node("another-machine"), node("worker-x")]
    async with backend(api, token_file) as kubernetes:
        assert kubernetes.to_drain(1, nodes, [], "worker-3-0") == ["worker-11-0"], "not the one that scaling would like"
        assert kubernetes.to_drain(3, nodes, ["worker-10-0"]) == ["worker-11-0", "worker-9-0", "worker-8-0"]
        await kubernetes.release(["worker-9-0"], nodes)
        assert api.replicas == 12, "pods after it are in use"
        await kubernetes.release(["worker-9-0", "worker-10-0", "worker-11-0", "another-machine-0"], nodes)
        assert api.replicas == 9
        await kubernetes.release(["worker-9-0", "worker-10-0", "worker-11-0"], nodes)
        assert api.replicas == 9, "again: no effect"
        assert await kubernetes.revivable(["worker-8-0", "worker-9-0"], nodes) == ["worker-8-0"]


async def test_a_pod_of_two_instances_goes_when_both_are_empty(token_file: Path) -> None:
    api = ScriptedApiServer(replicas=2)
    nodes = pods(0, 1, num_instances=2)
    async with backend(api, token_file) as kubernetes:
        assert kubernetes.to_drain(1, nodes, [], "worker-1-0") == ["worker-1-0"]
        assert kubernetes.to_drain(3, nodes, []) == ["worker-1-1", "worker-1-0", "worker-0-1"]
        await kubernetes.release(["worker-1-1"], nodes)
        assert api.replicas == 2
        await kubernetes.release(["worker-1-1", "worker-1-0"], nodes)
        assert api.replicas == 1


async def test_the_drained_pod_of_a_deployment_is_the_one_that_goes(token_file: Path) -> None:
    api = ScriptedApiServer("deployment/worker", replicas=3)
    first, second, third = api.alive
    nodes = [node(name) for name in api.alive]
    async with backend(api, token_file) as kubernetes:
        assert kubernetes.to_drain(1, nodes, [], f"{second}-0") == [f"{second}-0"]
        assert await kubernetes.revivable([f"{second}-0"], nodes) == [f"{second}-0"]
        await kubernetes.release([f"{second}-0"], nodes)
        assert api.pods[second]["metadata"]["annotations"][COST] == "-1000"
        assert api.replicas == 2
        await kubernetes.release([f"{second}-0"], nodes)
        assert api.replicas == 2, "the controller has not got to it yet"
        api.reconcile()
        assert api.alive == [first, third]
        await kubernetes.release([f"{second}-0"], nodes)
        assert await kubernetes.revivable([f"{second}-0"], nodes) == []
        api.reconcile()
        await kubernetes.release([f"{second}-0"], nodes)
        assert (api.replicas, api.alive) == (2, [first, third])
        await kubernetes.release([f"{first}-0", f"{third}-0"], nodes)
        assert api.replicas == 1, "one after the other"
        await kubernetes.grow(1, [node(third)])
        assert api.replicas == 2


async def test_a_conflict_is_read_again(token_file: Path) -> None:
    api = ScriptedApiServer(replicas=2)
    async with backend(api, token_file) as kubernetes:
        api.faults = ["", "race", "", "race"]
        await kubernetes.grow(1, pods(0, 1))
        assert api.replicas == 3
        assert [method for method, _ in api.calls] == ["GET", "PATCH"] * 3
        api.faults = ["", "race"] * kubernetes_module.MAX_CONFLICTS
        with pytest.raises(ServiceError) as caught:
            await kubernetes.grow(1, pods(0, 1, 2))
        assert caught.value.code == ErrorCode.CONFLICT


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        (403, ErrorCode.UNAVAILABLE, "Role"),
        (422, ErrorCode.BAD_REQUEST, "422"),
        (500, ErrorCode.UNAVAILABLE, "500"),
        (429, ErrorCode.UNAVAILABLE, "429"),
        ("text", ErrorCode.UNAVAILABLE, "without a JSON object"),
        ("silent", ErrorCode.DEADLINE, "did not answer"),
    ],
)
async def test_failures_are_typed(
    fault: int | str, code: ErrorCode, text: str, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_server_module, "CALL_TIMEOUT_S", 0.2 if fault == "silent" else 10.0)
    api = ScriptedApiServer()
    api.faults = [fault]
    async with backend(api, token_file) as kubernetes:
        with pytest.raises(ServiceError, match=text) as caught:
            await kubernetes.grow(1, pods(0, 1))
        assert caught.value.code == code


async def test_a_workload_that_is_not_there_and_a_server_that_is_not(token_file: Path) -> None:
    api = ScriptedApiServer()
    with api.serving() as url:
        other = KubernetesBackend(ApiServer(url, "tide", token_file), "statefulset/other")
        with pytest.raises(ServiceError, match="statefulsets/other/scale not found") as caught:
            await other.grow(1, [])
        assert caught.value.code == ErrorCode.GONE
    with pytest.raises(ServiceError, match="cannot be reached") as caught:
        await other.grow(1, [])
    assert caught.value.code == ErrorCode.UNAVAILABLE
    await other.close()


async def test_a_token_that_the_kubelet_renewed_is_used(token_file: Path) -> None:
    api = ScriptedApiServer()
    async with backend(api, token_file) as kubernetes:
        await kubernetes.grow(1, pods(0, 1))
        api.token = "t1"
        with pytest.raises(ServiceError, match="401"):
            await kubernetes.grow(1, pods(0, 1, 2))
        await asyncio.to_thread(token_file.write_text, "t1")
        await kubernetes.grow(1, pods(0, 1, 2))
        assert api.replicas == 4
        await asyncio.to_thread(token_file.unlink)
        with pytest.raises(ServiceError, match="token"):
            await kubernetes.grow(1, pods(0, 1, 2))


@pytest.fixture
def certificate(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    certificate, key = tmp_path / "ca.crt", tmp_path / "key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key],
        check=True, capture_output=True,
    )  # fmt: skip
    yield certificate, key


async def test_in_a_pod_the_service_account_is_all_it_needs(
    tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    (tmp_path / "namespace").write_text("tide")
    api = ScriptedApiServer()
    with api.serving(certificate) as url:
        port = url.rpartition(":")[2]
        environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
        kubernetes = KubernetesBackend(ApiServer.in_cluster(tmp_path, environment), "statefulset/worker")
        await kubernetes.grow(1, pods(0, 1))
        await kubernetes.close()
        assert api.replicas == 3
        stranger = KubernetesBackend(ApiServer(url, "tide", token_file), "statefulset/worker")
        with pytest.raises(ServiceError, match=r"cannot be reached.*certificate"):
            await stranger.grow(1, pods(0, 1))
        await stranger.close()
        with pytest.raises(SettingsError, match="KUBERNETES_SERVICE_HOST"):
            ApiServer.in_cluster(tmp_path, {})


def test_outside_of_a_pod_and_a_workload_that_is_none(tmp_path: Path, token_file: Path) -> None:
    with pytest.raises(SettingsError, match="service account in"):
        ApiServer.in_cluster(tmp_path / "nowhere", {})
    for workload in ("worker", "daemonset/worker", "statefulset/", "statefulset/Worker", "deployment/a/b"):
        with pytest.raises(SettingsError, match="TIDEWAY_KUBERNETES_WORKLOAD"):
            KubernetesBackend(ApiServer("http://127.0.0.1:1", "tide", token_file), workload)
