"""See the package."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.coserving.setup import machine
from bench.coserving.testbed import SHAPES
from bench.migration.affinity import Affinity
from bench.migration.experiments import EXPERIMENTS, Result, Setup
from services.worker.executor import Executor
from shared.engine.slab import choose_merged_bytes
from shared.messages import ModelSpec


def make_setup(folder: Path, arguments: argparse.Namespace) -> Setup:
    """A Llama of the shape, with random weights and room for the longest request."""
    longest = max(arguments.lengths)
    shape = {**SHAPES[arguments.model], "max_position_embeddings": longest + 8192}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        config = LlamaConfig(**shape, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    prepared = Executor("cpu", 1, 1 << 30, 1).prepare_model(ModelSpec("model", str(folder)))
    slot_bytes = prepared.model.kv_shape(prepared.page_tokens).slot_bytes
    merged_bytes = choose_merged_bytes([slot_bytes])
    pool_tokens = 3 * longest + 16384
    num_merged = -(-pool_tokens // prepared.page_tokens) // (merged_bytes // slot_bytes) + 1
    return Setup(
        checkpoint=folder,
        vocab_size=shape["vocab_size"],
        merged_bytes=merged_bytes,
        pool_bytes=num_merged * merged_bytes,
        lengths=tuple(arguments.lengths),
        num_moves=arguments.moves,
        seed=arguments.seed,
        is_pinned=not arguments.no_pinning,
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(rows[0])
    cells = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return lines + [f"| {' | '.join(row)} |" for row in cells]


def report(name: str, result: Result) -> list[str]:
    lines = [f"**{result.title}**", "", *table(result.rows), ""]
    for target in result.targets:
        sign = "at most" if target.is_upper else "at least"
        verdict = "met   " if target.is_met else "MISSED"
        lines.append(f"- {verdict}  {target.name}: {target.value:.3f} ({sign} {target.limit:g})")
    return [f"## {name}, {time.strftime('%Y-%m-%d')}", "", *lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.migration")
    parser.add_argument("experiments", nargs="*", default=list(EXPERIMENTS), metavar="|".join(EXPERIMENTS))
    parser.add_argument("--model", default="135m", choices=sorted(SHAPES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8192], metavar="TOKENS")
    parser.add_argument("--moves", type=int, default=12, help="of each length")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-pinning", action="store_true", help="let the kernel place all threads")
    parser.add_argument("--output", type=Path, help="folder for migration-NAME-DATE.json and .md")
    arguments = parser.parse_args()
    if unknown := set(arguments.experiments) - set(EXPERIMENTS):
        parser.error(f"no such experiment: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="tideway-migration-") as folder:
        setup = make_setup(Path(folder), arguments)
        for name in arguments.experiments:
            started_s = time.perf_counter()
            result = asyncio.run(EXPERIMENTS[name](setup))
            lines = report(name, result)
            print("\n".join(lines), flush=True)
            if arguments.output:
                save(arguments, name, result, lines, time.perf_counter() - started_s)


def save(arguments: argparse.Namespace, name: str, result: Result, lines: list[str], took_s: float) -> None:
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"migration-{name}-{time.strftime('%Y-%m-%d')}"
    content = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "pinning": Affinity(not arguments.no_pinning).describe(),
        "model": arguments.model,
        "moves": arguments.moves,
        "seed": arguments.seed,
        "took_s": round(took_s, 1),
        "rows": result.rows,
        "targets": [{**target._asdict(), "is_met": target.is_met} for target in result.targets],
    }
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
