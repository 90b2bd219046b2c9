"""Requests move with their KV between two instances whose engine is another's, on a real NATS: engines are scripted
(scripted_adapter.py), whose tokens are right only where the KV that came is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker.engines.hosted import HostedEngine
from services.worker.instance.migrations import OpenTransport
from services.worker.kv_transport import KvTransport
from shared.engines.moving import MORE_BLOCKS
from shared.messages.admin import Drain
from shared.messages.catalogue import INSTANCE_CANCEL, INSTANCE_DRAIN, INSTANCE_REBALANCE, INSTANCE_REPLAY
from shared.messages.migration import MigrationReason, Rebalance
from shared.messages.requests import (
    Cancel,
    FinishReason,
    ReplayQuery,
    StreamPosition,
)
from shared.runtime.settings import BusSettings
from tests.shared.engine.fake_executor import expected_output, request
from tests.worker.engines.engine_stage import scripted_engine
from tests.worker.engines.pair import Pair, pair_on
from tests.worker.engines.scripted_adapter import FACTS, NUM_SLOTS
from tests.worker.kv_transport.local import LocalHub, LocalNetwork

PROMPT = list(range(40))
NUM_TOKENS = 500
STEP_S = 0.01


@pytest.fixture
async def pair(nats_settings: BusSettings, tmp_path: Path) -> AsyncIterator[Pair]:
    hub = LocalHub()

    def engine() -> HostedEngine:
        return scripted_engine(STEP_S=STEP_S, CAME_FILE=tmp_path / "came")

    def opener(name: str) -> OpenTransport:
        async def open_transport() -> KvTransport:
            transport = KvTransport(LocalNetwork(hub, name))
            await transport.open()
            return transport

        return open_transport

    async with pair_on(nats_settings, [engine(), engine()], [opener("a"), opener("b")]) as pair:
        yield pair


async def test_a_request_that_decodes_moves_with_its_kv(pair: Pair, tmp_path: Path) -> None:
    sent = request("r1", PROMPT, NUM_TOKENS, temperature=0.0)
    await pair.stages[0].submit(sent)
    await pair.until(lambda: len(pair.output(sent)) > 50)
    pair.rebalance(0)
    await pair.until(lambda: pair.end(sent))
    assert pair.output(sent) == expected_output(sent, 600)
    assert pair.num_moved == 1 and pair.stages[1].end("r1")
    assert pair.end(sent).epoch == sent.epoch + 1
    _, came, of = (tmp_path / "came").read_text().split()
    size = FACTS.block_size
    least = (
        len(PROMPT) + 50
    ) // size * size + MORE_BLOCKS * size  # of a machine on which steps go on for long meanwhile
    assert min(int(of) - 1, least) <= int(came) < int(of), "the KV of all but the last token came"
    await pair.until_rest(NUM_SLOTS)
    reply = await pair.stages[0].bus.request(
        INSTANCE_REPLAY.at(instance_id="node-0"), ReplayQuery([StreamPosition("r1", sent.epoch, 0)]), timeout_s=5
    )
    assert reply.moved[0].instance_id == "node-1"


async def test_requests_move_to_and_fro_and_none_loses_a_token(pair: Pair) -> None:
    sent = [request(f"r{number}", list(range(number, number + 60)), NUM_TOKENS, temperature=0.0) for number in range(4)]
    for one in sent:
        await pair.stages[0].submit(one)
    source = 0
    while not all(pair.end(one) for one in sent):
        num_before = pair.num_moved
        pair.rebalance(source, max_concurrent=4)
        await pair.until(lambda: pair.num_moved > num_before or all(pair.end(one) for one in sent))  # noqa: B023
        pair.stop(source)
        source = 1 - source
    for one in sent:
        assert pair.output(one) == expected_output(one, 600), one.request_id
    assert pair.num_moved >= 4
    await pair.until_rest(NUM_SLOTS)


@pytest.mark.parametrize(
    "faults",
    [
        "source.answer:fail,source.owns:fail",  # it may come back before its source knows that it has gone
        "source.commit:fail",
        "destination.copied:fail",
        "source.detached:delay:0.2,destination.committed:delay:0.2",
    ],
)
async def test_faults_leave_each_request_with_one_owner(pair: Pair, faults: str) -> None:
    sent = [request(f"r{number}", list(range(number, number + 60)), 300, temperature=0.0) for number in range(4)]
    for one in sent:
        await pair.stages[0].submit(one)
    source = number = 0
    while not all(pair.end(one) for one in sent):
        pair.set_faults(faults if number % 3 else "")
        pair.rebalance(source, max_concurrent=4)
        await asyncio.sleep(0.15)
        pair.stop(source)
        source, number = 1 - source, number + 1
    for one in sent:
        assert pair.output(one) == expected_output(one, 600), one.request_id
    pair.set_faults("")
    await pair.until_rest(NUM_SLOTS)


async def test_a_cancel_reaches_a_request_that_has_moved(pair: Pair) -> None:
    sent = request("r1", PROMPT, NUM_TOKENS, temperature=0.0)
    await pair.stages[0].submit(sent)
    await pair.until(lambda: len(pair.output(sent)) > 20)
    pair.rebalance(0)
    await pair.until(lambda: pair.num_moved)
    pair.stages[0].bus.publish(INSTANCE_CANCEL.at(instance_id="node-0"), Cancel("r1"))
    await pair.until(lambda: pair.end(sent))
    assert pair.end(sent).finish_reason is FinishReason.CANCELLED
    await pair.until_rest(NUM_SLOTS)


async def test_a_drain_moves_requests_out(pair: Pair) -> None:
    sent = [request(f"r{number}", list(range(number, number + 60)), NUM_TOKENS, temperature=0.0) for number in range(3)]
    for one in sent:
        await pair.stages[0].submit(one)
    await pair.until(lambda: all(len(pair.output(one)) > 20 for one in sent))
    await pair.stages[0].bus.request(INSTANCE_DRAIN.at(instance_id="node-0"), Drain(20.0), timeout_s=5)
    pair.stages[0].bus.publish(
        INSTANCE_REBALANCE.at(instance_id="node-0"), Rebalance(["node-1"], MigrationReason.DRAIN, 20.0, 4)
    )
    await pair.until(lambda: all(pair.end(one) for one in sent))
    for one in sent:
        assert pair.output(one) == expected_output(one, 600)
    assert pair.num_moved == 3
