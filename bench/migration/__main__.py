"""See the package."""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import torch

from bench.coserving.testbed import SHAPES, make_checkpoint
from bench.devices import add_device_option, environments, gpu_names, kv_block
from bench.migration.experiments import EXPERIMENTS, Setup
from bench.migration.pair import Affinity
from bench.reporting import judged, machine, table_of, write
from shared.engine.memory.slab import choose_merged_bytes


def make_setup(folder: Path, arguments: argparse.Namespace) -> Setup:
    """A Llama of the shape, with random weights and room for the longest request, unless there is one already."""
    longest = max(arguments.lengths)
    shape = {**SHAPES[arguments.model], "max_position_embeddings": longest + 8192}
    if arguments.checkpoint is None:
        make_checkpoint(folder, shape, device=arguments.device[0])
        if arguments.ends[0]:
            torch.cuda.empty_cache()  # the instances need the memory
    folder = arguments.checkpoint or folder
    block_bytes, block_size = kv_block(folder, torch.device(arguments.device[0]))
    merged_bytes = choose_merged_bytes([block_bytes])
    pool_tokens = 3 * longest + 16384
    num_merged = -(-pool_tokens // block_size) // (merged_bytes // block_bytes) + 1
    return Setup(
        checkpoint=folder,
        vocab_size=shape["vocab_size"],
        block_size=block_size,
        block_bytes=block_bytes,
        merged_bytes=merged_bytes,
        pool_bytes=num_merged * merged_bytes,
        lengths=tuple(arguments.lengths),
        num_migrations=arguments.moves,
        seed=arguments.seed,
        # Where a GPU computes, an engine's thread is no burden for the others, and one core is too little for two.
        is_pinned=not arguments.no_pinning and not arguments.ends[0],
        devices=tuple(arguments.device),
        ends=tuple(arguments.ends),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.migration")
    parser.add_argument("experiments", nargs="*", metavar="|".join(EXPERIMENTS))
    parser.add_argument("--model", default="135m", choices=sorted(SHAPES))
    parser.add_argument("--checkpoint", type=Path, help="of that shape, to be used instead of one that is made")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8192], metavar="TOKENS")
    parser.add_argument("--moves", type=int, default=12, help="of each length")
    parser.add_argument("--seed", type=int, default=1)
    add_device_option(parser)
    parser.add_argument("--no-pinning", action="store_true", help="let the kernel place all threads")
    parser.add_argument("--output", type=Path, help="folder for migration-NAME-DATE.json and .md")
    arguments = parser.parse_args()
    if unknown := set(arguments.experiments) - set(EXPERIMENTS):
        parser.error(f"no such experiment: {', '.join(sorted(unknown))}")
    try:
        arguments.ends = environments(arguments.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except ValueError as error:
        parser.error(str(error))
    if arguments.ends[0] and not torch.cuda.is_available():
        parser.error("torch finds no GPU here")
    arguments.gpu = gpu_names(arguments.device)
    place = f", {arguments.model} on {arguments.gpu}" if arguments.gpu else ""
    names = arguments.experiments or [name for name in EXPERIMENTS if arguments.gpu or name != "transfer"]
    with tempfile.TemporaryDirectory(prefix="tideway-migration-") as folder:
        setup = make_setup(Path(folder), arguments)
        for name in names:
            started_s = time.perf_counter()
            result = asyncio.run(EXPERIMENTS[name](setup))
            date = time.strftime("%Y-%m-%d")
            lines = [f"## {name}, {date}{place}", "", f"**{result.title}**", "", *table_of(result.rows), ""]
            lines += [*(f"- {target}" for target in result.targets), ""]
            print("\n".join(lines), flush=True)
            if arguments.output:
                content = {
                    "date": date,
                    "machine": {**machine(), "gpu": arguments.gpu},
                    "device": " ".join(arguments.device),
                    "pinning": Affinity(setup.is_pinned).describe(),
                    "model": arguments.model,
                    "moves": arguments.moves,
                    "seed": arguments.seed,
                    "took_s": round(time.perf_counter() - started_s, 1),
                    "rows": result.rows,
                    "targets": judged(result.targets),
                }
                kind = "-cuda" if arguments.gpu else ""
                write(arguments.output, f"migration-{name}{kind}-{date}", content, "\n".join(lines))


if __name__ == "__main__":
    main()
