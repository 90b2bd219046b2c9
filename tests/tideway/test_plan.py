"""What `tideway plan` shows of plans and proposals, and what `--apply` says of a replacement that it looks at now and
then."""

from __future__ import annotations

import time
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from shared.messages.admin import PlanProposal, ReplacementState, ShownPlan
from shared.messages.cluster import DeviceGroup, InstancePlan, ModelSpec, PlanChange
from shared.placement.plan import Group, Horizon, ModelPrediction, Plan, Prediction, Rejected, Trial
from tideway.data_folder import OperatorError
from tideway.operations import CHOSEN
from tideway.plan import carry_out, lines_of, search, show_plan


def predicted(attainment: float, p99_s: float) -> Prediction:
    """Prediction for 40 requests of chat, and none of code."""
    chat = ModelPrediction(
        num_requests=40, attainment=attainment, normalised_latency=1.5, mean_latency_s=p99_s / 3, p99_latency_s=p99_s,
        mean_ttft_s=p99_s / 100, p99_ttft_s=p99_s / 10, mean_tpot_s=p99_s / 1000,
    )  # fmt: skip
    code = ModelPrediction(
        num_requests=0, attainment=1.0, normalised_latency=0.0, mean_latency_s=0.0, p99_latency_s=0.0
    )
    return Prediction(attainment=attainment, normalised_latency=1.5, models={"chat": chat, "code": code})


def place(instance_id: str, *names: str, num_ranks: int = 1) -> InstancePlan:
    models = [ModelSpec(name, f"/models/{name}") for name in names]
    return InstancePlan(instance_id, "node", models, 1 << 30, 1 << 25, DeviceGroup(("",) * num_ranks))


BOTH, APART, WIDE = (
    Plan(groups)
    for groups in (
        (Group("node", (0,), ("chat", "code")),),
        (Group("node", (0,), ("chat",)), Group("node", (1,), ("code",))),
        (Group("node", (0, 1), ("chat", "code")),),
    )
)
TRIAL = Trial(
    change_s=42.0, lost_device_s=30.0, moved_bytes=2_500_000_000, interrupted=["code"], busier_gain=0.034,
    horizons=[
        Horizon(
            seconds=600.0, num_requests=40, stay_attainment=0.8, change_attainment=0.9, free_attainment=0.95,
            attainment_error=0.01, stay_latency=3.0, change_latency=2.0, free_latency=1.75, latency_error=0.1,
        )
    ],
)  # fmt: skip
PROPOSAL = PlanProposal(
    found_s=0.0, why="asked", version=3, is_worth=True, verdict="more is attained", cause="pays", plan=APART,
    prediction=predicted(0.95, 10.0), before=BOTH, incumbent=predicted(0.8, 20.0), measured=predicted(0.7, 25.0),
    unplaced={"huge": "memory"},
    rejected=[Rejected(WIDE, predicted(0.7, 30.0), "attains less"), Rejected(BOTH, None, "it runs [already]")],
    search_s=1.0, interval_s=600.0, num_requests=40, target=[place("node-0", "chat"), place("node-1", "code")],
    trial=TRIAL,
)  # fmt: skip


def shown(
    proposal: PlanProposal | None,
    version: int = 3,
    width: int = 160,
    more: tuple[InstancePlan, ...] = (),
    is_chosen: bool = False,
) -> list[str]:
    """Lines, with single spaces. `more`: instances of the plan that runs."""
    state = ReplacementState(
        mode="advise", interval_s=600.0, since_s=time.time(), measured=predicted(0.75, 25.0),
        predicted=predicted(0.9, 15.0), proposal=proposal,
    )  # fmt: skip
    console = Console(file=StringIO(), width=width, highlight=False)
    instances = [place("node-0", "chat", "code"), *more]
    plan = ShownPlan(version, instances, unplaced={"huge": "memory"}, is_chosen=is_chosen, replacement=state)
    show_plan(plan, console, as_json=False)
    assert isinstance(console.file, StringIO)
    assert all(line == line.rstrip() for line in console.file.getvalue().splitlines() if "rejected:" in line)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_a_change_of_which_no_traffic_is_known_is_told_without_a_table() -> None:
    assert PROPOSAL.trial is not None
    text = " ".join(
        shown(msgspec.structs.replace(PROPOSAL, trial=msgspec.structs.replace(PROPOSAL.trial, horizons=[])))
    )
    assert "The change takes 42 s" in text and "What it would have gained is not known yet." in text
    assert "on the last" not in text


