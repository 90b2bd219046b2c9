from __future__ import annotations

import pytest

from shared.messages.timeline import Phase, TimelinePhase
from tideway.requests import phase_bar


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
