"""Timelines over HTTP: what the gateway sees itself, and what the scheduler and instances tell it."""

from __future__ import annotations

import time
from typing import Any

from services.gateway.streams import timelines as module
from shared.messages.catalogue import GATEWAY_EVENTS
from shared.messages.cluster import ModelSpec
from shared.messages.requests import FinishReason
from shared.messages.timeline import EventKind, RequestEvent, RequestEvents
from shared.runtime.settings import BusSettings
from tests.gateway.conftest import MODEL, Stack, running_gateway, running_stack
from tests.gateway.peer import until


def tell(stack: Stack, request_id: str, *events: tuple[EventKind, float, tuple[float, ...]]) -> None:
    """The instance, of so many seconds ago."""
    now = time.time()
    told = [
        RequestEvent(request_id, 0, kind, now - ago_s, "memory", "a" if kind is EventKind.DISPATCHED else "", numbers)
        for kind, ago_s, numbers in events
    ]
    topic = GATEWAY_EVENTS.at(gateway_id=stack.gateway.context.gateway_id)
    stack.peer.bus.publish(topic, RequestEvents("a", told))


async def timeline(stack: Stack, request_id: str) -> dict[str, Any]:
    answer = await stack.client.get(f"/admin/requests/{request_id}")
    assert answer.status_code == 200, answer.text
    [shown] = answer.json()["requests"]
    return shown


async def test_the_timeline_of_a_request_that_runs_and_ends(stack: Stack) -> None:
    stack.peer.automatic = False
    reader = stack.read(headers={"x-request-id": "mine"}, ttft_ms=100)
    sent = await stack.next_request()
    running = await timeline(stack, sent.request_id)
    assert (running["is_over"], running["state"], running["ttft_s"]) == (False, "queue", None)
    assert [event["kind"] for event in running["events"]] == ["received", "submitted"]
    tell(
        stack,
        sent.request_id,
        (EventKind.DISPATCHED, 0.0, (float("inf"), 1.0)),
        (EventKind.ARRIVED, 0.0, (0.1, 0.0, 0.0)),
        (EventKind.ADMITTED, 0.0, (0.0, 1.0)),
    )
    stack.peer.emit(sent, 0, stack.ids("Hello"))
    stack.peer.emit(sent, len(stack.ids("Hello")), [stack.eos], FinishReason.STOP)
    await reader.end()
    call_id = reader.chunks[0]["id"]
    over = await timeline(stack, call_id)
    assert over == await timeline(stack, "mine") == await timeline(stack, sent.request_id)
    kinds = [event["kind"] for event in over["events"]]
    assert kinds[:2] == ["received", "submitted"] and kinds[-1] == "ended" and "delivered" in kinds
    assert (over["is_over"], over["state"], over["output_tokens"], over["model"]) == (True, "stop", 2, MODEL)
    assert abs(sum(phase["end_s"] - phase["begin_s"] for phase in over["phases"]) - over["duration_s"]) < 1e-6


async def test_what_missed_its_objective_is_explained(stack: Stack, monkeypatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    stack.peer.automatic = False
    reader = stack.read()
    sent = await stack.next_request()
    # It has an objective that nobody could meet.
    tell(stack, sent.request_id, (EventKind.ARRIVED, 0.0, (1e-6, 0.0, 0.0)))
    await until(lambda: stack.gateway.context.timelines.find(sent.request_id)[0].state == "instance queue", "the event")
    stack.peer.emit(sent, 0, [*stack.ids("Hello"), stack.eos], FinishReason.STOP)
    await reader.end()
    over = await timeline(stack, sent.request_id)
    [objective] = over["objectives"]
    assert (objective["name"], objective["is_met"]) == ("ttft", False)
    assert "missed by" in objective["text"] and "instance queue" in objective["text"]
    assert objective["is_default"] and "(default)" in objective["text"], "neither request nor model names one"
    assert abs(sum(part["seconds"] for part in objective["parts"]) - over["ttft_s"]) < 1e-6
    [explained] = (await stack.client.get("/admin/slo?interval_s=60")).json()["objectives"]
    assert (explained["model"], explained["num_judged"], explained["num_missed"]) == (MODEL, 1, 1)
    assert explained["num_default"] == 1
    assert abs(sum(part["seconds"] for part in explained["parts"]) - explained["measured_s"]) < 1e-6
    listed = (await stack.client.get("/admin/requests?missed=true&limit=5")).json()["requests"]
    assert [one["id"] for one in listed] == [sent.request_id] and listed[0]["events"] == []
    assert (await stack.client.get("/admin/requests?running=true")).json()["requests"] == []


async def test_requests_that_met_their_objectives_are_judged_once(stack: Stack, monkeypatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    stack.say("Hello")
    for _ in range(3):
        assert (await stack.post("/v1/completions", prompt="x", max_tokens=5)).status_code == 200
    kept = stack.gateway.context.timelines
    assert len(kept.latest(5)) == 3

    def again(*_: object) -> None:
        raise AssertionError("a list of those that missed theirs works nothing out of the others")

    monkeypatch.setattr(module, "objectives", again)
    assert kept.latest(5, is_missed=True) == []


async def test_refusals_name_the_field(stack: Stack) -> None:
    for query, name in (("limit=0", "limit"), ("missed=perhaps", "missed")):
        answer = await stack.client.get(f"/admin/requests?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    answer = await stack.client.get("/admin/slo?interval_s=5")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "interval_s")
    answer = await stack.client.get("/admin/requests/chatcmpl-nobody")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


async def test_memory_is_bounded_and_cancelled_requests_are_not_judged(nats_settings: BusSettings, checkpoint) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, max_timelines=3, admin_api_key="secret") as stack:
        stack.say("Hello")
        for _ in range(5):
            assert (await stack.post("/v1/completions", prompt="x", max_tokens=5)).status_code == 200
        assert (await stack.client.get("/admin/requests")).status_code == 401
        answer = await stack.client.get("/admin/requests", headers={"authorization": "Bearer secret"})
        assert len(answer.json()["requests"]) == 3
        stack.peer.automatic = False
        reader = stack.read()
        sent = await stack.next_request(5)
        await reader.hang_up()
        kept = stack.gateway.context.timelines
        await until(lambda: kept.find(sent.request_id)[0].is_over, "the end")
        assert kept.find(sent.request_id)[0].state == "cancelled"


async def test_another_gateway_knows_it(stack: Stack, nats_settings: BusSettings, monkeypatch) -> None:
    monkeypatch.setattr(module, "ASK_TIMEOUT_S", 20.0)
    async with running_gateway(nats_settings, gateway_id="other") as other:
        other.context.timelines._asked_at = float("inf")  # those that it knows are enough
        body = {"model": MODEL, "prompt": "x", "max_tokens": 5}
        answer = await stack.client.post("/v1/completions", json=body)
        found = await other.context.timelines.find_anywhere(answer.json()["id"])
        assert [one.gateway_id for one in found] == [stack.gateway.context.gateway_id]
        url = f"http://127.0.0.1:{other.port}/admin/requests"
        listed = (await stack.client.get(url)).json()["requests"]
        assert [one["request_id"] for one in listed] == [answer.json()["id"]]