def test_a_placement_that_was_chosen_is_called_so() -> None:
    assert CHOSEN[1:] in " ".join(shown(None, is_chosen=True))
    assert not any("was chosen" in line for line in shown(None))


def test_what_the_slo_of_a_plan_is_stands_below_it() -> None:
    assert "within slo_scale times its model's mean execution time (slo_scale is 5 unless set)" in " ".join(
        shown(PROPOSAL)
    )


def test_a_model_on_another_engine_is_shown_with_it() -> None:
    hosted = msgspec.structs.replace(place("node-1"), models=[ModelSpec("fast", "/models/fast", engine="vllm")])
    assert "node-1 1 fast (vllm)" in shown(None, more=(hosted,))


def test_a_proposal_is_shown_beside_the_plan_that_runs_with_its_trial_and_what_was_rejected() -> None:
    lines = shown(PROPOSAL)
    assert "node-0 1 chat, code chat" in lines and "node-1 1 - code" in lines
    assert "model requests measured as now proposed P99 s TTFT s TPOT ms" in lines
    text = " ".join(lines)
    assert "40 online requests since, 75.0% within their SLO" in text and "predicted: 90.0%" in text
    assert "Online requests of the 600 s before the search" in text
    attained = "chat 40 70.0% 1.50x 80.0% 1.50x 95.0% 1.50x"
    assert f"{attained} 20 -> 10 0.2 -> 0.1 20 -> 10" in lines
    assert "code 0 - - - - - -" in lines
    assert "Proposed, worth a change (pays): more is attained." in lines
    title = " ".join(lines).partition("The change takes 42 s")[2]
    assert "30 s of devices" in title and "2.5 GB" in title and "+3.4%" in title and "code would wait" in title
    assert "600 s 40 80.0% 3.00x 90.0% 2.00x 95.0% 1.75x" in lines
    assert "rejected: node-0 x2: chat+code\nattains less\n" in "\n".join(lines)
    assert "rejected: node-0: chat+code\nit runs [already]\n" in "\n".join(lines)
    assert "huge is on no instance: memory" in lines and "huge fits nowhere: memory" in lines


def test_who_is_served_worst_and_left_behind_is_told_with_the_price() -> None:
    def of(chat: float, code: float) -> Prediction:
        models = {
            name: ModelPrediction(
                num_requests=num, attainment=attainment, normalised_latency=1.5, mean_latency_s=1.0, p99_latency_s=2.0
            )
            for name, num, attainment in (("chat", 90, chat), ("code", 10, code))
        }
        return Prediction(attainment=0.9 * chat + 0.1 * code, normalised_latency=1.5, models=models)

    lines = shown(msgspec.structs.replace(PROPOSAL, incumbent=of(0.9, 0.0), prediction=of(0.9, 0.8), floor_cost=0.012))
    text = " ".join(lines)
    assert "Served worst would be code: 80.0% within its SLO, of all requests 89.0%" in text
    assert "the plan that serves most in total has 1.2% more." in text
    assert "Left behind now: code (0.0% within its SLO)." in text
    assert "Left behind by" not in text
    text = " ".join(shown(msgspec.structs.replace(PROPOSAL, prediction=of(0.9, 0.1))))
    assert "Left behind by the proposed plan, below 80% of the attainment of all requests: code (10.0%" in text


def test_figures_give_way_where_there_is_no_room() -> None:
    attained = "chat 40 70.0% 1.50x 80.0% 1.50x 95.0% 1.50x"
    for width, figures in ((70, " 20 -> 10"), (60, "")):
        lines = shown(PROPOSAL, width=width)
        assert f"model requests measured as now proposed{' P99 s' if figures else ''}" in lines
        assert f"{attained}{figures}" in lines


@pytest.mark.parametrize(
    ("proposal", "said"),
    [(None, "No search has found a plan yet"), (PROPOSAL, "The last proposal was for another plan")],
    ids=["none", "old"],
)
def test_without_a_proposal_figures_are_those_of_the_interval(proposal: PlanProposal | None, said: str) -> None:
    lines = shown(proposal, version=4)
    assert any(line.startswith(said) for line in lines)
    assert "chat 40 75.0% 1.50x 90.0% 1.50x 15 0.15 15" in lines


