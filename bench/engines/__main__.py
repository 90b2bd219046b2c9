"""vLLM hosted by Tideway beside `vllm serve` and the native engine.

    tideway engine install vllm
    python -m bench.engines               135M, 1, 8 and 32 streams, then online requests alone and beside a batch
    python -m bench.engines --smoke       the same in some minutes, with too few requests for a P99

All servers are up while one is measured, the others idle; their turns alternate (A B C C B A). First `vllm serve` answers
the online requests alone: the objectives of the others are its P99 times the limits of the targets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from bench.engines import results
from bench.engines.load import Client, Lengths, LoadError, Turn
from bench.engines.results import ALONE, BESIDE, HOSTED, NATIVE, PRIORITY, STOCK, Measured
from bench.engines.servers import StockVllm, batch_fields, hosted, native
from bench.peers.checkpoints import SHAPES, make_checkpoint
from bench.peers.results import turns
from bench.peers.servers import Server, ServerError
from bench.reporting import judged, machine, take_precedence, write
from shared.runtime.engine_environments import EngineEnvironmentError

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 256
STREAM = Lengths(PROMPT_TOKENS, 32)
ONLINE = Lengths(PROMPT_TOKENS, 16)
BATCH = Lengths(PROMPT_TOKENS, 32)
WARM_UP_REQUESTS = 8
IDLE_S = 3.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "tideway-engines-bench")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--flags", nargs="*", default=[], help="of vLLM, hosted or not, without the dashes: enforce-eager"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2, help="per stream and turn; at least 4 per turn")
    parser.add_argument("--rate", type=float, default=0.5, help="online requests per second")
    parser.add_argument("--duration", type=float, default=60.0, help="of online requests per turn, in seconds; 0: none")
    parser.add_argument("--batch-streams", type=int, default=32)
    parser.add_argument("--no-native", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--precedence", type=int, default=0, metavar="NICENESS", help="of servers and client, say -15")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench/results")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.requests, arguments.duration = 1, min(10.0, arguments.duration)
    return arguments


class Bench:
    """Servers, and what was measured of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._folder = arguments.folder.resolve()
        self._checkpoint = make_checkpoint(self._folder / "checkpoints", arguments.shape)
        self._vocabulary = SHAPES[arguments.shape]["vocab_size"]
        flags = [f"--{flag}" for flag in arguments.flags]
        self._flags = flags
        self.servers: dict[str, Server] = {}
        self.measured: list[Measured] = []
        self.idle_cores: dict[str, float] = {}
        self.objectives_ms = (0.0, 0.0)
        """Objectives of TTFT and TPOT."""

    def run(self) -> None:
        """Raises `ServerError`, `LoadError`."""
        arguments, folder, dtype = self._arguments, self._folder, self._arguments.dtype
        with contextlib.ExitStack() as stack:
            stock = StockVllm("stock", folder, dtype, self._flags, arguments.threads)
            stock.set_up()
            self._start(stack, STOCK, stock)
            if arguments.duration:
                first = self._online(STOCK, ALONE, arguments.seed)
                (row,) = results.rows([first])
                self.objectives_ms = (
                    results.MOST_TTFT_RATIO * row.p99_ttft_ms,
                    results.MOST_TPOT_RATIO * row.p99_tpot_ms,
                )
            objectives = zip(("TIDEWAY_TTFT_MS", "TIDEWAY_TPOT_MS"), self.objectives_ms, strict=True)
            settings = {name: f"{ms:.1f}" for name, ms in objectives if ms}
            self._start(stack, HOSTED, hosted("hosted", folder, dtype, self._flags, arguments.threads, settings))
            if not arguments.no_native:
                self._start(stack, NATIVE, native("native", folder, arguments.threads, settings))
            before_s = {name: server.processor_s() for name, server in self.servers.items()}
            time.sleep(IDLE_S)
            for name, server in self.servers.items():
                self.idle_cores[name] = (server.processor_s() - before_s[name]) / IDLE_S
            for number in range(arguments.rounds):
                self._throughput(number)
                if arguments.duration:
                    self._harvest(number)

    def _start(self, stack: contextlib.ExitStack, name: str, server: Server) -> None:
        began_s = time.monotonic()
        stack.callback(server.stop)
        server.start(self._checkpoint, self._arguments.precedence)
        self.servers[name] = server
        print(f"{name} is up after {time.monotonic() - began_s:.0f} s", flush=True)
        asyncio.run(
            self._client(name).closed_loop(STREAM, WARM_UP_REQUESTS, WARM_UP_REQUESTS, 1000 + len(self.servers))
        )

    def _client(self, name: str) -> Client:
        return Client(self.servers[name].url, self._checkpoint.name, self._vocabulary)

    def _note(self, variant: str, case: str, turn: Turn) -> Measured:
        measured = Measured(variant, case, turn)
        self.measured.append(measured)
        (row,) = results.rows([measured])
        print(
            f"{case:14} {variant:20} {row.output_tokens_per_s:7.1f} tok/s  TTFT {row.mean_ttft_ms:6.0f} "
            f"P99 {row.p99_ttft_ms:6.0f}  TPOT {row.mean_tpot_ms:6.1f} P99 {row.p99_tpot_ms:6.1f}  "
            f"ITL P50 {row.p50_itl_ms:6.1f} P99 {row.p99_itl_ms:6.1f} ms  "
            f"batch {row.batch_tokens_per_s:6.0f} tok/s  others {row.others_cores:.2f} cores",
            flush=True,
        )
        return measured

    def _throughput(self, number: int) -> None:
        arguments = self._arguments
        for streams in arguments.concurrency:
            order = turns(list(self.servers))
            num_requests = max(4, streams * arguments.requests)
            for place, name in enumerate(order):
                # The same prompts for all; others in the second half, since a cache would have those of the first.
                seed = arguments.seed + 100 * streams + 10 * number + (2 * place >= len(order))
                turn = asyncio.run(self._client(name).closed_loop(STREAM, streams, num_requests, seed))
                self._note(name, f"{streams} stream{'s' * (streams > 1)}", turn)

    def _harvest(self, number: int) -> None:
        plain = [(name, ALONE) for name in self.servers] + [(name, BESIDE) for name in self.servers]
        order = turns([*plain, (PRIORITY, BESIDE)])
        for place, (variant, case) in enumerate(order):
            self._online(variant, case, self._arguments.seed + 20 + 10 * number + 2 * (2 * place >= len(order)))

    def _online(self, variant: str, case: str, seed: int) -> Measured:
        arguments = self._arguments
        name = STOCK if variant == PRIORITY else variant
        is_beside = case == BESIDE
        turn = asyncio.run(
            self._client(name).open_loop(
                ONLINE,
                arguments.rate,
                arguments.duration,
                seed,
                # No two turns have prompts in common: a cache would have those of the earlier one.
                prompts_seed=1000 * (1 + len(self.measured)) + seed,
                batch=BATCH if is_beside else None,
                batch_streams=arguments.batch_streams if is_beside else 0,
                batch_fields=batch_fields(self.servers[name], variant == PRIORITY),
            )
        )
        return self._note(variant, case, turn)


