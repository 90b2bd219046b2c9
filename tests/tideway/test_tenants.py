"""`tideway tenants` against real gateways on a real NATS, with a scripted scheduler's statistics."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shared.messages.catalogue import SCHEDULER_STATISTICS
from shared.messages.cluster import ModelSpec, StatisticsReport, TenantStatistics
from shared.runtime.settings import BusSettings
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint
from tests.gateway.conftest import MODEL, Stack, running_gateway, running_stack
from tests.gateway.peer import until
from tideway.data_folder import OperatorError
from tideway.operations import AdminClient
from tideway.tenants import show_tenants

LONG = "a-department-with-a-name-of-sixty-four-letters-as-long-as-it-may"
SETTINGS: dict[str, Any] = {
    "api_keys": f"one:8:100000::acme,two:4:::acme,three,four::::{LONG},proxy:2:::*",
    "admin_api_key": "root",
    "tenant_weights": "acme=2.5",
}


def shown(url: str, width: int = 80) -> str:
    output = io.StringIO()
    with AdminClient(url, "root") as client:
        show_tenants(client, Console(file=output, width=width), as_json=False)
    return output.getvalue()


async def ask(stack: Stack, url: str, key: str, **headers: str) -> asyncio.Task[Any]:
    body = {"model": MODEL, "prompt": [5] * 30, "max_tokens": 2}
    headers = {"authorization": f"Bearer {key}", **headers}
    num_before = len(stack.peer.submitted)
    asking = asyncio.create_task(stack.client.post(f"{url}/v1/completions", json=body, headers=headers))
    await until(lambda: len(stack.peer.submitted) > num_before, "a request")
    return asking


async def test_what_each_tenant_has_and_uses_over_all_gateways(
    nats_settings: BusSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = [ModelSpec(MODEL, str(write_checkpoint(tmp_path / "model", byte_level_tokenizer())))]
    async with (
        running_stack(nats_settings, specs, gateway_id="first", **SETTINGS) as stack,
        running_gateway(nats_settings, gateway_id="second", **SETTINGS) as second,
    ):
        stack.say("Hi")
        assert "acme" in (text := await asyncio.to_thread(shown, stack.url)) and "?" in text, "no scheduler says more"
        stack.peer.may_answer.clear()
        asking = [
            await ask(stack, stack.url, "one"),
            await ask(stack, f"http://127.0.0.1:{second.port}", "one"),
            await ask(stack, stack.url, "proxy", **{"x-tideway-tenant": "globex"}),
        ]
        told = [
            TenantStatistics(tenant="acme", num_queued=3, num_placed=12, service_s=30.25, lag_s=0.5),
            TenantStatistics(tenant=LONG, num_placed=1, service_s=10.0),
        ]
        stack.peer.bus.publish(SCHEDULER_STATISTICS, StatisticsReport("s", [], told))
        await until(lambda: stack.gateway.context.loads.tenants() is not None, "statistics")
        with AdminClient(stack.url, "root") as client:
            await asyncio.to_thread(show_tenants, client, Console(), as_json=True)
        states = {one["tenant"]: one for one in json.loads(capsys.readouterr().out)["tenants"]}
        assert list(states)[:2] == ["acme", LONG]
        acme = states["acme"]
        assert (acme["weight"], acme["num_running"], acme["num_waiting"], acme["lag_s"]) == (2.5, 12, 3, 0.5)
        assert acme["share"] == pytest.approx(30.25 / 40.25)
        used = [(key["num_online"], key["max_in_flight"], key["num_tokens"]) for key in acme["keys"]]
        assert sorted(used) == [(0, 4, 0), (2, 8, 60)], "over both gateways"
        assert [key["num_online"] for key in states["globex"]["keys"]] == [1]
        three = next(one for name, one in states.items() if name.startswith("key-"))
        assert three["keys"] == [] and three["num_running"] == 0
        text = await asyncio.to_thread(shown, stack.url)
        assert all(len(line) <= 80 for line in text.splitlines())
        assert "key-...: a key without a tenant's name, by the beginning of its SHA-256." in text
        row = next(line for line in text.splitlines() if line.startswith("acme"))
        assert row.split()[1:7] == ["2.5", "30.2", "s", "75%", "12", "3"] and "60/100,000" in text and "2/8" in text
        stack.peer.may_answer.set()
        assert [(await one).status_code for one in asking] == [200] * 3
        with AdminClient(stack.url, "wrong") as client, pytest.raises(OperatorError, match="--api-key"):
            await asyncio.to_thread(show_tenants, client, Console(), as_json=False)
