"""Admin keys with roles, files of keys that change, the audit log, and what batches use of a key's tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.access import admission as admission_module
from services.gateway.access.admission import (
    AdminKey,
    AdminRole,
    Admission,
    Key,
    PromptCharge,
    TenantPolicy,
    checked_tenant,
    name_of,
    read_admin_keys,
    read_keys,
)
from services.gateway.admin import audit
from services.gateway.batch import line_answering
from services.gateway.batch import state as batch_state
from services.gateway.http.errors import ApiError
from services.gateway.requests.answering import prompts_in_time
from services.gateway.requests.kept_calls import WINDOW_HEADER
from shared.bus.interface import ServiceError
from shared.messages.catalogue import AUDIT
from shared.messages.cluster import ModelSpec
from shared.messages.requests import MAX_TENANT_NAME, ErrorCode, ErrorInfo, FinishReason, RequestClass
from shared.runtime.settings import BusSettings, GatewaySettings, SettingsError
from tests.gateway.batching import reach
from tests.gateway.conftest import MODEL, running_gateway, running_stack
from tests.gateway.peer import until
from tests.tideway.readme import REPOSITORY

ADMINS = "anna:operate:a-secret\nrob:read:r-secret  # looks only\n"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_roles_and_the_audit_log(
    nats_settings: BusSettings, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "admins"
    file.write_text(ADMINS)
    caplog.set_level("INFO", audit.logger.name)
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, admin_keys_file=str(file)) as stack:
        assert (await stack.client.get("/admin/models")).status_code == 401
        assert (await stack.client.get("/admin/models", headers=bearer("r-secret"))).status_code == 200
        body = {"replicas": 2}
        path = f"/admin/models/{MODEL}/scale"
        statuses = [
            (await stack.client.post(path, json=body, headers=bearer(key))).status_code
            for key in ("r-secret", "wrong", "a-secret")
        ]
        assert statuses == [403, 401, 200]
        shown = (await stack.client.get("/admin/audit", headers=bearer("r-secret"))).json()["actions"]
        assert [(one["who"], one["status"], one["body"]) for one in shown] == [
            ("anna", 200, '{"replicas":2}'),
            ("rob", 403, ""),
        ]
        assert all((one["action"], one["address"]) == (f"POST {path}", "127.0.0.1") for one in shown)
        lines = [
            json.loads(r.getMessage().removeprefix("audit ")) for r in caplog.records if r.name == audit.logger.name
        ]
        assert [line for line in lines if line["who"]] == shown[::-1] and "secret" not in json.dumps(lines)
        assert [line["status"] for line in lines if not line["who"]] == [401]

        source = {"name": "x", "source": str(tmp_path / "nowhere")}
        assert (await stack.client.post("/admin/models", json=source, headers=bearer("a-secret"))).status_code == 400
        shown = (await stack.client.get("/admin/audit", headers=bearer("r-secret"))).json()["actions"]
        assert "null" not in shown[0]["body"] and json.loads(shown[0]["body"]).items() >= source.items()


async def test_strangers_cannot_push_actions_out_of_the_audit_log(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit, "MAX_ACTIONS", 3)
    monkeypatch.setattr(audit, "REFUSALS_LOGGED_S", 3600.0)
    caplog.set_level("INFO", audit.logger.name)
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, admin_api_key="s") as stack:
        await stack.client.post("/admin/scale", json={"instances": 2}, headers=bearer("s"))
        for _ in range(10):
            assert (await stack.client.post("/admin/scale", json={"instances": 9})).status_code == 401
        shown = (await stack.client.get("/admin/audit", headers=bearer("s"))).json()["actions"]
        assert [one["who"] for one in shown] == ["admin"]
        assert "tideway_gateway_admin_refusals_total 10.0" in (await stack.client.get("/metrics")).text
        assert len([r for r in caplog.records if '"status":401' in r.getMessage()]) == 1


async def test_an_open_gateway_says_what_is_open(
    nats_settings: BusSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "admins"
    file.write_text(ADMINS)
    for overrides, says_admin in (({}, True), ({"admin_keys_file": str(file)}, False)):
        caplog.clear()
        async with running_gateway(nats_settings, host="0.0.0.0", **overrides):
            (text,) = [r.getMessage() for r in caplog.records if "WITHOUT API KEYS" in r.getMessage()]
            assert ("and the admin API" in text) == says_admin


async def test_the_audit_log_is_bounded(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MAX_ACTIONS", 3)
    monkeypatch.setattr(audit, "ACTIONS_BETWEEN_TRIMS", 1)
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))]) as stack:
        for instances in range(1, 6):
            await stack.client.post("/admin/scale", json={"instances": instances})
        shown = (await stack.client.get("/admin/audit")).json()["actions"]
        assert [json.loads(one["body"])["instances"] for one in shown] == [5, 4, 3]
        stored = await (await stack.peer.bus.key_value(AUDIT)).entries()
        assert len(stored) <= 5, "those that are too many go before one more is stored"


async def test_keys_are_read_again_when_their_file_changes(
    nats_settings: BusSettings, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_module, "FILES_INTERVAL_S", 0.02)
    file = tmp_path / "keys"
    file.write_text("one:2\n")
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, api_keys_file=str(file)) as stack:
        admission = stack.gateway.context.admission

        async def status(key: str) -> int:
            return (await stack.client.get("/v1/models", headers=bearer(key))).status_code

        def reloads(outcome: str) -> float:
            name = "tideway_gateway_key_reloads_total"
            return stack.gateway.context.telemetry.registry.get_sample_value(name, {"outcome": outcome}) or 0

        used = admission.authenticate(bearer("one"))
        file.write_text("one:5\ntwo\n")
        await until(lambda: reloads("read") == 1, "the file to be read again")
        assert (await status("one"), await status("two")) == (200, 200)
        assert admission.authenticate(bearer("one")) is used and used.max_in_flight == 5
        for number, wrong in enumerate(("three:many\n", "# none\n"), 1):
            file.write_text(wrong)
            await until(lambda number=number: reloads("refused") == number, "the file to be refused")
            assert (await status("one"), await status("two"), await status("three")) == (200, 200, 401)
        file.write_text("three\n")
        await until(lambda: reloads("read") == 2, "the file to be read again")
        assert (await status("one"), await status("three")) == (401, 200)


async def test_what_a_key_began_goes_on_when_it_is_taken_away(
    nats_settings: BusSettings, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins and resumes nothing, and counts what it has used when it comes back."""
    monkeypatch.setattr(admission_module, "FILES_INTERVAL_S", 0.02)
    file = tmp_path / "keys"
    file.write_text("one:2:1000\ntwo\n")
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], api_keys_file=str(file)) as stack:
        stack.peer.automatic = False
        admission, path = stack.gateway.context.admission, "/v1/completions"

        def is_taken() -> bool:
            with contextlib.suppress(ApiError):
                return admission.authenticate(bearer("one")) is key
            return False

        readers = [stack.read(headers=bearer("one") | {WINDOW_HEADER: "30"}) for _ in range(2)]
        requests = [await stack.next_request(number) for number in range(2)]
        tokens = stack.ids("Hello world")
        for request in requests:
            stack.peer.emit(request, 0, tokens[:2])
        await until(lambda: all(reader.text for reader in readers), "both have begun")
        key = admission.authenticate(bearer("one"))
        file.write_text("two\n")
        await until(lambda: not is_taken(), "the file to be read again")
        body = {"model": MODEL, "prompt": "x", "max_tokens": 100}
        streams = f"/v1/streams/{readers[0].chunks[0]['id']}"
        for begun in (stack.client.post(path, json=body, headers=bearer("one")), stack.client.get(streams)):
            assert (await begun).status_code == 401
        assert (await stack.client.get(streams, headers=bearer("one"))).status_code == 401
        await readers[1].hang_up()
        for request in requests:
            stack.peer.emit(request, 2, [*tokens[2:], stack.eos], FinishReason.STOP)
        await readers[0].end()
        assert readers[0].is_complete and readers[0].text == "Hello world"
        await until(lambda: not any(key.num_in_flight.values()), "nothing is in flight")
        assert not any(admission.num_in_flight.values())
        file.write_text("one:2:1000\n")
        await until(is_taken, "the file to be read again")
        stack.peer.automatic = True
        stack.say("Hello world")
        again = await stack.client.post(path, json=body, headers=bearer("one"))
        assert again.status_code == 200
        assert int(again.headers["x-ratelimit-remaining-tokens"]) < 1000 - 2 * len(tokens)


