"""A recorded scheduler decides the same when it is run again (`test_core_properties` replays whatever happens there)."""

from __future__ import annotations

import msgspec
import pytest

from shared.messages.requests import Image
from shared.recording import ReplayMismatch, frames
from shared.runtime.settings import SchedulerSettings
from shared.scheduling import recording
from shared.scheduling.actions import Dispatch
from shared.scheduling.calls import OnDispatched, OnRegistry, OnReport, Submit
from tests.shared.scheduling.samples import make_info, make_report, make_request


def record_run(picks_at_once: int | None = None) -> bytes:
    """Forty requests to three instances of two models, with prefixes that are cached somewhere."""
    written: list[bytes] = []
    settings = SchedulerSettings(nats_password="do not tell", max_waiting_per_model=2)
    core = recording.recorded(recording.Configuration.of(settings, 3, {}, picks_at_once), written.append)
    for name in "abc":
        core.apply(OnRegistry(name, make_info(name, "m", "n")), 0.0)
    for number in range(40):
        now, name = number * 0.1, "abc"[number % 3]
        core.apply(OnReport(make_report(name, number + 1, freeness=float(number % 7), num_running=3)), now)
        request = make_request(f"r{number}", model="mn"[number % 2], num_prompt=64 * (number % 5))
        if number == 1:
            request = msgspec.structs.replace(request, images=(Image(b"an image"),), chat=b"a chat")
        core.apply(Submit(request), now)
        while actions := core.actions(now):
            for action in actions:
                if isinstance(action, Dispatch):
                    core.apply(OnDispatched.to(action, None), now)
    return b"".join(written)


def test_a_request_less_is_noticed_and_the_difference_named() -> None:
    header, *rest = frames(record_run())
    first = next(index for index, frame in enumerate(rest) if b"submit" in frame)
    changed = (len(frame).to_bytes(4, "little") + frame for frame in [header, *rest[:first], *rest[first + 1 :]])
    with pytest.raises(ReplayMismatch, match=r"decision 0 at 0\.000000 s differs: .*'Dispatch'.*'r0'.*and is \[\]"):
        recording.replay(b"".join(changed))


def test_what_was_decided_a_dispatch_at_a_time_is_decided_so_again() -> None:
    run = record_run(picks_at_once=1)
    assert b"picks_at_once" in run
    core, num_decisions = recording.replay(run)
    assert num_decisions > 40 and len(core.requests) == 40


def test_no_secret_is_recorded_and_no_prompt_twice() -> None:
    run = record_run()
    assert b"do not tell" not in run
    assert run.count(make_request("r4", num_prompt=64 * 4).prompt) == 8, "once for each that was submitted with it"
    assert run.count(b"an image") == run.count(b"a chat") == 1
