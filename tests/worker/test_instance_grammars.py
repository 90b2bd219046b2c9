"""An instance that is given a request has its grammar compiled beside the steps first, and says what is wrong with it. On a
real NATS; the executor is a fake (instance_stage.py)."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from services.worker.executor.grammars import GrammarCounters
from services.worker.instance import service as instance
from shared.bus.interface import BusError
from shared.messages.catalogue import INSTANCE_SUBMIT
from shared.messages.requests import ErrorCode, FinishReason, GenerationRequest
from shared.runtime.settings import BusSettings
from tests.shared.engine.fake_executor import request
from tests.worker.instance_stage import IDS, Stage, SteppedExecutor, instance_on


class Following(SteppedExecutor):
    def __init__(self) -> None:
        super().__init__()
        self.grammar_counters = GrammarCounters()
        self.compiled: dict[str, Future[Any]] = {}
        self.asked: list[str] = []

    def compile_grammar(self, model: str, grammar: str) -> Future[Any]:
        assert model == "a"
        self.asked.append(grammar)
        return self.compiled.setdefault(grammar, Future())


def following(name: str, grammar: str) -> GenerationRequest:
    plain = request(name, [1, 2, 3], 5)
    return msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, grammar=grammar))


async def refusal(stage: Stage, sent: GenerationRequest) -> tuple[ErrorCode, str]:
    with pytest.raises(BusError) as refused:
        await stage.bus.request(INSTANCE_SUBMIT.at(**IDS), sent, timeout_s=60)
    return refused.value.code, refused.value.info.message


async def test_a_request_is_taken_when_its_grammar_is_compiled(
    nats_settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "COMPILE_WAIT_S", 0.1)
    async with instance_on(nats_settings, executor=Following()) as stage:
        compiled = stage.executor.compiled
        assert (await refusal(stage, following("r1", "slow")))[0] == ErrorCode.LOADING
        await stage.submit(request("plain", [1, 2], 5))
        compiled["slow"].set_result(object())
        await stage.submit(following("r1", "slow"))
        await stage.until(lambda: stage.end("r1") and stage.end("plain"))
        assert stage.end("r1").finish_reason == FinishReason.LENGTH

        compiled["bad"] = Future()
        compiled["bad"].set_result("unknown name")
        code, message = await refusal(stage, following("r2", "bad"))
        assert code == ErrorCode.BAD_REQUEST and message == "The output's grammar cannot be followed: unknown name"
        stage.service.intake.models.clear()
        assert (await refusal(stage, following("r3", "new")))[0] == ErrorCode.GONE
        assert "new" not in compiled


async def test_requests_that_wait_for_a_grammar_keep_no_others_out(
    nats_settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "COMPILE_WAIT_S", 60.0)
    async with instance_on(nats_settings, executor=Following()) as stage:
        sent = [following(f"r{number}", "slow") for number in range(100)]
        waiting = [asyncio.create_task(stage.bus.request(INSTANCE_SUBMIT.at(**IDS), one, timeout_s=60)) for one in sent]
        await stage.until(lambda: len(stage.executor.asked) == len(sent))
        await stage.submit(request("plain", [1, 2], 5))
        stage.executor.compiled["slow"].set_result(object())
        assert [reply.request_id for reply in await asyncio.gather(*waiting)] == [one.request_id for one in sent]
