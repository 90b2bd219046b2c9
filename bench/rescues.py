"""What clients notice when an instance is killed under long contexts, without and with copies of their KV elsewhere: tokens
that are computed again, and the longest silence of a stream. On the real system; every text is that of an undisturbed run.

    python -m bench.rescues [--contexts 32] [--tokens 2000] [--instances 2] [--backup off,all] [--seed 1]

About `contexts / instances` requests are lost. The model is a small one, whose KV has 6 KB a token.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np

from tests.e2e.checkpoints import make_llama
from tests.e2e.stack import Stack
from tests.e2e.streams import Stream, stream_completion

MODEL = "llama"
STEP_S = 0.02
"""What a step takes at least, so that streams last."""
COPY_TIMEOUT_S = 120.0
MIN_PROGRESS = 10
"""Tokens that each stream has before the instance is killed."""


class Rescue(NamedTuple):
    """What came of one kill."""

    streams: list[Stream]
    num_lost: int
    """Requests that the instance had."""
    kept_tokens: int
    """Known tokens of these whose KV was found elsewhere."""
    recomputed_tokens: int
    silence_s: float
    """The longest time without a token of any stream, from the kill on."""
    copy_s: float
    """From the last stream's progress until nothing lacked a copy; 0 without copies."""

    @property
    def recomputed_share(self) -> float:
        """Share of the tokens that are recomputed without copies: all that are known."""
        return self.recomputed_tokens / max(1, self.kept_tokens + self.recomputed_tokens)


def make_model(folder: Path, max_len: int) -> str:
    return str(make_llama(folder / MODEL, hidden=192, layers=4, max_len=max_len))


def prompts_of(num: int, num_tokens: int, seed: int = 1) -> list[list[int]]:
    """Prompts that have no beginning in common."""
    draws: list[list[int]] = np.random.default_rng(seed).integers(10, 250, (num, num_tokens)).tolist()
    return draws


def metric(stack: Stack, name: str, label: str = "") -> dict[str, float]:
    """By instance, the sum over the lines of a metric that have the label."""
    found = {}
    for instance in stack.instances():
        text = httpx.get(f"http://127.0.0.1:{instance['metrics_port']}/metrics", timeout=5).text
        lines = (line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")) and label in line)
        found[instance["instance_id"]] = sum(float(line.rpartition(" ")[2]) for line in lines)
    return found


async def run(url: str, prompts: list[list[int]], max_tokens: int, arrivals: list[list[float]]) -> list[Stream]:
    """`arrivals`: for each stream, when tokens came."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        return await asyncio.gather(
            *(
                stream_completion(
                    client, url, MODEL, prompt, max_tokens, lambda _, own=own: own.append(time.monotonic())
                )  # type: ignore[misc]
                for prompt, own in zip(prompts, arrivals, strict=True)
            )
        )


async def rescue(stack: Stack, prompts: list[list[int]], max_tokens: int, *, has_copies: bool) -> Rescue:
    """Kills the instance with the most requests when each stream has some tokens, and nothing lacks a copy."""
    arrivals: list[list[float]] = [[] for _ in prompts]
    running = asyncio.create_task(run(stack.url, prompts, max_tokens, arrivals))
    while not all(len(own) >= MIN_PROGRESS for own in arrivals):
        assert not running.done(), [stream.error for stream in running.result()]
        await asyncio.sleep(0.02)
    progressed_s, copy_s = time.monotonic(), 0.0
    while has_copies and not await asyncio.to_thread(are_copied, stack, len(prompts)):
        copy_s = time.monotonic() - progressed_s
        assert copy_s < COPY_TIMEOUT_S and not running.done(), "they are not copied in time"
        await asyncio.sleep(0.1)
    num_running = metric(stack, "vllm:num_requests_running")
    most = max(num_running, key=lambda name: num_running[name])
    killed_s = time.monotonic()
    stack.kill_instance(sorted(num_running).index(most))
    streams = await running
    times = [[killed_s, *(at for at in own if at > killed_s)] for own in arrivals]
    silence_s = max((b - a for own in times for a, b in pairwise(own)), default=0.0)
    return Rescue(streams, int(num_running[most]), *rescued_tokens(stack), silence_s, copy_s)


def rescued_tokens(stack: Stack) -> tuple[int, int]:
    """Tokens kept and recomputed, on the instances that live."""
    name = "tideway_instance_rescued_tokens_total"
    kept, recomputed = (sum(metric(stack, name, f'"{what}"').values()) for what in ("kept", "recomputed"))
    return int(kept), int(recomputed)


def are_copied(stack: Stack, num_requests: int) -> bool:
    """Whether each has copies elsewhere, of all but a few blocks."""
    num_copied = sum(metric(stack, "tideway_kv_backup_requests", "source").values())
    num_missing = sum(metric(stack, "tideway_kv_backup_missing_blocks").values())
    return num_copied >= num_requests and num_missing <= 3 * num_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000, help="of each prompt")
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--backup", default="off,all", help="values of TIDEWAY_KV_BACKUP, one after the other")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    arguments = parser.parse_args()
    print(
        "| copies | lost | copied after, s | kept | recomputed | of all known | longest silence, s | texts that differ |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), arguments.tokens + arguments.output_tokens + 16)
        prompts = prompts_of(arguments.contexts, arguments.tokens, arguments.seed)
        for backup in arguments.backup.split(","):
            environment = {"TIDEWAY_KV_BACKUP": backup}
            with Stack(
                {MODEL: model}, num_instances=arguments.instances, environment=environment, step_s=STEP_S
            ) as stack:
                stack.wait_ready()
                found = asyncio.run(rescue(stack, prompts, arguments.output_tokens, has_copies=backup != "off"))
                expected = asyncio.run(run(stack.url, prompts, arguments.output_tokens, [[] for _ in prompts]))
            num_differing = sum(a.text != b.text for a, b in zip(found.streams, expected, strict=True))
            print(
                f"| {backup} | {found.num_lost} | {found.copy_s:.1f} | {found.kept_tokens} | {found.recomputed_tokens} "
                f"| {found.recomputed_share:.1%} | {found.silence_s:.2f} | {num_differing} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
