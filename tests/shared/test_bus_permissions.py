"""What the users of each role may do, on a real server with the configuration that `tideway nats-config` makes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

import msgspec
import nats
import pytest
from nats.js.api import ConsumerConfig

from shared.bus.interface import BusError
from shared.bus.nats_bus import NatsBus
from shared.bus.permissions import MAX_NODE_INSTANCES, ROLES, permissions
from shared.messages import catalogue
from shared.messages.channels import Bucket, Endpoint, ObjectBucket, Role, Topic
from shared.messages.cluster import LeaseHolder, PlacementPlan
from shared.messages.requests import (
    Accepted,
    Cancel,
    ErrorCode,
    GenerationRequest,
    ListHeldRequests,
    ReplayQuery,
    SamplingParams,
)
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer
from tests.shared.conftest import flushed
from tideway.data_folder import OperatorError
from tideway.nats_config import nats_users, users_file

CHANNELS = {name: value for name, value in vars(catalogue).items() if isinstance(value, Topic | Endpoint)}
NODES = {"worker-a": "a", "worker-b": "b"}
USERS = ["gateway", "scheduler", "placement", "operator", *NODES]
INSIDERS: dict[str, tuple[list[str], list[str]]] = {
    # By user: what they must not hear, and what they must not publish.
    "worker-a": (
        [
            "tideway.v1.instance.b-0.submit",
            "tideway.v1.instance.b-0.pre_allocate",
            "tideway.v1.instance.*.submit",
            "tideway.v1.scheduler.submit",
            "tideway.v1.gateway.g.frames",
            "_INBOX.gateway.>",
            "_INBOX.worker.b.>",
            "_INBOX.worker.>",
            "_INBOX.>",
            "$KV.tideway_plans.>",
            "$JS.API.>",
            ">",
        ],
        [
            "tideway.v1.instance.b-0.submit",
            "tideway.v1.instance.b-0.drain",
            "tideway.v1.instance.a-0.rebalance",
            "tideway.v1.instance.b-0.rebalance",
            "tideway.v1.placement.remove_model",
            "tideway.v1.scheduler.announce",
            "tideway.v1.gateway.g.lost",
            "_INBOX.x.1",
            "$KV.tideway_plans.current",
            "$KV.tideway_models.m",
            "$KV.tideway_instances.b-0",
            "$KV.tideway_leases.scheduler",
            "$JS.API.DIRECT.GET.OBJ_tideway_file_contents",
            "$JS.API.CONSUMER.CREATE.KV_tideway_files",
        ],
    ),
    "scheduler": (
        ["tideway.v1.instance.a-0.submit", "tideway.v1.gateway.g.frames", "_INBOX.gateway.>", "_INBOX.worker.a.>"],
        [
            "$KV.tideway_plans.current",
            "$KV.tideway_leases.placement",
            "tideway.v1.placement.remove_model",
            "tideway.v1.instance.a-0.drain",
            "$JS.API.DIRECT.GET.OBJ_tideway_file_contents",
            "_INBOX.placement.x.1",
            "_INBOX.worker.a.x.1",
        ],
    ),
    "gateway": (
        [
            "tideway.v1.instance.a-0.submit",
            "tideway.v1.scheduler.submit",
            "tideway.v1.placement.plan",
            "_INBOX.worker.a.>",
        ],
        [
            "$JS.API.DIRECT.GET.KV_tideway_models.m",
            "$KV.tideway_plans.current",
            "$KV.tideway_models.m",
            "$KV.tideway_leases.scheduler",
            "$KV.tideway_terms.placement",
            "$JS.API.STREAM.PURGE.KV_tideway_terms",
            "tideway.v1.instance.a-0.drain",
            "tideway.v1.gateway.g.frames",
        ],
    ),
    "placement": (
        [
            "tideway.v1.instance.a-0.submit",
            "tideway.v1.scheduler.submit",
            "tideway.v1.gateway.g.frames",
            "_INBOX.gateway.>",
        ],
        ["tideway.v1.instance.a-0.submit", "$JS.API.DIRECT.GET.OBJ_tideway_file_contents", "$KV.tideway_instances.a-0"],
    ),
    "operator": (
        [
            "tideway.v1.instance.a-0.submit",
            "tideway.v1.scheduler.submit",
            "tideway.v1.gateway.g.frames",
            "_INBOX.gateway.>",
        ],
        [
            "$KV.tideway_plans.current",
            "tideway.v1.placement.remove_model",
            "tideway.v1.instance.a-0.drain",
            "$JS.API.DIRECT.GET.OBJ_tideway_file_contents",
        ],
    ),
}
for _, forbidden in INSIDERS.values():
    # Nobody deletes a stream, or makes one of his own that takes others' messages.
    forbidden += ["$JS.API.STREAM.DELETE.KV_tideway_plans", "$JS.API.STREAM.CREATE.TAKEN", "$JS.API.STREAM.DELETE.>"]
for insider in ("worker-a", "scheduler", "gateway", "operator"):
    INSIDERS[insider][1].append("$JS.API.STREAM.UPDATE.KV_tideway_plans")
    INSIDERS[insider][1].append("$JS.API.STREAM.PURGE.KV_tideway_plans")


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    users = nats_users({user: user for user in USERS}, NODES)
    made = NatsServer(f"authorization: {json.dumps({'users': users})}")
    yield made
    made.close()


@pytest.fixture
async def buses(server: NatsServer) -> AsyncIterator[dict[str, NatsBus]]:
    made = {}
    for user in USERS:
        settings = BusSettings(nats_url=server.url, nats_user=user, nats_password=user)
        made[user] = await NatsBus.connect(settings, "test", user)
    for bucket in catalogue.buckets_declared_by(Role.PLACEMENT):
        await made["placement"].key_value(bucket)
    for bucket in catalogue.buckets_declared_by(Role.GATEWAY):
        await made["gateway"].key_value(bucket)
    yield made
    for bus in made.values():
        await bus.close()


def test_every_channel_says_who_is_at_its_ends() -> None:
    for name, channel in CHANNELS.items():
        far = channel.heard_by if isinstance(channel, Topic) else channel.served_by
        assert channel.sent_by and far and Role.OWN_NODE not in far, name
    for name, channel in vars(catalogue).items():
        if isinstance(channel, Bucket):
            assert channel.writers and channel.read_by and channel.declared_by, name
        elif isinstance(channel, ObjectBucket):
            assert channel.used_by, name


def test_a_worker_of_a_known_node_hears_that_node_alone() -> None:
    own = permissions(Role.WORKER, "worker-a", "a")
    assert not [subject for subject in own.subscribe if "*" in subject]
    assert f"tideway.v1.instance.a-{MAX_NODE_INSTANCES - 1}.submit" in own.subscribe
    anywhere = permissions(Role.WORKER, "worker")
    assert "tideway.v1.instance.*.submit" in anywhere.subscribe and "$KV.tideway_nodes.*" in anywhere.publish


@pytest.mark.parametrize("user", INSIDERS)
async def test_an_insider_is_refused(server: NatsServer, buses: dict[str, NatsBus], user: str) -> None:
    """With a client of its own, which keeps none of our rules."""
    errors: list[str] = []

    async def on_error(error: Exception) -> None:
        errors.append(str(error))

    client = await nats.connect(server.url, user=user, password=user, error_cb=on_error)
    unheard, unsaid = INSIDERS[user]
    for subject in unheard:
        await client.subscribe(subject)
    for subject in unsaid:
        await client.publish(subject, b"{}")
    deadline_s = asyncio.get_running_loop().time() + 15
    while len(errors) < len(unheard) + len(unsaid) and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(0.01)
    for kind, subjects in (("subscription", unheard), ("publish", unsaid)):
        for subject in subjects:
            assert any(f'violation for {kind} to "{subject.lower()}"' in error for error in errors), (kind, subject)
    assert len(errors) == len(unheard) + len(unsaid)
    await client.close()


@pytest.mark.parametrize(
    ("user", "mine"),
    [
        ("worker-a", "tideway.v1.instance.a-0.cancel"),
        ("scheduler", "tideway.v1.scheduler.execution_statistics"),
        ("operator", "$SRV.PING"),
    ],
)
async def test_who_asks_itself_may_answer_nowhere_else(
    server: NatsServer, buses: dict[str, NatsBus], user: str, mine: str
) -> None:
    """A reply subject is the sender's choice, and some may send what they hear themselves."""
    errors: list[str] = []

    async def on_error(error: Exception) -> None:
        errors.append(str(error))

    client = await nats.connect(server.url, user=user, password=user, error_cb=on_error)
    heard = await client.subscribe(mine)
    unsaid = [
        "tideway.v1.placement.remove_model",
        "$KV.tideway_plans.current",
        "$JS.API.STREAM.DELETE.KV_tideway_plans",
    ]
    for subject in unsaid:
        await client.publish(mine, b"", reply=subject)
        assert (await heard.next_msg(timeout=15)).reply == subject
        await client.publish(subject, b"{}")
    deadline_s = asyncio.get_running_loop().time() + 15
    while len(errors) < len(unsaid) and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(0.01)
    for subject in unsaid:
        assert any(f'violation for publish to "{subject.lower()}"' in error for error in errors), (subject, errors)
    await client.close()


