"""The console in a headless Chromium, by clicks and by keyboard, on the real gateway; the peers on the bus are scripted, the
KV pools that they show are a real engine's."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from services.gateway.console import state as console_state
from shared.bus.interface import ServiceError
from shared.engine.calls import Submit
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape
from shared.messages.admin import ScaleInstances, ScaleModel
from shared.messages.catalogue import ADAPTERS, GATEWAY_EVENTS, INSTANCE_POOL
from shared.messages.channels import bucket_key
from shared.messages.cluster import AdapterSpec, DraftUse, KvCopies, ModelSpec
from shared.messages.console import PoolView
from shared.messages.requests import ErrorCode, RequestClass
from shared.messages.timeline import EventKind, RequestEvent, RequestEvents
from shared.policies.catalogue import ordering_policy
from shared.policies.token_budget import FixedTokenBudget
from shared.runtime.settings import BusSettings
from tests.browser.driver import ENTER, MISSING, RIGHT, TAB, Browser
from tests.gateway.conftest import MODEL, Stack, running_gateway, running_stack
from tests.gateway.peer import until
from tests.shared.engine.cluster import Node
from tests.shared.engine.fake_executor import request

ADMIN_KEY = "let-me-look"


def engine_with(*request_ids: str) -> Engine:
    """With one sequence in decode and one that waits for others, of which each block is a cell."""
    engine = Engine(48, 8, ordering_policy("fcfs"), FixedTokenBudget(64), num_host_merged=16, steps_in_flight=1)
    node = Node(engine, [ModelShape(MODEL, 4, 2, 200)])
    for number, request_id in enumerate(request_ids):
        offline = {"request_class": RequestClass.OFFLINE if number else RequestClass.ONLINE}
        assert engine.apply(Submit(request(request_id, [number] * 40, 60, model=MODEL, **offline)), 0.0) is None
    for _ in range(3):
        node.plan(0.0)
        node.step_returns(0.0)
    return engine


@pytest.fixture
async def stack(nats_settings: BusSettings, checkpoint: Path) -> AsyncIterator[Stack]:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, admin_api_key=ADMIN_KEY) as stack:
        await stack.peer.add_instance("b", MODEL, kv_address="127.0.0.1:1")
        await until(lambda: len(stack.gateway.context.catalog.instances) == 2, "instances")
        copies = KvCopies(
            num_backed_up=3, num_missing_blocks=5, backed_up_bytes=3 << 19, num_kept=2, num_rescued_tokens=900,
            num_recomputed_tokens=17, num_fetches=4, num_fetched_blocks=31,
        )  # fmt: skip
        uses = (DraftUse(model=MODEL, state="on", gain=1.25, num_drafted=80, num_kept=60),)
        stack.peer.loads = {"a": {"num_running": 2, "kv_copies": copies, "drafts": uses}, "b": {}}
        yield stack


async def test_pages_are_whole_and_let_nothing_in_from_elsewhere(stack: Stack) -> None:
    page = await stack.client.get("/console")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("console.css", "console.js", "dom.js", "icon.svg"):
        file = await stack.client.get(f"/console/{name}")
        assert file.status_code == 200 and "http://" not in file.text.replace("http://www.w3.org/", "")
        again = await stack.client.get(f"/console/{name}", headers={"if-none-match": file.headers["etag"]})
        assert again.status_code == 304
    for name in ("nobody.js", "..%2F__init__.py", "pages.py"):
        assert (await stack.client.get(f"/console/{name}")).status_code == 404


def test_scripts_ask_for_elements_that_the_page_has() -> None:
    static = files("services.gateway.console").joinpath("static")
    scripts = "".join(file.read_text() for file in static.iterdir() if file.name.endswith(".js"))
    asked = set(re.findall(r'byId\("([\w-]+)"\)', scripts))
    assert (
        {"model-base", "timeline-close"}
        <= asked
        <= set(re.findall(r' id="([\w-]+)"', static.joinpath("index.html").read_text()))
    )


async def test_its_state_needs_the_admin_key_and_is_put_together_once_in_a_while(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_state, "FRESH_S", 3600.0)
    assert (await stack.client.get("/admin/console/state")).status_code == 401
    asked = 0

    def show(_: object) -> PoolView:
        nonlocal asked
        asked += 1
        return engine_with("r0", "r1").pool_view()

    await stack.peer.bus.serve(INSTANCE_POOL.at(instance_id="a"), show)
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    answers = await asyncio.gather(*(stack.client.get("/admin/console/state", headers=headers) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {200} and asked == 1
    state = answers[0].json()
    assert [one["instance_id"] for one in state["instances"]] == ["a", "b"] and list(state["pools"]) == ["a"]
    pool = state["pools"]["a"]
    assert (pool["models"], [one["request_id"] for one in pool["sequences"]]) == ([MODEL], ["r0", "r1"])
    assert pool["sequences"][0]["num_blocks"] == 11 and len(pool["sequences"][0]["merged"]) == 6
    assert [one["is_online"] for one in pool["sequences"]] == [True, False]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Each test's gateway has a port of its own, and so nothing of what another's page keeps."""
    if MISSING:
        pytest.skip(MISSING)
    browser = Browser(tmp_path_factory.mktemp("profile"))
    try:
        yield browser
    finally:
        browser.close()


