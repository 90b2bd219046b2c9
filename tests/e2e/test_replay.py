"""What the scheduler and the instances of a running system recorded decides the same when it is run again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec

from shared.engine import recording
from shared.recording import Applied, Decided, records
from shared.scheduling import recording as scheduling
from shared.scheduling.actions import Action, Dispatch
from shared.scheduling.calls import Submit
from tests.e2e.stack import Stack


def submitted(recorded: bytes) -> list[str]:
    applied = (record.call for record in records(recorded) if isinstance(record, Applied))
    calls = (scheduling.CALLS.decode(call) for call in applied if b"submit" in bytes(call))
    return [call.request.request_id for call in calls if isinstance(call, Submit)]


def dispatched(recorded: bytes) -> list[tuple[str, str]]:
    decided = (record.decision for record in records(recorded) if isinstance(record, Decided))
    actions = (msgspec.msgpack.decode(decision, type=list[Action]) for decision in decided)
    return [(a.request.request_id, a.instance_id) for some in actions for a in some if isinstance(a, Dispatch)]


def test_scheduler_and_instances_decide_the_same_again(stack: Stack, recordings: Path) -> None:
    async def run() -> set[str]:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            bodies = [
                {"model": ("llama", "opt")[number % 2], "prompt": [3 + number] * 40, "max_tokens": 20}
                for number in range(24)
            ]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            assert {answer.status_code for answer in answers} == {200}
            return {f"{answer.json()['id']}-0" for answer in answers}

    own = asyncio.run(run())
    # A term each: one that did not renew its lease in time, on a busy machine, was followed by another.
    terms = sorted(recordings.glob("of.scheduler-0.*"), key=lambda path: int(path.suffix[1:]))
    recorded = [path.read_bytes() for path in terms]
    replayed = [scheduling.replay(term) for term in recorded]
    names = {instance["instance_id"] for instance in stack.instances()}
    placed = [placement for term in recorded for placement in dispatched(term)]
    wanted = {request_id for term in recorded for request_id in submitted(term)}
    assert all(number > 0 for _, number in replayed) and len(replayed[-1][0].cluster) == 2
    assert {name for _, name in placed} == names
    # Requests of other tests may be refused, or end while they wait.
    assert len(own) == 24 and own <= wanted and own <= {request_id for request_id, _ in placed}
    for name in names:
        engine, num_plans = recording.replay((recordings / f"of.{name}").read_bytes())
        assert num_plans > 20
        assert set(engine.memory.queues) == {"llama", "opt"}
