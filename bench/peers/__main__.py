"""Tideway beside vLLM and llama.cpp: sets each up, starts them on the same checkpoint, measures them in turns.

    python -m bench.peers                                     both shapes, all servers, 1, 8 and 32 streams, prefill of 2k
    python -m bench.peers --quick                             135M only, one short A B B A each, about five minutes
    python -m bench.peers --tree before=../old --peers vllm   another source tree of Tideway beside this one and vLLM
    python -m bench.peers --set-up                            installs and compiles, and ends

All servers are up while one is measured, the others idle: what they take then is in the result. Output is greedy. The client
is vLLM's and runs on the same cores. Environments (some GiB) and checkpoints stay in --folder for the next time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.peers import results
from bench.peers.checkpoints import SHAPES, make_checkpoint
from bench.peers.client import measure
from bench.peers.results import Case, Measured
from bench.peers.servers import LlamaCpp, Server, ServerError, Tideway, Vllm
from bench.reporting import judged, machine, save_figure, take_precedence, write

REPOSITORY = Path(__file__).resolve().parents[2]
OWN = "tideway"
PEERS = {"vllm": Vllm, "llama.cpp": LlamaCpp}
WARM_UP = Case("warm-up", 256, 16, 8, 8)
IDLE_S = 5.0


def cases(concurrencies: Sequence[int], is_quick: bool) -> list[Case]:
    """More streams answer more prompts, so that the start and the end of a turn weigh alike."""
    least, each, num_long = (4, 2, 2) if is_quick else (16, 4, 8)
    found = [
        Case(f"{streams} stream{'s' * (streams > 1)}", 256, 64, streams, max(least, streams * each))
        for streams in concurrencies
    ]
    return [*found, Case(f"{results.PREFILL} 2k", 2048, 8, 1, num_long)]


def compare(
    servers: Sequence[Server], client: Vllm, checkpoint: Path, arguments: argparse.Namespace
) -> tuple[list[Measured], dict[str, float]]:
    """All of one checkpoint, and the cores that each server takes while it idles."""
    measured: list[Measured] = []
    by_name = {server.name: server for server in servers}
    left_out: set[str] = set()
    """Those that have failed."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            began_s = time.monotonic()
            stack.callback(server.stop)
            server.start(checkpoint, arguments.precedence)
            print(f"{server.name} is up after {time.monotonic() - began_s:.0f} s", flush=True)
        for number, server in enumerate(servers):
            measure(client, server, checkpoint, WARM_UP, -1, 1000 + number)
        before_s = {server.name: server.processor_s() for server in servers}
        time.sleep(IDLE_S)
        idle_cores = {server.name: (server.processor_s() - before_s[server.name]) / IDLE_S for server in servers}
        seed = 0
        for number in range(arguments.rounds):
            for case in cases(arguments.concurrency, arguments.quick):
                order = results.turns(list(by_name))
                for turn, name in enumerate(order):
                    # The same prompts for all; others in the second half, since Tideway would find those of the first.
                    if name in left_out:
                        continue
                    try:
                        one = measure(client, by_name[name], checkpoint, case, number, seed + (2 * turn >= len(order)))
                    except ServerError as error:
                        print(f"{error}; it is left out from here on", flush=True)
                        left_out.add(name)
                        continue
                    measured.append(one)
                    print(
                        f"{checkpoint.name} {case.name:11} {name:10} {one.output_tokens_per_s:7.1f} tok/s  "
                        f"TTFT {one.mean_ttft_ms:6.0f} P99 {one.p99_ttft_ms:6.0f}  TPOT {one.mean_tpot_ms:6.1f} "
                        f"P99 {one.p99_tpot_ms:6.1f} ms  others {one.others_cores:.2f} cores",
                        flush=True,
                    )
                seed += 2
    return measured, idle_cores


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--folder", type=Path, default=cache / "tideway-peers", help="environments and checkpoints")
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=list(PEERS))
    parser.add_argument(
        "--tree", action="append", default=[], metavar="NAME=FOLDER", help="another source tree of Tideway; repeatable"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="TIDEWAY_X=VALUE", dest="settings", help="of this tree's Tideway"
    )
    parser.add_argument("--no-tideway", action="store_true", help="peers alone")
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=None)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--precedence",
        type=int,
        default=0,
        metavar="NICENESS",
        help="of servers and client over what else runs here, say -15",
    )
    parser.add_argument("--set-up", action="store_true", help="install, compile, make checkpoints; measure nothing")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench/results")
    parser.add_argument("--name", default="", help="of the result, beside the date")
    arguments = parser.parse_args()
    arguments.shapes = arguments.shapes or (["135m"] if arguments.quick else list(SHAPES))
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 2)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench.peers: ended"))  # no server is to stay
    folder = arguments.folder.resolve()
    if arguments.precedence:
        take_precedence(os.getpid(), arguments.precedence)
    client = Vllm("vllm", folder)
    servers: list[Server] = []
    if not arguments.no_tideway:
        servers.append(Tideway(OWN, folder, REPOSITORY, dict(each.split("=", 1) for each in arguments.settings)))
    for name, tree in (each.split("=", 1) for each in arguments.tree):
        servers.append(Tideway(name, folder, Path(tree).resolve(), {}))
    servers += [client if name == "vllm" else PEERS[name](name, folder) for name in arguments.peers]
    try:
        client.set_up()
        for server in servers:
            server.set_up()
        checkpoints = [make_checkpoint(folder / "checkpoints", shape) for shape in arguments.shapes]
        if arguments.set_up:
            return
        for checkpoint in checkpoints:
            measured, idle_cores = compare(servers, client, checkpoint, arguments)
            if not measured:
                sys.exit("bench.peers: no server could be measured")
            report(servers, measured, idle_cores, checkpoint.name, arguments)
    except ServerError as error:
        sys.exit(f"bench.peers: {error}")


def report(
    servers: Sequence[Server],
    measured: Sequence[Measured],
    idle_cores: dict[str, float],
    shape: str,
    arguments: argparse.Namespace,
) -> None:
    rows = results.rows(measured)
    targets = results.targets(rows, OWN)
    versions = {server.name: server.version() for server in servers}
    lines = [
        f"# Tideway beside its peers: {shape}, {time.strftime('%Y-%m-%d')}",
        "",
        *results.page(rows, OWN),
        "",
        *(f"    {target}" for target in targets),
        "",
        *(f"- {name}: {version}; {idle_cores[name]:.3f} cores while idle" for name, version in versions.items()),
        f"- machine: {machine()}",
    ]
    print("\n".join(lines))
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "shape": {shape: SHAPES[shape]},
        "servers": versions,
        "idle_cores": idle_cores,
        "targets": judged(targets),
        "rows": [msgspec.structs.asdict(row) for row in rows],
        "turns": [msgspec.structs.asdict(each) for each in measured],
    }
    name = "-".join(["peers", shape, *filter(None, [arguments.name]), time.strftime("%Y-%m-%d")])
    stem = write(arguments.output, name, document, "\n".join(lines))
    save_figure(lambda: results.draw(rows, f"{shape}, bfloat16, CPU"), stem.with_suffix(".png"))


if __name__ == "__main__":
    main()
