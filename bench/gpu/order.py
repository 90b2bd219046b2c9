"""What there is to run, and in which calls of at most nine minutes, as some machines end a command after ten.

`CALLS` is the order of the first half hour on a GPU: right or wrong before how fast, and what needs two instances after what
needs one. Standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUDGET_S = 530.0
"""Time of a call: less than ten minutes with the start of the machine's Python and what is written at the end."""
SHAPE, QUICK_SHAPE = "llama-3.1-8b", "tiny"
MIGRATION_LENGTHS = (256, 1024, 4096, 8192)


@dataclass(frozen=True)
class Part:
    name: str
    limit_s: float
    title: str
    needs: tuple[str, ...] = ()
    num_devices: int = 1
    is_local: bool = False
    """What it leaves is on the machine alone, so that a later call makes it again for parts that need it."""
    is_added_to: bool = False
    """A try after one that was cut finds the rows of that one, and measures what is missing."""


PARTS = (
    Part("machine", 40, "The machine"),
    Part("kernels", 120, "Which kernels were chosen, and how long that took"),
    Part("equality", 80, "The same tokens"),
    Part("tests", 150, "Tests on the device"),
    Part("sanitizer", 120, "compute-sanitizer over the tests of captured graphs", is_added_to=True),
    Part("rates", 30, "Rates measured in this run"),
    Part("checkpoint", 60, "Random weights", is_local=True),
    Part("decode", 120, "Decode", ("rates", "checkpoint"), is_added_to=True),
    Part("prefill", 50, "Prefill", ("rates", "checkpoint"), is_added_to=True),
    Part("safepoints", 40, "Safepoints", ("checkpoint",)),
    Part("copies", 35, "KV blocks to the host and back", ("checkpoint",)),
    Part("copies_beside", 45, "Decodes beside checkpoints of KV blocks", ("checkpoint",)),
    Part("sampling", 25, "Sampling"),
    Part("products", 25, "Products of 16 and 8 bits"),
    Part("decode_fp8", 90, "Decode with float8 weights", ("rates", "checkpoint"), is_added_to=True),
    Part("migration", 120, "Requests that move between two instances on the device", ("checkpoint",)),
    Part("profile", 230, "A hardware profile", ("checkpoint",)),
    Part("sharing", 120, "Two models on one executor", ("checkpoint",)),
    Part("shapes", 240, "Shapes and models that come and go", is_added_to=True),
    Part("cuda_ipc", 60, "KV blocks between two processes"),
    Part("lock", 60, "The interpreter's lock"),
    Part("tensor_parallel", 120, "A model on one device and on two", num_devices=2),
    Part("fidelity", 200, "Simulated against live"),
)  # fmt: skip
BY_NAME = {part.name: part for part in PARTS}

CALLS: dict[str, tuple[str, ...]] = {
    "right": ("machine", "kernels", "equality", "tests", "sanitizer"),
    "speed": (
        "rates", "decode", "prefill", "safepoints", "copies", "copies_beside", "sampling", "products", "decode_fp8",
    ),
    "migration": ("migration", "profile", "sharing"),
    "shapes": ("shapes", "cuda_ipc"),
    "rest": ("lock", "tensor_parallel", "fidelity"),
}  # fmt: skip
"""By name; a call has a number too, from 1 on. `checkpoint` comes along where it is needed."""

BENCHES = ("migration", "sharing", "lock", "tensor_parallel", "fidelity")
"""Parts that are benches of the tree, with results of their own."""

TESTS = (
    "tests/worker/test_attention.py", "tests/worker/test_ops.py", "tests/worker/test_nucleus.py",
    "tests/worker/test_transfer.py", "tests/worker/test_fp8_linear.py", "tests/worker/test_executor.py",
    "tests/worker/test_on_cuda.py", "tests/worker/kv_transport/test_transfers.py", "tests/worker/test_deterministic.py",
    "tests/worker/test_ranks.py",
)  # fmt: skip
"""What has variants for CUDA."""