async def test_a_reply_subject_does_not_tell_others(server: NatsServer, buses: dict[str, NatsBus]) -> None:
    client = await nats.connect(server.url, user="worker-a", password="worker-a")
    endpoint = catalogue.INSTANCE_REPLAY.at(instance_id="a-0")
    heard = await client.subscribe(endpoint.subject)
    await flushed(client)
    requests = [buses["gateway"].send_request(endpoint, ReplayQuery([]), timeout_s=0.2) for _ in range(4)]
    replies = [(await heard.next_msg(timeout=15)).reply for _ in requests]
    tokens = sorted(int(reply.rpartition(".")[2], 16) for reply in replies)
    assert min(after - before for before, after in pairwise(tokens)) > 1 << 32
    await asyncio.gather(*requests, return_exceptions=True)
    await client.close()


async def test_requests_replies_and_entries_pass(buses: dict[str, NatsBus]) -> None:
    endpoint = catalogue.INSTANCE_SUBMIT.at(instance_id="a-0")
    heard: list[str] = []

    def serve(request: GenerationRequest) -> Accepted:
        heard.append(request.request_id)
        return Accepted(request.request_id)

    await buses["worker-a"].serve(endpoint, serve)
    request = GenerationRequest(
        request_id="r", gateway_id="g", model="m", prompt=b"", sampling=SamplingParams(max_tokens=1)
    )
    for user in ("gateway", "scheduler"):
        assert (await buses[user].request(endpoint, request, timeout_s=5)).request_id == "r"
    assert heard == ["r", "r"]
    plans = await buses["placement"].key_value(catalogue.PLANS)
    await plans.put("current", PlacementPlan(1, []))
    watch = await (await buses["worker-a"].key_value(catalogue.PLANS)).watch()
    assert watch.entries["current"].version == 1


