"""What the scheduler must do among its neighbours, told once and run on both buses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.scheduler.active import STATISTICS_INTERVAL_S
from shared.bus.interface import ServiceError
from shared.messages.admin import Done
from shared.messages.batches import GrantQuery, OfflineDemand
from shared.messages.catalogue import (
    EXECUTION_STATISTICS,
    MODELS,
    PLACEMENT_REQUESTS,
    SCHEDULER_DEMAND,
    SCHEDULER_GRANT,
    SCHEDULER_STATISTICS,
)
from shared.messages.cluster import (
    DemandReport,
    ExecutionStatistics,
    ExecutionStatisticsReport,
    ModelSpec,
    StatisticsReport,
)
from shared.messages.requests import ErrorCode, FinishReason, GenerationRequest
from shared.messages.traffic import Outcome, RequestRow, RequestRows, request_number
from tests.scheduler.conftest import Stage
from tests.scheduler.peers import ScriptedGateway, eventually, token_at
from tests.shared.scheduling.samples import make_request

Scenario = Callable[[Stage], Awaitable[None]]
SCENARIOS: list[Scenario] = []
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def scenario(function: Scenario) -> Scenario:
    SCENARIOS.append(function)
    return function


def assert_whole(gateway: ScriptedGateway, request: GenerationRequest) -> None:
    """The stream ended by length with exactly the tokens of an undisturbed run."""
    request_id = request.request_id
    assert gateway.end_of(request_id) == FinishReason.LENGTH
    assert gateway.outputs[request_id] == [token_at(request_id, n) for n in range(request.sampling.max_tokens)]


@scenario
async def a_request_passes_through_untouched(stage: Stage) -> None:
    await stage.scheduler()
    gateway, instance = await stage.gateway(), await stage.instance("a")
    request = make_request("r", max_tokens=5, timeout_s=30.0, high=True, traceparent=TRACE)
    await gateway.submit(request)
    await eventually(lambda: instance.received)
    (received,) = instance.received
    assert (received.prompt, received.sampling, received.epoch) == (request.prompt, request.sampling, 0)
    assert received.traceparent == TRACE and 0 <= received.waited_s < 5 and 25 < received.timeout_s <= 30
    instance.emit("r", 2)
    instance.finish("r", num_tokens=3)
    await eventually(lambda: gateway.end_of("r"))
    assert_whole(gateway, request)
    assert [frame.sender for frame in gateway.frames] == ["a", "a"], "tokens do not pass through the scheduler"


@scenario
async def requests_wait_for_their_model_and_are_spread_over_instances(stage: Stage) -> None:
    await stage.scheduler()
    gateway = await stage.gateway()
    for number in range(4):
        await gateway.submit(make_request(f"r{number}"))
    other, first, second = await stage.instance("x", "other"), await stage.instance("a"), await stage.instance("b")
    await eventually(lambda: len(first.held) + len(second.held) == 4)
    assert not other.received
    assert len(first.received) + len(second.received) == 4, "each dispatched once"


@scenario
async def a_cancel_reaches_the_queue_and_the_instance(stage: Stage) -> None:
    await stage.scheduler()
    gateway = await stage.gateway()
    await gateway.submit(make_request("queued"))
    gateway.cancel("queued")
    await gateway.submit(make_request("r"))
    instance = await stage.instance("a")
    await eventually(lambda: "r" in instance.held)
    gateway.cancel("r")
    await eventually(lambda: not instance.held)
    assert [request.request_id for request in instance.received] == ["r"]


@scenario
async def a_deadline_ends_a_queued_request(stage: Stage) -> None:
    await stage.scheduler()
    gateway = await stage.gateway()
    await gateway.submit(make_request("r", timeout_s=0.3, epoch=128, num_prior=3))
    await eventually(lambda: gateway.frames)
    (entry,) = gateway.frames[0].entries
    assert gateway.frames[0].sender == "scheduler-1"
    assert (entry.request_id, entry.epoch, entry.offset) == ("r", 128, 3)
    assert entry.finish_reason == FinishReason.DEADLINE
    assert entry.error is not None and entry.error.code == ErrorCode.DEADLINE
    assert stage.metric("requests_total", outcome="deadline", **{"class": "online"}) == 1


@scenario
async def overload_is_refused_in_the_open_and_passed_on_between_instances(stage: Stage) -> None:
    await stage.scheduler(max_queued=2)
    gateway = await stage.gateway()
    for number in range(2):
        await gateway.submit(make_request(f"r{number}"))
    with pytest.raises(ServiceError) as refused:
        await gateway.submit(make_request("r2"))
    assert refused.value.code == ErrorCode.OVERLOADED and refused.value.info.retry_after_s >= 1

    full = await stage.instance("a")

    async def refuse(request: GenerationRequest) -> None:
        raise ServiceError.of(ErrorCode.OVERLOADED, "full")

    full.on_submit = refuse
    await eventually(lambda: len(full.received) >= 2)
    free = await stage.instance("b")
    await eventually(lambda: len(free.held) == 2)
    assert {request.epoch for request in free.received} == {0}, "a refusal is not a placement"
    with pytest.raises(ServiceError) as too_long:
        await gateway.submit(make_request("long", num_prompt=2000))
    assert too_long.value.code == ErrorCode.TOO_LONG
    with pytest.raises(ServiceError) as malformed:
        await gateway.submit(make_request("s", gateway_id="not a subject"))
    assert malformed.value.code == ErrorCode.BAD_REQUEST


@scenario
async def a_final_refusal_of_the_instance_reaches_the_client(stage: Stage) -> None:
    await stage.scheduler()
    gateway, instance = await stage.gateway(), await stage.instance("a")

    async def refuse(request: GenerationRequest) -> None:
        raise ServiceError.of(ErrorCode.BAD_REQUEST, "no such token", "prompt")

    instance.on_submit = refuse
    await gateway.submit(make_request("r"))
    await eventually(lambda: gateway.end_of("r"))
    error = gateway.ends["r"].error
    assert error is not None and (error.code, error.param) == (ErrorCode.BAD_REQUEST, "prompt")


@scenario
async def draining_instances_get_nothing_new(stage: Stage) -> None:
    await stage.scheduler()
    gateway, draining = await stage.gateway(), await stage.instance("a")
    await gateway.submit(make_request("r0"))
    await eventually(lambda: draining.held)
    draining.info = type(draining.info)(**{**_fields(draining.info), "state": "draining"})
    await eventually(lambda: stage.metric("instances", state="draining") == 1)
    await gateway.submit(make_request("r1"))
    fresh = await stage.instance("b")
    await eventually(lambda: "r1" in fresh.held)
    assert list(draining.held) == ["r0"], "what it has it keeps"


def _fields(struct: object) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}  # type: ignore[attr-defined]


@scenario
async def an_exited_instance_hands_its_streams_on(stage: Stage) -> None:
    await stage.scheduler()
    gateway, first = await stage.gateway(), await stage.instance("a")
    requests = [make_request(f"r{number}", max_tokens=6) for number in range(3)]
    for request in requests:
        await gateway.submit(request)
    await eventually(lambda: len(first.held) == 3)
    for request in requests:
        first.emit(request.request_id, 2)
    await eventually(lambda: all(len(output) == 2 for output in gateway.outputs.values()))
    started_s = gateway.bus.now()
    await first.die(exit_code=137)
    second = await stage.instance("b", seconds_per_token=0.01)
    await eventually(lambda: len(gateway.ends) == 3)
    assert gateway.bus.now() - started_s < 2.5, "sooner than by silence and registry"
    for request in requests:
        assert_whole(gateway, request)
    assert [len(lost.requests) for lost in gateway.lost] == [3], "one message"
    assert {(request.epoch, len(request.prior)) for request in second.received} == {(64, 8)}
    assert stage.metric("lost_instances_total", reason="exited") == 1
    assert stage.metric("recovered_requests_total") == 3


@scenario
async def a_silent_instance_is_given_up_before_its_registry_entry_ends(stage: Stage) -> None:
    await stage.scheduler()
    gateway, first = await stage.gateway(), await stage.instance("a")
    request = make_request("r", max_tokens=4)
    await gateway.submit(request)
    await eventually(lambda: first.held)
    first.emit("r", 1)
    started_s = gateway.bus.now()
    await first.die()
    await eventually(lambda: gateway.lost)
    assert 0.7 < gateway.bus.now() - started_s < 2.5
    await stage.instance("b", seconds_per_token=0.01)
    await eventually(lambda: gateway.end_of("r"))
    assert_whole(gateway, request)
    assert stage.metric("lost_instances_total", reason="silent") == 1


@scenario
async def a_restarted_instance_is_another_one(stage: Stage) -> None:
    await stage.scheduler()
    gateway, first = await stage.gateway(), await stage.instance("a")
    request = make_request("r", max_tokens=4)
    await gateway.submit(request)
    await eventually(lambda: first.held)
    await first.die()
    await stage.instance("a", incarnation="2", seconds_per_token=0.01)
    await eventually(lambda: gateway.end_of("r"))
    assert_whole(gateway, request)
    assert [lost.instance_id for lost in gateway.lost] == ["a"]


@scenario
async def submit_calls_of_unknown_outcome_are_settled(stage: Stage) -> None:
    await stage.scheduler()
    gateway, slow = await stage.gateway(), await stage.instance("a")

    async def answer_too_late(request: GenerationRequest) -> None:
        if request.request_id == "kept":
            slow.hold(request)
        await asyncio.Event().wait()

    slow.on_submit = answer_too_late
    await gateway.submit(make_request("kept"))
    await gateway.submit(make_request("dropped"))
    await eventually(lambda: len(slow.received) == 2)
    other = await stage.instance("b")
    await eventually(lambda: "dropped" in other.held)
    assert other.held["dropped"].epoch == 64
    assert list(slow.held) == ["kept"] and slow.held["kept"].epoch == 0
    assert [request.request_id for request in other.received] == ["dropped"]
    # Known to be there: its owner's death is noticed.
    await slow.die(exit_code=1)
    await eventually(lambda: "kept" in other.held)
    assert other.held["kept"].epoch == 64


@scenario
async def a_standby_takes_over_at_once_when_the_leader_stops(stage: Stage) -> None:
    leader = await stage.scheduler("scheduler-1")
    standby = await stage.scheduler("scheduler-2")
    gateway, instance = await stage.gateway(), await stage.instance("a")
    await gateway.submit(make_request("running"))
    await eventually(lambda: instance.held)
    await gateway.submit(make_request("queued", model="later"))
    assert leader.is_active and not standby.is_active
    of_requests = ("tracked_requests", "ledger_requests")
    queued = {"model": "later", "class": "online"}
    await eventually(lambda: stage.metric("tracked_requests") == 2 and stage.metric("queue_length", **queued) == 1)
    started_s = gateway.bus.now()
    await leader.stop()
    await eventually(lambda: standby.is_active and gateway.announced)
    assert gateway.bus.now() - started_s < 2.0
    assert gateway.announced[-1].scheduler_id == "scheduler-2" and gateway.announced[-1].term == 2
    later = await stage.instance("b", "later")
    await eventually(lambda: "queued" in later.held)
    assert later.held["queued"].epoch == 0
    assert len(instance.received) == 1, "what an instance holds is not placed again"
    gateway.cancel("running")
    await eventually(lambda: not instance.held)
    assert stage.metric("is_leader", "scheduler-2") == 1 and stage.metric("is_leader", "scheduler-1") == 0
    # What it saw last is another's to say now.
    assert [stage.metric(name) for name in of_requests] == [0, 0] and stage.metric("queue_length", **queued) == 0


@scenario
async def statistics_metrics_and_spans(stage: Stage) -> None:
    await stage.scheduler()
    gateway, instance = await stage.gateway(), await stage.instance("a")
    reports: list[StatisticsReport] = []
    await gateway.bus.subscribe(SCHEDULER_STATISTICS, reports.append)
    await gateway.submit(make_request("r", max_tokens=3, traceparent=TRACE))
    await gateway.submit(make_request("waits", model="later", online=False))
    await eventually(lambda: instance.held)
    instance.finish("r", num_tokens=3)
    await eventually(lambda: any(model.num_finished for report in reports for model in report.models))
    models = [model for report in reports for model in report.models if model.model == "m"]
    assert sum(model.num_arrived for model in models) == 1
    assert sum(model.output_tokens for model in models) == 3 and sum(model.prompt_tokens for model in models) == 10
    assert reports[-1].scheduler_id == "scheduler-1"
    assert [model.num_queued for model in reports[-1].models if model.model == "later"] == [1]
    assert all(0.5 < model.interval_s < 5 for model in models)

    assert stage.metric("queue_length", model="later", **{"class": "offline"}) == 1
    assert stage.metric("queue_seconds_count", **{"class": "online"}) == 1
    assert stage.metric("dispatches_total", outcome="accepted", **{"class": "online"}) == 1
    assert stage.metric("instances", state="ready") == 1
    assert stage.metric("reports_total") > 2
    assert stage.metric("ledger_requests") == 0

    spans = {span.name: span for span in stage.spans.get_finished_spans()}
    for name in ("queue", "dispatch"):
        span = spans[name]
        assert span.attributes is not None and span.parent is not None
        assert f"{span.context.trace_id:032x}" in TRACE and f"{span.parent.span_id:016x}" in TRACE
        assert span.attributes["gen_ai.request.model"] == "m" and span.attributes["tideway.request_class"] == "online"
        assert span.attributes["tideway.instance_id"] == "a"
    assert spans["queue"].attributes["tideway.num_attempts"] == 1  # type: ignore[index]
    # The two spans cannot be compared: one of them ends by the bus's clock, which may be virtual.
    assert spans["queue"].start_time <= spans["queue"].end_time  # type: ignore[operator]


@scenario
async def the_service_monitor_is_told_of_each_request_until_it_listens(stage: Stage) -> None:
    scheduler = await stage.scheduler(max_queued=2)
    gateway = await stage.gateway()
    for number in range(2):
        await gateway.submit(make_request(f"r{number}", waited_s=3.0, num_prompt=7 + number))
    with pytest.raises(ServiceError):
        await gateway.submit(make_request("refused"))
    gateway.cancel("r1")
    await asyncio.sleep(1.2)  # nobody listened so far

    told: list[RequestRow] = []
    is_refusing = True

    async def listen(rows: RequestRows) -> Done:
        if is_refusing:
            raise ServiceError.of(ErrorCode.NOT_LEADER, "not yet")
        assert rows.scheduler_id == "scheduler-1" and rows.models == ["m"] and not rows.num_dropped
        told.extend(rows.rows)
        return Done()

    await gateway.bus.serve(PLACEMENT_REQUESTS, listen)
    await asyncio.sleep(1.2)
    is_refusing = False
    await eventually(lambda: len(told) == 4)
    assert [row.outcome for row in told] == [Outcome.PENDING, Outcome.PENDING, Outcome.REFUSED, Outcome.CANCELLED]
    assert [row.number for row in told] == [request_number(name) for name in ("r0", "r1", "refused", "r1")]
    assert [row.prompt_tokens for row in told] == [7, 8, 10, 8]
    assert 5 < told[0].age_s < 9 and 2 < told[2].age_s < 6 and all(row.is_online for row in told)

    instance = await stage.instance("a")
    await eventually(lambda: "r0" in instance.held)
    instance.finish("r0", num_tokens=20)
    await eventually(lambda: not scheduler._active._core.requests._by_id)  # type: ignore[union-attr]
    await scheduler.stop()
    (row,) = told[4:]
    assert (row.number, row.outcome) == (request_number("r0"), Outcome.FINISHED), "told at the end of the term at last"
    assert (row.output_tokens, row.execution_s, row.is_ttft_met, row.is_tpot_met) == (20, 0.05, True, None)
    assert 5 < row.latency_s <= row.age_s < 12


@scenario
async def execution_times_are_told_on_change_and_to_new_instances(stage: Stage) -> None:
    await stage.scheduler()
    gateway, instance = await stage.gateway(), await stage.instance("a")
    reports: list[ExecutionStatisticsReport] = []
    await gateway.bus.subscribe(EXECUTION_STATISTICS, reports.append)
    for name in ("r", "cancelled"):
        await gateway.submit(make_request(name))
    await eventually(lambda: len(instance.held) == 2)
    instance.finish("cancelled", FinishReason.CANCELLED)
    instance.finish("r", num_tokens=3)
    await eventually(lambda: reports)
    expected = [ExecutionStatistics("m", 0.05, 0.0, 1)]
    assert [(report.scheduler_id, report.models) for report in reports] == [("scheduler-1", expected)]
    await gateway.submit(make_request("same"))
    await eventually(lambda: "same" in instance.held)
    instance.finish("same", num_tokens=3)
    await asyncio.sleep(1.2)
    assert len(reports) == 1, "nothing changed"
    await stage.instance("b")
    await eventually(lambda: len(reports) == 2)
    assert reports[1].models == expected

    # A standby has heard them, and takes over with them.
    standby = await stage.scheduler("scheduler-2")
    await stage.instance("c")
    await eventually(lambda: len(reports) == 3)
    await stage.schedulers[0].stop()
    await eventually(lambda: standby.is_active and len(reports) == 4)
    assert reports[3] == ExecutionStatisticsReport("scheduler-2", expected)


@scenario
async def offline_requests_are_granted_and_go_where_there_is_room(stage: Stage) -> None:
    await stage.scheduler()
    gateway, instance = await stage.gateway(), await stage.instance("a")
    instance.offline_room = 100
    query = GrantQuery("g0", [OfflineDemand("batch", "tenant", "m", 500, 5000, 3600.0)])

    async def granted() -> int:
        reply = await gateway.bus.request(SCHEDULER_GRANT, query, timeout_s=2.0)
        assert 0 < reply.ask_again_s <= 1
        return reply.grants[0].tokens

    async with asyncio.timeout(10):
        while await granted() != 100:
            await asyncio.sleep(0.01)
    await eventually(lambda: stage.metric("offline_room_tokens", model="m") == 100)
    assert stage.metric("offline_unmet_tokens", model="m") == 400
    assert stage.metric("granted_tokens_total", model="m") >= 100
    instance.offline_room = 45
    async with asyncio.timeout(10):
        while await granted() != 45:
            await asyncio.sleep(0.01)
    for number in range(3):
        await gateway.submit(make_request(f"r{number}", online=False))
    await eventually(lambda: len(instance.held) == 2)
    instance.offline_room = 0
    instance.report()
    await gateway.submit(make_request("online"))
    await eventually(lambda: "online" in instance.held)
    assert set(instance.held) == {"r0", "r1", "online"} and await granted() == 0
    instance.offline_room = 110
    await eventually(lambda: "r2" in instance.held)
    instance.finish("r0", num_tokens=20)
    await eventually(lambda: stage.metric("offline_tokens_per_second", model="m") > 0)
    assert (await gateway.bus.request(SCHEDULER_GRANT, query, timeout_s=2.0)).tokens_per_s["m"] > 0


@scenario
async def who_waits_for_a_model_on_demand_is_told_at_once(stage: Stage) -> None:
    gateway, instance = await stage.gateway(), await stage.instance("a", "other")
    models = await gateway.bus.key_value(MODELS)
    for spec in (ModelSpec("m", "/m", on_demand=True), ModelSpec("other", "/other")):
        await models.put(spec.name, spec)
    reports: list[DemandReport] = []
    await gateway.bus.subscribe(SCHEDULER_DEMAND, reports.append)
    await stage.scheduler()
    await eventually(lambda: reports)
    assert reports[-1].models == [], "nobody asks for it"
    begun_s = gateway.bus.now()
    await gateway.submit(make_request("r"))
    await gateway.submit(make_request("served", model="other"))
    await eventually(lambda: [one.num_online for one in reports[-1].models] == [1])
    assert gateway.bus.now() - begun_s < STATISTICS_INTERVAL_S / 2
    await eventually(lambda: "served" in instance.held)
    assert [one.model for one in reports[-1].models] == ["m"], "the other is always loaded"
    later = await stage.instance("b", "m")
    await eventually(lambda: "r" in later.held)
    await eventually(lambda: [one.num_held_online for one in reports[-1].models] == [1])
    later.finish("r")
    await eventually(lambda: reports[-1].models == [])


@scenario
async def requests_of_a_removed_model_end_at_once(stage: Stage) -> None:
    gateway = await stage.gateway()
    models = await gateway.bus.key_value(MODELS)
    await models.put("later", ModelSpec("later", "x"))
    await stage.scheduler()
    await gateway.submit(make_request("r", model="later"))
    await models.delete("later")
    await eventually(lambda: gateway.end_of("r"))
    error = gateway.ends["r"].error
    assert error is not None and error.code == ErrorCode.UNKNOWN_MODEL
    with pytest.raises(ServiceError) as refused:
        await gateway.submit(make_request("new", model="later"))
    assert refused.value.code == ErrorCode.UNKNOWN_MODEL
    await models.put("later", ModelSpec("later", "x"))
    gateway.want(make_request("again", model="later"))
    instance = await stage.instance("a", "later")
    await eventually(lambda: "again" in instance.held)


async def a_server_restart_kills_nobody(stage: Stage) -> None:
    """Needs a server of its own. The outage is longer than an instance may be silent, and that is longer than a busy machine
    takes until all have found the server again."""
    lost_after_s = 2.5
    await stage.scheduler(lost_after_s=lost_after_s)
    gateway = await stage.gateway()
    instances = [await stage.instance(name) for name in "ab"]
    await gateway.submit(make_request("running", max_tokens=3))
    await eventually(lambda: any(instance.held for instance in instances))
    await gateway.submit(make_request("queued", model="later", max_tokens=3))
    await stage.restart_server(lost_after_s + 0.5)
    # Through all that follows from the silence.
    await asyncio.sleep(lost_after_s + 0.5)
    gateway.want(make_request("new", max_tokens=3))
    later = await stage.instance("c", "later")
    await eventually(lambda: sum(len(instance.held) for instance in instances) == 2, 20)
    await eventually(lambda: "queued" in later.held, 20)
    assert gateway.lost == []
    assert stage.metric("lost_instances_total", reason="silent") == 0
    assert stage.metric("lost_instances_total", reason="vanished") == 0
    assert sum(len(instance.received) for instance in instances) == 2, "nothing was placed twice"
