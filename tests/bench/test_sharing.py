"""SeaLLM's evaluation, small: workloads are seeded and of the shape that is asked for, every system serves every request."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.sharing import fleets, kv
from bench.sharing.__main__ import main
from bench.sharing.experiments import CHOICES, SYSTEMS, Point, run_point, targets
from bench.sharing.fleets import Fleet, asked_of, carried, climb, fleet_table
from bench.sharing.results import Capacity, Outcome, capacity
from bench.sharing.systems import DEDICATED, MUXSERVE, Case, System, drawn
from bench.sharing.workloads import NUM_SAMPLED, SHAPES, Workload, clusters, draw, services

NOWHERE = Path("/nonexistent")
WORKLOAD = Workload(rate_rps=20.0)


@pytest.mark.parametrize("folder", [None, NOWHERE], ids=["traces", "table-1"])
def test_services_are_clusters_of_lengths_with_models(folder: Path | None) -> None:
    known = services(WORKLOAD) if folder is None else services(WORKLOAD, folder)
    assert len(known) == 8
    assert sorted(service.shape for service in known) == sorted(SHAPES * 2)
    assert sum(service.share for service in known) == pytest.approx(1.0)
    total = np.concatenate([service.lengths for service in known])
    assert len(total) <= 2 * NUM_SAMPLED
    assert total.min() >= 1
    assert total.sum(1).max() <= WORKLOAD.max_tokens
    assert [service.name for service in known] == [
        service.name for service in services(WORKLOAD, folder or Path("../shared/traces"))
    ]


def test_clusters_part_what_lies_apart() -> None:
    rng = np.random.default_rng(1)
    centres = np.array([[0.0, 0.0], [0.0, 9.0], [9.0, 0.0], [9.0, 9.0]])
    of = rng.integers(0, 4, 200)
    found = clusters(centres[of] + rng.normal(0, 0.1, (200, 2)), 4, rng)
    assert len({(int(one), int(other)) for one, other in zip(of, found, strict=True)}) == 4


def test_traffic_is_seeded_bursty_and_at_its_rate() -> None:
    history, run = draw(WORKLOAD, 200.0, 300.0, 5)
    again = draw(WORKLOAD, 200.0, 300.0, 5)[1]
    other = draw(WORKLOAD, 200.0, 300.0, 6)[1]
    assert (run.arrival_s == again.arrival_s).all()
    assert run.num_requests != other.num_requests or (run.arrival_s != other.arrival_s).any()
    assert history.num_requests + run.num_requests == pytest.approx(20.0 * 500, rel=0.01)
    assert (np.diff(run.arrival_s) >= 0).all()
    assert 0 <= run.arrival_s[0] <= run.arrival_s[-1] <= 300.0
    own = np.diff(run.arrival_s[run.model == np.bincount(run.model).argmax()])
    assert own.std() / own.mean() > 2.0


def test_skew_keeps_requests_and_times_and_makes_runs_of_services() -> None:
    plain = draw(WORKLOAD, 0.0, 300.0, 5)[1]
    skewed = draw(msgspec.structs.replace(WORKLOAD, num_consecutive=16), 0.0, 300.0, 5)[1]
    assert (plain.arrival_s == skewed.arrival_s).all()
    assert (np.bincount(plain.model) == np.bincount(skewed.model)).all()
    assert np.count_nonzero(np.diff(skewed.model)) < 0.2 * np.count_nonzero(np.diff(plain.model))


def test_an_error_of_outputs_leaves_the_history_and_the_prompts() -> None:
    plain = draw(WORKLOAD, 100.0, 100.0, 5)
    wrong = draw(msgspec.structs.replace(WORKLOAD, output_error=4.0), 100.0, 100.0, 5)
    assert (plain[0].output_tokens == wrong[0].output_tokens).all()
    assert (plain[1].prompt_tokens == wrong[1].prompt_tokens).all()
    assert wrong[1].output_tokens.mean() > 1.5 * plain[1].output_tokens.mean()
    assert wrong[1].output_tokens.min() == 1
    assert (wrong[1].output_tokens + wrong[1].prompt_tokens).max() <= WORKLOAD.max_tokens


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_every_system_serves_all_and_the_same_again(system: System) -> None:
    case = Case(workload=Workload(rate_rps=2.0, num_services=2), num_devices=4, history_s=40.0, run_s=20.0)
    found, again = (run_point(Point(x=2.0, system=system, case=case)) for _ in range(2))
    assert not found.error
    assert found.num_requests == drawn(case)[1].num_requests
    assert 0 < found.normalised_latency < 20
    assert len(found.placement) >= 1
    assert msgspec.structs.replace(again, took_s=found.took_s) == found


def test_a_system_without_a_placement_says_so() -> None:
    case = Case(workload=Workload(rate_rps=1.0), num_devices=2, history_s=40.0, run_s=20.0)
    assert "fits no node" in run_point(Point(x=1.0, system=MUXSERVE, case=case)).error


def test_targets_are_of_the_worst_and_of_the_last_rate() -> None:
    outcomes = [
        Outcome(x=x, system=system, normalised_latency=latency, attainment=0.95)
        for x, system, latency in [
            (2.0, "tideway", 4.0),
            (50.0, "tideway", 2.0),
            (2.0, "vllm", 1.0),
            (50.0, "vllm", 19.0),
        ]
    ]
    assert [(aim.value, aim.is_met) for aim in targets(outcomes)] == [(4.0, False), (0.95, True), (9.5, True)]


def test_the_rate_at_which_attainment_falls_below_a_level() -> None:
    attained = {10.0: 1.0, 20.0: 0.98, 40.0: 0.78}
    outcomes = [Outcome(x=x, system="a", attainment=share) for x, share in attained.items()]
    assert capacity(outcomes, "a", 0.99) == Capacity(pytest.approx(15.0))
    assert str(capacity(outcomes, "a", 0.9)) == "28"
    assert capacity(outcomes, "a", 0.5) == Capacity(40.0, is_over=True)
    assert str(capacity(outcomes[1:], "a", 0.99)) == "below 20"
    assert capacity([Outcome(x=1.0, system="a", error="none")], "a", 0.9) is None


@pytest.mark.parametrize("holds", [3.0, 30.0, 300.0])
def test_a_climb_brackets_both_levels(holds: float) -> None:
    """Attainment is whole up to a rate, and falls in proportion beyond it."""
    asked: list[float] = []

    def run(rate: float) -> Outcome:
        asked.append(rate)
        return Outcome(x=rate, system="a", attainment=min(1.0, holds / rate))

    found = climb(run, 20.0)
    assert [one.x for one in found] == sorted(set(asked)) and len(asked) <= 14
    for level in (0.99, 0.9):
        carried = capacity(found, "a", level)
        assert carried is not None and not carried.is_below and not carried.is_over
        assert carried.rate == pytest.approx(holds / level, rel=0.06)


def test_a_system_that_serves_no_rate_is_not_asked_for_ever() -> None:
    found = climb(lambda rate: Outcome(x=rate, system="a", attainment=0.5), 20.0)
    assert len(found) < 12 and str(capacity(found, "a", 0.9)).startswith("below")
    assert [one.error for one in climb(lambda rate: Outcome(x=rate, system="a", error="no"), 20.0)] == ["no"]


@pytest.mark.long
def test_the_fleets_that_are_compared() -> None:
    """Each system climbs on the same fleet, and the table has a row of each."""
    fleet = Fleet(num_devices=4, popularity=1.0, seed=7, num_services=2)
    systems = [one for one in fleets.SYSTEMS if one.placement == "muxserve"]
    found = [carried(asked) for asked in asked_of([fleet], run_s=10.0, systems=systems)]
    rates = {one.system: capacity(one.outcomes, one.system, 0.9) for one in found}
    assert list(rates) == [one.name for one in systems] and None not in rates.values()
    by_width = [rates[name].rate for name in list(rates)[:3]]
    assert by_width == sorted(by_width, reverse=True) and by_width[0] > by_width[-1]
    text = "\n".join(fleet_table(found))
    assert "4 x 1, seed 7" in text and all(one.name in text for one in systems)
    ours = [
        msgspec.structs.replace(
            found[0],
            system="tideway",
            outcomes=[msgspec.structs.replace(one, system="tideway") for one in found[0].outcomes],
        )
    ]
    aims = fleets.targets([*ours, *found])
    assert [aim.value for aim in aims[:2]] == [1.0, 1.0] and aims[2].value > 1.0


@pytest.mark.long
def test_what_baselines_are_given_can_be_switched_off() -> None:
    case = Case(workload=Workload(rate_rps=8.0, num_services=2), num_devices=4, history_s=40.0, run_s=20.0)
    found = {one.name: run_point(Point(x=8.0, system=one, case=case)) for one in CHOICES}
    assert not any(one.error for one in found.values())
    for strong in (DEDICATED, MUXSERVE):
        for name, weak in found.items():
            if name.startswith(f"{strong.name}, "):
                assert weak.normalised_latency > found[strong.name].normalised_latency, name


def test_merged_blocks_hold_nearly_what_split_ones_do_with_tables_a_thousandth_the_size() -> None:
    for one in kv.compare():
        assert one.entries["split"] > 1000 * one.entries["merged"]
        assert one.held_alone["merged"] >= 0.9 * one.held_alone["split"] > one.held_alone["fixed"]
        assert abs(one.held_both["merged"] - one.held_both["fixed"]) <= 2


def test_what_is_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("sharing-kv-*.json")
    assert len(json.loads(path.read_text())["comparison"]) == 9
    assert "llama-2-13b" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["figure6", "--systems", "none"])
