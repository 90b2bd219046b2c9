"""What a step costs on two ranks of a CPU, a thread each: on one rank, on two, on two whose calls to each other
are left out, and those calls alone, back to back, as one step makes them. On two GPUs, where decodes are captured with their
calls, only on one and on two.

    python -m bench.tensor_parallel [--rounds 20] [--dtype bfloat16] [--gloo] [--device cuda] [--realtime]

The kinds alternate, so that a drift of the machine cancels. Of each the least time counts: whatever else runs here takes one
of the two cores, and both ranks wait for the slower one. Times are those of rank 0. `--realtime` gives the ranks precedence
over all else (it needs the privilege), for some seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.coserving.testbed import SHAPES, make_checkpoint
from bench.reporting import Target, judged, machine, table_of, write
from bench.sharing_overhead import HELD, Place
from services.worker.executor.executor import Executor, region_bytes
from services.worker.ranks.group import RankGroup, Ranks
from services.worker.ranks.shared_memory import RankMemory
from shared.engine.memory.slab import choose_merged_bytes
from shared.messages.cluster import ModelSpec

SHAPE = SHAPES["135m"] | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
"""SmolLM-135M, but for its 9 heads and 3 KV heads, which two ranks do not divide."""
NUM_RANKS = 2
POOL_BYTES = {"cpu": 1 << 29, "cuda": 1 << 32}
KINDS = {"cpu": ("one rank", "two ranks", "without calls", "calls alone"), "cuda": ("one rank", "two ranks")}
WARM_UP_ROUNDS = 3
MAX_FACTOR = 1.1


class Nobody:
    """Stands for the other ranks in compiled layers whose sums are left out."""

    pointer = None
    is_lost = False


class Switch(RankGroup):
    """A group whose calls can be left out, and noted then."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._word = torch.zeros(1, device=device)
        self._ranks = ranks
        self.turn(on=True)
        self.calls: list[tuple[bool, torch.Size, torch.dtype]] = []
        """(whether it was an all-gather, shape, dtype)"""

    def turn(self, *, on: bool, noting: bool = False) -> None:
        """Calls that compiled layers make by themselves are not noted: where all are to be, layers run one by one."""
        self.is_on = on
        compiled: Any = None if self._ranks.exchange is None or noting else Nobody()
        self.exchange = self._ranks.exchange if on else compiled

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append((False, tensor.shape, tensor.dtype))
        return self._ranks.all_reduce(tensor) if self.is_on else tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append((True, tensor.shape, tensor.dtype))
        return self._ranks.all_gather(tensor) if self.is_on else torch.cat([tensor] * self.size, -1)

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        raise AssertionError

    def receive(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        raise AssertionError

    def close(self) -> None:
        self._ranks.close()

    def meet(self) -> None:
        """All ranks leave it at the same time, nearly."""
        self._ranks.all_reduce(self._word).item()


def take_precedence() -> None:
    """Gives this process precedence over all others; its threads that carry messages go before the one that computes.
    Raises `PermissionError`."""
    for task in map(int, os.listdir("/proc/self/task")):
        priority = 10 if task == threading.get_native_id() else 20
        os.sched_setscheduler(task, os.SCHED_RR, os.sched_param(priority))


def compute(
    rank: int,
    kind: str,
    rendezvous: Path,
    memory: tuple[str, int],
    checkpoint: Path,
    rounds: int,
    is_first: bool,
    over_gloo: bool,
) -> dict[str, list[float]]:
    """Seconds of each kind in each round, on this rank; all ranks do the same. `kind`: of device."""
    torch.set_num_threads(1)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, rank)
        torch.cuda.set_device(device)
    ranks = Ranks(rank, NUM_RANKS, rendezvous, device)
    if over_gloo:
        ranks.exchange = None
    group = Switch(ranks, device)
    spec = ModelSpec("model", str(checkpoint))
    one = Executor(device, 1, 1 << 30, 1)
    prepared = one.prepare_model(spec)
    merged_bytes = choose_merged_bytes([prepared.model.kv_shape(prepared.block_size).block_bytes])
    merged_bytes += -merged_bytes % (NUM_RANKS * 64)
    num_merged, num_rows = POOL_BYTES[kind] // merged_bytes, HELD[kind].num_sequences + 1
    single = Executor(device, num_merged, merged_bytes, num_rows)
    part = merged_bytes // NUM_RANKS
    double = Executor(
        device, num_merged, part, num_rows, group=group, shared=RankMemory(memory[0], NUM_RANKS, memory[1])
    )
    places = [Place(each, each.add_model(each.prepare_model(spec)), 0, 0) for each in (single, double)]
    for place in places:
        place.clock = time.perf_counter
    alone, together = places

    def without_calls(step: Callable[[], float], *, noting: bool = False) -> float:
        group.turn(on=False, noting=noting)
        try:
            return step()
        finally:
            group.turn(on=True)

    def calls_alone(step: Callable[[], float]) -> float:
        group.calls.clear()
        without_calls(step, noting=True)
        made = [(is_gather, torch.zeros(shape, dtype=dtype)) for is_gather, shape, dtype in group.calls]
        group.meet()
        started_s = time.perf_counter()
        for is_gather, tensor in made:
            if is_gather:
                group._ranks.all_gather(tensor)
            else:
                group._ranks.all_reduce(tensor)
        return time.perf_counter() - started_s

    seconds: dict[str, list[float]] = {}
    for number in range(WARM_UP_ROUNDS + rounds):
        if is_first and number == 1:
            take_precedence()
        for name, mine, ours in (
            ("decode", alone.decode_s, together.decode_s),
            ("prefill", alone.prefill_s, together.prefill_s),
        ):
            kinds: dict[str, Callable[[], float]] = {
                "one rank": lambda mine=mine: mine() if rank == 0 else 0.0,  # type: ignore[misc]
                "two ranks": ours,
                "without calls": lambda ours=ours: without_calls(ours),  # type: ignore[misc]
                "calls alone": lambda ours=ours: calls_alone(ours),  # type: ignore[misc]
            }
            for what in KINDS[kind]:
                group.meet()
                value = kinds[what]()
                if number >= WARM_UP_ROUNDS:
                    seconds.setdefault(f"{name}, {what}", []).append(value)
    for executor in (one, single, double):
        executor.close()
    group.meet()
    group.close()
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tensor_parallel", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument("--device", choices=KINDS, default="cpu", help="cuda: the first two of them, with an 8B shape")
    parser.add_argument("--gloo", action="store_true", help="as where no kernels are compiled: sums over gloo")
    parser.add_argument("--realtime", action="store_true", help="precedence over all other processes")
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"))
    options = parser.parse_args(arguments)
    if options.gloo and options.device != "cpu":
        parser.error("--gloo is for CPUs: GPUs sum over NCCL")
    on_cpu = options.device == "cpu"
    with tempfile.TemporaryDirectory(prefix="tideway-ranks-") as root:
        folder = Path(root)
        shape = SHAPE if on_cpu else SHAPES["llama-3.1-8b"]
        checkpoint = make_checkpoint(folder / "model", shape, options.dtype, options.device)
        memory = RankMemory.create(NUM_RANKS, region_bytes(POOL_BYTES["cpu"] >> 20, 1 << 20, 0) if on_cpu else 0)
        common = (
            options.device, folder / "rendezvous", (memory.path, memory.region_bytes), checkpoint, options.rounds,
            options.realtime, options.gloo,
        )  # fmt: skip
        other = multiprocessing.get_context("spawn").Process(target=compute, args=(1, *common), daemon=True)
        other.start()
        seconds = compute(0, *common)
        other.join(30)
    rows, targets = [], []
    for step in ("decode", "prefill"):
        kinds = {kind: seconds[f"{step}, {kind}"] for kind in KINDS[options.device]}
        rows += [
            {"step": step, "": which, **{f"{kind} ms": 1e3 * of(values) for kind, values in kinds.items()}}
            for which, of in (("least", min), ("median", statistics.median))
        ]
        if not on_cpu:
            continue
        least = {kind: 1e3 * min(values) for kind, values in kinds.items()}
        sums = least["without calls"] + least["calls alone"]
        targets.append(
            Target(
                name=f"{step} on two ranks over its own computing and its calls alone", value=least["two ranks"] / sums,
                limit=MAX_FACTOR, note=f"of one rank's time: {least['two ranks'] / least['one rank']:.2f}",
            )
        )  # fmt: skip
    date = time.strftime("%Y-%m-%d")
    text = "\n".join([
        f"# Two ranks on {options.device}, {date}", "",
        f"{machine()}, {options.dtype}, {'135M parameters, a thread a rank' if on_cpu else '8B parameters'}; decode of "
        f"{HELD[options.device].num_sequences} sequences at {HELD[options.device].context} tokens, prefill of "
        f"{HELD[options.device].prompt}; {options.rounds} rounds{', sums over gloo' if options.gloo else ''}", "",
        *table_of(rows), "", *map(str, targets),
    ])  # fmt: skip
    print(text)
    result = {
        "date": date, "machine": machine(), "dtype": options.dtype, "realtime": options.realtime, "gloo": options.gloo,
        "shape": shape, "rows": rows, "seconds": seconds, "targets": judged(targets),
    }  # fmt: skip
    name = f"tensor-parallel-{'gloo-' if options.gloo else ''}{date}"
    print(f"written: {write(options.output, name, result, text)}.json, .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
