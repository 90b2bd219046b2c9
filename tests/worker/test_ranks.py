"""Processes of a group, on CPUs and on two CUDA devices: what rank 0 is told, all do, and whatever happens to one of them
ends all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from services.worker.kv_transport.staging import KvPool
from services.worker.ranks.group import GroupError
from services.worker.ranks.group_executor import GroupExecutor
from services.worker.ranks.messages import SetUp
from services.worker.ranks.starting import RankProcess, join_ranks, start_ranks
from shared.engine.calls import AddModel, OnStep, Submit
from shared.engine.driver import Driver as EngineDriver
from shared.engine.engine import Engine
from shared.engine.plan import CopyKind, EndedCopy, KvCopy, StepPlan
from shared.engine.requests import Ended, Output
from shared.messages.cluster import DeviceGroup, ModelSpec
from shared.messages.requests import Adapter, GenerationRequest, SamplingParams, pack_tokens, unpack_tokens
from shared.models.checkpoint import CheckpointError
from shared.policies.ordering import FirstComeFirstServed
from shared.policies.token_budget import FixedTokenBudget
from tests.e2e.checkpoints import make_llama
from tests.shared.engine.test_draft_model import Always
from tests.worker.adapters import ALL, OPT, merged, write_adapter
from tests.worker.checkpoints import prompt_of, reference_outputs, write_checkpoint
from tests.worker.step_driver import Driver
from tests.worker.test_draft_model import similar

MERGED_BYTES = 1 << 18
NUM_MERGED = 6
PROMPT = prompt_of(70)
STEPS = 12
ADAPTED = 1
"""Which of several prompts has an adapter."""


class Group:
    """Ranks on a CPU, or on GPUs, of which rank 0 has the first."""

    def __init__(self, device: str = "cpu", num_devices: int = 2, num_stages: int = 1, *, ends: bool = False) -> None:
        """`ends`: the process ends where a rank is lost."""
        self.lost: list[str] = []
        self.is_lost = threading.Event()
        names = ("cpu",) * num_devices if device == "cpu" else gpus()[:num_devices]
        self.others: list[RankProcess] = start_ranks(DeviceGroup(names, num_stages))
        setup = SetUp(
            device=device, num_merged=NUM_MERGED, merged_bytes=MERGED_BYTES // num_devices, num_rows=4,
            num_host_merged=NUM_MERGED, num_threads=1, num_stages=num_stages, num_window_merged=1,
            host_weights_bytes=1 << 30,
        )  # fmt: skip
        self.executor: GroupExecutor = join_ranks(self.others, setup, None if ends else self.lose)

    def lose(self, reason: str) -> None:
        self.lost.append(reason)
        self.is_lost.set()

    def close(self) -> None:
        self.executor.close()
        assert all(other.process.returncode is not None for other in self.others)


def gpus() -> tuple[str, ...]:
    """GPUs as CUDA_VISIBLE_DEVICES names them."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(seen.split(",") if seen else map(str, range(torch.cuda.device_count())))


ON_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_GPUS)])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(request.param)
    yield made
    made.close()


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_what_rank_0_is_told_all_do(group: Group, path: Path) -> None:
    """Tokens as transformers has them, from blocks that were checkpointed, overwritten and restored on all ranks, after a
    step that all refuse; models come and go."""
    executor, expected = group.executor, reference_outputs(path, [PROMPT], STEPS)[0]
    with pytest.raises(CheckpointError):
        executor.prepare_model(ModelSpec("gone", str(path / "gone")))
    for name in ("first", "second"):
        shape = executor.add_model(executor.prepare_model(ModelSpec(name, str(path))))
        driver = Driver(executor, shape, range(NUM_MERGED))  # type: ignore[arg-type]
        row = driver.add(0, PROMPT)
        driver.step([(row, len(PROMPT))])
        driver.decode([row], 3)
        copies = iter(range(100 * len(name), 200 * len(name)))

        def copied(kind: CopyKind, blocks: list[int], host: list[int], name: str = name) -> None:
            copy = KvCopy(next(copies), kind, name, blocks, host)  # noqa: B023
            executor.start_copy(copy)
            ended: list[EndedCopy] = []
            until(lambda: ended.extend(executor.finished_copies()) or ended)
            assert [each[:2] for each in ended] == [(copy.copy_id, True)]

        host = list(range(len(row.blocks)))
        copied(CopyKind.CHECKPOINT, row.blocks, host)
        other = driver.add(1, PROMPT[::-1])
        other.blocks = list(row.blocks)
        driver.step([(other, len(PROMPT))])
        executor.claim_blocks(name, row.blocks)
        copied(CopyKind.RESTORE, row.blocks, host)
        refused = executor.execute(
            StepPlan(
                step_id=99,
                model="nobody",
                rows=[0],
                starts=[0],
                counts=[1],
                samples=[True],
                new_sequences=[],
                new_blocks=[],
            )
        )
        assert "nobody" in refused.error
        driver.decode([row], STEPS - 4)
        assert row.output == expected
        executor.remove_model(name)
    assert not group.lost


