"""What clients and browsers go by beside the answer itself: headers, the page of the API, tool calls in a history."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import httpx
import pytest

from shared.messages.cluster import ModelSpec
from shared.runtime.settings import BusSettings
from tests.gateway.conftest import MODEL, Stack, running_stack

TOOL_TEMPLATE = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    "{% for name, value in call.function.arguments.items() %}[{{ name }}={{ value }}]{% endfor %}"
    "{% endfor %}{{ m.content }}{% endfor %}"
)


async def test_a_deadline_is_not_tried_again_by_the_client(stack: Stack) -> None:
    stack.peer.automatic = False
    client = stack.openai().with_options(max_retries=3)
    with pytest.raises(Exception, match="time limit") as caught:
        await client.completions.create(model=MODEL, prompt="x", extra_headers={"x-request-timeout": "0.3"})
    assert caught.value.response.headers["x-should-retry"] == "false"  # type: ignore[attr-defined]
    assert len(stack.peer.submitted) == 1


async def test_limits_of_a_key_are_in_headers(nats_settings: BusSettings, checkpoint: Path) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, api_keys="secret:2:100,free") as stack:
        stack.say("Hello world")
        asked = {"model": MODEL, "prompt": [5] * 30, "max_tokens": 5}

        async def ask(key: str, prompt: list[int]) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return await stack.client.post("/v1/completions", json={**asked, "prompt": prompt}, headers=headers)

        answer = await ask("secret", [5] * 30)
        assert answer.status_code == 200
        limits = {name: value for name, value in answer.headers.items() if name.startswith("x-ratelimit-")}
        assert re.fullmatch(r"[0-9.]+s", limits.pop("x-ratelimit-reset-tokens"))
        assert limits == {
            "x-ratelimit-limit-requests": "2",
            "x-ratelimit-remaining-requests": "1",
            "x-ratelimit-limit-tokens": "100",
            "x-ratelimit-remaining-tokens": "70",
        }
        refused = await ask("secret", [5] * 90)
        assert refused.status_code == 429 and int(refused.headers["x-ratelimit-remaining-tokens"]) < 70
        assert not any(name.startswith("x-ratelimit") for name in (await ask("free", [5])).headers)


async def test_pages_of_named_origins_may_call(nats_settings: BusSettings, checkpoint: Path) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, cors_origins="https://app.example, https://b.example") as stack:
        asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        preflight = await stack.client.options("/v1/completions", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        answer = await stack.client.get("/v1/models", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in answer.headers
        answer = await stack.client.get("/v1/models", headers={"Origin": "https://b.example"})
        assert answer.headers["access-control-allow-origin"] == "https://b.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


async def test_without_a_setting_no_page_may(stack: Stack) -> None:
    answer = await stack.client.get("/v1/models", headers={"Origin": "https://app.example"})
    assert not any(name.startswith("access-control") for name in answer.headers)


async def test_the_page_of_the_api_needs_no_other_server(stack: Stack) -> None:
    page = (await stack.client.get("/docs")).text
    sources = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(sources) >= 2 and all(source.startswith("/") for source in sources)
    for source in sources:
        assert (await stack.client.get(source)).status_code == 200, source


async def test_arguments_of_tool_calls_reach_templates_as_objects(
    nats_settings: BusSettings, tmp_path: Path, checkpoint: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "tools"))
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(folder))]) as stack:
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Ulm", "days": 2}'},
        }
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "and?"}]
        answer = await stack.post("/tokenize", messages=messages)
        text = (await stack.post("/detokenize", tokens=answer.json()["tokens"])).json()["prompt"]
        assert text == "[city=Ulm][days=2]and?"
        call["function"]["arguments"] = "not JSON"  # type: ignore[index]
        answer = await stack.post("/tokenize", messages=messages)
        text = (await stack.post("/detokenize", tokens=answer.json()["tokens"])).json()["prompt"]
        assert text == "[arguments=not JSON]and?"
