"""Keys, windows and limits as pure decisions: the time is an argument."""

from __future__ import annotations

import math
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.access.admission import WINDOW_S, Admission, Key, TokenWindow, read_keys
from services.gateway.http.errors import ApiError
from services.gateway.openai.parsing import MAX_SEQUENCE_TOKENS, max_tokens_of, options_of, sampling_of, timeout_of
from services.gateway.openai.schemas import CompletionRequest
from services.gateway.service import _within_descriptors
from services.gateway.streams.placing import candidates
from shared.messages.channels import MAX_MESSAGE_BYTES
from shared.messages.cluster import InstanceInfo, LoadedModel
from shared.messages.requests import Priority, RequestClass
from shared.runtime.settings import GatewaySettings, SettingsError


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), max_size=40), st.integers(0, 200))
def test_a_window_counts_the_last_minute(steps: list[tuple[float, int]], limit: int) -> None:
    window, now, added = TokenWindow(), 0.0, []
    for gap_s, num_tokens in steps:
        now += gap_s
        window.add(num_tokens, now)
        added.append((now, num_tokens))
    total = window.total(now)
    # Buckets of a second: a token may leave up to a second early.
    assert total <= sum(n for at, n in added if at > now - WINDOW_S)
    assert total >= sum(n for at, n in added if at > now - WINDOW_S + 1)
    wait_s = window.seconds_until_below(limit, now)
    assert 0 <= wait_s <= WINDOW_S
    assert window.total(now + wait_s + 0.001) <= limit


ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE


async def test_tokens_per_minute() -> None:
    key = Key(tokens_per_minute=100)
    admission = Admission({"k": key}, {}, max_in_flight=10)
    await admission.enter(key, 1, ONLINE)
    key.charge_prompt(60, 1000.0)
    key.charge_output(30, 1010.0)
    with pytest.raises(ApiError) as raised:
        key.charge_prompt(20, 1020.0)
    assert raised.value.status == 429
    assert raised.value.headers()["retry-after"] == "40", "when the first 60 leave the window"
    key.charge_prompt(20, 1061.0)
    with pytest.raises(ApiError):
        key.charge_prompt(101, 5000.0)


def test_an_output_fits_a_minute() -> None:
    key = Key(tokens_per_minute=100)
    assert key.fitted_output(40, 1, 60, "max_tokens") == 60
    assert key.fitted_output(40, 1, 4096, "") == 60
    assert key.fitted_output(40, 3, 4096, "") == 20
    assert key.fitted_output(99, 3, 4096, "") == 1
    assert Key().fitted_output(40, 128, 1500, "n") == 1500
    with pytest.raises(
        ApiError, match=r"40 tokens of prompts and an output of up to 61; .* 100 tokens per minute"
    ) as one:
        key.fitted_output(40, 1, 61, "max_tokens")
    with pytest.raises(ApiError, match="128 outputs of up to 1500") as many:
        key.fitted_output(1, 128, 1500, "n")
    assert [(each.value.status, each.value.param) for each in (one, many)] == [(400, "max_tokens"), (400, "n")]


def test_a_gateway_does_not_start_where_it_could_serve_next_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GatewaySettings(max_connections=1000)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    with pytest.raises(SettingsError, match=r"may have 256 descriptors, .* to 320 or more \(ulimit -n\)"):
        _within_descriptors(settings)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (320, 320))
    assert _within_descriptors(settings).max_connections == 64


async def test_what_is_in_flight_is_given_back_once() -> None:
    key = Key(max_in_flight=2)
    admission = Admission({"k": key}, {}, max_in_flight=5)
    tickets = [await admission.enter(key, 2, ONLINE), await admission.enter(key, 2, ONLINE)]
    with pytest.raises(ApiError, match="2 requests in flight"):
        await admission.enter(key, 1, ONLINE)
    with pytest.raises(ApiError, match="4 online sequences in flight"):
        await admission.enter(Key(), 2, ONLINE)
    tickets.append(await admission.enter(key, 5, OFFLINE))
    for ticket in (*tickets, *tickets):
        ticket.release()
    for request_class in (ONLINE, OFFLINE):
        assert (key.num_in_flight[request_class], admission.num_in_flight[request_class]) == (0, 0)


