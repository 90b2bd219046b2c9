"""A soak ends where it began, and says so where it does not."""

from __future__ import annotations

import pytest

from bench.soak.__main__ import page, run
from bench.soak.usage import LIMITS, TREND_S, Held, Sample, metric, targets, trend


def of(memory_mib: float, at_s: float = 0.0, **more: float) -> Sample:
    held = Held(memory_mib, int(more.get("descriptors", 20)), int(more.get("threads", 5)), more.get("tasks", 9.0))
    return Sample(at_s, {"gateway": [held]})


def missed(before: Sample, after: Sample, during: list[Sample] | None = None) -> set[str]:
    return {target.name for target in targets(before, after, during or []) if not target.is_met}


def test_what_is_left_is_missed() -> None:
    limits = LIMITS["gateway"]
    assert missed(of(100), of(100 + limits.memory_mib)) == set()
    assert missed(of(100), of(101 + limits.memory_mib)) == {"gateway: more memory"}
    assert missed(of(100), of(90, descriptors=21 + limits.descriptors)) == {"gateway: more descriptors"}
    assert missed(of(100), of(90, threads=6 + limits.threads)) == {"gateway: more threads"}
    assert missed(of(100), of(90, tasks=10.0 + limits.tasks)) == {"gateway: more tasks"}
    after = of(100)
    after.under_way, after.num_files = {"tideway_gateway_open_streams": 1.0, "a num_running": 0.0}, 2
    assert missed(of(100), after) == {"tideway_gateway_open_streams", "files"}


def test_a_trend_is_that_of_the_second_half_of_a_long_run() -> None:
    def growing(mib_a_minute: float, seconds: float) -> list[Sample]:
        return [
            of(100 + mib_a_minute * i * seconds / 20 / 60 * (1 if i > 9 else 5), i * seconds / 20) for i in range(21)
        ]

    assert trend("gateway", growing(2.0, TREND_S / 2)) is None
    assert trend("gateway", growing(2.0, 2 * TREND_S)) == pytest.approx(2.0)
    assert missed(of(100), of(100), growing(2.0, 2 * TREND_S)) == {"gateway: memory a minute"}


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP a_b x\na_b{c="d"} 2.0\na_b{c="e"} 3.0\na_b_total 9.0\nf 1.0\n'
    assert (metric(text, "a_b"), metric(text, "f"), metric(text, "a")) == (5.0, 1.0, None)


@pytest.mark.long
@pytest.mark.timeout(420)
def test_a_short_soak_ends_where_it_began() -> None:
    found = run(40.0, 4)
    assert found["is_met"], page(found)
    operations = {name for name in found["counts"] if name.endswith("done")}
    assert {"batch, done", "adapter, done", "kill_instance, done"} <= operations
    answered = {name for name in found["counts"] if name.endswith(("answered", "left", "rightly"))}
    assert len(answered) == 12, "every kind of request was asked"
