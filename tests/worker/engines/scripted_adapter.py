"""An adapter without an engine: a process behind HostedEngine's socket whose tokens are hashes of their prefix, one of
each sequence a step. `SCRIPT`: `fail` says that it cannot serve; `die` exits after some steps; `diverge` makes other
tokens the second time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

from services.worker.engines.frames import FrameReader, FrameWriter
from services.worker.engines.hosted import SOCKET
from shared.engines.capabilities import Capability
from shared.engines.messages import Abort, Command, EngineFacts, Failed, Generate, Progress, Ready, Step
from shared.messages.requests import FinishReason, TokenLogprob, pack_tokens, unpack_tokens
from tests.shared.engine.fake_executor import next_token

STEP_S = 0.001
LACKS = (
    Capability.ADAPTERS,
    Capability.PROMPT_LOGPROBS,
    Capability.POOLING,
    Capability.SEED_RESUME,
    Capability.PENALTY_RESUME,
)
FACTS = EngineFacts(
    version="1.0", lacks=LACKS, max_model_len=600, block_size=4, num_blocks=400, block_bytes=64, max_running=8,
    max_step_tokens=512,
)  # fmt: skip


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
    writer.write(Ready(FACTS))
    held: dict[str, tuple[Generate, list[int], int]] = {}
    ended = asyncio.Event()

    async def obey() -> None:
        while (command := await reader.read()) is not None:
            if isinstance(command, Generate):
                held[command.key] = (command, unpack_tokens(command.prompt), len(command.prompt) // 4)
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
        num_steps += 1
        if script == "die" and num_steps > 20:
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
