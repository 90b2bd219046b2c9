"""`tideway simulate` as it is typed: the examples, the README's line, what it writes and how it refuses."""

from __future__ import annotations

import os
import re
from pathlib import Path

import matplotlib.figure  # noqa: F401  (plots are drawn: not a fast test)
import msgspec
import pytest
from typer.testing import CliRunner

from tests.tideway.readme import REPOSITORY, shell_lines
from tideway.command import app
from tideway.data_folder import OperatorError
from tideway.scenario import build, read
from tideway.simulate import MANY_SIMULATED, num_processes

TWO_MODELS = REPOSITORY / "examples" / "simulate_two_models.toml"
PNG = b"\x89PNG"


def run(*words: str) -> str:
    """What it says on stdout. Raises what the command raises."""
    result = CliRunner().invoke(app, ["simulate", *words], env={"COLUMNS": "200"})
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_readmes_settings_are_compared_and_everything_is_written(tmp_path: Path) -> None:
    (line,) = [line for line in shell_lines() if line.startswith(".venv/bin/tideway simulate")]
    assert line.split()[2] == str(TWO_MODELS.relative_to(REPOSITORY))
    file, plots = tmp_path / "result.json", tmp_path / "plots"
    said = run(str(TWO_MODELS), "--duration", "2", "--seed", "3", "--json", str(file), "--plot", str(plots))
    written = msgspec.json.decode(file.read_bytes())
    assert [one["name"] for one in written] == ["apart", "shared, first come first served", "shared"]
    for one in written:
        assert one["name"] in said and re.search(r"all .*%", said)
        assert one["scenario"]["duration_s"] == 2 and one["scenario"]["seed"] == 3
        assert one["metrics"]["total"]["num_requests"] == written[0]["metrics"]["total"]["num_requests"] > 3
        assert one["metrics"]["total"]["offline_tokens_s"] > 0 and one["is_over"]
        for name in ("chat", "summaries"):
            metrics = one["metrics"]["models"][name]
            assert 0 <= metrics["attainment"] <= 1 and metrics["normalised_latency"] > 0.5
            assert metrics["ttft_s"]["p99"] >= metrics["ttft_s"]["p50"] > 0
            assert 0 < metrics["use"] < one["metrics"]["total"]["use"] < 1
    compared = said[said.index("All models, by setting") :]
    for one in written:
        assert re.search(rf"{one['name']} +\W +{one['metrics']['total']['num_requests']} ", compared)
    assert [sorted(one["metrics"]["use"]) for one in written] == [["node-0", "node-1"], ["node-0"], ["node-0"]]
    for name in ("models.png", "latency.png", "use.png"):
        assert (plots / name).read_bytes().startswith(PNG) and name in said


def test_placements_are_found(tmp_path: Path) -> None:
    file = tmp_path / "placements.toml"
    settings = [
        ("search", 'placement = "search"'),
        ("checked", 'placement = "search"\nsearch_by = "simulation"'),
        ("dedicated", 'placement = "dedicated"'),
        ("devices by need", 'placement = "dedicated_by_need"'),
        ("alpaserve", 'placement = "alpaserve"'),
        ("muxserve", 'placement = "muxserve"\nsplit_kv = { block_size = 32, overhead = 1.05 }'),
    ]
    plain = TWO_MODELS.read_text().split("[[batches]]")[0]
    file.write_text(plain + "".join(f'[[settings]]\nname = "{name}"\n{keys}\n' for name, keys in settings))
    written = tmp_path / "result.json"
    run(str(file), "--duration", "2", "--json", str(written))
    for one in msgspec.json.decode(written.read_bytes()):
        placed = {name for group in one["plan"]["groups"] for name in group["models"]}
        assert placed == {"chat", "summaries"} and not one["unplaced"], one["name"]
        assert one["metrics"]["total"]["num_unserved"] == 0 and one["metrics"]["total"]["use"] > 0


def test_a_search_that_takes_long_has_all_cores() -> None:
    problem = build(read(TWO_MODELS)[0]).problem
    assert problem.traffic.num_requests < MANY_SIMULATED
    assert num_processes(problem, is_simulated=True) == 1
    many = msgspec.structs.replace(problem, nodes=problem.nodes * 128)
    assert num_processes(many, is_simulated=False) == len(os.sched_getaffinity(0))


def test_another_placement_is_looked_for_while_it_serves(tmp_path: Path) -> None:
    file, written = tmp_path / "changes.toml", tmp_path / "result.json"
    plain = TWO_MODELS.read_text().split("[[batches]]")[0].replace("gamma:6:4", "poisson:2")
    groups = 'groups = [{ node = "node", devices = [0], models = ["chat", "summaries"] }]'
    file.write_text(f"{plain}[[settings]]\n{groups}\nreplacement = {{ interval_s = 10, least_s = 10, search_s = 1 }}\n")
    said = run(str(file), "--duration", "25", "--json", str(written))
    (result,) = msgspec.json.decode(written.read_bytes())
    assert [change["what"] for change in result["changes"]][:2] == ["searched", "searched"]
    assert 10 <= result["changes"][0]["at_s"] < 12 and result["changes"][0]["reason"] in said.replace("\n", " ")
    assert result["metrics"]["total"]["num_unserved"] == 0


def test_it_says_who_got_no_answer_and_why(tmp_path: Path) -> None:
    file, text = tmp_path / "long.toml", TWO_MODELS.read_text()
    alone = text.split("[[settings]]")[0].replace("output_tokens = 64", "output_tokens = 5000")
    file.write_text(alone.replace('shape = "llama-2-13b"', 'shape = "llama-2-13b"\nmax_model_len = 1000'))
    said = run(str(file), "--duration", "4")
    assert "500 of 500 batch lines of chat were not sent: they are longer than its 4096 tokens." in said
    assert re.search(r"(\d+) of \1 requests of summaries were not sent: they are longer than its 1000 tokens", said)
    (row,) = [line for line in said.splitlines() if "summaries" in line and "0.0 %" in line and " - " in line]
    assert "0.00" not in row, "nobody has no latency"


def test_it_says_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(TWO_MODELS.read_text().replace("ttft_ms", "tttf_ms"))
    with pytest.raises(OperatorError, match=r"serving\.tttf_ms: no such key; did you mean 'ttft_ms'\?"):
        run(str(file))
    with pytest.raises(OperatorError, match=r"^[^:]*nowhere\.toml: No such file or directory$"):
        run(str(tmp_path / "nowhere.toml"))