@pytest.mark.parametrize("line", ["anna:a-secret", "anna:write:a-secret", ":read:a-secret", "anna:read:", ""])
def test_malformed_admin_keys(tmp_path: Path, line: str) -> None:
    file = tmp_path / "admins"
    file.write_text(line)
    with pytest.raises(SettingsError) as raised:
        read_admin_keys(GatewaySettings(admin_keys_file=str(file)))
    assert "a-secret" not in str(raised.value)


def test_the_single_admin_key_may_do_all() -> None:
    admission = Admission({}, read_admin_keys(GatewaySettings(admin_api_key="s")), max_in_flight=1)
    assert admission.authenticate_admin("Bearer s") == AdminKey("admin", AdminRole.OPERATE)


async def test_batch_lines_count_against_the_tokens_of_their_key(nats_settings: BusSettings, checkpoint: Path) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, api_keys="secret::100") as stack:
        stack.say("Hello world")
        client = stack.openai("secret")
        body = {"model": MODEL, "prompt": [5] * 40, "max_tokens": 5}
        lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(3)]
        data = "\n".join(map(json.dumps, lines)).encode()
        file = await client.files.create(file=("input.jsonl", data), purpose="batch")
        await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        admission = stack.gateway.context.admission
        key: Key = admission.authenticate(bearer("secret"))
        now = stack.gateway.context.bus.now
        num_output = len(stack.ids("Hello world")) + 1
        await until(lambda: key.window.total(now()) == 2 * (40 + num_output), "two lines' tokens")
        await stack.until_metrics('batch_line_retries_total{reason="overloaded"}')
        answer = await stack.client.post("/v1/completions", json=body, headers=bearer("secret"))
        assert answer.status_code == 429, "they are gone for other requests too"
        assert key.num_in_flight == dict.fromkeys(RequestClass, 0)


