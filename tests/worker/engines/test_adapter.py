"""What vLLM's adapter answers where vLLM does not do what it was told, with a scripted client in the place of vLLM's."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from services.worker.engines.frames import FrameReader, FrameWriter
from services.worker.engines.vllm import adapter
from services.worker.engines.vllm.adapter import Adapter
from services.worker.engines.vllm.adapters import mask
from services.worker.engines.vllm.interrupting import NUMBER_BYTES, ArrivalNumber
from shared.engines.messages import (
    OFFLINE_PRIORITY,
    Command,
    Export,
    Exported,
    Generate,
    Imported,
    Report,
    Step,
    TakenOut,
    TakeOut,
)
from shared.messages.requests import Adapter as LoraAdapter
from shared.messages.requests import ErrorCode, FinishReason, SamplingParams


class FailingClient:
    """A client of an engine core whose utility calls fail."""

    def __init__(self) -> None:
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.aborted: list[str] = []

    async def call_utility_async(self, method: str, *arguments: Any) -> Any:
        raise RuntimeError(f"no memory for {method}")

    async def abort_requests_async(self, keys: list[str]) -> None:
        self.aborted += keys

    async def get_output_async(self) -> Any:
        return await self.outputs_queue.get()


@asynccontextmanager
async def running(
    client: FailingClient, arrivals: ArrivalNumber | None = None, max_adapters: int = 0
) -> AsyncIterator[tuple[FrameWriter, FrameReader[Report]]]:
    """An adapter; its other end."""
    ends = [await asyncio.open_connection(sock=one) for one in socket.socketpair()]
    (reader, writer), (others_reader, others_writer) = ends
    reading: FrameReader[Command] = FrameReader(others_reader, Command)  # type: ignore[arg-type]
    made = Adapter(client, 100, reading, FrameWriter(others_writer), arrivals, max_adapters=max_adapters)
    task = asyncio.create_task(made.run())
    try:
        yield FrameWriter(writer), FrameReader(reader, Report)  # type: ignore[arg-type]
    finally:
        writer.close()
        others_writer.close()
        task.cancel()
        await asyncio.wait([task])


async def test_a_failed_copy_is_answered_and_the_sequence_leaves_the_engine(capfd: pytest.CaptureFixture[str]) -> None:
    client = FailingClient()
    async with running(client) as (commands, reports):
        commands.write(Export("r#0#0", 0, (1, 2)))
        assert await reports.read() == Exported((1, 2), False)
        commands.write(TakeOut("r#0#0", 2, (3,)))
        assert await reports.read() == TakenOut("r#0#0", -1, -1)
    assert client.aborted == ["r#0#0"]
    assert "no memory for tideway_export" in capfd.readouterr().err


async def test_slots_of_a_refused_request_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise ValueError("no such parameter")

    monkeypatch.setattr(adapter, "core_request", refuse)
    async with running(FailingClient()) as (commands, reports):
        sampling = SamplingParams(max_tokens=5)
        commands.write(
            Generate(key="r#1#0", prompt=b"00000000", sampling=sampling, priority=0, slots=(4,), num_computed=1)
        )
        step = await reports.read()
        assert isinstance(step, Step) and step.progress[0].finish_reason is FinishReason.ERROR
        assert await reports.read() == Imported("r#1#0")


async def test_an_online_request_interrupts_once_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    file = os.memfd_create("arrivals")
    os.ftruncate(file, NUMBER_BYTES)
    arrivals = ArrivalNumber(file)
    os.close(file)
    sent: list[tuple[str, int, int]] = []

    class Client(FailingClient):
        async def add_request_async(self, request: tuple[str, int]) -> None:
            sent.append((*request, arrivals.get()))

    monkeypatch.setattr(adapter, "core_request", lambda message, _most, number, *_: (message.key, number))
    async with running(Client(), arrivals) as (commands, _):
        for key, priority in (("a", 0), ("b", OFFLINE_PRIORITY), ("c", -1), ("d", 0)):
            sampling = SamplingParams(max_tokens=5)
            commands.write(Generate(key=key, prompt=b"0000", sampling=sampling, priority=priority))
        while len(sent) < 4 or arrivals.get() < 3:
            await asyncio.sleep(0.01)
    assert sent == [("a", 1, 0), ("b", 0, 1), ("c", 2, 1), ("d", 3, 2)]


async def test_a_lora_adapter_is_loaded_before_a_request_needs_it_and_again_when_others_took_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []
    sent: list[str] = []

    class Client(FailingClient):
        async def add_lora_async(self, adapter: LoraAdapter) -> None:
            if adapter.source == "broken":
                wrong = "rank 64 is greater than max_lora_rank 16."
                raise RuntimeError(
                    f"Call failed: Worker failed with error '{wrong}', please check the stack trace above"
                )
            loaded.append(adapter.name)

        async def add_request_async(self, key: str) -> None:
            sent.append(key)

    monkeypatch.setattr(adapter, "core_request", lambda message, *_: message.key)
    monkeypatch.setattr(adapter, "lora_request", lambda adapter: adapter)
    async with running(Client(), max_adapters=2) as (commands, reports):
        for number, name in enumerate(["a", "b", "a", "broken", "c", "a", "b"]):
            lora = LoraAdapter(name, "1", name)
            sampling = SamplingParams(max_tokens=5)
            commands.write(Generate(key=f"r{number}", prompt=b"0000", sampling=sampling, priority=0, adapter=lora))
        step = await reports.read()
        while len(sent) < 6:
            await asyncio.sleep(0.01)
    assert isinstance(step, Step)
    (refused,) = step.progress
    assert refused.key == "r3" and refused.error is not None and refused.error.code is ErrorCode.BAD_REQUEST
    assert refused.error.message.endswith("'broken' cannot be loaded: rank 64 is greater than max_lora_rank 16.")
    assert sent == ["r0", "r1", "r2", "r4", "r5", "r6"]
    assert loaded == ["a", "b", "c", "b"], "a was used since b was, so c took the place of b"


@pytest.mark.parametrize("names", [[], ["Qwen3ForCausalLM", "Qwen3Model"]])
def test_a_model_of_no_or_several_architectures_scores_no_pairs(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": names}))
    with pytest.raises(adapter.NotHostable, match=f"names {', '.join(names) or 'none'} as architectures"):
        adapter._classifier_of_tokens(str(tmp_path), (1,))


def test_rows_without_a_lora_adapter_get_nothing_of_the_others() -> None:
    module = ModuleType("punica_cpu")

    def shrink(inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor) -> None:
        output[:] = inputs * weights[indices]

    module.bgmv_shrink = shrink  # type: ignore[attr-defined]
    module.sgmv_shrink = lambda inputs, weights, output, _starts, lengths, indices: shrink(  # type: ignore[attr-defined]
        inputs, weights, output, indices.repeat_interleave(lengths)
    )
    mask(module)
    weights, indices, lengths = torch.tensor([[2.0], [3.0]]), torch.tensor([0, -1, 1]), torch.tensor([2, 1, 1])
    by_row, by_token = torch.full((3, 1), 9.0), torch.full((4, 1), 9.0)
    module.bgmv_shrink(torch.ones(3, 1), weights, by_row, indices)
    module.sgmv_shrink(torch.ones(4, 1), weights, by_token, torch.tensor([0, 2, 3]), lengths, indices)
    assert by_row.tolist() == [[2.0], [0.0], [3.0]] and by_token.tolist() == [[2.0], [2.0], [0.0], [3.0]]
