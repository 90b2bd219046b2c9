"""bench/authority: scenarios judged at the worst of their seeds, and a small form of each that the scheduler meets."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from bench import authority, authority_live
from bench.authority import SCENARIOS, Sizes, measure
from bench.authority_live import Client
from bench.reporting import Target

SMALL = Sizes(
    num_lines=12, backlog_lines=30, offline_s=12.0, backlog_s=3.0, num_prompts=2, num_conversations=5, num_instances=2,
    constant_s=10.0, step_s=35.0, noise=0.0,
)  # fmt: skip


@pytest.mark.slow
def test_small_forms_are_met() -> None:
    targets, rows = measure(SCENARIOS, SMALL, [1])
    assert [row[1] for row in rows] == [target.name for target in targets]
    assert {row[0] for row in rows} == set(SCENARIOS)
    values = {target.name: target for target in targets}
    assert all(math.isfinite(target.value) for target in targets)
    # Conversations of so few instances find little to gain; how a backlog fares is for the whole form.
    missed = [
        str(one) for name, one in values.items() if not one.is_met and "backlog" not in name and "mean" not in name
    ]
    assert not missed
    tokens = next(one for name, one in values.items() if name.endswith("12 lines"))
    assert tokens.note.startswith("13,812 of 13,812 tokens"), "all prompts and all answers but their last tokens"


def test_the_worst_seed_is_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def scenario(_: Sizes, seed: int) -> list[Target]:
        return [
            Target(name="share", value=0.1 * seed, limit=0.85, is_least=True),
            Target(name="time", value=float(seed), limit=8.5, unit=" s"),
        ]

    monkeypatch.setattr(authority, "SCENARIOS", {"one": scenario})
    targets, rows = measure(["one"], SMALL, [8, 9])
    assert [(one.value, one.is_met) for one in targets] == [(0.8, False), (9.0, False)]
    assert rows == [["one", "share", "0.8, 0.9", "at least 0.85"], ["one", "time", "8, 9 s", "at most 8.5 s"]]
    assert authority.main(["--only", "one", "--seed", "9", "--num-seeds", "1", "--output", str(tmp_path)]) == 1
    (file,) = tmp_path.glob("authority-*.json")
    assert [one["is_met"] for one in json.loads(file.read_text())["targets"]] == [True, False]
    assert "| one      | time" in file.with_suffix(".md").read_text()


def test_an_unknown_scenario_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        authority.main(["--only", "high,low"])
    assert "--only: low: expected some of offline, high" in capsys.readouterr().err


def test_tokens_of_a_client_count_with_its_prompt_once_it_has_begun() -> None:
    client = Client("", "model", [1] * 10, 5, {})
    client.sent_s = time.monotonic()
    assert client.tokens_until(math.inf) == 0
    client.tokens = [(client.sent_s + at_s, num) for at_s, num in ((0.5, 1), (0.75, 2), (2.0, 2))]
    assert client.tokens_until(client.sent_s + 1.0) == 13 and client.tokens_until(math.inf) == 15
    assert client.ttft_s == pytest.approx(0.5) and client.longest_gap_s == pytest.approx(0.625)


@pytest.mark.long
def test_the_live_form_runs() -> None:
    sizes = authority_live.Sizes(
        num_streams=2, stream_tokens=1500, num_lines=4, line_tokens=(64, 16), num_normal=2, normal_tokens=60
    )
    targets, rows = authority_live.measure(sizes)
    assert len(targets) == 4 and all(target.value > 0 for target in targets), list(map(str, targets))
    assert {row[0] for row in rows} == {"batch", "high"}