async def test_no_request_asks_for_more_than_its_key_has_in_a_minute(
    nats_settings: BusSettings, checkpoint: Path
) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, api_keys="secret::100") as stack:
        stack.say("Hello world")
        many = {"model": MODEL, "prompt": [5] * 10, "n": 4, "max_tokens": 50}
        refused = await stack.client.post("/v1/completions", json=many, headers=bearer("secret"))
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
        assert refused.headers["x-ratelimit-remaining-tokens"] == "100", "it cost nothing"
        hello = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        for path, body in (("/v1/chat/completions", hello), ("/v1/messages", {**hello, "max_tokens": 4000})):
            answer = await stack.client.post(path, json=body, headers=bearer("secret"))
            assert answer.status_code == 200, answer.text
            sent = stack.peer.submitted[-1]
            assert sent.sampling.max_tokens == 100 - len(sent.prompt) // 4


async def test_a_batch_line_counts_once_and_waits_untokenised(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_state, "FIRST_BACKOFF_S", 0.01)
    num_made = 0

    async def counting(*given: Any) -> Any:
        nonlocal num_made
        num_made += 1
        return await prompts_in_time(*given)

    monkeypatch.setattr(line_answering, "prompts_in_time", counting)
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, api_keys="secret::100") as stack:
        stack.say("Hello world")
        stack.peer.refusal = ServiceError(ErrorInfo(ErrorCode.OVERLOADED, "full"))
        client = stack.openai("secret")
        body = {"model": MODEL, "prompt": [5] * 60, "max_tokens": 5}
        lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(2)]
        data = "\n".join(map(json.dumps, lines)).encode()
        file = await client.files.create(file=("input.jsonl", data), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        context = stack.gateway.context
        key = context.admission.authenticate(bearer("secret"))
        await until(lambda: num_made >= 6, "one line to be tried again and again")
        assert key.window.total(context.bus.now()) == 60
        stack.peer.refusal = None
        await until(lambda: key.window.total(context.bus.now()) > 60, "its answer")
        num_before = num_made
        await asyncio.sleep(0.3)
        assert num_made == num_before, "the other line waits"
        waiting = (await reach(client, batch.id, lambda shown: shown.waiting_for)).waiting_for
        assert waiting["code"] == "tokens_per_minute" and "The 100 tokens per minute" in waiting["message"]
        assert (await client.batches.cancel(batch.id)).waiting_for is None


async def test_the_charge_of_a_prompt_over_several_tries() -> None:
    key = Key(tokens_per_minute=100)
    admission = Admission({"k": key}, {}, max_in_flight=10)
    charge, other = PromptCharge(admission), PromptCharge(admission)
    await charge.charge(key, 60, 0.0)
    await charge.charge(key, 60, 1.0)
    assert key.window.total(1.0) == 60 and await charge.wait_s(key, 1.0) == 0
    assert await other.wait_s(key, 1.0) == 0, "how long it is is not known"
    with pytest.raises(ApiError):
        await other.charge(key, 60, 1.0)
    assert await other.wait_s(key, 2.0) == 58.0
    assert await other.wait_s(key, 60.0) == 0 and key.window.total(60.0) == 60
    await other.charge(key, 60, 61.0)
    assert key.window.total(61.0) == 60
    key.charge_output(40, 61.0)
    assert await PromptCharge(admission).wait_s(key, 61.0) > 0, "nothing is left for one of any length"


def test_a_key_that_is_taken_away_leaves_its_batches_their_limits() -> None:
    admission = Admission({"one": Key(tokens_per_minute=5), "two": Key()}, {}, max_in_flight=1)
    one = admission.authenticate(bearer("one"))
    admission.set_keys({"two": Key()})
    assert admission.key_of(one.tenant) is one and one.tokens_per_minute == 5
    with pytest.raises(ApiError):
        admission.authenticate(bearer("one"))
    admission.set_keys({"one": Key(tokens_per_minute=7)})
    assert admission.authenticate(bearer("one")) is one and one.tokens_per_minute == 7


async def test_the_files_of_a_key_have_a_bound(nats_settings: BusSettings, checkpoint: Path) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, api_keys="one,two", max_key_file_bytes=3000) as stack:

        async def upload(key: str) -> httpx.Response:
            form = {"files": {"file": ("a.txt", b"x" * 1500)}, "data": {"purpose": "user_data"}}
            return await stack.client.post("/v1/files", headers=bearer(key), **form)

        kept = (await upload("one")).json()["id"]
        refused = await upload("one")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_storage_full")
        assert "3000 bytes: 1500 are used" in refused.json()["error"]["message"]
        assert (await upload("two")).status_code == 200
        await stack.client.delete(f"/v1/files/{kept}", headers=bearer("one"))
        assert (await upload("one")).status_code == 200


