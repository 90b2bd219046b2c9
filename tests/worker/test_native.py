"""The compiled kernels against torch, and that a row's bits do not depend on what is computed with it. Attention,
layers and whole models run them in the tests of those."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from services.worker.models.decoder import activation
from services.worker.native import building, library
from services.worker.native.library import (
    ACTIVATIONS,
    Kernels,
    PackedIntegers,
    PackedWeight,
    kernels,
    packs,
    packs_integers,
)
from shared.engine.plan import NO_TOKEN
from shared.placement.node import START_TIMEOUT_S

COMPILED = kernels()
needs_kernels = pytest.mark.skipif(
    COMPILED is None or not packs(torch.zeros(32, 32)),
    reason="needs a compiler and a processor whose products are fast",
)
DTYPES = [d for d in library.DTYPES if COMPILED is not None and packs(torch.zeros(32, 32, dtype=d))]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 2), (50, 96), (320, 192), (70, 416)])
def test_a_product_has_torchs_result_and_its_rows_the_same_bits_alone(
    dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight, bias, x = (random(*shape, dtype=dtype) for shape in ((outputs, inputs), (outputs,), (257, inputs)))
    linear = PackedWeight(weight, bias)
    whole = linear(x)
    rtol, atol = (1e-5, 1e-4) if dtype == torch.float32 else (1.6e-2, 1e-3)
    torch.testing.assert_close(whole, F.linear(x, weight, bias), rtol=rtol, atol=atol)
    for start, stop in ((0, 0), (0, 1), (5, 17), (30, 63), (100, 257)):
        assert torch.equal(linear(x[start:stop]), whole[start:stop])
    assert torch.equal(linear(x[:, :2].contiguous() if inputs == 2 else x.repeat(1, 2)[:, :inputs]), whole)


@pytest.mark.skipif(
    COMPILED is None or not COMPILED.has_tiles, reason="needs AMX, and a compiler and a system that have it"
)
def test_tiles_are_used_where_the_system_allows_them() -> None:
    """A process whose stack for signals is too small for their registers is refused them, and torch multiplies."""
    program = """
import ctypes, sys, torch
if sys.argv[1:]:
    class Stack(ctypes.Structure):
        _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
    memory = ctypes.create_string_buffer(4096)
    assert not ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, len(memory))), None)
