"""`tideway nats-replicas` on a real cluster with a user per role."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from nats.js import JetStreamContext

from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import FILE_CONTENTS, INSTANCES, LEASES, MODELS
from shared.messages.cluster import LeaseHolder, ModelSpec
from shared.runtime.settings import BusSettings
from tests.e2e.stack import users_by_role
from tests.nats_cluster import NatsCluster
from tideway.data_folder import OperatorError
from tideway.nats_replicas import move_all, nats_replicas, users_of

CONTENT = b"a line\n" * 50_000
PASSWORDS = {"NATS_GATEWAY_PASSWORD": "gateway", "NATS_PLACEMENT_PASSWORD": "placement"}


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    cluster = NatsCluster(users_by_role({}))
    yield cluster
    cluster.close()


def replicas(cluster: NatsCluster) -> dict[str, int]:
    async def ask(streams: JetStreamContext) -> dict[str, int]:
        return {str(info.config.name): info.config.num_replicas or 1 for info in await streams.streams_info()}

    return cluster.ask(ask, otherwise={})


async def test_streams_move_up_and_down_with_all_that_is_in_them(
    cluster: NatsCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def settings(role: str) -> BusSettings:
        return BusSettings(nats_url=cluster.url, nats_user=role, nats_password=role)

    buses = {role: await NatsBus.connect(settings(role), "test", role) for role in ("placement", "gateway")}
    models = await buses["placement"].key_value(MODELS)
    await buses["placement"].key_value(INSTANCES)
    await models.put("tide", ModelSpec("tide", "somewhere"))
    told: list[object] = []
    watch = await (await buses["gateway"].key_value(MODELS)).watch(lambda *change: told.append(change))
    objects = await buses["gateway"].object_store(FILE_CONTENTS)
    await objects.put("file", CONTENT)
    leases = await buses["placement"].key_value(LEASES)
    for number in (3, 1):
        await move_all(settings("gateway"), number, PASSWORDS)
        moved = await asyncio.to_thread(replicas, cluster)
        assert set(moved) >= {"KV_tideway_models", "KV_tideway_instances", "OBJ_tideway_file_contents"}
        assert set(moved.values()) == {number}
        entry = await models.get("tide")
        assert entry is not None and entry.value == ModelSpec("tide", "somewhere")
        assert await objects.get("file") == CONTENT
        assert await leases.put("placement", LeaseHolder("one", number)) > 0
    assert list(watch.entries) == ["tide"] and len(told) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "KV_tideway_models: 3 copies, had 1" in lines and "KV_tideway_models: 1 copy, had 3" in lines
    for bus in buses.values():
        await bus.close()


def test_who_may_not_change_all_streams_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = BusSettings(nats_user="somebody", nats_password="x")
    assert list(users_of(one, {})) == [one]
    gateway = BusSettings(nats_user="gateway", nats_password="x")
    with pytest.raises(OperatorError, match="Set NATS_PLACEMENT_PASSWORD"):
        list(users_of(gateway, {}))
    users = [user.nats_user for user in users_of(gateway, PASSWORDS)]
    assert users == ["gateway", "placement"]
    with pytest.raises(OperatorError, match="expected 1, 3 or 5"):
        nats_replicas(2)
    monkeypatch.delenv("TIDEWAY_NATS_URL", raising=False)
    with pytest.raises(OperatorError, match="Set TIDEWAY_NATS_URL"):
        nats_replicas(3)
