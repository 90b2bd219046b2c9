"""The one command for a lent CUDA machine: what becomes of parts that fail, hang or are cut, calls that go on from earlier
ones, what counts as a fallback, its page and targets, the archive it takes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu import fallbacks, order, page, results, runner, sanitizer, targets
from bench.gpu.order import BUDGET_S, CALLS, PARTS, Part, Place, asked_for, with_needed
from bench.gpu.results import Document, Outcome
from bench.gpu.runner import Machine, Run

FAKE = (
    Part("fails", 30, "Fails"), Part("hangs", 3, "Hangs"), Part("works", 30, "Works"),
    Part("waits", 30, "Waits", ("fails",)), Part("cannot", 30, "Cannot"),
    Part("grows", 30, "Grows", is_added_to=True), Part("local", 30, "Local", is_local=True),
    Part("late", 30, "Late", ("local",)), Part("mute", 30, "Mute"),
)  # fmt: skip
SCRIPTS = {
    "works": 'open(r"ROWS", "a").write(\'{"a": 1, "b": 2.5}\\n\')',
    "fails": "raise SystemExit(3)",
    "hangs": 'open(r"ROWS", "a").write(\'{"a": 7}\\n\'); import time; time.sleep(60)',
    "cannot": 'open(r"ROWS", "a").write(\'{"left_out": "no such thing here"}\\n\'); raise SystemExit(77)',
    # One row a try: done when there are two.
    "grows": 'f = open(r"ROWS", "a+"); f.seek(0); n = len(f.readlines()); f.write(\'{"n": %d}\\n\' % n); '
    "raise SystemExit(0 if n else 4)",
    "local": 'open(r"ROWS", "a").write(\'{"made": "here"}\\n\')',
    "late": "",
    "mute": "raise SystemExit(77)",
    "writes": 'import os, time; open(r"ROWS.pid", "w").write(str(os.getpid())); time.sleep(60)',
}


CPU = Machine("cpu")


def document(device: str = "cpu", **rows: list[dict[str, Any]]) -> Document:
    """A document of parts that are done, with such rows."""
    outcomes = {part: Outcome(part, part, "done", rows=found) for part, found in rows.items()}
    card = "NVIDIA H100 80GB HBM3" if device == "cuda" else ""
    return Document("then", "2026-12-01", device, card, "580.1", "abc", False, asked_for=list(rows), outcomes=outcomes)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """A call of parts that are scripts."""
    by_name = {part.name: part for part in FAKE}
    for module in (order, runner):
        monkeypatch.setattr(module, "BY_NAME", by_name)
    monkeypatch.setattr(order, "PARTS", FAKE)
    monkeypatch.setattr(runner, "KILL_AFTER_S", 0.5)
    monkeypatch.setattr(runner, "LEAST_S", 0.5)
    monkeypatch.setattr(runner, "NOTE_S", 0.2)

    def command(part: str, place: Place, limit_s: float) -> list[str]:
        return [sys.executable, "-c", SCRIPTS[part].replace("ROWS", str(place.rows(part)))]

    monkeypatch.setattr(runner, "command", command)
    runs: list[Run] = []

    def start_one(*names: str, machine: Machine = CPU, earlier: Path | None = None, budget_s: float = 60.0) -> Run:
        known = document() if earlier is None else results.load(earlier / results.STATE)
        known.asked_for = [part.name for part in FAKE if part.name in names]
        output = tmp_path / f"out{len(runs)}"
        runs.append(Run(known, machine, dict(os.environ), output, budget_s=budget_s, earlier=earlier))
        return runs[-1]

    yield start_one
    for run in runs:
        if not run.log.closed:
            run.close()


def test_a_part_that_fails_or_hangs_costs_only_itself(start: Callable[..., Run]) -> None:
    started_s = time.monotonic()
    run = start("fails", "hangs", "works", "waits", "cannot")
    run.run_all()
    assert time.monotonic() - started_s < 30
    run.close()
    found = results.load(run.output / results.STATE).outcomes
    assert {name: str(outcome) for name, outcome in found.items()} == {
        "works": "done", "fails": "failed: status 3, see gpu.log", "hangs": "cut: its limit of 3 s ended it",
        "waits": "not begun: needs fails", "cannot": "left out: no such thing here",
    }  # fmt: skip
    assert {name: outcome.rows for name, outcome in found.items() if outcome.rows} == {
        "hangs": [{"a": 7}], "works": [{"a": 1, "b": 2.5}],
    }  # fmt: skip
    text = (run.output / results.PAGE).read_text()
    assert text.startswith("INCOMPLETE: fails failed: status 3") and "needs fails" in text.splitlines()[0]
    assert "the CPU, since torch finds no CUDA device" in text and "| 1 | 2.5 |" in text
    assert run.status == 1 and not run.place.scratch.exists()


def test_a_part_that_says_not_why_it_is_left_out_has_failed(start: Callable[..., Run]) -> None:
    run = start("mute", "cannot", "works")
    run.run_all()
    assert str(run.document.outcomes["mute"]) == "failed: status 77, see gpu.log"
    assert run.document.outcomes["works"].state == "done", "the others go on"


def test_what_this_machine_cannot_show_is_no_failure(start: Callable[..., Run]) -> None:
    run = start("works", "cannot")
    run.run_all()
    assert run.status == 0
    run.close()
    assert (run.output / results.PAGE).read_text().startswith("DONE")


def test_a_later_call_goes_on_from_the_folder_of_an_earlier_one(start: Callable[..., Run], tmp_path: Path) -> None:
    first = start("works", "grows", "local")
    first.run_all()
    benches = first.place.results("works")
    benches.mkdir(parents=True)
    (benches / "figure.json").write_text("{}")
    first.close()
    assert first.status == 1
    fetched = first.output.rename(tmp_path / "fetched")

    second = start("works", "grows", "late", earlier=fetched)
    assert [part.name for part in second.parts()] == ["grows", "local", "late"], "done but what is on the machine alone"
    second.run_all()
    second.close()
    assert second.status == 0
    found = results.load(second.output / results.STATE)
    assert found.rows("works") == [{"a": 1, "b": 2.5}]
    assert found.rows("grows") == [{"n": 0}, {"n": 1}], "what it had found before it failed is added to"
    assert found.seconds >= first.document.seconds > 0
    assert "===== works" in (second.output / results.LOG).read_text(), "the log goes on too"
    with tarfile.open(second.output / results.FILES) as tar:
        assert tar.getnames() == ["works/figure.json"]


def test_a_try_that_finds_less_does_not_lose_what_was_found(start: Callable[..., Run], tmp_path: Path) -> None:
    known = document(fails=[{"a": 1}, {"a": 2}])
    known.outcomes["fails"].state = "cut"
    known.save(tmp_path / results.STATE)
    run = start("fails", earlier=tmp_path)
    run.run_all()
    assert run.document.outcomes["fails"].state == "failed"
    assert run.document.rows("fails") == [{"a": 1}, {"a": 2}]


def test_rows_are_written_down_while_their_part_runs(start: Callable[..., Run]) -> None:
    run = start("hangs")
    written: list[Document] = []
    write = run.write

    def observed() -> None:
        write()
        written.append(results.load(run.output / results.STATE))

    run.write = observed  # type: ignore[method-assign]
    run.run_all()
    assert written[0].outcomes["hangs"].state == "not begun", "what is to come is on disk before it begins"
    first = written[1].outcomes["hangs"]
    assert (first.state, first.why, first.rows) == ("cut", "the call was ended meanwhile", [{"a": 7}])


def test_without_time_nothing_is_begun_and_the_rest_is_said(start: Callable[..., Run]) -> None:
    run = start("works", budget_s=0.1)
    run.run_all()
    assert str(run.document.outcomes["works"]) == "not begun: no time was left" and run.status == 1


def test_what_needs_two_devices_is_left_out_on_one(start: Callable[..., Run]) -> None:
    part = Part("works", 30, "Works", num_devices=2)
    run = start("works")
    run.run(part)
    assert run.document.outcomes["works"].state == "done", "on a CPU there are as many as are asked for"
    run = start("works", machine=Machine("cuda", 1))
    run.run(part)
    assert str(run.document.outcomes["works"]) == "left out: needs 2 devices"


@pytest.mark.parametrize("call", CALLS)
def test_the_limits_of_a_call_fit_into_it(call: str) -> None:
    parts = with_needed(asked_for([], [call]))
    assert {part.name for part in parts} >= set(CALLS[call])
    assert sum(part.limit_s for part in parts) <= BUDGET_S <= 9 * 60


def test_calls_have_each_part_once_and_numbers() -> None:
    in_calls = [name for names in CALLS.values() for name in names]
    assert sorted([*in_calls, "checkpoint"]) == sorted(part.name for part in PARTS)
    assert list(CALLS)[:4] == ["right", "speed", "migration", "shapes"]
    assert asked_for([], ["4"]) == list(CALLS["shapes"]) == asked_for(["shapes", "cuda_ipc"], [])
    assert asked_for([], []) == [part.name for part in PARTS]
    with pytest.raises(ValueError, match="no such call: 9"):
        asked_for([], ["9"])
    with pytest.raises(ValueError, match="no such part: decod"):
        asked_for(["decod"], [])


def test_parts_bring_those_that_they_need() -> None:
    assert [part.name for part in with_needed(["profile"])] == ["checkpoint", "profile"]
    assert with_needed([part.name for part in PARTS]) == list(PARTS)


# ------------------------------------------------------------------------------------------------- runs that break


def test_a_new_run_has_nothing_of_another_in_its_folder(start: Callable[..., Run], tmp_path: Path) -> None:
    output = tmp_path / "out0"
    output.mkdir()
    for name in (results.STATE, results.PAGE, results.LOG, results.HARDWARE, results.FILES):
        (output / name).write_text("of another run")
    run = start("works")
    run.run_all()
    run.close()
    assert {path.name for path in output.iterdir()} == {results.STATE, results.PAGE, results.LOG}
    assert "another" not in (output / results.LOG).read_text()


def test_two_runs_do_not_write_to_one_folder(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("works")
    run.log.write("of the first")
    run.log.flush()
    with pytest.raises(ValueError, match=r"another run writes to .*out0"):
        Run(document(), CPU, {}, run.output)
    assert (run.output / results.LOG).read_text() == "of the first"
    run.close()
    Run(document(), CPU, {}, run.output).close()


def test_scratch_folders_are_removed_when_their_run_is_gone(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(runner, "scratch_root", lambda: None)
    left = tmp_path / f"{runner.SCRATCH}left/model"
    left.mkdir(parents=True)
    first, second = start("works"), start("works")
    assert not left.parent.exists() and first.place.scratch.is_dir() and second.place.scratch.is_dir()


def test_a_part_ends_when_its_runner_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from bench.gpu import runner; from tests.bench.test_gpu import *\n"
        "runner.command = lambda *_: [sys.executable, '-c', SCRIPTS['writes'].replace('ROWS', sys.argv[1] + '/part')]\n"
        "run = Run(document(), CPU, dict(os.environ), Path(sys.argv[1]) / 'out')\n"
        "run.document.outcomes['works'] = Outcome('works', 'Works')\n"
        "run.run(Part('works', 30, 'Works'))\n"
    )
    written = tmp_path / "part.pid"
    environment = os.environ | {"PYTHONPATH": str(runner.REPOSITORY), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment) as process:
        try:
            wait_for(lambda: written.exists() and bool(written.read_text()))
        finally:
            process.kill()
    wait_for(lambda: not Path("/proc", written.read_text(), "cmdline").exists() or is_zombie(written.read_text()))


def is_zombie(pid: str) -> bool:
    """Ended, and not waited for by whoever has inherited it."""
    return not Path("/proc", pid, "cmdline").read_bytes()


def wait_for(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


@pytest.fixture
def call(
    start: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int | str | None, str, str]]:
    """The command on a machine with a CPU, with the folder `named` unless another is: its status, output and errors."""
    monkeypatch.setattr(gpu, "find_machine", lambda environment: CPU)

    def run(*arguments: str) -> tuple[int | str | None, str, str]:
        try:
            status: int | str | None = gpu.main(["--output", str(tmp_path / "named"), *arguments])
        except SystemExit as error:
            status = error.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_a_run_that_sigterm_ends_says_what_is_known(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCRIPTS, "hangs", "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()")
    before = signal.getsignal(signal.SIGTERM)
    status, out, _ = call("works", "hangs")
    assert status == 1 and out.startswith("INCOMPLETE: hangs cut: the call was ended meanwhile")
    assert results.load(tmp_path / "named" / results.STATE).outcomes["hangs"].state == "cut"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_full_disk_does_not_hide_what_is_known(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "named" / results.PAGE
    monkeypatch.setitem(SCRIPTS, "works", f"import os; os.remove(r'{file}'); os.symlink('/dev/full', r'{file}')")
    status, out, _ = call("works")
    assert status == 1 and out.startswith("INCOMPLETE: not all of it could be written down: [Errno 28]")
    assert "`works` on cpu: done" in out


@pytest.mark.parametrize("arguments", [
    ["--budget-s", "nan"], ["--budget-s", "inf"], ["--budget-s", "-1"], ["--budget-s", "soon"], ["--output", "FILE"],
    ["--output", "FILE/below"], ["--resume", "FILE"], ["--resume", "FOLDER"], ["--site", "FILE"], ["--site", "FOLDER"],
    ["--site", "CUT"], ["--site", "nowhere"],
])  # fmt: skip
@pytest.mark.usefixtures("bare")
def test_what_cannot_be_used_is_an_error_of_the_command(
    arguments: list[str], call: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "FILE").write_text("rubbish")
    (tmp_path / "FOLDER").mkdir()
    with tarfile.open(tmp_path / "whole", "w:xz") as tar:
        tar.add(__file__, "thing.py")
    (tmp_path / "CUT").write_bytes((tmp_path / "whole").read_bytes()[:-2000])
    places = [str(tmp_path / word) if word[0].isupper() else word for word in arguments]
    status, out, err = call("works", *places)
    assert (status, out) == (2, "") and "error: " in err.splitlines()[-1]


def test_a_folder_as_the_archive_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "site/thing").mkdir(parents=True)
    with pytest.raises(OSError, match="Is a directory"):
        runner.unpacked(tmp_path / "site")
    assert (tmp_path / "site/thing").is_dir()


@pytest.mark.parametrize("changes", [
    {"seconds": "long"}, {"outcomes": [3]}, {"outcomes": 3}, {"date": "../../x"}, {"device": "../x"}, {"is_quick": None},
    {"outcomes": [{"part": "works", "title": "Works", "rows": [1]}]}, {"outcomes": [{"part": "works", "rows": []}]},
])  # fmt: skip
def test_a_state_with_other_types_is_none(changes: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / results.STATE
    document(works=[{"a": 1}]).save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match="is not the state of a run"):
        results.load(file)


def test_an_archive_of_benches_that_is_cut_is_an_error_and_nothing_is_filed(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    status, *_ = call("works")
    named = tmp_path / "named"
    for name in (results.STATE, results.PAGE, results.LOG):
        assert status == 0 and (named / name).exists()
    content = tmp_path / "benches"
    content.mkdir()
    (content / "figure.json").write_bytes(os.urandom(50_000))
    results.pack_files(content, named / results.FILES)
    cut = (named / results.FILES).read_bytes()[:30_000]
    (named / results.FILES).write_bytes(cut)
    status, _, err = call("works", "--resume", str(named))
    assert status == 2 and f"{results.FILES} cannot be unpacked" in err
    assert (named / results.FILES).read_bytes() == cut, "what is there is left as it is"
    with pytest.raises(ValueError, match="cannot be unpacked"):
        results.collect(named, tmp_path / "filed")
    assert not (tmp_path / "filed").exists()


def test_torch_that_cannot_be_imported_is_told_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    with pytest.raises(ValueError, match=r"torch cannot be used here:[\s\S]*libcudart\.so\.13 is missing"):
        runner.find_machine(os.environ | {"PYTHONPATH": str(tmp_path)})


# ---------------------------------------------------------------------------------------------------- fallbacks

CHOSEN = {"decodes": "flashinfer", "prompts": "flashinfer", "ops": "FlashInferOps", "graphs": 35, "graph_sizes": 35}
SEEN = {
    "torch for attention of decodes": {"decodes": "torch"},
    "torch for attention of prompts": {"prompts": "torch"},
    "torch for norms, rotations and gates": {"ops": "TorchOps"},
    "single launches for decode graphs": {"graphs": 0},
    "widened weights for float8 products": {"float8": "widened"},
    "the host's memory for KV blocks between processes": {"cuda_ipc": False},
    "none for tests on the device": {"what": "skipped: test_x", "why": "needs CUDA"},
}


@pytest.mark.parametrize("what", SEEN)
def test_a_fallback_on_cuda_is_a_failure_and_comes_first(what: str) -> None:
    row = {"why": "no compiler"} | CHOSEN | SEEN[what]
    found = document("cuda", decode=[row])
    assert fallbacks.seen(found) == [f"{what} (decode: {row['why']})"]
    first = page.page(found).splitlines()[0]
    assert first.startswith(f"FAILED: fell back to {what}") and row["why"] in first
    assert fallbacks.seen(document("cpu", decode=[row])) == [], "a CPU has nothing better"


def test_every_kind_of_fallback_is_seen_by_one_of_these_rows() -> None:
    assert {f"{fallback.to} for {fallback.of}" for fallback in fallbacks.FALLBACKS} == set(SEEN)


def test_what_was_meant_to_be_chosen_is_no_fallback() -> None:
    rows = [CHOSEN | {"float8": "multiply_rowwise", "cuda_ipc": True}, {"measure": "experts", "captured": 0}, {"a": 1}]
    needs_two = {"what": "skipped: test_ranks", "why": "needs two CUDA devices"}
    found = document("cuda", shapes=rows, tests=[needs_two])
    assert fallbacks.seen(found) == [] and fallbacks.verdict(found).startswith("DONE")


def test_a_run_with_a_fallback_has_the_status_of_a_failure(start: Callable[..., Run]) -> None:
    run = start("works")
    run.run_all()
    assert run.status == 0
    run.document.outcomes["works"].rows = [{"ops": "TorchOps", "why": "no flashinfer"}]
    run.document.device = "cuda"
    assert run.status == 1


@pytest.mark.usefixtures("start")
def test_the_output_begins_with_what_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "find_machine", lambda environment: CPU)
    output = ["--output", str(tmp_path / "named")]
    assert gpu.main(["works", "cannot", *output]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("DONE") and said.out.rstrip().endswith("DONE: all parts that were asked for")
    assert "left out: no such thing here" in said.err, "how far it is goes beside"
    monkeypatch.setattr(gpu, "find_machine", lambda environment: Machine("cuda", 1, "NVIDIA H100", "580.1"))
    monkeypatch.setitem(SCRIPTS, "works", 'open(r"ROWS", "a").write(\'{"ops": "TorchOps", "why": "no nvcc"}\')')
    assert gpu.main(["works", *output]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "FAILED: fell back to torch for norms, rotations and gates (works: no nvcc)"
    assert (tmp_path / "named" / results.PAGE).read_text().splitlines()[0] == first
    with pytest.raises(SystemExit):
        gpu.main(["work", *output])


# ------------------------------------------------------------------------------------------------ page and targets


def test_targets_are_computed_from_rows_and_say_by_how_much_they_are_missed() -> None:
    found = document(
        "cuda",
        equality=[{"what": "tokens in float32", "equal": 16, "of": 16},
                  {"what": "deterministic mode", "equal": 99, "of": 100}],
        decode=[{"batch": 8, "sampling": "greedy", "share_of_roofline": 0.8}, {"batch": 8, "sampling": "top_p 0.95",
                 "share_of_roofline": 0.1}],
        prefill=[{"tokens": 8192, "share_of_products": 0.5}],
        safepoints=[{"what": "overhead", "overhead_percent": 0.4}, {"what": "reaction", "longest_ms": 3.5}],
        copies_beside=[{"overhead_percent": 3.0}],
        migration=[{"bench": "migration-pause-cuda", "pause / step": 1.2}, {"pause / step": 1.6},
                   {"way": "device", "GB/s": 90.0}, {"way": "host", "GB/s": 20.0}],
        sharing=[{"what": "one other resident", "step": "decode", "overhead": 0.01},
                 {"what": "one other computing in turn", "step": "decode", "overhead": 0.5},
                 {"what": "the other of both, one resident", "step": "decode", "overhead": 0.03}],
    )  # fmt: skip
    rows = {row["target"]: (row["measured"], row["met"]) for row in targets.judged(found)}
    assert rows["tokens in float32, equal to the CPU's"] == ("1", "met")
    assert rows["deterministic mode: sequences equal to those alone"] == ("0.99", "missed by 0.01")
    assert rows["decode of 8, of the memory roofline"] == ("0.8", "met")
    assert rows["decode of 64, of the memory roofline"] == (None, "not measured")
    assert rows["prompt of 8192, of the matrix rate"] == ("0.5", "missed by 0.2")
    assert rows["safepoints: what a step takes longer"] == ("0.4 %", "met")
    assert rows["safepoints: longest time to stop"] == ("3.5 ms", "missed by 1.5 ms")
    assert rows["checkpoints of KV beside decodes: what a step takes longer"] == ("3 %", "met")
    assert rows["migration between two processes: pause over step"] == ("1.6", "missed by 0.1")
    assert rows["migration: rate by the device over that by the host"] == ("4.5", "met")
    assert rows["two 8B shapes on one GPU, the other idle: decode against alone"] == ("3 %", "missed by 1 %")
    found.device = "cpu"
    assert {row["met"] for row in targets.judged(found)} == {"not measured: no CUDA device"}


def test_the_page_names_the_card_and_begins_with_the_targets() -> None:
    text = page.page(document("cuda", decode=[{"batch": 1, "step_ms": 5.0}]))
    assert "# bench.gpu on NVIDIA H100 80GB HBM3, 2026-12-01" in text and "driver 580.1; commit abc" in text
    assert text.index("## Targets") < text.index("## decode")


def test_a_prediction_stands_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Roofline:
        @staticmethod
        def expected_ms(card: str, what: str, size: int) -> float | None:
            return 4.0 if (card, what, size) == ("NVIDIA H100 80GB HBM3", "decode", 8) else None

    monkeypatch.setitem(sys.modules, "bench.gpu.roofline", Roofline)
    rows = [{"graphs": 35}, {"batch": 8, "step_ms": 5.0, "x": 1}, {"batch": 64, "step_ms": 9.0, "x": 1}]
    assert page.with_predicted(document("cuda", decode=rows), "decode") == [
        {"graphs": 35}, {"batch": 8, "step_ms": 5.0, "predicted_ms": 4.0, "x": 1}, {"batch": 64, "step_ms": 9.0, "x": 1},
    ]  # fmt: skip
    assert page.with_predicted(document("cpu", decode=rows), "decode") == rows


def test_a_table_begins_anew_where_the_columns_change() -> None:
    lines = page.tables([{"a": 1}, {"a": 2}, {"b": "x|y", "c": 1 / 3}])
    assert lines == ["| a |", "|---|", "| 1 |", "| 2 |", "", "| b | c |", "|---|---|", "| x\\|y | 0.3333 |"]


# ---------------------------------------------------------------------------------------------- the output folder


def test_the_output_folder_comes_back_whole(start: Callable[..., Run]) -> None:
    run = start("works")
    deep = run.place.results("works") / "with, comma" / "deep" / "deeper"
    deep.mkdir(parents=True)
    for number in range(20):
        (deep / f"{number}.json").write_text("{}")
    run.place.hardware.write_text("flops = 1.0\n")
    run.run_all()
    run.close()
    assert results.faults_of(run.output) == []
    assert {path.name for path in run.output.iterdir()} == {
        results.STATE, results.PAGE, results.LOG, results.HARDWARE, results.FILES,
    }  # fmt: skip


def test_faults_of_a_folder_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_FILE_BYTES", 10)
    deep = tmp_path / "a/b/c"
    deep.mkdir(parents=True)
    for path, content in ((deep / "x", ""), (tmp_path / "a,b", ""), (tmp_path / "large", 11 * "x")):
        path.write_text(content)
    assert len(results.faults_of(tmp_path)) == 3
    for number in range(6):
        (tmp_path / str(number)).touch()
    assert any("9 files, more than 8" in fault for fault in results.faults_of(tmp_path))


def test_a_long_log_loses_its_middle(tmp_path: Path) -> None:
    file = tmp_path / "gpu.log"
    file.write_bytes(b"begin" + bytes(1000) + b"end")
    results.shorten(file, 100)
    content = file.read_bytes()
    assert len(content) < 200 and content.startswith(b"begin") and content.endswith(b"end")
    results.shorten(file, 200)
    assert file.read_bytes() == content


def test_results_are_filed_by_card_and_date(tmp_path: Path) -> None:
    fetched, filed = tmp_path / "fetched", tmp_path / "results"
    benches = tmp_path / "benches/migration"
    for folder in (fetched, benches):
        folder.mkdir(parents=True)
    (benches / "migration-pause-cuda-2026-12-01.json").write_text("[]")
    results.pack_files(benches.parent, fetched / results.FILES)
    (fetched / results.PAGE).write_text("page")
    (fetched / results.LOG).write_text("log")
    (fetched / results.HARDWARE).write_text("flops = 1.0")
    found = document("cuda", decode=[{"a": 1}])
    found.save(fetched / results.STATE)
    stem = "gpu-nvidia-h100-80gb-hbm3-2026-12-01"
    expected = {f"{stem}.{end}" for end in ("json", "md", "toml", "log.gz", "migration-pause-cuda-2026-12-01.json")}
    for _ in range(2):  # a later call of the same run takes the place of the earlier one's
        results.collect(fetched, filed)
        assert {path.name for path in filed.iterdir()} == expected
    assert gzip.decompress((filed / f"{stem}.log.gz").read_bytes()) == b"log"
    found.run = "another of that day"
    found.save(fetched / results.STATE)
    assert results.collect(fetched, filed)[0].name == f"{stem}-2.json"


def test_figures_of_two_machines_are_not_mixed(tmp_path: Path) -> None:
    document("cuda", decode=[]).save(tmp_path / results.STATE)
    options = gpu.argparse.Namespace(quick=False, resume=tmp_path, commit="")
    assert gpu.document_of(options, Machine("cuda", 1, "NVIDIA H100 80GB HBM3")).run == "then"
    with pytest.raises(ValueError, match=r"NVIDIA H200.*do not belong together"):
        gpu.document_of(options, Machine("cuda", 1, "NVIDIA H200"))
    with pytest.raises(ValueError, match="small shapes"):
        gpu.document_of(options, Machine("cpu"))


# -------------------------------------------------------------------------------------------------- rows of parts


def test_a_hardware_profile_becomes_rows(tmp_path: Path) -> None:
    file = tmp_path / "hardware.toml"
    file.write_text('flops = 1e12  # as H100\nkv_share = 0.5\n\n[measured."m".1]\nfixed_s = 0.01\n')
    assert results.rows_of_hardware(file) == [
        {"what": "flops", "value": 1e12}, {"what": "kv_share", "value": 0.5}, {"model": "m", "fixed_s": 0.01},
    ]  # fmt: skip


def test_the_tests_part_tells_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "tests.xml"
    file.write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1"><testcase name="a"/>'
        '<testcase name="b"><failure message="1 != 2&#10;more"/></testcase>'
        '<testcase name="c"><skipped message="needs CUDA"/></testcase></testsuite></testsuites>'
    )
    assert results.rows_of_tests(file) == [
        {"what": "all", "tests": 3, "failures": 1, "errors": 0, "skipped": 1},
        {"what": "failure: b", "why": "1 != 2"},
        {"what": "skipped: c", "why": "needs CUDA"},
    ]


def test_what_a_sanitizer_found_is_counted_over_all_processes() -> None:
    report = "========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 2 errors\n"
    assert sanitizer.num_found(report) == 2
    assert sanitizer.num_found("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)") == 1
    assert sanitizer.num_found("========= COMPUTE-SANITIZER\n") is None


# --------------------------------------------------------------------------------------------------- the archive


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without what is packed."""
    monkeypatch.setattr(runner, "PACKED", ("no_such_package_anywhere",))
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("ending", ["gz", "xz"])
def test_what_is_missing_comes_from_the_archive(tmp_path: Path, ending: str) -> None:
    def pack(content: str, *more: str) -> Path:
        file = tmp_path / f"site.tar.{ending}"
        (tmp_path / "content").mkdir(exist_ok=True)
        (tmp_path / "content/thing.py").write_text(content)
        with tarfile.open(file, f"w:{ending}") as tar:
            for name in ("thing.py", *more):
                tar.add(tmp_path / "content/thing.py", name)
        return file

    environment = runner.environment_of(pack("first"))
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(runner.REPOSITORY) and paths[-1] == str(tmp_path / "site")
    assert environment["PATH"].startswith(str(tmp_path / "site/bin"))
    assert "FLASHINFER_DISABLE_JIT" not in environment
    environment = runner.environment_of(pack("second, and longer", f"{runner.BUILT_AHEAD}/norm/norm.so"))
    assert (tmp_path / "site/thing.py").read_text() == "second, and longer", "not what was unpacked before"
    assert environment["FLASHINFER_DISABLE_JIT"] == "1"


@pytest.mark.usefixtures("bare")
def test_an_archive_for_another_python_is_refused(tmp_path: Path) -> None:
    file, here = tmp_path / "site.tar.gz", f"{sys.version_info.major}.{sys.version_info.minor}"
    for version in (here, "3.7"):
        (tmp_path / "version").write_text(f"{version}\n")
        with tarfile.open(file, "w:gz") as tar:
            tar.add(tmp_path / "version", runner.MADE_FOR)
        if version == here:
            assert "site" in runner.environment_of(file)["PYTHONPATH"]
    for _ in range(2):  # also where it has been unpacked
        with pytest.raises(ValueError, match=f"is for Python 3.7, and this is {here}"):
            runner.environment_of(file)


def test_a_stack_passes_on_where_packages_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.e2e import stack

    monkeypatch.setenv("PYTHONPATH", "/of/the/archive")
    monkeypatch.setattr(stack.Stack, "start", lambda self, name: None)
    system = stack.Stack({"m": "/nowhere/m"})
    try:
        paths = system._environment["PYTHONPATH"].split(os.pathsep)
    finally:
        system.nats.close()
    assert paths == [str(stack.REPOSITORY), "/of/the/archive"]
