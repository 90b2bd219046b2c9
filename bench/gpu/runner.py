"""Runs parts one after the other, each in a process with a limit, and writes down what is known after each.

Standard library only: what parts import may have to come out of the archive first.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu import results
from bench.gpu.fallbacks import seen, unfinished
from bench.gpu.order import BUDGET_S, BY_NAME, Part, Place, command, with_needed
from bench.gpu.page import page
from bench.gpu.results import CUT, DONE, FAILED, LEFT_OUT, NOT_BEGUN, Document, Outcome
from bench.gpu.targets import judged
from services.worker.node.processes import dies_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]
ARCHIVES = (REPOSITORY / ".tideway/gpu/site.tar.xz", REPOSITORY / ".tideway/gpu/site.tar.gz")
"""Archives of `make gpu-wheels`; the first that is there counts."""
PACKED = ("msgspec", "nats", "fastapi", "opentelemetry", "pytest_asyncio")
"""Packages without one of which those of the archive are used."""
BUILT_AHEAD = "flashinfer/data/aot"
MADE_FOR = "python-version"
"""The archive's file that says for which Python its packages are, as `3.12`."""
SCRATCH = "tideway-gpu-run-"
NOTE_S = 5.0
"""How often rows of a part that runs are written down."""
KILL_AFTER_S = 5.0
LEAST_S = 5.0
"""What must be left for a part to begin."""
LEFT_OUT_STATUS = 77
"""Status of a part that cannot be shown on this machine; its last row says why as `left_out`."""


@dataclass(frozen=True)
class Machine:
    device: str
    """cuda or cpu"""
    num_devices: int = 1
    card: str = ""
    driver: str = ""