async def test_an_operator_looks_on_and_acts(stack: Stack, browser: Browser) -> None:
    stack.peer.automatic = False
    reader = stack.read()
    sent = await stack.next_request()
    engine = engine_with(sent.request_id, "another")
    await stack.peer.bus.serve(INSTANCE_POOL.at(instance_id="a"), lambda _: engine.pool_view())

    def tell() -> None:
        """What the scheduler says each second, and of a move that is under way."""
        stack.peer.tell_statistics(MODEL, num_arrived=1, num_queued=7, num_offline_queued=3)
        topic = GATEWAY_EVENTS.at(gateway_id=stack.gateway.context.gateway_id)
        event = RequestEvent(sent.request_id, 0, EventKind.MIGRATING, 1.7e9, "balance", "b")
        stack.peer.bus.publish(topic, RequestEvents("a", [event]))

    async def telling() -> None:
        while True:
            tell()
            await asyncio.sleep(0.5)

    task = asyncio.create_task(telling())
    try:
        await asyncio.to_thread(_look_and_act, browser, stack, sent.request_id)
        assert [type(one) for one in stack.peer.scaled] == [ScaleModel, ScaleInstances]
        assert stack.peer.scaled[-1] == ScaleInstances(3)
        stack.peer.emit(sent, 0, [*stack.ids("Hello"), stack.eos])
    finally:
        task.cancel()
        await reader.hang_up()