def test_what_is_not_worth_a_change_says_so() -> None:
    kept = msgspec.structs.replace(PROPOSAL, is_worth=False, cause="chance", plan=BOTH, verdict="it may be chance")
    lines = shown(kept)
    assert "Proposed, not worth a change (chance): it may be chance." in lines
    assert not any(line.startswith("The change takes") for line in lines), "there is nothing to change to"


def test_a_search_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        looks = 0

        def change_plan(self, action: str) -> None:
            assert action == "search"

        def shown_plan(self) -> ShownPlan:
            self.looks += 1
            searching = "asked" if self.looks < 3 else ""
            state = ReplacementState(mode="off", interval_s=600.0, since_s=0.0, proposal=PROPOSAL, searching=searching)
            return ShownPlan(version=3, instances=[], replacement=state)

    monkeypatch.setattr("tideway.plan.WAIT_LINE_INTERVAL_S", 0.0)
    said: list[str] = []
    search(Client(), wait_s=60.0, say=said.append)  # type: ignore[arg-type]
    assert [line.partition(" (")[0] for line in said[1:-1]] == ["  still searching"] * 2
    assert said[0].startswith("Searching") and said[-1].startswith("The search over 40 requests")


def test_a_roll_back_says_what_another_one_does() -> None:
    class Client:
        """Each roll-back undoes the last replacement."""

        change = PlanChange(
            number=1, reason="it pays", stage="carried_out", begun_s=0.0, stage_s=0.0, step_s=0.0, before=[], target=[]
        )
        end = "carried_out"

        def change_plan(self, _: str) -> ReplacementState:
            number = self.change.number
            self.change = msgspec.structs.replace(
                self.change, number=number + 1, undoes=number, reason="rolls back", stage=self.end, failure="no memory"
            )
            return ReplacementState(mode="off", interval_s=600.0, since_s=0.0)

        def shown_plan(self) -> ShownPlan:
            return ShownPlan(version=3, instances=[], change=self.change)

    client, said = Client(), list[str]()
    carry_out(client, "roll_back", wait_s=60.0, say=said.append)  # type: ignore[arg-type]
    assert said[0] == "Replacement 2: rolls back" and "comes back" not in said[1]
    assert said[-1] == "Replacement 1 is undone. Another --rollback undoes this, replacement 2."
    said.clear()
    carry_out(client, "roll_back", wait_s=60.0, say=said.append)  # type: ignore[arg-type]
    assert said[1] == "  2 rolled 1 back: the placement of 1 comes back."
    assert said[-1] == "Replacement 2 is undone. Another --rollback undoes this, replacement 3."
    client.end = "rolled_back"
    with pytest.raises(OperatorError, match=r"^Rolled back: no memory\.$"):
        carry_out(client, "roll_back", wait_s=60.0, say=said.append)  # type: ignore[arg-type]


def told(*seen: tuple[str, list[str]]) -> list[str]:
    """The first word of each line, over these looks at stage and steps."""
    change = PlanChange(number=1, reason="", stage="fetch", begun_s=0.0, stage_s=0.0, step_s=0.0, before=[], target=[])
    lines: list[str] = []
    stage, num_steps = "", 0
    for now, steps in seen:
        change = msgspec.structs.replace(change, stage=now, steps=steps)
        lines += [line.split()[0].rstrip(":") for line in lines_of(change, stage, num_steps)]
        stage, num_steps = now, len(steps)
    return lines


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (
            [("fetch", []), ("change", ["load"]), ("change", ["load", "unload"]), ("settle", ["load", "unload"])],
            "fetch change load unload settle",
        ),
        ([("change", []), ("settle", ["load"]), ("carried_out", ["load"])], "change load settle carried_out"),
        ([("fetch", []), ("carried_out", ["load", "unload"])], "fetch change load unload carried_out"),
        ([("change", ["load"]), ("roll_back", ["load"]), ("rolled_back", ["load", "unload"])],
         "change load roll_back unload rolled_back"),
    ],
)  # fmt: skip
def test_steps_stand_below_their_stage(seen: list[tuple[str, list[str]]], expected: str) -> None:
    assert told(*seen) == expected.split()