def test_keys_from_settings(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text("c:5:600  # a comment\n# none\n\nd::7\n")
    keys = read_keys(GatewaySettings(api_keys=" a , b:3,", api_keys_file=str(file)))
    limits = {name: (key.max_in_flight, key.tokens_per_minute) for name, key in keys.items()}
    assert limits == {"a": (None, None), "b": (3, None), "c": (5, 600), "d": (None, 7)}
    with pytest.raises(SettingsError, match="cannot be read"):
        read_keys(GatewaySettings(api_keys_file=str(tmp_path / "missing")))
    file.write_text("good\nsecret:x\n")
    with pytest.raises(SettingsError, match=":2") as raised:
        read_keys(GatewaySettings(api_keys_file=str(file)))
    assert "secret" not in str(raised.value)
    keys = read_keys(GatewaySettings(api_keys="a:::normal,b:1:2:high,c:1:2:"))
    assert [key.may_be_high for key in keys.values()] == [False, True, True]
    assert (keys["a"].max_in_flight, keys["b"].tokens_per_minute) == (None, 2)


async def test_a_key_that_is_not_for_high_priority() -> None:
    key = Key(may_be_high=False)
    admission = Admission({"k": key}, {}, max_in_flight=10)
    with pytest.raises(ApiError, match="high priority") as raised:
        await admission.enter(key, 1, ONLINE, Priority.HIGH)
    assert (raised.value.status, raised.value.code) == (403, "priority_not_allowed")
    (await admission.enter(key, 1, ONLINE, Priority.NORMAL)).release()
    assert admission.num_in_flight[ONLINE] == 0


def test_time_limits() -> None:
    request = CompletionRequest(model="m", prompt="x")
    assert timeout_of(request, {}, 600.0) == 600.0
    assert timeout_of(request, {"x-request-timeout": "5"}, 600.0) == 5.0
    assert timeout_of(request, {"x-request-timeout": "0.5"}, 600.0) == 0.5
    for text in ("inf", "nan", "0", "-1", "1_0", "1e999", "٥", "", " 5", "5" * 400):
        with pytest.raises(ApiError, match="number of seconds"):
            timeout_of(request, {"x-request-timeout": text}, 600.0)
    request.request_timeout_s = 7.0
    assert timeout_of(request, {"x-request-timeout": "5"}, 600.0) == 7.0
    assert timeout_of(request, {}, 6.0) == 6.0


def test_a_flex_request_is_not_urgent() -> None:
    request = CompletionRequest(model="m", prompt="x", service_tier="flex", priority="high")
    assert options_of(request, {}, 600.0).service_tier == "flex"
    assert options_of(request, {}, 600.0).priority == "normal"


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 300) | st.none(), st.sampled_from([None, 16]))
def test_prompt_and_output_never_exceed_the_model(num_prompt: int, length: int, asked: int | None, default) -> None:
    try:
        max_tokens = max_tokens_of(asked, default, num_prompt, length, "prompt", "max_tokens")
    except ApiError as error:
        assert error.code == "context_length_exceeded"
        assert str(length) in error.message
        assert str(num_prompt) in error.message
        assert num_prompt + (asked or 1) > length
    else:
        assert 1 <= max_tokens <= length - num_prompt
        assert asked is None or max_tokens == asked


def test_the_longest_sequence_fits_into_a_message() -> None:
    assert 4 * MAX_SEQUENCE_TOKENS < MAX_MESSAGE_BYTES
    assert MAX_SEQUENCE_TOKENS > 100_000


def test_bypass_candidates_fewest_requests_first() -> None:
    def instance(name: str, running: int, waiting: int, model: str = "m", state: str = "ready") -> InstanceInfo:
        loaded = LoadedModel(name=model, state="ready", num_running=running, num_waiting=waiting)
        return InstanceInfo(
            instance_id=name,
            incarnation="1",
            node_id="node",
            state=state,
            models=[loaded, LoadedModel(name="other", state="ready")],
        )

    instances = [
        instance("busy", 5, 0),
        instance("idle", 1, 0),
        instance("queueing", 0, 1),
        instance("elsewhere", 0, 0, model="x"),
        instance("leaving", 0, 0, state="draining"),
    ]
    assert candidates(instances, "m", {}) == ["idle", "queueing", "busy"]


def test_in_bypass_the_freest_instance_comes_first_and_what_was_sent_there_counts() -> None:
    def instance(name: str, freeness: float, running: int) -> InstanceInfo:
        loaded = LoadedModel(name="m", state="ready", block_size=16, blocks_per_merged=2, num_running=running)
        return InstanceInfo(
            instance_id=name,
            incarnation="1",
            node_id="node",
            state="ready",
            models=[loaded],
            num_merged=100,
            dispatch_freeness=freeness,
        )

    # few long requests fill the one, many short ones leave the other free; a third has offline work only
    instances = [instance("full", -1.0, 2), instance("free", 9.0, 8), instance("harvests", math.inf, 20)]
    assert candidates(instances, "m", {}) == ["harvests", "free", "full"]
    # nine of 320 tokens, 10 merged blocks each, leave one block for each of them
    assert candidates(instances, "m", {"harvests": 9}, num_tokens=320) == ["free", "harvests", "full"]
    assert candidates(instances, "m", {"harvests": 5, "free": 3}, num_tokens=320) == ["harvests", "free", "full"]


@pytest.mark.parametrize(("asked", "used"), [(1e-38, 0.0), (1e-6, 0.0), (1e-5, 1e-5), (0.7, 0.7), (None, 1.0)])
def test_temperatures_that_overflow_are_greedy(asked: float | None, used: float) -> None:
    request = CompletionRequest(model="m", prompt="x", temperature=asked)
    options = options_of(request, {}, 600.0)
    assert sampling_of(request, options, max_tokens=1, eos_token_ids=(), vocab_size=9).temperature == used