def _look_and_act(browser: Browser, stack: Stack, request_id: str) -> None:
    _enter(browser, f"{stack.url}/console")
    browser.until_text("#instances", "a", "b", "ready")
    browser.until_text("#instance-a", "backed up 3 requests, 1.5 MiB sent", "not yet copied 5 blocks", "2 requests")
    browser.until_text("#instance-a", "900 tokens kept, 17 computed again", "prefixes fetched 4, 31 blocks")
    browser.until_text("#instance-a", f"drafts of {MODEL} on, 75.0 % kept")
    assert "backed up" not in browser.text("#instance-b") and "drafts" not in browser.text("#instance-b")
    browser.until_text("#queues", MODEL, "4 online, 3 offline")
    tops = (
        "const [name, , count] = document.querySelector('#queues').children;"
        "return [name, count].map((one) => one.getBoundingClientRect().top)"
    )
    for width in (420, 1440):
        browser.resize(width, 900)
        name, count = browser.run(tops)
        assert abs(name - count) < 10, "a model and its count are in one line, the bar between them or below"
    pool = "return document.querySelector('#instance-a canvas.pool').getAttribute('aria-label')"
    browser.until(lambda: "48; used by" in browser.run(pool), "the pool of a")
    painted = (
        "const canvas = document.querySelector('#instance-a canvas.pool');"
        "const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        "return new Set(new Uint32Array(pixels.buffer)).size"
    )
    assert browser.run(painted) > 2, "free blocks, used ones, and what is between them"
    cells = "return document.querySelectorAll('#instance-a .cells button').length"
    assert browser.run(cells) == 2
    browser.until(lambda: browser.run("return document.querySelectorAll('#moves g').length") == 1, "the move")
    assert "a to b, balance" in browser.run("return document.querySelector('#moves title').textContent")

    browser.click("#instance-a .cells button")
    browser.until_text("#timeline", request_id, "received", "submitted", "migrating")
    assert browser.run("return document.activeElement.id") == "timeline"

    # An action asks first; the page says what came of it.
    browser.click("#instance-b .drain")
    browser.until(lambda: browser.run("return document.getElementById('sure-dialog').open"), "a question")
    assert "Drain b?" in browser.text("#sure-dialog")
    browser.click("#sure-ok")
    browser.until_text("#news", "Drain b: done")
    browser.click("#models button[aria-label$='one instance more']")
    browser.until_text("#news", "done")
    browser.write("#num-instances", "3")
    browser.press(ENTER)
    browser.until_text("#news", "3 instances: done")

    # Tabs by keyboard.
    browser.run("document.getElementById('tab-requests').focus()")
    browser.press(RIGHT)
    assert browser.run("return document.activeElement.id") == "tab-slo"
    browser.press(RIGHT, RIGHT, RIGHT, RIGHT, TAB)
    assert browser.run("return document.activeElement.id") == "chat-log"

    unnamed = (
        "return [...document.querySelectorAll('button, input, select, textarea')].filter(one =>"
        " !(one.innerText?.trim() || one.ariaLabel || one.labels?.length)).map(one => one.outerHTML)"
    )
    assert browser.run(unnamed) == [], "everything that takes the focus has a name"
    _is_readable(browser)
    assert [line for line in browser.log() if stack.url in line and "401" not in line] == []


CONTRAST = """
const light = (colour) => { const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map((c) => c / 255).map((c) =>
  c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (one) => { for (; one; one = one.parentElement) { const of = getComputedStyle(one).backgroundColor;
  if (!/, 0\\)$|transparent/.test(of)) return of; } return "rgb(255, 255, 255)"; };
const low = [];
for (const one of document.querySelectorAll("body *")) {
  const isText = (node) => node.nodeType === 3 && node.data.trim();
  if (!one.checkVisibility() || one.disabled || ![...one.childNodes].some(isText)) continue;
  const [a, b] = [getComputedStyle(one).color, behind(one)].map(light).sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) low.push(one.tagName + " " + one.textContent.slice(0, 30));
}
return low;
"""


def _is_readable(browser: Browser) -> None:
    shots = []
    for is_dark in (False, True):
        browser.set_dark(is_dark)
        theme = f"return document.documentElement.dataset.theme === '{'dark' if is_dark else 'light'}'"
        browser.until(partial(browser.run, theme), "the theme")
        assert browser.run(CONTRAST) == [], "text of too little contrast"
        extent = "const page = document.documentElement; return [page.scrollWidth, page.scrollHeight]"
        assert browser.run(extent) == browser.run("return [innerWidth, innerHeight]"), "all on one screen"
        shots.append(browser.screenshot())
    assert shots[0] != shots[1]


