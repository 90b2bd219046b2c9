"""Whether the device computes the same tokens: in float32 as the CPU, in deterministic mode whatever is computed beside."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

from bench.gpu.order import QUICK_SHAPE
from bench.gpu.stepping import Setup, make_executor
from shared.messages.cluster import ModelSpec
from tests.worker.step_driver import Driver, Row

MOST_PROMPT = 90
FLOAT32_STEPS = 48
DETERMINISTIC_STEPS = 16


def equality(setup: Setup) -> None:
    """Raises `RuntimeError` where a sequence has another token, once all are compared."""
    torch.set_num_threads(1)
    shape = QUICK_SHAPE if setup.is_quick else "30m"
    _float32(setup, setup.checkpoint("float32", shape, "float32"))
    _deterministic(setup, setup.checkpoint("bfloat16", shape))
    wrong = [row for row in setup.rows_of("equality") if row["equal"] < row["of"]]
    if wrong:
        raise RuntimeError(f"tokens are not the same: {wrong}")


def _float32(setup: Setup, checkpoint: Path) -> None:
    """Greedy sequences that are computed in chunks and batches on the device, and one by one on the CPU."""
    prompts = prompts_of(4 if setup.is_quick else 16, seed=1)
    started_s = time.perf_counter()
    found = together(_driver(setup, setup.device, checkpoint, len(prompts)), prompts, FLOAT32_STEPS)
    expected = alone(_driver(setup, torch.device("cpu"), checkpoint, 1), prompts, FLOAT32_STEPS)
    _emit(setup, "tokens in float32", found, expected, FLOAT32_STEPS, started_s)


def _deterministic(setup: Setup, checkpoint: Path) -> None:
    """Sequences in changing company, against each alone, on the device."""
    count, at_once = (10, 5) if setup.is_quick else (100, 20)
    prompts = prompts_of(count, seed=2)
    started_s = time.perf_counter()
    driver = _driver(setup, setup.device, checkpoint, at_once, deterministic=True)
    expected = alone(driver, prompts, DETERMINISTIC_STEPS)
    order = random.Random(3).sample(range(count), count)
    found: list[list[int]] = [[] for _ in prompts]
    for begin in range(0, count, at_once):
        company = order[begin : begin + at_once]
        outputs = together(driver, [prompts[number] for number in company], DETERMINISTIC_STEPS)
        for number, output in zip(company, outputs, strict=True):
            found[number] = output
    _emit(setup, "deterministic mode", found, expected, DETERMINISTIC_STEPS, started_s)


def _emit(
    setup: Setup, what: str, found: list[list[int]], expected: list[list[int]], steps: int, started_s: float
) -> None:
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    seconds = round(time.perf_counter() - started_s, 1)
    setup.emit(what=what, equal=equal, of=len(expected), tokens_each=steps + 1, seconds=seconds)


def prompts_of(count: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [chance.choices(range(3, 500), k=chance.randint(5, MOST_PROMPT)) for _ in range(count)]


def _driver(
    setup: Setup, device: torch.device, checkpoint: Path, num_rows: int, *, deterministic: bool = False
) -> Driver:
    tokens = num_rows * (MOST_PROMPT + FLOAT32_STEPS + 128)
    executor = make_executor(device, [checkpoint], tokens, num_rows, deterministic=deterministic)
    prepared = executor.prepare_model(ModelSpec("model", str(checkpoint)))
    shape = executor.add_model(prepared)
    num_merged = len(executor.block_rows("model", on_host=False)) // shape.blocks_per_merged
    return Driver(executor, shape, range(num_merged))


def alone(driver: Driver, prompts: list[list[int]], steps: int) -> list[list[int]]:
    outputs = []
    for prompt in prompts:
        outputs += together(driver, [prompt], steps, in_chunks=False)
    return outputs


def together(driver: Driver, prompts: list[list[int]], steps: int, *, in_chunks: bool = True) -> list[list[int]]:
    """What follows the prompts, each of which is computed in two chunks beside the others' tokens."""
    rows: list[Row] = [driver.add(number, prompt) for number, prompt in enumerate(prompts)]
    firsts = [len(prompt) // 2 if in_chunks else 0 for prompt in prompts]
    if in_chunks:
        driver.step([(row, first) for row, first in zip(rows, firsts, strict=True)])
    driver.step([(row, len(row.tokens) - first) for row, first in zip(rows, firsts, strict=True)])
    driver.decode(rows, steps)
    for row in rows:
        driver.preempt(row)
    return [row.output for row in rows]