async def test_a_refusal_is_an_error_at_once_and_a_line_in_the_log(
    buses: dict[str, NatsBus], caplog: pytest.LogCaptureFixture
) -> None:
    worker = buses["worker-a"]
    with caplog.at_level(logging.ERROR):
        for attempt in (
            worker.request(catalogue.INSTANCE_HELD.at(instance_id="b-0"), ListHeldRequests(), timeout_s=60),
            worker.subscribe(catalogue.INSTANCE_CANCEL.at(instance_id="b-0"), lambda _: None),
            (await worker.key_value(catalogue.INSTANCES)).delete("b-0"),
        ):
            with pytest.raises(BusError) as caught:
                await attempt
            assert caught.value.code is ErrorCode.NOT_PERMITTED
        worker.publish(catalogue.SCHEDULER_CANCEL, Cancel("r"))
        await worker.round_trip_s()
    lines = [record.getMessage() for record in caplog.records if "NATS refuses" in record.getMessage()]
    assert len(lines) == 4 and lines[-1] == "NATS refuses user 'worker-a' the subject tideway.v1.scheduler.cancel"


async def test_who_may_not_make_a_bucket_waits_for_it(fresh_nats: NatsServer) -> None:
    """Users in roles keep to them also on a server that would let them do more."""
    made = {}
    for user in ("worker", "placement"):
        settings = BusSettings(nats_url=fresh_nats.url, nats_user=user, nats_password="x")
        made[user] = await NatsBus.connect(settings, "test", user)
    waiting = asyncio.create_task(made["worker"].key_value(catalogue.INSTANCES))
    await made["worker"].round_trip_s()
    assert not waiting.done()
    await made["placement"].key_value(catalogue.INSTANCES)
    assert await (await asyncio.wait_for(waiting, 15)).entries() == {}
    for bus in made.values():
        await bus.close()


