"""Load on an OpenAI-compatible server in the manner of `vllm bench serve`: random prompts as token ids, fixed output
lengths, streamed, a bound on concurrency or a Poisson rate.

    python -m bench.load --url http://127.0.0.1:8000 --model tideway-demo-llama --concurrency 32 --requests 128
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx


@dataclass
class Outcome:
    ttft_s: float = 0.0
    latency_s: float = 0.0
    num_output_tokens: int = 0
    inter_token_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def tpot_s(self) -> float:
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else 0.0


async def one_request(
    client: httpx.AsyncClient, url: str, model: str, prompt: list[int], output_len: int, stream: bool
) -> Outcome:
    """Sends one completion and times it; any failure is in `error`."""
    outcome = Outcome()
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "repetition_penalty": 1.0,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    started = time.perf_counter()
    try:
        if not stream:
            response = await client.post(f"{url}/v1/completions", json=body)
            outcome.latency_s = outcome.ttft_s = time.perf_counter() - started
            if response.status_code != 200:
                outcome.error = response.text
            else:
                outcome.num_output_tokens = response.json()["usage"]["completion_tokens"]
            return outcome
        previous = 0.0
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                outcome.error = (await response.aread()).decode()
                return outcome
            buffer = b""
            async for piece in response.aiter_bytes():
                now = time.perf_counter()
                buffer += piece
                *events, buffer = buffer.split(b"\n\n")
                for event in events:
                    if event == b"data: [DONE]":
                        continue
                    chunk = json.loads(event[6:])
                    if "error" in chunk:
                        outcome.error = json.dumps(chunk["error"])
                    elif chunk["choices"]:
                        if not previous:
                            outcome.ttft_s = now - started
                        else:
                            outcome.inter_token_s.append(now - previous)
                        previous = now
                    else:
                        outcome.num_output_tokens = chunk["usage"]["completion_tokens"]
            outcome.latency_s = previous - started
    except (httpx.HTTPError, ValueError, KeyError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def run_load(
    url: str,
    model: str,
    *,
    num_requests: int,
    concurrency: int,
    input_len: int,
    output_len: int,
    vocabulary: int = 1000,
    request_rate: float = 0.0,
    stream: bool = True,
    seed: int = 0,
) -> dict[str, float]:
    """Runs the load; returns throughput and latencies (seconds, tokens per second)."""
    chooser = random.Random(seed)
    prompts = [[chooser.randrange(3, vocabulary) for _ in range(input_len)] for _ in range(num_requests)]
    bound = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)

    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def bounded(prompt: list[int], delay_s: float) -> Outcome:
            await asyncio.sleep(delay_s)
            async with bound:
                return await one_request(client, url, model, prompt, output_len, stream)

        delay_s, delays = 0.0, []
        for _ in prompts:
            delays.append(delay_s)
            if request_rate:
                delay_s += chooser.expovariate(request_rate)
        started = time.perf_counter()
        outcomes = await asyncio.gather(*(bounded(p, d) for p, d in zip(prompts, delays, strict=True)))
        elapsed_s = time.perf_counter() - started
    good = [outcome for outcome in outcomes if not outcome.error]
    if not good:
        raise SystemExit(f"all requests failed; the first: {outcomes[0].error}")

    def percentile(values: list[float], share: float) -> float:
        ordered = sorted(values)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    ttfts, tpots = [o.ttft_s for o in good], [o.tpot_s for o in good]
    tokens = sum(o.num_output_tokens for o in good)
    return {
        "num_failed": len(outcomes) - len(good),
        "elapsed_s": elapsed_s,
        "requests_per_s": len(good) / elapsed_s,
        "output_tokens_per_s": tokens / elapsed_s,
        "ttft_mean_s": statistics.mean(ttfts),
        "ttft_p50_s": percentile(ttfts, 0.5),
        "ttft_p99_s": percentile(ttfts, 0.99),
        "tpot_mean_s": statistics.mean(tpots),
        "tpot_p99_s": percentile(tpots, 0.99),
        "latency_p50_s": percentile([o.latency_s for o in good], 0.5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second, Poisson; 0: as fast as allowed")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--no-stream", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = arguments.model or httpx.get(f"{arguments.url}/v1/models").json()["data"][0]["id"]
    figures = asyncio.run(
        run_load(
            arguments.url,
            model,
            num_requests=arguments.requests,
            concurrency=arguments.concurrency,
            input_len=arguments.input_len,
            output_len=arguments.output_len,
            vocabulary=arguments.vocabulary,
            request_rate=arguments.rate,
            stream=not arguments.no_stream,
            seed=arguments.seed,
        )
    )
    for name, value in figures.items():
        print(f"{name:22} {value:.4f}")


if __name__ == "__main__":
    main()