def report(bench: Bench, arguments: argparse.Namespace) -> None:
    rows = results.rows(bench.measured)
    targets = results.targets(rows)
    versions = {name: server.version() for name, server in bench.servers.items()}
    ttft_ms, tpot_ms = bench.objectives_ms
    lines = [
        f"# vLLM hosted by Tideway: {arguments.shape}, {arguments.dtype}, {time.strftime('%Y-%m-%d')}",
        "",
        *results.page(rows),
        "",
        *(f"    {target}" for target in targets),
        "",
        f"- threads of each engine: {arguments.threads}",
        f"- objectives of Tideway's instances: TTFT {ttft_ms:.0f} ms, TPOT {tpot_ms:.0f} ms",
        f"- online: {arguments.rate:g} requests per second of {ONLINE.prompt} and {ONLINE.output} tokens; the batch: "
        f"{arguments.batch_streams} requests at once of {BATCH.prompt} and {BATCH.output} tokens",
        *(f"- {name}: {version}; {bench.idle_cores[name]:.3f} cores while idle" for name, version in versions.items()),
        f"- machine: {machine()}",
    ]
    print("\n".join(lines))
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "servers": versions,
        "objectives_ms": bench.objectives_ms,
        "idle_cores": bench.idle_cores,
        "targets": judged(targets),
        "rows": [msgspec.structs.asdict(row) for row in rows],
        "turns": results.document(bench.measured),
    }
    name = "-".join(["engines", arguments.shape, *(["smoke"] if arguments.smoke else []), time.strftime("%Y-%m-%d")])
    write(arguments.output, name, found, "\n".join(lines))


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench.engines: ended"))  # no server is to stay
    if arguments.precedence:
        take_precedence(os.getpid(), arguments.precedence)
    bench = Bench(arguments)
    try:
        bench.run()
    except (EngineEnvironmentError, ServerError, LoadError) as error:
        print(f"bench.engines: {error}", file=sys.stderr)
        if not bench.measured:
            sys.exit(1)
    report(bench, arguments)


if __name__ == "__main__":
    main()