async def test_an_answer_that_is_late_ends_no_waiting(fresh_nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BusSettings(nats_url=fresh_nats.url, nats_user="worker", nats_password="x")
    bus = await NatsBus.connect(settings, "test", "worker")
    maker = await NatsBus.connect(BusSettings(nats_url=fresh_nats.url), "test", "maker")
    await maker.key_value(catalogue.INSTANCES)
    monkeypatch.setattr(bus._streams.context, "_timeout", 0.2)
    os.kill(fresh_nats.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(bus.key_value(catalogue.INSTANCES))
    await asyncio.sleep(0.5)
    monkeypatch.undo()
    os.kill(fresh_nats.pid, signal.SIGCONT)
    assert await (await waiting).entries() == {}
    await maker.close()
    await bus.close()


async def test_what_jetstream_is_made_to_say_is_not_listened_to(
    server: NatsServer, buses: dict[str, NatsBus], caplog: pytest.LogCaptureFixture
) -> None:
    """A worker may not publish to the scheduler's subjects, but it may name them where JetStream is to send entries to."""
    heard: list[Cancel] = []
    await buses["scheduler"].subscribe(catalogue.SCHEDULER_CANCEL, heard.append)
    client = await nats.connect(server.url, user="worker-a", password="worker-a", inbox_prefix="_INBOX.worker.a")
    bucket, subject = "KV_tideway_instances", "$KV.tideway_instances.a-0"
    await client.jetstream().publish(subject, msgspec.msgpack.encode(Cancel("r")))
    consumer = ConsumerConfig(deliver_subject=catalogue.SCHEDULER_CANCEL.subject)
    await client.jetstream().add_consumer(bucket, consumer)
    deadline_s = asyncio.get_running_loop().time() + 15
    while not any("redirected" in record.getMessage() for record in caplog.records):
        assert asyncio.get_running_loop().time() < deadline_s, caplog.text
        await asyncio.sleep(0.01)
    assert heard == []
    await client.close()


def test_the_printed_users_start_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GATEWAY", "SCHEDULER", "PLACEMENT", "OPERATOR", "WORKER_NODE_A"):
        monkeypatch.setenv(f"NATS_{name}_PASSWORD", '"007"')
    text = users_file(["node-a"])
    assert "$NATS_WORKER_PASSWORD" not in text and set(ROLES) == {
        "gateway",
        "scheduler",
        "placement",
        "worker",
        "operator",
    }
    server = NatsServer(text)

    async def connect(user: str) -> None:
        await (await nats.connect(server.url, user=user, password="007", allow_reconnect=False)).close()

    try:
        asyncio.run(connect("worker-node-a"))
        with pytest.raises(nats.errors.Error):
            asyncio.run(connect("worker"))
    finally:
        server.close()


async def test_who_writes_one_key_cannot_clear_the_bucket(server: NatsServer, buses: dict[str, NatsBus]) -> None:
    leases = await buses["placement"].key_value(catalogue.LEASES)
    await leases.put("placement", LeaseHolder("p", 1))
    client = await nats.connect(server.url, user="scheduler", password="scheduler", inbox_prefix="_INBOX.scheduler")
    for rollup in ("all", "sub"):
        with pytest.raises(nats.js.errors.APIError, match="rollup not permitted"):
            await client.jetstream().publish("$KV.tideway_leases.scheduler", b"", headers={"Nats-Rollup": rollup})
    await client.close()
    assert "placement" in await leases.entries()


@pytest.mark.parametrize(
    ("nodes", "complaint"),
    [(["a.b"], "'a.b'"), (["*"], "'*'"), ([""], "''"), (["a-b", "a_b"], "NATS_WORKER_A_B_PASSWORD")],
)
def test_nodes_that_are_no_ids_or_share_a_password_are_refused(nodes: list[str], complaint: str) -> None:
    with pytest.raises(OperatorError, match=re.escape(complaint)):
        users_file(nodes)


def test_nobody_hears_all_inboxes() -> None:
    for user, node_id in (("worker-a.b", ""), ("", ""), ("worker", "a.>")):
        with pytest.raises(ValueError, match="part of a subject"):
            permissions(Role.WORKER, user, node_id)