async def test_a_gateways_history_is_everybodys_and_each_slot_is_written_once(
    nats_settings: BusSettings, stack: Stack
) -> None:
    async with running_gateway(nats_settings, gateway_id="another", admin_api_key=ADMIN_KEY) as other:
        histories = [stack.gateway.context.history, other.context.history]
        stack.peer.tell_statistics(MODEL, num_queued=7, num_finished=5, output_tokens=400)
        await until(lambda: all(one._tokens[MODEL] == 400 for one in histories), "statistics")
        now_s = time.time()
        for history in histories:
            await history.record(now_s)
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        url = "/admin/console/history?interval_s=60"
        for port in (stack.gateway.port, other.port):
            answer = await stack.client.get(f"http://127.0.0.1:{port}{url}", headers=headers)
            samples = answer.json()["samples"]
            [sample] = [one for one in samples if one["at_s"] == now_s]
            assert sample["output_tokens_s"] == {MODEL: 40.0} and sample["finished_s"] == {MODEL: 0.5}
            assert (sample["num_instances"], sample["num_queued"]) == (2, 7)
            assert set(sample["pools"]) == {"a", "b"}
        assert (await stack.client.get(url.replace("60", "59"), headers=headers)).status_code == 400


def _enter(browser: Browser, url: str) -> None:
    """Opens the page, whose gateway wants a key: the dialog is there by itself, and is used by keyboard."""
    browser.open(url)
    browser.until(lambda: browser.run("return document.getElementById('keys-dialog').open"), "the dialog for keys")
    browser.write("#admin-key", ADMIN_KEY)
    browser.press(ENTER)


async def _begin_batch(stack: Stack) -> dict[str, Any]:
    line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "Hi"}}
    form = {"files": {"file": ("in.jsonl", json.dumps(line))}, "data": {"purpose": "batch"}}
    file = (await stack.client.post("/v1/files", **form)).json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch: dict[str, Any] = (await stack.client.post("/v1/batches", json=wanted)).json()
    return batch


async def _failed_batch(stack: Stack) -> dict[str, Any]:
    """A batch whose only line is in its error file."""
    stack.peer.refusal = ServiceError.of(ErrorCode.TOO_LONG, "more than fits")
    batch = await _begin_batch(stack)
    async with asyncio.timeout(20):
        while batch["status"] != "completed":
            batch = (await stack.client.get(f"/v1/batches/{batch['id']}")).json()
            await asyncio.sleep(0.05)
    stack.peer.refusal = None
    return batch


async def test_an_operator_sees_and_cancels_a_batch_of_any_tenant(stack: Stack) -> None:
    failed = await _failed_batch(stack)
    stack.peer.may_answer.clear()
    batch, headers = await _begin_batch(stack), {"authorization": f"Bearer {ADMIN_KEY}"}
    path = f"/admin/batches/{batch['id']}"
    assert (await stack.client.get(path)).status_code == 401
    assert (await stack.client.post(f"{path}/cancel")).status_code == 401
    missing = await stack.client.get("/admin/batches/batch_none", headers=headers)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "batch_not_found")

    async def once(status: str) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while True:
                shown: dict[str, Any] = (await stack.client.get(path, headers=headers)).json()
                if shown["batch"]["status"] == status:
                    return shown
                await asyncio.sleep(0.05)

    shown = await once("in_progress")
    assert (shown["tenant"], shown["batch"]["id"], shown["failures"]) == ("", batch["id"], [])
    cancelled = (await stack.client.post(f"{path}/cancel", headers=headers)).json()
    assert cancelled["batch"]["status"] in ("cancelling", "cancelled")
    shown = await once("cancelled")
    assert {"cancelling", "cancelled"} <= shown["status_s"].keys()
    assert shown["failures"] == [], "what was not run has not failed"
    with_failure = (await stack.client.get(f"/admin/batches/{failed['id']}", headers=headers)).json()
    [failure] = map(json.loads, with_failure["failures"])
    assert failure["custom_id"] == "one"
    again = await stack.client.post(f"{path}/cancel", headers=headers)
    assert again.status_code == 200 and again.json()["batch"]["status"] == "cancelled"
    actions = (await stack.client.get("/admin/audit", headers=headers)).json()["actions"]
    assert [one["status"] for one in actions if one["action"] == f"POST {path}/cancel"] == [200, 200]