def test_weights_that_are_kept_are_those_of_all_ranks(group: Group, path: Path) -> None:
    executor, expected = group.executor, reference_outputs(path, [PROMPT], STEPS)[0]
    first = executor.prepare_model(ModelSpec("kept", str(path)))
    model = first.own.model
    for prepared in (first, None):
        prepared = prepared or executor.prepare_model(ModelSpec("kept", str(path)))
        assert prepared.own.model is model
        driver = Driver(executor, executor.add_model(prepared), range(NUM_MERGED))  # type: ignore[arg-type]
        row = driver.add(0, PROMPT)
        driver.step([(row, len(PROMPT))])
        driver.decode([row], STEPS - 1)
        assert row.output == expected
        executor.hold_weights("kept")
        executor.remove_model("kept")
        assert executor.keep_weights("kept") and executor.has_weights("kept")
    executor.drop_weights("kept")
    assert not executor.has_weights("kept") and not group.lost


def test_blocks_of_all_ranks_are_read_and_written_through_the_window(group: Group, path: Path) -> None:
    executor = group.executor
    shape = executor.add_model(executor.prepare_model(ModelSpec("model", str(path))))
    driver = Driver(executor, shape, range(NUM_MERGED))  # type: ignore[arg-type]
    row = driver.add(0, PROMPT)
    driver.step([(row, len(PROMPT))])
    pool = KvPool(executor.block_rows("model", False))
    whole = torch.zeros(len(row.blocks) * pool.block_bytes, dtype=torch.uint8)
    checksum = pool.gather(row.blocks, whole, 64)
    pool.zero(row.blocks)
    executor.claim_blocks("model", row.blocks)
    assert pool.scatter(row.blocks, whole, 64) == checksum
    driver.decode([row], STEPS - 1)
    assert row.output == reference_outputs(path, [PROMPT], STEPS)[0]
    executor.remove_model("model")
    with pytest.raises(KeyError):
        pool.gather(row.blocks, whole, 64)
    assert not group.lost


def test_adapters_are_loaded_on_all_ranks(group: Group, path: Path, tmp_path: Path) -> None:
    executor, adapter = group.executor, write_adapter(tmp_path / "lora", path)
    expected = reference_outputs(merged(tmp_path / "merged", path, adapter), [PROMPT], STEPS)[0]
    shape = executor.add_model(executor.prepare_model(ModelSpec("adapted", str(path))))
    with pytest.raises(CheckpointError, match="adapter_config"):
        executor.load_adapter("adapted", Adapter("none", "none", str(tmp_path)))
    executor.load_adapter("adapted", adapter)
    driver = Driver(executor, shape, range(NUM_MERGED))  # type: ignore[arg-type]
    row = driver.add(0, PROMPT, adapter.version)
    driver.step([(row, len(PROMPT))])
    driver.decode([row], STEPS - 1)
    assert row.output == expected
    executor.drop_adapter(adapter.version)
    executor.remove_model("adapted")
    assert not group.lost


def test_grammars_are_compiled_by_all_ranks(group: Group, tmp_path: Path) -> None:
    executor, path = group.executor, make_llama(tmp_path / "llama")
    shape = executor.add_model(executor.prepare_model(ModelSpec("guided", str(path))))
    bad, good = (json.dumps({"grammars": [{"lark_grammar": f"start: {what}"}]}) for what in ("nothing", '"a" | "b"'))
    assert "nothing" in executor.compile_grammar("guided", bad).result(60)
    assert "not here" in executor.compile_grammar("nobody", good).result(60)
    assert not isinstance(executor.compile_grammar("guided", good).result(60), str)
    driver = Driver(executor, shape, range(NUM_MERGED))  # type: ignore[arg-type]
    row = driver.add(0, PROMPT, grammar=good)
    driver.step([(row, len(PROMPT))])
    assert Tokenizer.from_file(str(path / "tokenizer.json")).decode(row.output) in ("a", "b")
    assert executor.grammar_counters.cached == 1
    executor.remove_model("guided")
    assert not group.lost


