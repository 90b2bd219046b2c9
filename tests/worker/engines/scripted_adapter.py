"""An adapter without an engine: a process behind HostedEngine's socket whose tokens are hashes of their prefix, one of
each sequence a step. `SCRIPT`: `fail` says that it cannot serve; `die` exits after some steps of five sequences, `choke`
at a prompt that begins with `BAD_TOKEN`; `diverge` makes other tokens the second time.

Its KV is the tokens themselves: a block of the staging memory holds those of its positions, and whoever comes with KV goes
on from that. `CAME_FILE` gets a line for each of these: key, tokens that came, tokens in all."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
from pathlib import Path

import msgspec
import numpy as np

from services.worker.engines.frames import FrameReader, FrameWriter
from services.worker.engines.hosted import SOCKET
from shared.engines.capabilities import Capability
from shared.engines.messages import (
    Abort,
    Command,
    EngineFacts,
    Export,
    Exported,
    Failed,
    Generate,
    Imported,
    Progress,
    Ready,
    Step,
    TakenOut,
    TakeOut,
)
from shared.messages.requests import FinishReason, TokenLogprob, pack_tokens, unpack_tokens
from tests.shared.engine.fake_executor import next_token

STEP_S = float(os.environ.get("STEP_S", "0.001"))
LACKS = (
    Capability.ADAPTERS,
    Capability.PROMPT_LOGPROBS,
    Capability.POOLING,
    Capability.SEED_RESUME,
    Capability.PENALTY_RESUME,
)
FACTS = EngineFacts(
    version="1.0", lacks=LACKS, max_model_len=600, block_size=4, num_blocks=400, block_bytes=64, max_running=8,
    max_step_tokens=512, layout="tokens",
)  # fmt: skip
NUM_SLOTS = 300
BAD_TOKEN = 13


class Staging:
    """`NUM_SLOTS` blocks of token ids."""

    def __init__(self) -> None:
        size = NUM_SLOTS * FACTS.block_size * 4
        self._file = os.memfd_create("scripted")
        os.ftruncate(self._file, size)
        self._slots = np.frombuffer(mmap.mmap(self._file, size), np.int32).reshape(NUM_SLOTS, FACTS.block_size)

    @property
    def facts(self) -> EngineFacts:
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        return msgspec.structs.replace(FACTS, staging=path, num_slots=NUM_SLOTS, block_bytes=4 * FACTS.block_size)

    def copy_out(self, tokens: list[int], first_block: int, slots: tuple[int, ...], *, is_partial: bool) -> list[int]:
        """Slots that were filled, and tokens in them and before; the last token is not computed yet."""
        size = FACTS.block_size
        num_computed = min(len(tokens) - 1, (first_block + len(slots)) * size)
        if num_computed < first_block * size:
            return [-1, -1]
        end = -(-num_computed // size) if is_partial else num_computed // size
        for block in range(first_block, end):
            part = tokens[block * size : min((block + 1) * size, num_computed)]
            self._slots[slots[block - first_block], : len(part)] = part
        return [end - first_block, num_computed]

    def bring_in(self, message: Generate) -> list[int]:
        """Its tokens, the first ones as their KV has them."""
        tokens = unpack_tokens(message.prompt)
        came = [int(one) for slot in message.slots for one in self._slots[slot]][: message.num_computed]
        if came:
            with Path(os.environ["CAME_FILE"]).open("a") as file:
                print(message.key, len(came), len(tokens), file=file)
        return came + tokens[len(came) :]


def advance(tokens: list[int], num_made: int, message: Generate) -> Progress:
    """One more token."""
    token = next_token(tokens)
    tokens.append(token)
    sampling, reason = message.sampling, None
    if token in sampling.stop_token_ids and num_made + 1 > sampling.min_tokens:
        reason = FinishReason.STOP
    elif num_made + 1 >= sampling.max_tokens:
        reason = FinishReason.LENGTH
    logprobs = (TokenLogprob(-1.0, rank=1),) if sampling.logprobs >= 0 else ()
    return Progress(key=message.key, tokens=pack_tokens([token]), logprobs=logprobs, finish_reason=reason)


async def main() -> None:
    script = os.environ.get("SCRIPT", "")
    stream, stream_writer = await asyncio.open_connection(sock=socket.socket(fileno=int(os.environ[SOCKET])))
    reader: FrameReader[Command] = FrameReader(stream, Command)  # type: ignore[arg-type]
    writer = FrameWriter(stream_writer)
    if script == "fail":
        writer.write(Failed("no such weights", is_final=True))
        await writer.drain()
        return
    staging = Staging()
    writer.write(Ready(staging.facts))
    held: dict[str, tuple[Generate, list[int], int]] = {}
    ended = asyncio.Event()

    async def obey() -> None:
        while (command := await reader.read()) is not None:
            if isinstance(command, Generate):
                held[command.key] = (command, staging.bring_in(command), len(command.prompt) // 4)
                if command.slots:
                    writer.write(Imported(command.key))
            elif isinstance(command, Export):
                _, tokens, _ = held.get(command.key, (None, [], 0))
                num_out, _ = staging.copy_out(tokens, command.first_block, command.slots, is_partial=False)
                writer.write(Exported(command.slots, num_out == len(command.slots)))
            elif isinstance(command, TakeOut):
                _, tokens, _ = held.pop(command.key, (None, [], 0))
                found = staging.copy_out(tokens, command.first_block, command.slots, is_partial=True)
                writer.write(TakenOut(command.key, *found))
            elif isinstance(command, Abort):
                for key in command.keys:
                    held.pop(key, None)
        ended.set()

    obeying = asyncio.create_task(obey())
    num_steps = 0
    while not ended.is_set():
        await asyncio.sleep(STEP_S)
        if not held:
            continue
        num_steps += len(held) >= 5
        is_bad = script == "choke" and any(tokens[0] == BAD_TOKEN for _, tokens, _ in held.values())
        if is_bad or (script == "die" and num_steps > 20):
            os.kill(os.getpid(), signal.SIGKILL)
        progress = []
        for key, (message, tokens, num_prompt) in list(held.items()):
            made = advance(tokens, len(tokens) - num_prompt, message)
            if made.finish_reason is not None:
                del held[key]
            progress.append(made)
        writer.write(Step(progress=progress, used_share=0.1, shape=(0, 0.0, len(progress), 10), seconds=STEP_S))
        await writer.drain()
    obeying.cancel()


if __name__ == "__main__":
    asyncio.run(main())
