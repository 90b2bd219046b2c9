"""What a stream waits when its prompt was computed on one instance and it goes on at another: from its first token to its
second, against the time between later tokens. On the real system, over UCX, without roles and with them.

    python -m bench.handoffs [--requests 40] [--tokens 1600] [--output-tokens 40] [--beside 4] [--seed 1]

The model is a small one, whose KV has 6 KB a token. One long prompt comes after the other,
beside streams of short prompts, which only decode.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from bench.rescues import MODEL, make_model, metric, prompts_of
from tests.e2e.stack import Stack
from tests.e2e.streams import stream_completion

SHORT = 8
"""Tokens of a prompt beside them."""
BESIDE_TOKENS = 100_000
"""More than a stream beside them has until it is left alone."""
WARM_REQUESTS = 4
"""Long prompts at once from which step times are learnt."""
MAX_ROUNDS = 40
"""Rounds of these, at most."""
ROLES = {"off": "", "fixed": "prefill,decode"}


class Waits(NamedTuple):
    first_s: list[float]
    """Time of each request from its first token to its second."""
    later_s: list[float]
    """Between the others."""
    num_handoffs: float
    told_s: float
    """Mean wait for the decoder's first step from the end of the prompt, as the decoder measures it."""


async def stream(client: httpx.AsyncClient, url: str, prompt: list[int], num_tokens: int) -> list[float]:
    """Times at which tokens came."""
    arrivals: list[float] = []
    await stream_completion(client, url, MODEL, prompt, num_tokens, lambda _: arrivals.append(time.monotonic()))
    return arrivals


async def measure(stack: Stack, prompts: list[list[int]], num_tokens: int, num_beside: int, max_len: int) -> Waits:
    limits = httpx.Limits(max_connections=None)
    first_s, later_s = [], []
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:

        async def beside(seed: int) -> None:
            while True:
                prompt = prompts_of(1, SHORT, seed)[0]
                await stream(client, stack.url, prompt, min(BESIDE_TOKENS, max_len - SHORT))

        for _ in range(MAX_ROUNDS):
            await asyncio.gather(
                *(stream(client, stack.url, one, num_tokens) for one in (*prompts[:WARM_REQUESTS], [7]))
            )
            if all(is_known(one) for one in stack.instances()):
                break
        else:
            raise RuntimeError("the instances did not learn their step times, or have no transport")
        handed_over = await asyncio.to_thread(told, stack)
        others = [asyncio.create_task(beside(1000 + number)) for number in range(num_beside)]
        for prompt in prompts[WARM_REQUESTS:]:
            gaps = [b - a for a, b in pairwise(await stream(client, stack.url, prompt, num_tokens))]
            first_s.append(gaps[0])
            later_s += gaps[1:]
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    count, total_s = (now - before for now, before in zip(told(stack), handed_over, strict=True))
    return Waits(first_s, later_s, count, total_s / count if count else 0.0)


def is_known(instance: dict[str, Any]) -> bool:
    """Whether it has a transport and step times."""
    return bool(instance["migration"]) and instance["models"][0]["cost_model"] not in ("", "none")


def told(stack: Stack) -> tuple[float, float]:
    """Requests handed over so far, and the sum of their waits."""
    names = ("tideway_handoff_wait_seconds_count", "tideway_handoff_wait_seconds_sum")
    count, total_s = (sum(metric(stack, name).values()) for name in names)
    return count, total_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=1600, help="of each long prompt")
    parser.add_argument("--output-tokens", type=int, default=40)
    parser.add_argument("--beside", type=int, default=4, help="streams that decode meanwhile")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    arguments = parser.parse_args()
    print("| roles | requests, handed over | first to second token, ms: p50, p90 | later tokens: p50, p90 | told |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        max_len = arguments.tokens + arguments.output_tokens + 16
        model = make_model(Path(folder), max_len)
        prompts = prompts_of(WARM_REQUESTS + arguments.requests, arguments.tokens, arguments.seed)
        for mode, roles in ROLES.items():
            environment = {
                "TIDEWAY_ROLES": mode, "TIDEWAY_INSTANCE_ROLES": roles, "TIDEWAY_TOKEN_BUDGET": "256",
                "TIDEWAY_PROFILE": "live",
            }  # fmt: skip
            with Stack({MODEL: model}, environment=environment) as stack:
                stack.wait_ready()
                waits = asyncio.run(measure(stack, prompts, arguments.output_tokens, arguments.beside, max_len))
            (first50, first90), (later50, later90) = (
                1000 * np.percentile(of, (50, 90)) for of in (waits.first_s, waits.later_s)
            )
            print(
                f"| {mode} | {arguments.requests}, {waits.num_handoffs:.0f} | {first50:.0f}, {first90:.0f} "
                f"| {later50:.0f}, {later90:.0f} | {1000 * waits.told_s:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