async def test_a_batch_is_looked_at_and_cancelled(stack: Stack, browser: Browser) -> None:
    failed = await _failed_batch(stack)
    stack.peer.may_answer.clear()
    batch = await _begin_batch(stack)

    def look_and_cancel() -> None:
        _enter(browser, f"{stack.url}/console")
        browser.click(f"#batches button.link[title='{batch['id']}']")
        browser.until_text("#batch", batch["id"], batch["input_file_id"], "0 of 1 done", "no tenant", "in progress")
        browser.click("#batch-cancel")
        browser.until(lambda: browser.run("return document.getElementById('sure-dialog').open"), "a question")
        browser.click("#sure-ok")
        browser.until_text("#news", f"Cancel {batch['id']}: done")
        browser.until_text("#batches", "cancelled", "0 of 1, 1 not")
        browser.click(f"#batches button.link[title='{failed['id']}']")
        browser.until_text("#batch", failed["id"], "The first 1 lines of the error file", "one: ")
        assert browser.run("return document.getElementById('batch-cancel').disabled")
        browser.click("#tab-audit")
        browser.until_text("#audit", f"POST /batches/{batch['id']}/cancel", "200")

    await asyncio.to_thread(look_and_cancel)


async def test_requests_are_filtered_and_have_addresses(stack: Stack, browser: Browser) -> None:
    stack.say("Hello")
    answer = (await stack.client.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"})).json()
    route = {"name": "public", "arms": {MODEL: 1}, "sticky": "user"}
    made = await stack.client.post("/admin/routes", json=route, headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert made.status_code == 200

    def look() -> None:
        _enter(browser, f"{stack.url}/console#request={answer['id']}")
        browser.until_text("#timeline", answer["id"], "received", "ended")
        browser.until_text("#requests", answer["id"][-8:])
        browser.click("#filter-state option[value='running']")
        browser.until_text("#requests", "No request as the filters say")
        browser.click("#filter-state option[value='']")
        browser.click(f"#filter-model option[value='{MODEL}']")
        browser.click("#requests td a")
        browser.until_text("#timeline", f"{answer['id']}-0")
        assert browser.run("return location.hash") == f"#request={answer['id']}-0"
        browser.click("#timeline-close")
        assert browser.run("return document.getElementById('timeline').hidden && location.hash === ''")
        browser.click("#tab-routes")
        browser.until_text("#routes", "public", f"{MODEL} 100 %", "user")
        browser.click("#tab-tenants")
        browser.until_text("#tenants", "There is no API key")

    await asyncio.to_thread(look)


async def test_a_refused_model_leaves_what_was_typed(stack: Stack, browser: Browser, tmp_path: Path) -> None:
    def add() -> None:
        _enter(browser, f"{stack.url}/console")
        browser.until_text("#models", MODEL)
        browser.click("#add-model")
        browser.write("#model-name", "nothing")
        browser.write("#model-source", str(tmp_path))
        browser.click("#model-add")
        browser.until_text("#model-refusal", "config.json")
        dialog = "return [document.getElementById('model-dialog').open, document.getElementById('model-name').value]"
        assert browser.run(dialog) == [True, "nothing"]

    await asyncio.to_thread(add)


async def test_the_page_is_no_wider_than_any_window(stack: Stack, browser: Browser) -> None:
    def look() -> None:
        _enter(browser, f"{stack.url}/console")
        browser.until_text("#models", MODEL)
        for width, is_phone in ((1280, False), (1366, False), (1400, False), (1600, False), (420, True)):
            browser.resize(width, 800)
            overflow = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
            assert browser.run(overflow) == 0, width
            cut = (
                "return [...document.querySelectorAll('.scroll')].filter((one) => one.checkVisibility()"
                " && one.scrollWidth > one.clientWidth + 1).map((one) => one.id)"
            )
            assert browser.run(cut) == [], width
            shown = "return document.querySelector('#models th.roomy').checkVisibility()"
            assert browser.run(shown) != is_phone
        browser.resize(1440, 900)

    await asyncio.to_thread(look)


async def test_durations_are_written_as_they_are(stack: Stack, browser: Browser) -> None:
    def read() -> None:
        browser.open(f"{stack.url}/console")
        script = "return import('/console/dom.js').then(({seconds}) => arguments[0].map(seconds))"
        values = [0.2, 0.28, 0.1, 0.01, 0.0304, 0.00025, 0, 1.5, 119, 120, 7200, 2869560, None]
        expected = ["200 ms", "280 ms", "100 ms", "10 ms", "30.4 ms", "0.25 ms", "0 ms", "1.50 s", "119 s", "2 min"]
        assert browser.run(script, values) == [*expected, "2.0 h", "33 days", "–"]

    await asyncio.to_thread(read)


async def test_an_instance_that_is_gone_has_no_empty_rows(stack: Stack, browser: Browser) -> None:
    shown = (
        "return import('/console/instances.js').then(({showInstances}) => {"
        " showInstances({instances: [], draining: ['gone'], pools: {}, moves: []}, {});"
        " const panel = document.getElementById('instance-gone');"
        " return [panel.querySelector('.badge').textContent,"
        "   [...panel.querySelectorAll('.row')].filter((one) => one.checkVisibility()).length]; })"
    )

    def look() -> None:
        _enter(browser, f"{stack.url}/console")
        assert browser.run(shown) == ["drained", 0]

    await asyncio.to_thread(look)


async def test_an_adapter_is_added(stack: Stack, browser: Browser, tmp_path: Path) -> None:
    def add() -> None:
        _enter(browser, f"{stack.url}/console")
        browser.until_text("#models", MODEL)
        browser.click("#add-model")
        browser.write("#model-name", "poet")
        browser.write("#model-source", str(tmp_path))
        browser.click(f"#model-base option[value='{MODEL}']")
        assert browser.run("return document.getElementById('model-replicas').disabled")
        browser.click("#model-dialog .main")
        browser.until_text("#news", "Add poet: done")
        browser.until_text("#adapters", "poet")

    await asyncio.to_thread(add)
    [adapter] = stack.gateway.context.catalog.adapters
    assert (adapter.name, adapter.base, adapter.source) == ("poet", MODEL, str(tmp_path))


async def test_a_chat_shows_its_stream_and_its_timeline(stack: Stack, browser: Browser) -> None:
    stack.say("Hello world")
    await (await stack.peer.bus.key_value(ADAPTERS)).put(
        bucket_key("poet"), AdapterSpec("poet", MODEL, "f", version="v")
    )

    def chat() -> None:
        _enter(browser, f"{stack.url}/console")
        browser.click("#tab-chat")
        browser.until(lambda: browser.run("return document.getElementById('chat-model').value") == MODEL, "the model")
        browser.write("#chat-text", "Who is there?")
        browser.press(ENTER)
        browser.until_text("#chat-log", "Who is there?", "Hello world", "timeline")
        names = "return [...document.getElementById('chat-model').options].map((one) => one.value)"
        assert browser.run(names) == [MODEL, "poet"]
        assert {"poet", MODEL} <= set(browser.text("#adapters tbody").split())
        browser.click("#chat-log button")
        browser.until_text("#timeline", "chatcmpl-", "ended", "stop")

    await asyncio.to_thread(chat)


async def test_the_description_of_the_api_is_shown_without_the_internet(stack: Stack, browser: Browser) -> None:
    def read() -> None:
        browser.open("about:blank")
        browser.log()  # of pages before it
        browser.open(f"{stack.url}/docs")
        browser.until_text("#swagger-ui", "/v1/chat/completions", "/admin/requests/{request_id}")
        assert browser.log() == []

    await asyncio.to_thread(read)
