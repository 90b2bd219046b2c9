"""Turns of text work: fair between those for whom it is done, and held by nobody whose client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from services.gateway.text.turns import MAX_ABSENT, FairTurns
from shared.messages.cluster import ModelSpec
from shared.runtime.settings import BusSettings
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint
from tests.gateway.conftest import Stack, running_stack
from tests.gateway.peer import until

SLOW = "{% for i in range(60000) %}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
NUM_OF_FLOOD, NUM_PROCESSES = 12, 2


class Work:
    """Work of several owners in virtual time: each turn takes as long as it says."""

    def __init__(self, num_turns: int) -> None:
        self.now_s = 0.0
        self.turns = FairTurns(num_turns, lambda: self.now_s)
        self.order: list[str] = []

    async def do(self, owner: str, seconds: float) -> None:
        turn = await self.turns.take(owner)
        self.order.append(owner)
        self.now_s += seconds
        await asyncio.sleep(0)
        turn.end()


async def test_whoever_had_less_time_is_next() -> None:
    work = Work(1)
    await asyncio.gather(*(work.do("flood", 1.0) for _ in range(6)), *(work.do("other", 0.1) for _ in range(3)))
    assert work.order == ["flood", "other", "other", "other", "flood", "flood", "flood", "flood", "flood"]


async def test_nobody_saves_up_time() -> None:
    work = Work(1)
    flood = [asyncio.create_task(work.do("flood", 1.0)) for _ in range(20)]
    while len(work.order) < 10:
        await asyncio.sleep(0)
    late = [asyncio.create_task(work.do("late", 1.0)) for _ in range(5)]
    await asyncio.gather(*flood, *late)
    behind = work.order[work.order.index("late") :]
    assert behind[:8].count("late") <= 5 and "flood" in behind[:3]


async def test_who_has_gone_holds_no_turn() -> None:
    work = Work(1)
    held = await work.turns.take("first")
    waiting = asyncio.create_task(work.do("gone", 1.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    given = asyncio.create_task(work.do("gone too", 1.0))
    await asyncio.sleep(0)
    held.end()
    given.cancel()  # it has the turn, and does not know yet
    with suppress(asyncio.CancelledError):
        await given
    async with asyncio.timeout(5):
        await work.do("last", 1.0)
    assert work.order == ["last"]


async def test_owners_that_have_gone_leave_nothing_behind() -> None:
    """On a gateway that is never idle."""
    work = Work(1)
    held = await work.turns.take("first")
    for number in range(100):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await work.turns.take(f"impatient {number}")
    assert not work.turns._waiting
    for number in range(5000):
        given = asyncio.create_task(work.turns.take(f"tenant {number}"))
        await asyncio.sleep(0)
        work.now_s += 1.0
        held.end()
        held = await given
    assert len(work.turns._used_s) <= 2 * MAX_ABSENT + 2
    held.end()


@pytest.fixture
async def stack(nats_settings: BusSettings, tmp_path: Path) -> AsyncIterator[Stack]:
    """With a model whose chat template takes its time, and three keys."""
    write_checkpoint(tmp_path / "slow", byte_level_tokenizer(), chat_template=SLOW)
    specs = [ModelSpec("slow", str(tmp_path / "slow"))]
    async with running_stack(nats_settings, specs, api_keys="flood,one,two", text_processes=NUM_PROCESSES) as stack:
        stack.say("Hello")
        yield stack


async def test_a_flood_of_chats_holds_up_no_other_key(stack: Stack) -> None:
    async def chat(key: str, text: str) -> None:
        body = {"model": "slow", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        answer = await stack.client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text

    flood = [asyncio.create_task(chat("flood", "flood")) for _ in range(NUM_OF_FLOOD)]
    await until(lambda: stack.gateway.context.tokenizers._pool._turns._waiting)
    await asyncio.gather(chat("one", "one"), chat("two", "two"))
    num_before = len(stack.peer.submitted)
    assert num_before < NUM_OF_FLOOD, "the others waited behind all of it"
    await asyncio.gather(*flood)
