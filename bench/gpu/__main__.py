"""python -m bench.gpu [PART ...] [--quick] [--output FOLDER] [--site ARCHIVE] [--budget-s 530]

Needs the standard library and torch; what else it needs it takes from the archive that `make gpu-wheels` left, where it is
not installed. Writes gpu.json and gpu.md after each part, and gpu.log. Without a CUDA device the same parts run on the CPU
with small shapes (as with --quick): whether all works, not how fast. Exit status: 0, also where a part failed, which the
page says; 1 where none ran to its end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[2]
ARCHIVE = REPOSITORY / ".tideway/gpu/site.tar.gz"
TESTS = (
    "tests/worker/test_attention.py", "tests/worker/test_ops.py", "tests/worker/test_nucleus.py",
    "tests/worker/test_transfer.py", "tests/worker/test_fp8_linear.py", "tests/worker/test_executor.py",
    "tests/worker/kv_transport/test_transfers.py", "tests/worker/test_deterministic.py",
    "tests/worker/test_ranks.py",
)  # fmt: skip
"""What has variants for CUDA."""
KILL_AFTER_S = 5.0
LEAST_S = 5.0
"""What must be left for a part to begin."""


@dataclass(frozen=True)
class Part:
    name: str
    limit_s: float
    title: str
    needs: tuple[str, ...] = ()
    num_devices: int = 1
    is_beside: bool = False
    """Runs beside those that do not need it: it keeps processors of the host busy, not the device."""


PARTS = (
    Part("machine", 60, "The machine"),
    Part("kernels", 240, "Kernels compiled, and what was chosen", is_beside=True),
    Part("rates", 60, "Rates measured in this run"),
    Part("checkpoint", 120, "Random weights"),
    Part("decode", 150, "Decode", ("kernels", "rates", "checkpoint")),
    Part("prefill", 60, "Prefill", ("kernels", "rates", "checkpoint")),
    Part("tests", 150, "Tests on the device", ("kernels",)),
    Part("safepoints", 60, "Safepoints", ("kernels", "checkpoint")),
    Part("copies", 60, "KV blocks to the host and back", ("checkpoint",)),
    Part("sampling", 40, "Sampling"),
    Part("products", 40, "Products of 16 and 8 bits"),
    Part("migration", 150, "Requests that move between two instances on the device", ("kernels",)),
    Part("sharing", 150, "Two models on one executor", ("kernels",)),
    Part("lock", 60, "The interpreter's lock"),
    Part("decode_fp8", 90, "Decode with float8 weights", ("kernels", "rates", "checkpoint")),
    Part("tensor_parallel", 120, "A model on one device and on two", ("kernels",), num_devices=2),
    Part("fidelity", 200, "Simulated against live", ("kernels",)),
    Part("profile", 240, "A hardware profile", ("kernels", "checkpoint")),
)
BENCHES = ("migration", "sharing", "lock", "tensor_parallel", "fidelity")
"""Parts that are benches with results of their own."""
HARDWARE = "hardware.toml"


@dataclass
class Outcome:
    part: str
    title: str
    state: str = "not begun"
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


class Run:
    def __init__(
        self,
        options: argparse.Namespace,
        environment: dict[str, str],
        device: str,
        parts: Sequence[Part],
        num_devices: int = 1,
    ) -> None:
        self.options, self.environment, self.device = options, environment, device
        self.num_devices = num_devices
        self.is_quick = options.quick or device == "cpu"
        self.started_s = time.monotonic()
        self.scratch = Path(tempfile.mkdtemp(prefix="tideway-gpu-", dir=scratch_root()))
        self.outcomes = {part.name: Outcome(part.name, part.title) for part in parts}
        options.output.mkdir(parents=True, exist_ok=True)
        self.log = (options.output / "gpu.log").open("w")

    def left_s(self) -> float:
        return float(self.options.budget_s) - (time.monotonic() - self.started_s)

    def command(self, part: Part) -> list[str]:
        python, rows = sys.executable, self.scratch / f"{part.name}.jsonl"
        if part.name == "tests":
            # Without a device the variants for the CPU are run instead, of those files that take seconds.
            chosen, files = (
                ("gpu and not long", TESTS) if self.device == "cuda" else ("not gpu and not long", TESTS[1:5])
            )
            return [python, "-m", "pytest", "-q", "-m", chosen, "-p", "no:cacheprovider", "-p", "no:schemathesis",
                    f"--junitxml={self.scratch / 'tests.xml'}", *files]  # fmt: skip
        results = ["--output", str(self.scratch / part.name)]
        model = "tiny" if self.is_quick else "llama-3.1-8b"
        if part.name == "migration":
            sizes = ["--lengths", "96", "192", "--moves", "3"] if self.is_quick else \
                ["--lengths", "256", "1024", "4096", "8192", "--moves", "6"]  # fmt: skip
            experiments = ["transfer", "pause"]
            return [python, "-m", "bench.migration", *experiments, "--device", self.device, "--model", model,
                    "--no-pinning", *sizes, *results]  # fmt: skip
        if part.name == "sharing":
            return [python, "-m", "bench.sharing_overhead", "--device", self.device, "--models", model, model, "--rounds",
                    "5" if self.is_quick else "20", *results]  # fmt: skip
        if part.name == "lock":
            return [python, "-m", "bench.interpreter_lock", "--steps", "20" if self.is_quick else "100", "--rounds", "2",
                    *results]  # fmt: skip
        if part.name == "tensor_parallel":
            return [python, "-m", "bench.tensor_parallel", "--device", self.device, "--rounds",
                    "3" if self.is_quick else "20", *results]  # fmt: skip
        if part.name == "fidelity":
            cells = ["--mixes", "chat"] if self.is_quick else ["--mixes", "chat", "bursts"]
            # Of the small models of this bench a GPU computes more than one client sends.
            of_device = ["--instances", str(self.num_devices), "--max-running", "8"] if self.device == "cuda" else []
            return [python, "-m", "bench.fidelity", "--quick", *cells, "--loads", "0.6", "--seconds", "6", *of_device,
                    *results]  # fmt: skip
        if part.name == "profile":
            return [python, "-m", "tideway", "profile", "--model", f"{model}={self.scratch / 'model'}", "--instances", "1",
                    "--data-dir", str(self.scratch / "profile"), "--hardware", str(self.hardware),
                    *(["--brief"] if self.is_quick else [])]  # fmt: skip
        return [python, "-m", "bench.gpu.parts", part.name, "--device", self.device, "--scratch", str(self.scratch),
                "--rows", str(rows), *(["--quick"] if self.is_quick else [])]  # fmt: skip

    @property
    def hardware(self) -> Path:
        """What `tideway profile` says of the device, beside the page."""
        path: Path = self.options.output.resolve() / HARDWARE
        return path

    def start(self, part: Part) -> Running:
        limit_s = min(part.limit_s, self.left_s())
        outcome = self.outcomes[part.name]
        done = {name for name, other in self.outcomes.items() if other.state == "done"}
        missing = [name for name in part.needs if name not in done and name != "kernels"]
        if self.device == "cuda" and self.num_devices < part.num_devices:
            missing = [f"{part.num_devices} devices"]
        if missing or limit_s < LEAST_S:
            outcome.state = f"left out: needs {', '.join(missing)}" if missing else "left out: no time was left"
            return Running(part, None, time.monotonic(), 0.0)
        print(f"[{time.monotonic() - self.started_s:6.1f} s] {part.name}", flush=True)
        self.log.write(f"\n===== {part.name}\n")
        self.log.flush()
        process = subprocess.Popen(
            self.command(part), cwd=REPOSITORY, env=self.environment | {"TMPDIR": str(self.scratch)},
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        return Running(part, process, time.monotonic(), limit_s)

    def finish(self, running: Running) -> None:
        outcome, part = self.outcomes[running.part.name], running.part
        if running.process is None:
            print(f"           {outcome.state}", flush=True)
        else:
            try:
                code = running.process.wait(max(0.0, running.started_s + running.limit_s - time.monotonic()))
                outcome.state = "done" if code == 0 else f"failed with status {code}, see gpu.log"
            except subprocess.TimeoutExpired:
                outcome.state = f"ended after its limit of {running.limit_s:.0f} s"
            end_group(running.process)
            outcome.seconds = round(time.monotonic() - running.started_s, 1)
            outcome.rows = self.rows_of(part)
            print(f"           {outcome.state}: {outcome.seconds} s, {len(outcome.rows)} rows", flush=True)
        self.write()

    def rows_of(self, part: Part) -> list[dict[str, Any]]:
        """What the part has left, also where it was ended."""
        try:
            if part.name == "tests":
                return rows_of_tests(self.scratch / "tests.xml")
            if part.name == "profile":
                return rows_of_hardware(self.hardware)
            if part.name in BENCHES:
                return [
                    row for file in sorted((self.scratch / part.name).glob("*.json")) for row in rows_of_bench(file)
                ]
            lines = (self.scratch / f"{part.name}.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines]
        except (OSError, ValueError, ElementTree.ParseError):
            return []

    def write(self) -> None:
        outcomes = list(self.outcomes.values())
        document = {
            "date": time.strftime("%Y-%m-%d"), "device": self.device, "quick": self.is_quick,
            "seconds": round(time.monotonic() - self.started_s, 1), "parts": [asdict(outcome) for outcome in outcomes],
        }  # fmt: skip
        (self.options.output / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
        (self.options.output / "gpu.md").write_text(page(document))

    def close(self) -> None:
        self.log.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


@dataclass
class Running:
    part: Part
    process: subprocess.Popen[bytes] | None
    started_s: float
    limit_s: float


def end_group(process: subprocess.Popen[bytes]) -> None:
    """The part and whatever it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            continue
        time.sleep(0.1)
    process.wait()