def test_a_file_of_keys_that_holds_none_opens_nothing(tmp_path: Path) -> None:
    """A secret that was not mounted, say."""
    file = tmp_path / "keys"
    file.write_text("\n")
    with pytest.raises(SettingsError, match=r"TIDEWAY_API_KEYS_FILE=.* holds no key"):
        read_keys(GatewaySettings(api_keys_file=str(file)))


HEADER = "x-tideway-tenant"
TENANTS = "secret:8,named::100:normal:acme,other-of-acme::::acme,proxy:2:::*"


async def test_each_request_says_whose_it_is_and_whose_prefixes_it_finds(
    nats_settings: BusSettings, checkpoint: Path
) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    settings = {"api_keys": TENANTS, "tenant_weights": "acme=2.5", "shared_prefixes": "acme"}
    async with running_stack(nats_settings, specs, **settings) as stack:
        stack.say("Hello")
        body = {"model": MODEL, "prompt": [5] * 10, "max_tokens": 5}
        for headers in (
            bearer("named"),
            bearer("other-of-acme"),
            {**bearer("proxy"), HEADER: "globex"},
            {**bearer("proxy"), HEADER: "acme"},
            bearer("secret"),
        ):
            assert (await stack.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        told = [(one.tenant, one.tenant_weight, one.prefix_salt) for one in stack.peer.submitted]
        assert told[:4] == [("acme", 2.5, ""), ("acme", 2.5, ""), ("globex", 1.0, "globex"), ("acme", 2.5, "")]
        name, weight, salt = told[4]
        assert name.startswith("key-") and weight == 1.0 and salt == name
        await stack.until_metrics(
            'tideway_gateway_tenant_requests_total{outcome="ok",tenant="acme"} 3.0',
            'tideway_gateway_tenant_requests_total{outcome="ok",tenant="globex"} 1.0',
            'tideway_gateway_tenant_tokens_total{direction="input",tenant="acme"} 30.0',
            'tideway_gateway_tenant_tokens_total{direction="output",tenant="acme"} 6.0',
            'tideway_gateway_tenant_time_to_first_token_seconds_count{tenant="acme"} 3.0',
        )


async def test_a_client_s_own_salt_parts_prefixes_further_and_joins_no_tenants(
    nats_settings: BusSettings, checkpoint: Path
) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    settings = {"api_keys": TENANTS, "shared_prefixes": "acme"}
    async with running_stack(nats_settings, specs, **settings) as stack:
        stack.say("Hello")

        async def salt_of(key: str, salt: str, path: str = "completions", **body: Any) -> str:
            sent = {"model": MODEL, "cache_salt": salt, **(body or {"prompt": [5] * 10, "max_tokens": 5})}
            answer = await stack.client.post(f"/v1/{path}", json=sent, headers=bearer(key))
            assert answer.status_code == 200, answer.text
            return stack.peer.submitted[-1].prefix_salt

        ours = await salt_of("named", "user-1")
        assert ours == await salt_of("other-of-acme", "user-1") == await salt_of("named", "user-1")
        assert ours == await salt_of("named", "user-1", "responses", input="Hello")
        salts = [ours]
        for key, salt in (("named", "user-2"), ("secret", "user-1"), ("secret", "acme"), ("named", "é" * 256)):
            salts.append(await salt_of(key, salt))
        assert len(set(salts)) == len(salts)
        for salt in salts:
            assert len(salt) <= MAX_TENANT_NAME
            with pytest.raises(ValueError, match="a tenant's name"):
                checked_tenant(salt)


async def test_who_is_no_trusted_proxy_names_no_tenant(nats_settings: BusSettings, checkpoint: Path) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    body = {"model": MODEL, "prompt": [5] * 10, "max_tokens": 5}
    async with running_stack(nats_settings, specs, api_keys=TENANTS) as stack:
        stack.say("Hello")
        for key, name, status, code in (
            ("named", "acme", 403, "tenant_not_allowed"),
            ("secret", "x", 403, "tenant_not_allowed"),
            ("wrong", "x", 401, "invalid_api_key"),
            ("proxy", "a" * 65, 400, None),
            ("proxy", "not a name", 400, None),
            ("proxy", "", 400, None),
        ):
            answer = await stack.client.post("/v1/completions", json=body, headers={**bearer(key), HEADER: name})
            error = answer.json()["error"]
            assert answer.status_code == status and (code is None or error["code"] == code), (key, name)
            assert status == 401 or error["param"] == HEADER
        assert not stack.peer.submitted
    async with running_stack(nats_settings, specs) as stack:
        answer = await stack.client.post("/v1/completions", json=body, headers={HEADER: "x"})
        assert answer.status_code == 403, "without keys nobody is trusted"


def test_without_keys_the_header_counts_where_the_setting_says_so() -> None:
    policy = TenantPolicy(GatewaySettings(trust_tenant_header=True, tenant_header="X-Org"))
    admission = Admission({}, {}, 8, policy)
    assert admission.authenticate({"x-org": "acme"}).tenant == "@acme" and admission.authenticate({}).tenant == ""


async def test_tenants_of_a_proxy_have_its_limits_each_for_itself_and_are_not_remembered_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "MAX_PROXIED", 3)
    admission = Admission({"proxy": Key(1, None, True, "*")}, {}, 100)
    asked = {name: admission.authenticate({**bearer("proxy"), HEADER: name}) for name in ("a", "b")}
    tickets = {name: await admission.enter(key, 1, RequestClass.ONLINE) for name, key in asked.items()}
    with pytest.raises(ApiError):
        await admission.enter(admission.authenticate({**bearer("proxy"), HEADER: "a"}), 1, RequestClass.ONLINE)
    for number in range(20):
        admission.authenticate({**bearer("proxy"), HEADER: f"n{number}"})
    assert len(admission._of_proxies) == 3
    assert admission.authenticate({**bearer("proxy"), HEADER: "a"}) is asked["a"], "it is in use"
    tickets["a"].release()
    assert admission.authenticate(bearer("proxy")).num_in_flight[RequestClass.ONLINE] == 0