class Run:
    """One call."""

    def __init__(
        self,
        document: Document,
        machine: Machine,
        environment: dict[str, str],
        output: Path,
        *,
        budget_s: float = BUDGET_S,
        earlier: Path | None = None,
    ) -> None:
        """`document`: what is known; what is asked for is in it. `earlier`: the folder of the call that this goes on
        from. Raises `ValueError` where another run writes to `output`, or what the earlier call left cannot be read;
        `OSError`."""
        self.document, self.environment, self.output = document, environment, output.resolve()
        self._budget_s, self._made = budget_s, set[str]()
        self._started_s, self._earlier_s = time.monotonic(), document.seconds
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / results.LOG).touch()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.output / results.LOG))
            except BlockingIOError:
                raise ValueError(f"another run writes to {self.output}") from None
            self.place = Place(
                machine.device, machine.num_devices, document.is_quick, stack.enter_context(scratch_folder()),
                self.output / results.HARDWARE,
            )  # fmt: skip
            self._take_over(None if earlier is None else earlier.resolve())
            self.log = (self.output / results.LOG).open("a")
            self._held = stack.pop_all()
        for part in with_needed(document.asked_for):
            self.document.outcomes.setdefault(part.name, Outcome(part.name, part.title))

    def _take_over(self, earlier: Path | None) -> None:
        """The files of the earlier call, and the rows that parts of this one need or add to; of another run's none."""
        if earlier is not None and (earlier / results.FILES).exists():
            with results.opened(earlier / results.FILES) as tar:
                tar.extractall(self.place.scratch / "benches", filter="data")
        if earlier != self.output:
            for name in (results.STATE, results.PAGE, results.HARDWARE, results.FILES):
                (self.output / name).unlink(missing_ok=True)
            (self.output / results.LOG).write_text("")
            for name in (results.LOG, results.HARDWARE):
                if earlier is not None and (earlier / name).exists():
                    shutil.copyfile(earlier / name, self.output / name)
        for part, outcome in self.document.outcomes.items():
            if outcome.rows:
                self.place.rows(part).write_text("".join(json.dumps(row) + "\n" for row in outcome.rows))

    def left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._started_s)

    def parts(self) -> list[Part]:
        """What is still to be run, in its order."""
        to_do = [name for name in self.document.asked_for if self.document.outcomes[name].state not in (DONE, LEFT_OUT)]
        return [
            part
            for part in with_needed(to_do)
            if part.is_local or self.document.outcomes[part.name].state not in (DONE, LEFT_OUT)
        ]

    def run_all(self) -> None:
        self.write()
        for part in self.parts():
            self.run(part)

    def run(self, part: Part) -> None:
        outcome = self.document.outcomes[part.name]
        limit_s = min(part.limit_s, self.left_s())
        missing = [need for need in part.needs if not self._is_there(need)]
        if self.place.device == "cuda" and self.place.num_devices < part.num_devices:
            outcome.state, outcome.why = LEFT_OUT, f"needs {part.num_devices} devices"
        elif missing:
            outcome.state, outcome.why = NOT_BEGUN, f"needs {', '.join(missing)}"
        elif limit_s < LEAST_S:
            outcome.state, outcome.why = (CUT if outcome.rows else NOT_BEGUN), "no time was left"
        else:
            self._run(part, outcome, limit_s)
        if outcome.state == DONE:
            self._made.add(part.name)
        self._say(f"           {outcome}: {outcome.seconds} s, {len(outcome.rows)} rows")
        self.write()

    def _is_there(self, need: str) -> bool:
        outcome = self.document.outcomes.get(need)
        is_done = outcome is not None and outcome.state == DONE
        return need in self._made or (is_done and not BY_NAME[need].is_local)

    def _run(self, part: Part, outcome: Outcome, limit_s: float) -> None:
        self._say(f"[{time.monotonic() - self._started_s:6.1f} s] {part.name}")
        self.log.write(f"\n===== {part.name}\n")
        self.log.flush()
        earlier = outcome.rows
        if not part.is_added_to:
            self.place.rows(part.name).unlink(missing_ok=True)
        started_s = time.monotonic()
        process = subprocess.Popen(
            dies_with_parent(command(part.name, self.place, limit_s)), cwd=REPOSITORY, stdin=subprocess.DEVNULL,
            stdout=self.log, stderr=subprocess.STDOUT, env=self.environment | {"TMPDIR": str(self.place.scratch)},
            start_new_session=True,
        )  # fmt: skip
        code = None
        outcome.state, outcome.why = CUT, "the call was ended meanwhile"
        try:
            while code is None and (left_s := started_s + limit_s - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(left_s, NOTE_S))
                self._note(part, outcome, earlier)
        finally:
            end_group(process)
        outcome.seconds = round(time.monotonic() - started_s, 1)
        self._note(part, outcome, earlier)
        found = results.rows_of(part.name, self.place)
        if code == LEFT_OUT_STATUS and found and "left_out" in found[-1]:
            outcome.state, outcome.why, outcome.rows = LEFT_OUT, str(found[-1]["left_out"]), found[:-1]
        elif code is None:
            outcome.why = f"its limit of {limit_s:.0f} s ended it"
        else:
            outcome.state, outcome.why = (FAILED, f"status {code}, see {results.LOG}") if code else (DONE, "")
            outcome.rows = outcome.rows if code else found

    def _note(self, part: Part, outcome: Outcome, earlier: list[results.Row]) -> None:
        """Writes down what there is so far, since whoever ends this call may give no notice. Of a try that has found less
        yet, what an earlier one had found is not lost."""
        found = results.rows_of(part.name, self.place)
        if len(found) >= len(earlier) and found != outcome.rows:
            outcome.rows = found
            self.write()

    def write(self) -> None:
        self.document.seconds = round(self._earlier_s + time.monotonic() - self._started_s, 1)
        self.document.save(self.output / results.STATE, targets=judged(self.document), fallbacks=seen(self.document))
        (self.output / results.PAGE).write_text(page(self.document))
        for name in results.pack_files(self.place.scratch / "benches", self.output / results.FILES):
            self._say(f"{name} is too large to come back")
        self.log.flush()

    def close(self) -> None:
        with self._held:
            with self.log:
                self.write()
            results.shorten(self.output / results.LOG)
            for fault in results.faults_of(self.output):
                self._say(f"the output would not come back whole: {fault}")

    def _say(self, text: str) -> None:
        """How far it is. The verdict alone is the first line of the output, which is known at the end."""
        print(text, file=sys.stderr, flush=True)

    @property
    def status(self) -> int:
        """0 where all that was asked for is done, or left out since this machine cannot show it, and nothing fell back."""
        return 1 if unfinished(self.document) or seen(self.document) else 0


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


