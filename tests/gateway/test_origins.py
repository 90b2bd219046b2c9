"""A gateway without keys is not for the web pages that its user's browser shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.http.origins import is_private_name
from shared.messages.cluster import ModelSpec
from shared.runtime.settings import BusSettings
from tests.gateway.conftest import MODEL, Stack, running_stack

DRAIN = "/admin/instances/a/drain"


def test_names_that_no_page_of_the_internet_has() -> None:
    for name in (
        "localhost",
        "127.0.0.1",
        "[::1]",
        "10.0.0.7",
        "gateway",
        "gateway.tideway.svc.cluster.local",
        "a.localhost",
    ):
        assert is_private_name(name), name
    for name in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example.", "0x7f.example"):
        assert not is_private_name(name), name


@pytest.mark.parametrize("path", [DRAIN, "/v1/completions"])
async def test_pages_of_other_origins_change_nothing(stack: Stack, path: str) -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "file://"):
        headers = {"origin": origin, "content-type": "text/plain"}
        answer = await stack.client.post(path, content="{}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert stack.peer.submitted == []
    own = await stack.client.post(
        "/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={"origin": stack.url}
    )
    assert own.status_code == 200, "the console's own page"


async def test_a_name_that_a_page_has_made_lead_here_is_refused(stack: Stack) -> None:
    for path in ("/admin/requests", "/console", "/v1/models"):
        answer = await stack.client.get(path, headers={"host": "rebound.evil.example:8000"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "host_not_allowed")
    assert (await stack.client.get("/v1/models", headers={"host": "LOCALHOST:8000"})).status_code == 200


async def test_what_is_allowed_by_setting_and_what_by_a_key(nats_settings: BusSettings, checkpoint: Path) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    headers = {"origin": "https://app.example.org", "host": "tideway.example.org"}
    body = {"model": MODEL, "prompt": "x"}
    allowed = {"cors_origins": "https://app.example.org", "allowed_hosts": "tideway.example.org"}
    async with running_stack(nats_settings, specs, **allowed) as stack:
        stack.say("Hello world")
        assert (await stack.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    async with running_stack(nats_settings, specs, api_keys="secret") as stack:
        stack.say("Hello world")
        answer = await stack.client.post(
            "/v1/completions", json=body, headers=headers | {"authorization": "Bearer secret"}
        )
        assert answer.status_code == 200, "no page has the key"
