from __future__ import annotations

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from shared.messages.timeline import MissedObjective, Phase, SloExplanation, TimelinePhase
from tideway.requests import explain_slo, phase_bar


@pytest.mark.parametrize("num_cells", [80, 40])
@pytest.mark.parametrize("num_phases", [1, 7, 200])
def test_the_bar_of_a_timeline_is_as_wide_as_it_may_be_whatever_is_rounded(num_cells: int, num_phases: int) -> None:
    # Rounded one by one, they would add up to another width.
    phases = [
        TimelinePhase((Phase.PREFILL, Phase.DECODE)[index % 2], 1.1 * index, 1.1 * (index + 1))
        for index in range(num_phases)
    ]
    assert len(phase_bar(phases, num_cells)) == num_cells


def test_the_bar_of_a_request_that_took_no_time_is_empty() -> None:
    assert len(phase_bar([TimelinePhase(Phase.GATEWAY, 0.0, 0.0)], 80)) == 0


def test_objectives_are_told_where_none_was_missed_and_which_are_the_default() -> None:
    one = MissedObjective(
        model="chat", name="ttft", num_judged=4, num_missed=0, measured_s=0.0, objective_s=1.5, parts=[], examples=[],
        num_default=4,
    )  # fmt: skip

    def told(*objectives: MissedObjective) -> str:
        class Client:
            def explain_slo(self, interval_s: int) -> SloExplanation:
                return SloExplanation(interval_s, list(objectives))

        console = Console(file=(output := StringIO()), width=120)
        explain_slo(Client(), console, interval_s=60, as_json=False)  # type: ignore[arg-type]
        return " ".join(output.getvalue().split())

    shown = told(
        one, msgspec.structs.replace(one, model="code", num_default=0), msgspec.structs.replace(one, num_default=1)
    )
    assert "chat time to first token 4 0 0.0% 1.5 s (default) -" in shown
    assert "code time to first token 4 0 0.0% 1.5 s -" in shown and shown.count("(default)") == 1
    for text in (shown, told()):
        assert "1500 ms to the first token and 110 ms a token" in text and "The SLO of tideway plan" in text