def test_a_draft_model_is_cut_over_all_ranks_and_its_model_says_what_it_says_without(
    group: Group, path: Path, tmp_path: Path
) -> None:
    draft = similar(path, tmp_path / "draft", 0.03)
    executor, prompts = group.executor, [prompt_of(20 + i) for i in range(3)]
    spec = ModelSpec("drafted", str(path), draft=str(draft))
    engine = Engine(NUM_MERGED, 4, FirstComeFirstServed(), FixedTokenBudget(64), steps_in_flight=1, fits_costs=False)
    shape = engine.apply(AddModel(executor.add_model(executor.prepare_model(spec))), 0.0)
    assert shape.draft is not None
    engine.drafting.speculators["drafted"].gate = lambda num_sequences: Always()  # type: ignore[method-assign]
    for index, prompt in enumerate(prompts):
        request = GenerationRequest(
            request_id=str(index), gateway_id="g", model="drafted", prompt=pack_tokens(prompt),
            sampling=SamplingParams(max_tokens=30, temperature=0.0),
        )  # fmt: skip
        assert engine.apply(Submit(request), 0.0) is None
    outputs: list[list[int]] = [[] for _ in prompts]
    while engine.num_held():
        result = executor.execute(engine.plan(0.0))
        assert not result.error
        engine.apply(OnStep(result), 0.0)
        for effect in engine.effects():
            for entry in effect.entries if isinstance(effect, Output) else ():
                outputs[int(entry.request_id)] += unpack_tokens(entry.tokens)
    assert outputs == reference_outputs(path, prompts, 30)
    assert engine.counters.accepted_tokens["drafted"] > 20
    executor.remove_model("drafted")