def rows_of_tests(file: Path) -> list[dict[str, Any]]:
    (suite,) = ElementTree.parse(file).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    rows: list[dict[str, Any]] = [{"what": "all", **counts}]
    for case in suite.iter("testcase"):
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                message = (found.get("message") or "").splitlines()
                rows.append({"what": f"{kind}: {case.get('name')}", "why": (message or [""])[0][:200]})
    return rows


def rows_of_bench(file: Path) -> list[dict[str, Any]]:
    document = json.loads(file.read_text())
    name = file.stem.partition("-2")[0]
    rows = document.get("rows") or document.get("measured") or []
    found = [{"bench": name, **row} for row in rows]
    if "weights_bytes" in document:
        found.append({"bench": "weights, bytes", **document["weights_bytes"]})
    return found


def rows_of_hardware(file: Path) -> list[dict[str, Any]]:
    plain = tomllib.loads(file.read_text())
    measured = plain.pop("measured", {})
    rows = [{"what": key, "value": value} for key, value in plain.items()]
    return rows + [{"model": name, **costs} for name, by_ranks in measured.items() for costs in by_ranks.values()]


def page(document: dict[str, Any]) -> str:
    where = "a CUDA device" if document["device"] == "cuda" else "the CPU, since torch finds no CUDA device here"
    lines = [f"# bench.gpu, {document['date']}", "", f"Every part ran on {where}; {document['seconds']:.0f} s in all."]
    if document["quick"]:
        lines.append("Shapes are small: this shows whether all works, not how fast.")
    for outcome in document["parts"]:
        lines += ["", f"## {outcome['title']}", "", f"`{outcome['part']}` on {document['device']}: {outcome['state']}"
                  + (f", {outcome['seconds']:.0f} s" if outcome["seconds"] else ""), ""]  # fmt: skip
        lines += tables(outcome["rows"])
    return "\n".join(lines).rstrip() + "\n"


def tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown; a new table where the columns change."""
    lines: list[str] = []
    last: tuple[str, ...] = ()
    for row in rows:
        columns = tuple(row)
        if columns != last:
            lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            last = columns
        lines.append("| " + " | ".join(cell(value) for value in row.values()) + " |")
    return lines[1:]


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def scratch_root() -> str | None:
    """Memory where there is plenty, since checkpoints of 16 GB pass through it; None: the default."""
    memory = Path("/dev/shm")
    try:
        free = shutil.disk_usage(memory).free
    except OSError:
        return None
    return str(memory) if free > 48 << 30 else None


def environment_of(archive: Path) -> dict[str, str]:
    """For parts: what is missing comes from the archive, unpacked beside it."""
    environment = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
    paths = [str(REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])]
    if importlib.util.find_spec("msgspec") is None and archive.exists():
        site = archive.parent / "site"
        if not site.exists():
            with tarfile.open(archive) as tar:
                tar.extractall(site, filter="tar")
        paths.append(str(site))
        environment["PATH"] = f"{site / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def find_device(environment: dict[str, str]) -> tuple[str, int]:
    """Its kind, and how many there are. Asked in a process of its own: this one makes no CUDA context."""
    question = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run(
        [sys.executable, "-c", question], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    num_gpus = int(answer.stdout.split()[-1])
    return ("cuda", num_gpus) if num_gpus else ("cpu", 1)


def with_needed(names: Sequence[str]) -> list[Part]:
    """And those before them; without names all."""
    needed = {need for part in PARTS if part.name in names for need in part.needs}
    return [part for part in PARTS if not names or part.name in names or part.name in needed]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--output", type=Path, default=REPOSITORY / ".tideway/bench/gpu")
    parser.add_argument("--site", type=Path, default=ARCHIVE, help="archive of make gpu-wheels (%(default)s)")
    parser.add_argument("--budget-s", type=float, default=530.0, help="for all parts (%(default)s)")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(names):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    chosen = with_needed(options.parts)
    environment = environment_of(options.site)
    device, num_devices = find_device(environment)
    run = Run(options, environment, device, chosen, num_devices)
    print(f"on {run.device}{', small shapes' if run.is_quick else ''}; results in {options.output}", flush=True)
    beside: list[Running] = []
    try:
        for part in chosen:
            for other in [other for other in beside if other.part.name in part.needs]:
                beside.remove(other)
                run.finish(other)
            running = run.start(part)
            if part.is_beside:
                beside.append(running)
            else:
                run.finish(running)
        while beside:
            run.finish(beside.pop())
    finally:
        for other in beside:
            if other.process is not None:
                end_group(other.process)
        run.write()
        run.close()
    print((options.output / "gpu.md").read_text())
    return 0 if any(outcome.state == "done" for outcome in run.outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