def test_the_example_of_two_teams_and_a_proxy(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/operating.md").read_text()
    (text,) = re.findall(r"```text\n(sk-[^`]*)```", page)
    (weights,) = re.findall(r"with `TIDEWAY_TENANT_WEIGHTS=([^`]*)`", page)
    file = tmp_path / "keys"
    file.write_text(text)
    settings = GatewaySettings(api_keys_file=str(file), tenant_weights=weights)
    admission = Admission(read_keys(settings), {}, 100, TenantPolicy(settings))
    asked = [admission.authenticate(bearer(key)) for key in ("sk-search-web", "sk-search-jobs", "sk-support")]
    asked.append(admission.authenticate({**bearer("sk-portal"), HEADER: "user-17"}))
    assert [name_of(key.tenant) for key in asked] == ["search", "search", "support", "user-17"]
    assert [admission.tenants.weight(name_of(key.tenant)) for key in asked] == [2.0, 2.0, 1.0, 1.0]
    limits = [(key.max_in_flight, key.tokens_per_minute) for key in asked]
    assert limits == [(64, None), (64, None), (None, 200_000), (4, 20_000)]
    assert asked[0].use_id != asked[1].use_id, "each key has its limits for itself"


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"api_keys": "k::::not a name"}, "64 letters"),
        ({"tenant_weights": "acme=0"}, "TIDEWAY_TENANT_WEIGHTS"),
        ({"tenant_weights": "acme"}, "TIDEWAY_TENANT_WEIGHTS"),
        ({"tenant_weights": "a b=1"}, "TIDEWAY_TENANT_WEIGHTS"),
    ],
)
def test_settings_of_tenants_that_are_wrong_are_told(settings: dict[str, str], part: str) -> None:
    with pytest.raises(SettingsError, match=part):
        read_keys(GatewaySettings(**settings))
        TenantPolicy(GatewaySettings(**settings))
