"""Who may delay whom on the real system: the two demonstration models on one instance, as clients see it.

`batch`: four streams of A alone, then beside flex requests of B. `high`: a stream of A that has high priority beside normal
streams of B and flex requests of B.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from bench.reporting import Target
from shared.runtime.settings import InstanceSettings
from tests.e2e.stack import REPOSITORY, Stack
from tests.e2e.streams import stream_completion

MODELS = {name: str(REPOSITORY / "models" / f"tideway-demo-{name}") for name in ("llama", "opt")}
A, B = MODELS
VOCABULARY = (200, 2000)
"""Token ids of prompts."""
TIMEOUT_S = 900.0
LEAST_FLEX = 0.9
"""A few flex requests are computed beside streams that last several times as long."""
FLEX: dict[str, str] = {"service_tier": "flex"}
HIGH: dict[str, str] = {"priority": "high"}


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    num_streams: int = 4
    stream_tokens: int = 1500
    num_lines: int = 24
    line_tokens: tuple[int, int] = (256, 128)
    """Prompt and answer of a flex request."""
    num_normal: int = 8
    normal_tokens: int = 500
    prompt_tokens: int = 64


class Client:
    """One request: times of its tokens, in seconds of a monotonic clock."""

    def __init__(self, url: str, model: str, prompt: list[int], max_tokens: int, fields: Mapping[str, Any]) -> None:
        self._ask = (url, model, prompt, max_tokens)
        self._fields = fields
        self.prompt_tokens = len(prompt)
        self.sent_s = 0.0
        self.tokens: list[tuple[float, int]] = []
        """Times at which some came, and how many."""

    async def run(self, http: httpx.AsyncClient) -> None:
        self.sent_s = time.monotonic()
        stream = await stream_completion(http, *self._ask, self._on_tokens, **self._fields)
        assert stream.ended_well, stream.error

    def _on_tokens(self, num: int) -> None:
        if num:
            self.tokens.append((time.monotonic(), num))

    @property
    def ttft_s(self) -> float:
        return self.tokens[0][0] - self.sent_s

    @property
    def end_s(self) -> float:
        return self.tokens[-1][0]

    @property
    def longest_gap_s(self) -> float:
        """The longest time between tokens. Those of one character arrive with its last, and share its time."""
        return max((b - a) / num for (a, _), (b, num) in pairwise(self.tokens))

    def tokens_until(self, at_s: float) -> int:
        """Tokens of prompt and answer that are known to be computed."""
        num = sum(count for when, count in self.tokens if when <= at_s)
        return num + self.prompt_tokens if num else 0


class Load:
    """Requests on a system, with prompts that have no beginning in common."""

    def __init__(self, url: str) -> None:
        self._url, self._draw = url, np.random.default_rng(1)

    def clients(
        self, num: int, model: str, prompt_tokens: int, max_tokens: int, fields: Mapping[str, Any] | None = None
    ) -> list[Client]:
        prompts = self._draw.integers(*VOCABULARY, (num, prompt_tokens)).tolist()
        return [Client(self._url, model, prompt, max_tokens, fields or {}) for prompt in prompts]

    def run(self, first: Sequence[Client], then: Sequence[Client] = ()) -> None:
        """`then` begin when each of `first` has a token."""

        async def all_of_them() -> None:
            async with (
                httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as http,
                asyncio.timeout(TIMEOUT_S),
                asyncio.TaskGroup() as group,
            ):
                tasks = [group.create_task(client.run(http)) for client in first]
                while not all(client.tokens for client in first) and not all(task.done() for task in tasks):
                    await asyncio.sleep(0.005)
                for client in then:
                    group.create_task(client.run(http))

        asyncio.run(all_of_them())


def measure(sizes: Sizes | None = None) -> tuple[list[Target], list[list[str]]]:
    """Targets, and rows of a table."""
    sizes = sizes or Sizes()
    with tempfile.TemporaryDirectory(prefix="tideway-authority-") as folder:
        # Step times of this machine, in no folder that is kept.
        environment = {"TIDEWAY_COST_MODELS_DIR": str(Path(folder))}
        with Stack(MODELS, num_instances=1, environment=environment) as stack:
            stack.wait_ready()
            load = Load(stack.url)
            for model in MODELS:  # the first steps of a process are slow
                load.run(load.clients(2, model, sizes.prompt_tokens, 20))
            found = [batch(load, sizes), high(load, sizes)]
    return [one for targets, _ in found for one in targets], [row for _, rows in found for row in rows]


def batch(load: Load, sizes: Sizes) -> tuple[list[Target], list[list[str]]]:
    tpot_s = InstanceSettings().tpot_ms / 1000
    streams = (sizes.num_streams, A, sizes.prompt_tokens, sizes.stream_tokens)
    alone, beside = load.clients(*streams), load.clients(*streams)
    lines = load.clients(sizes.num_lines, B, *sizes.line_tokens, FLEX)
    load.run(alone)
    load.run(beside, lines)
    alone_s, beside_s = (max(one.longest_gap_s for one in of) for of in (alone, beside))
    sent_s, end_s = min(one.sent_s for one in lines), max(one.end_s for one in beside)
    num_tokens = sum(one.tokens_until(end_s) for one in lines)
    done_s = max(one.end_s for one in lines) - sent_s
    first_s = min(one.tokens[0][0] for one in lines) - sent_s
    rows = [
        ["batch", "longest gap of A's streams alone", f"{alone_s:.3f} s", ""],
        ["batch", "longest gap of A's streams beside flex of B", f"{beside_s:.3f} s", ""],
        ["batch", "first token of any flex request", f"{first_s:.2f} s", ""],
        ["batch", "all flex requests done after", f"{done_s:.1f} s", f"A's streams ended after {end_s - sent_s:.1f} s"],
        ["batch", "flex tokens before A's streams ended", f"{num_tokens:,}", f"of {len(lines) * sum(sizes.line_tokens):,}"],
    ]  # fmt: skip
    return [
        Target(
            name="live: longest gap of streams of A beside flex requests of B", value=beside_s, limit=tpot_s, unit=" s",
            note=f"{alone_s:.3f} s alone",
        ),
        Target(
            name="live: share of the flex tokens of B computed before the streams of A end",
            value=num_tokens / (len(lines) * sum(sizes.line_tokens)), limit=LEAST_FLEX, is_least=True,
        ),
    ], rows  # fmt: skip


def high(load: Load, sizes: Sizes) -> tuple[list[Target], list[list[str]]]:
    settings = InstanceSettings()
    ttft_s, tpot_s = settings.ttft_ms / 1000, settings.tpot_ms / 1000
    urgent = load.clients(1, A, sizes.prompt_tokens, sizes.stream_tokens, HIGH)
    normal = load.clients(sizes.num_normal, B, sizes.prompt_tokens, sizes.normal_tokens)
    lines = load.clients(sizes.num_lines, B, *sizes.line_tokens, FLEX)
    load.run(urgent, [*normal, *lines])
    end_s = max(one.end_s for one in (*urgent, *normal))
    first_s, gap_s = max(one.ttft_s for one in normal), max(one.longest_gap_s for one in normal)
    num_tokens = sum(one.tokens_until(end_s) for one in lines)
    rows = [
        ["high", "first token, gap of the high stream", f"{urgent[0].ttft_s:.3f} s, {urgent[0].longest_gap_s:.3f} s", ""],
        ["high", "first token, gap of normal streams of B, at most", f"{first_s:.3f} s, {gap_s:.3f} s", ""],
        ["high", "flex tokens of B before these ended", f"{num_tokens:,}", f"of {len(lines) * sum(sizes.line_tokens):,}"],
    ]  # fmt: skip
    return [
        Target(name="live: first token of normal requests of B beside a high stream of A", value=first_s, limit=ttft_s,
               unit=" s"),
        Target(name="live: longest gap of normal streams of B beside a high stream of A", value=gap_s, limit=tpot_s,
               unit=" s", note=f"the high stream's: {urgent[0].longest_gap_s:.3f} s"),
    ], rows  # fmt: skip