def scratch_root() -> str | None:
    """Memory where there is plenty, since a checkpoint of 16 GB passes through it; None: the default."""
    memory = Path("/dev/shm")
    try:
        free = shutil.disk_usage(memory).free
    except OSError:
        return None
    return str(memory) if free > 40 << 30 else None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """A file or folder that no other run has, until this process ends. Raises `BlockingIOError` where one has it."""
    descriptor = os.open(path, os.O_RDONLY)  # which parts do not inherit
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new one, gone at the end. Those of runs that were killed go first, as there may be no room beside them."""
    for root in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for folder in root.glob(f"{SCRATCH}*"):
            with contextlib.suppress(OSError), locked(folder):
                shutil.rmtree(folder, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix="tideway-gpu-new-", dir=scratch_root()))
    with locked(made):  # before it has the name by which others would find it
        folder = made.rename(made.with_name(made.name.replace("tideway-gpu-new-", SCRATCH)))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def environment_of(archive: Path | None) -> dict[str, str]:
    """Environment for parts: what is missing here comes from the archive, unpacked beside it. Raises as `unpacked`."""
    environment = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
    paths = [str(REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])]
    is_bare = any(importlib.util.find_spec(name) is None for name in PACKED)
    if is_bare and archive is not None:
        site = unpacked(archive)
        paths.append(str(site))
        environment["PATH"] = f"{site / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
        if (site / BUILT_AHEAD).is_dir():
            # What is not among the modules must not be compiled within a part's limit, where there may be no compiler.
            environment.setdefault("FLASHINFER_DISABLE_JIT", "1")
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def unpacked(archive: Path) -> Path:
    """The folder `site` beside the archive, made anew where the archive has changed since. Raises `ValueError` where it is
    no archive, is cut, or is for another Python; `OSError`."""
    site, mark = archive.parent / "site", archive.parent / "site.from"
    stamp = f"{archive.name} {archive.stat().st_size} {archive.stat().st_mtime_ns}"
    if not (site.exists() and mark.exists() and mark.read_text() == stamp):
        with results.opened(archive) as tar:  # else nothing is touched
            mark.unlink(missing_ok=True)
            shutil.rmtree(site, ignore_errors=True)
            tar.extractall(site, filter="tar")
        mark.write_text(stamp)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    made_for = (site / MADE_FOR).read_text().strip() if (site / MADE_FOR).exists() else here
    if made_for != here:
        raise ValueError(f"{archive} is for Python {made_for}, and this is {here}: make one with --python {here}")
    return site


def find_machine(environment: dict[str, str]) -> Machine:
    """Asked in a process of its own: this one makes no CUDA context. Raises `ValueError` with what that said."""
    question = "import torch as t; n = t.cuda.device_count(); print(n, t.cuda.get_device_name() if n else '')"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", question], env=environment, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"torch did not answer within {error.timeout:.0f} s") from error
    if answer.returncode:
        raise ValueError(f"torch cannot be used here:\n{answer.stderr.strip()}")
    count, _, card = answer.stdout.splitlines()[-1].partition(" ")
    if not int(count):
        return Machine("cpu")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return Machine("cuda", int(count), card.strip(), said_by(query).partition("\n")[0])


def commit_of(folder: Path) -> str:
    """Empty where it is no checkout."""
    return said_by(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"])


def said_by(words: Sequence[str]) -> str:
    """What a command prints; empty where it cannot be run, or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