from services.worker.models.linear import Linear
from services.worker.native.library import kernels, packs
weight = torch.randn(64, 96).bfloat16()
x = torch.randn(3, 96).bfloat16()
torch.testing.assert_close(Linear(weight)(x), x @ weight.T, rtol=2e-2, atol=2e-2)
print(kernels().has_tiles, packs(weight))
"""
    for arguments, expected in (((), "True True"), (("small",), "False False")):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.split("\n")[-2] == expected, done.stderr
        assert ("the system refuses them" in done.stderr) == bool(arguments)


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="needs a processor whose products of it are fast")
@pytest.mark.parametrize("group_size", [None, 32, 192])
@pytest.mark.parametrize("outputs", [32, 70])
def test_weights_of_few_bits_are_the_numbers_they_stand_for(group_size: int | None, outputs: int) -> None:
    """int8 without groups, else int4."""
    generator = torch.Generator().manual_seed(0)
    inputs, zeros = 192, None
    num_groups = inputs // (group_size or inputs)
    scales = torch.rand(outputs, num_groups, generator=generator) / 64
    if group_size is None:
        values = torch.randint(-127, 128, (outputs, inputs), generator=generator).to(torch.int8)
    else:
        values = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
        zeros = torch.randint(0, 17, scales.shape, generator=generator).float()
    assert packs_integers(values, scales, zeros, torch.bfloat16)
    bias, x = random(outputs, dtype=torch.bfloat16), random(257, inputs, dtype=torch.bfloat16)
    numbers = values.float().view(outputs, num_groups, -1) - (0 if zeros is None else zeros[..., None])
    expected = F.linear(x.float(), (numbers * scales[..., None]).flatten(1), bias.float())
    linear = PackedIntegers(values, scales, zeros, bias)
    whole = linear(x)
    torch.testing.assert_close(whole, expected.bfloat16(), rtol=2e-2, atol=2e-3)
    for start, stop in ((0, 1), (5, 17), (100, 257)):
        assert torch.equal(linear(x[start:stop]), whole[start:stop])
    if linear.can_be_gated("silu"):
        gates, ups = expected.chunk(2, -1)
        torch.testing.assert_close(linear.gated("silu")(x), (F.silu(gates) * ups).bfloat16(), rtol=2e-2, atol=2e-2)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_are_those_of_torch(dtype: torch.dtype, name: str) -> None:
    weight, bias, x = random(192, 64, dtype=dtype), random(192, dtype=dtype), 3 * random(33, 64, dtype=dtype)
    gate, up = F.linear(x.float(), weight.float(), bias.float()).chunk(2, -1)
    torch.testing.assert_close(
        PackedWeight(weight, bias).gated(name)(x), (activation(name)(gate) * up).to(dtype), rtol=1e-2, atol=1e-2
    )
    assert not PackedWeight(weight[:190], None).can_be_gated(name)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 49, 1000])
def test_the_first_of_the_largest_is_found(dtype: torch.dtype, width: int) -> None:
    scores = random(9, width, dtype=dtype)
    scores[3] = scores[3].amax()
    scores[4, width // 2 :] = scores[4].amax()
    scores[5] = float("-inf")
    assert COMPILED is not None
    assert COMPILED.argmax(scores).tolist() == scores.float().numpy().argmax(-1).tolist()
    for row, wrong in enumerate((float("nan"), float("inf"))):
        scores[row, -1], scores[row + 2, 0] = wrong, wrong
    found = COMPILED.argmax(scores)
    assert found[:4].tolist() == [NO_TOKEN] * 4 and NO_TOKEN not in found[4:]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_looked_up_in_a_packed_weight(dtype: torch.dtype) -> None:
    weight, indices = random(50, 96, dtype=dtype), torch.tensor([0, 49, 31, 32, 31], dtype=torch.int32)
    assert torch.equal(PackedWeight(weight).rows(indices), weight[indices])
    assert PackedWeight(weight).rows(indices[:0]).shape == (0, 96)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 9])
def test_the_most_likely_is_what_norm_head_and_argmax_give(dtype: torch.dtype, num_rows: int) -> None:
    hidden, pending = (random(num_rows, 96, dtype=dtype, seed=seed) for seed in (0, 1))
    weight, head = random(96, dtype=dtype), PackedWeight(random(1000, 96, dtype=dtype))
    assert COMPILED is not None
    for more in (None, pending):
        logits = head(COMPILED.add_rms_norm(hidden.clone(), more, weight, 1e-5))
        found = COMPILED.most_likely(hidden.clone(), more, weight, 1e-5, head)
        assert torch.equal(found, COMPILED.argmax(logits))


@needs_kernels
def test_a_caller_is_kept_on_a_core_for_the_call_only() -> None:
    allowed = os.sched_getaffinity(0)
    loaded = library._library()
    assert loaded is not None
    team, scores = Kernels(loaded, len(allowed)), random(4, 16, dtype=torch.float32)
    team.argmax(scores)
    assert os.sched_getaffinity(0) == allowed


@needs_kernels
def test_threads_of_a_team_compute_together_for_callers_that_take_turns() -> None:
    weight, x = random(640, 128, dtype=torch.float32), random(40, 128, dtype=torch.float32)
    linear, expected = PackedWeight(weight), F.linear(x, weight)
    loaded = library._library()
    assert loaded is not None
    team = Kernels(loaded, 3)
    wrong = []

    def call() -> None:
        for _ in range(50):
            if not torch.allclose(team.linear(x, linear), expected, atol=1e-4):
                wrong.append(1)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong and not any(caller.is_alive() for caller in callers)


@needs_kernels
def test_a_team_does_not_look_at_what_it_was_asked_when_it_is_done() -> None:
    """Memory of a caller that has gone on."""
    command = [sys.executable, "-m", "tests.worker.forgotten_passes"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


def test_without_a_compiler_it_says_so_and_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(building, "_folders", lambda: [tmp_path / "built"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(building.BuildError, match="no C compiler"):
        building.find_or_build()
    library._library.cache_clear()
    try:
        assert library._library() is None
    finally:
        library._library.cache_clear()


def test_who_waits_for_another_s_build_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_folders", lambda: [tmp_path])
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(building.BuildError, match="another process compiles"):
            building.find_or_build(0.3)
    assert building.BUILD_TIMEOUT_S <= START_TIMEOUT_S / 2


def test_who_starts_together_compiles_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, made = tmp_path / "built", []
    both_have_looked, find, looked = threading.Barrier(2), building.find, threading.local()

    def find_with_the_other() -> Path | None:
        path = find()
        if not hasattr(looked, "once"):
            looked.once = both_have_looked.wait(60)
        return path

    def build(*, timeout_s: float) -> Path:
        made.append(folder / building._name(building._native()))
        made[-1].touch()
        return made[-1]

    monkeypatch.setattr(building, "_folders", lambda: [folder])
    monkeypatch.setattr(building, "find", find_with_the_other)
    monkeypatch.setattr(building, "build", build)
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(lambda _: building.find_or_build(), range(2), timeout=60))
    assert paths == set(made) and len(made) == 1