def test_an_interrupted_step_stops_on_all_ranks_and_goes_on(group: Group, path: Path) -> None:
    executor = group.executor
    shape = executor.add_model(executor.prepare_model(ModelSpec("model", str(path))))
    executor.set_layers_per_safepoint("model", 1)
    driver = Driver(executor, shape, range(NUM_MERGED))  # type: ignore[arg-type]
    row, online = driver.add(0, PROMPT), driver.add(1, PROMPT)
    driver.step([(row, 5)])
    plan = StepPlan(
        step_id=1000, model="model", rows=[0], starts=[5], counts=[len(PROMPT) - 5], samples=[True], new_sequences=[],
        new_blocks=[(0, [driver.free.pop() for _ in range(-(-len(PROMPT) // shape.block_size) - len(row.blocks))])],
        is_interruptible=True,
    )  # fmt: skip
    executor.interrupt(1000)
    suspended = executor.execute(plan)
    assert 0 <= suspended.suspended_share < 1
    driver.step([(online, len(PROMPT))])
    resumed = StepPlan(
        step_id=1000, model="model", rows=plan.rows, starts=plan.starts, counts=plan.counts, samples=plan.samples,
        new_sequences=[], new_blocks=[], is_interruptible=True, resumes=True,
    )  # fmt: skip
    assert executor.execute(resumed).tokens == online.output
    executor.remove_model("model")
    assert not group.lost


def check_odd_model(executor: GroupExecutor, folder: Path) -> None:
    """One whose logits are NaN is refused, also where the stage that is asked to add it does not see them."""
    odd = write_checkpoint(folder / "odd", "llama")
    file = next(odd.glob("*.safetensors"))
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": torch.full_like(tensors["model.norm.weight"], torch.nan)}, file)
    with pytest.raises(CheckpointError, match="logits are NaN"):
        executor.add_model(executor.prepare_model(ModelSpec("odd", str(odd))))


def test_a_model_whose_logits_are_no_numbers_is_refused_and_the_group_goes_on(
    group: Group, path: Path, tmp_path: Path
) -> None:
    executor = group.executor
    check_odd_model(executor, tmp_path)
    shape = executor.add_model(executor.prepare_model(ModelSpec("good", str(path))))
    driver = Driver(executor, shape, range(NUM_MERGED))  # type: ignore[arg-type]
    row = driver.add(0, PROMPT)
    driver.step([(row, len(PROMPT))])
    driver.decode([row], 3)
    assert [row.output] == reference_outputs(path, [PROMPT], 4) and executor.is_sound("good")
    executor.remove_model("good")
    assert not group.lost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "num_devices"),
    [pytest.param("cpu", 4, marks=pytest.mark.long), pytest.param("cuda", 2, marks=ON_GPUS)],
)
def test_stages_make_the_tokens_of_one_device(tmp_path: Path, device: str, num_devices: int) -> None:
    """Two stages of two ranks (of one, on GPUs) share three layers; steps of other sequences, one of which has an adapter,
    and of another model, are in flight at once."""
    group = Group(device, num_devices, num_stages=2)
    executor = group.executor
    check_odd_model(executor, tmp_path)
    paths = {variant: write_checkpoint(tmp_path, variant) for variant in ("llama-tied-bias", "opt")}
    modules = {"llama-tied-bias": ALL, "opt": OPT}
    adapters = {name: write_adapter(tmp_path / f"{name}-lora", path, modules[name]) for name, path in paths.items()}
    prompts = [prompt_of(length) for length in (70, 33, 9, 61)]
    engine = Engine(NUM_MERGED, 4, FirstComeFirstServed(), FixedTokenBudget(48), steps_in_flight=2, num_stages=2)
    for variant, path in paths.items():
        shape = executor.add_model(executor.prepare_model(ModelSpec(variant, str(path))))
        assert shape.num_layers == 3
        engine.apply(AddModel(shape), 0.0)
        executor.load_adapter(variant, adapters[variant])
        for index, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=16, temperature=0.0)
            request = GenerationRequest(
                request_id=f"{variant} {index}",
                gateway_id="g",
                model=variant,
                prompt=pack_tokens(prompt),
                sampling=sampling,
                adapter=adapters[variant] if index == ADAPTED else None,
            )
            assert engine.apply(Submit(request), 0.0) is None
    driver, outputs, num_ended, depths = EngineDriver(engine), dict[str, list[int]](), 0, Counter[int]()
    for now in range(20_000):
        turn = driver.turn(float(now))
        for copy in turn.copies:
            executor.start_copy(copy)
        if turn.plan is not None:
            executor.launch(turn.plan)
        effects = turn.effects
        if driver.collects:
            depths[len(engine.steps.in_flight)] += 1
            turn, _ = driver.on_result(executor.collect(), float(now))
            effects += turn.effects
            for copy in turn.copies:
                executor.start_copy(copy)
        for copy in driver.on_copies(executor.finished_copies(), float(now)):
            executor.start_copy(copy)
        for effect in effects:
            if isinstance(effect, Output):
                for entry in effect.entries:
                    outputs.setdefault(entry.request_id, []).extend(unpack_tokens(entry.tokens))
            num_ended += isinstance(effect, Ended)
        if num_ended == len(paths) * len(prompts):
            break
    for variant, path in paths.items():
        expected, base = reference_outputs(path, prompts, 16), prompts[ADAPTED]
        of_adapter = reference_outputs(merged(tmp_path / f"{variant}-merged", path, adapters[variant]), [base], 16)[0]
        assert of_adapter != expected[ADAPTED]
        expected[ADAPTED] = of_adapter
        assert [outputs[f"{variant} {index}"] for index in range(len(prompts))] == expected
    assert depths[2] > depths[1] and not group.lost
    group.close()


@pytest.mark.parametrize("group", ["cpu"], indirect=True)
def test_a_rank_that_dies_is_noticed_while_rank_0_waits_for_it(group: Group, path: Path) -> None:
    """The last test of the group."""
    executor = group.executor
    shape = executor.add_model(executor.prepare_model(ModelSpec("model", str(path))))
    driver = Driver(executor, shape, range(NUM_MERGED))  # type: ignore[arg-type]
    row = driver.add(0, PROMPT)
    driver.step([(row, len(PROMPT))])
    os.kill(group.others[0].process.pid, signal.SIGSTOP)  # rank 0 is in a collective call when the other dies

    def step() -> None:
        with contextlib.suppress(GroupError):
            driver.decode([row], 1)

    stepping = threading.Thread(target=step, daemon=True)
    stepping.start()
    time.sleep(0.2)
    assert stepping.is_alive() and not group.lost
    os.kill(group.others[0].process.pid, signal.SIGKILL)
    assert group.is_lost.wait(10.0)
    assert group.lost[0] == "rank 1 was killed by SIGKILL"


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=ON_GPUS)])
def test_a_rank_that_dies_ends_the_process_of_rank_0(path: Path, device: str) -> None:
    """Also where that waits for a kernel which waits for the other."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.worker.test_ranks", device, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1 and "the instance ends: rank 1 was killed by SIGKILL" in ended.stderr, ended.stderr


def lose_a_rank(device: str, path: str) -> None:
    group = Group(device, ends=True)
    executor = group.executor
    shape = executor.add_model(executor.prepare_model(ModelSpec("model", path)))
    driver = Driver(executor, shape, range(NUM_MERGED))  # type: ignore[arg-type]
    row = driver.add(0, PROMPT)
    driver.step([(row, len(PROMPT))])
    other = group.others[0].process.pid
    os.kill(other, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (other, signal.SIGKILL)).start()
    driver.decode([row], 1)
    raise AssertionError("the other rank has not computed its part")


if __name__ == "__main__":
    lose_a_rank(*sys.argv[1:])