def asked_for(names: Sequence[str], calls: Sequence[str]) -> list[str]:
    """Parts that are asked for, by their names and those of calls, by name or number; all where nothing is. Raises
    `ValueError`."""
    wanted = set(names)
    if unknown := wanted - set(BY_NAME):
        raise ValueError(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(BY_NAME)}")
    numbered = {str(number): name for number, name in enumerate(CALLS, 1)}
    for call in calls:
        name = numbered.get(call, call)
        if name not in CALLS:
            raise ValueError(f"no such call: {call}; there are {', '.join(f'{n} {c}' for n, c in numbered.items())}")
        wanted.update(CALLS[name])
    return [part.name for part in PARTS if not (names or calls) or part.name in wanted]


def with_needed(names: Sequence[str]) -> list[Part]:
    """Those and what they need, in their order."""
    needed = {need for name in names for need in BY_NAME[name].needs}
    return [part for part in PARTS if part.name in names or part.name in needed]


@dataclass(frozen=True)
class Place:
    """Place in which parts run, and what they run with."""

    device: str
    """cuda or cpu"""
    num_devices: int
    is_quick: bool
    scratch: Path
    """Gone at the end."""
    hardware: Path
    """The file for what `tideway profile` says of the device."""

    @property
    def model(self) -> Path:
        """What `checkpoint` makes."""
        return self.scratch / "model"

    def rows(self, part: str) -> Path:
        return self.scratch / f"{part}.jsonl"

    def results(self, part: str) -> Path:
        """Results of a bench: its own files."""
        return self.scratch / "benches" / part

    @property
    def tests(self) -> Path:
        return self.scratch / "tests.xml"


def command(part: str, place: Place, limit_s: float) -> list[str]:
    python, quick = [sys.executable, "-m"], place.is_quick
    device, results = ["--device", place.device], ["--output", str(place.results(part))]
    model = QUICK_SHAPE if quick else SHAPE
    made = ["--checkpoint", str(place.model)]
    if part == "tests":
        # Without a device the variants for the CPU are run instead, of those files that take seconds.
        on_device = place.device == "cuda"
        chosen, files = ("gpu and not long", TESTS) if on_device else ("not gpu and not long", TESTS[1:5])
        return [*python, "pytest", "-q", "-m", chosen, "-p", "no:cacheprovider", "-p", "no:schemathesis",
                f"--junitxml={place.tests}", *files]  # fmt: skip
    if part == "migration":
        lengths, moves = ((96, 192), 3) if quick else (MIGRATION_LENGTHS, 6)
        # The small one's context is shorter than what requests there are given.
        return [*python, "bench.migration", "transfer", "pause", *device, "--model", model, *([] if quick else made),
                "--no-pinning", "--lengths", *map(str, lengths), "--moves", str(moves), *results]  # fmt: skip
    if part == "sharing":
        return [*python, "bench.sharing_overhead", *device, "--models", model, model, *made, "--rounds",
                "5" if quick else "20", *results]  # fmt: skip
    if part == "lock":
        return [*python, "bench.interpreter_lock", "--steps", "20" if quick else "100", "--rounds", "2", *results]
    if part == "tensor_parallel":
        return [*python, "bench.tensor_parallel", *device, "--rounds", "3" if quick else "20", *results]
    if part == "fidelity":
        mixes = ["chat"] if quick else ["chat", "bursts"]
        # Of the small models of this bench a GPU computes more than one client sends.
        of_device = ["--instances", str(place.num_devices), "--max-running", "8"] if place.device == "cuda" else []
        return [*python, "bench.fidelity", "--quick", "--mixes", *mixes, "--loads", "0.6", "--seconds", "6", *of_device,
                *results]  # fmt: skip
    if part == "profile":
        return [*python, "tideway", "profile", "--model", f"{model}={place.model}", "--instances", "1",
                "--data-dir", str(place.scratch / "profile"), "--hardware", str(place.hardware),
                *(["--brief"] if quick else [])]  # fmt: skip
    return [*python, "bench.gpu.parts", part, *device, "--scratch", str(place.scratch), "--limit-s", f"{limit_s:.0f}",
            *(["--quick"] if quick else [])]  # fmt: skip
