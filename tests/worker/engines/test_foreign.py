"""What only engines of others do: they die beside their instance, cannot resume, or take requests a few at a time."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.worker import black_box
from services.worker.engines import endpoint
from services.worker.engines.endpoint import EndpointEngine, EndpointOptions
from services.worker.engines.interface import EngineFailed
from shared.messages.requests import ErrorCode, FinishReason, RequestClass, pack_tokens
from tests.shared.engine.fake_executor import expected_output, request
from tests.worker.engines.completions_server import completions_server
from tests.worker.engines.engine_stage import engine_instance_on, scripted_engine
from tests.worker.engines.scripted_adapter import BAD_TOKEN


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_an_adapter_that_dies_gives_all_requests_up_at_once(nats_settings):
    async with engine_instance_on(nats_settings, scripted_engine("die")) as stage:
        sent = [request(f"r{i}", [i, 1], 500) for i in range(5)]
        for one in sent:
            await stage.submit(one)
        await stage.until(lambda: all(stage.end(one.request_id) for one in sent))
        for one in sent:
            assert stage.end(one.request_id).error.code == ErrorCode.GONE
            tokens = stage.output(one.request_id)
            assert 0 < len(tokens) < 500 and tokens == expected_output(one, 600)[: len(tokens)]
        assert stage.service.failed.is_set()


async def test_requests_without_a_token_are_suspected_of_the_end_of_their_engine(nats_settings):
    box = black_box.make()
    async with engine_instance_on(nats_settings, scripted_engine("choke"), black_box=os.dup(box)) as stage:
        await stage.submit(request("good", [1], 500))
        await stage.until(lambda: stage.output("good"))
        await stage.submit(request("bad", [BAD_TOKEN], 500))
        await stage.until(stage.service.failed.is_set)
        assert black_box.read(box) == ("bad",)


async def test_an_engine_that_can_never_serve_says_why_and_is_not_started_again(nats_settings):
    async with engine_instance_on(nats_settings, scripted_engine("fail"), until_ready=False) as stage:

        def failed():
            info = stage.instances.entries.get("node-0")
            return info and info.models[0].state == "failed" and info.models[0]

        await stage.until(failed)
        assert failed().error == "no such weights" and failed().is_final
        assert stage.reports, "whoever looks on hears that it lives"
        assert not stage.service.failed.is_set()


async def test_no_adapter_stays_behind_its_instance(nats_settings):
    engine = scripted_engine()
    async with engine_instance_on(nats_settings, engine):
        pid = engine._process.pid
        assert is_running(pid)
    for _ in range(100):
        if not is_running(pid):
            break
        await asyncio.sleep(0.05)
    assert not is_running(pid)


async def test_output_of_a_seeded_request_is_made_again_and_goes_on(nats_settings):
    async with engine_instance_on(nats_settings, scripted_engine()) as stage:
        sent = request("r1", [4, 5], 50, temperature=1.0)
        whole = expected_output(sent, 600)
        again = request("r1", [4, 5], 50, temperature=1.0, epoch=64, prior=pack_tokens(whole[:20]))
        await stage.submit(again)
        await stage.until(lambda: stage.end("r1"))
        assert stage.output("r1", offset=20) == whole[20:]


async def test_output_that_comes_out_otherwise_goes_on_from_its_tokens_and_is_counted(nats_settings):
    async with engine_instance_on(nats_settings, scripted_engine()) as stage:
        prior = [1, 1, 1]
        await stage.submit(request("r1", [4, 5], 20, temperature=1.0, epoch=64, prior=pack_tokens(prior)))
        await stage.until(lambda: stage.end("r1"))
        follows = request("r1", [4, 5, *prior], 17)
        assert stage.output("r1", offset=3) == expected_output(follows, 600)
        counted = stage.telemetry.registry.get_sample_value(
            "tideway_engine_diverged_resumes_total", {"engine": "node-0"}
        )
        assert counted == 1


async def test_a_server_gets_no_more_than_its_rows_and_offline_requests_after_online_ones(nats_settings):
    async with completions_server() as server:
        engine = EndpointEngine(server.url, EndpointOptions(max_num_seqs=4))
        async with engine_instance_on(nats_settings, engine, "endpoint") as stage:
            server.gate.clear()
            offline = [request(f"o{i}", [i], 10, request_class=RequestClass.OFFLINE) for i in range(6)]
            online = [request(f"r{i}", [i, 1], 10) for i in range(6)]
            for one in offline:
                await stage.submit(one)
            await stage.until(lambda: server.num_open == 3)
            for one in online:
                await stage.submit(one)
            await stage.until(lambda: server.num_open == 4)
            await stage.until(lambda: stage.reports[-1].models[0].offline_room_tokens == 0)
            server.gate.set()
            await stage.until(lambda: all(stage.end(one.request_id) for one in (*online, *offline)))
            assert server.most_open == 4
            assert all(stage.output(one.request_id) == expected_output(one, 600) for one in (*online, *offline))
            ends = [entry.request_id for entry in stage.entries if entry.finish_reason]
            assert max(map(ends.index, [one.request_id for one in online])) < ends.index("o5")


async def test_what_unicode_takes_for_the_end_of_a_line_ends_no_event(nats_settings):
    async with completions_server(text="a\x85b\u2028c\u2029d") as server:
        engine = EndpointEngine(server.url, EndpointOptions())
        async with engine_instance_on(nats_settings, engine, "endpoint") as stage:
            sent = request("r1", [1, 2], 5)
            await stage.submit(sent)
            await stage.until(lambda: stage.end("r1"))
            assert stage.output("r1") == expected_output(sent, 600)


async def test_a_stream_that_ends_without_a_reason_is_given_up_and_the_server_goes_on(nats_settings):
    async with completions_server() as server:
        engine = EndpointEngine(server.url, EndpointOptions())
        async with engine_instance_on(nats_settings, engine, "endpoint") as stage:
            server.cut_after = 7
            sent = request("r1", [1, 2], 20)
            await stage.submit(sent)
            await stage.until(lambda: stage.end("r1"))
            assert stage.end("r1").finish_reason == FinishReason.ERROR
            assert stage.end("r1").error.code == ErrorCode.UNAVAILABLE
            assert stage.output("r1") == expected_output(sent, 600)[:7]
            server.cut_after = 0
            rest = request("r1", [1, 2], 20, epoch=64, prior=pack_tokens(stage.output("r1")))
            stage.entries.clear()
            await stage.submit(rest)
            await stage.until(lambda: stage.end("r1"))
            assert stage.output("r1", offset=7) == expected_output(sent, 600)[7:]
            assert not stage.service.failed.is_set()


@pytest.fixture
def watched_closely(monkeypatch):
    """Servers are asked often, and given up soon."""
    for name, seconds in (("RETRY_S", 0.05), ("WATCH_INTERVAL_S", 0.1), ("HANG_S", 1.0), ("CONNECT_TIMEOUT_S", 1.0)):
        monkeypatch.setattr(endpoint, name, seconds)


@pytest.fixture
async def watched(nats_settings, watched_closely):
    """A server, and the instance that serves its model."""
    async with completions_server() as server:
        engine = EndpointEngine(server.url, EndpointOptions())
        async with engine_instance_on(nats_settings, engine, "endpoint") as stage:
            yield server, stage


async def shows(stage, state, error=""):
    """Until the registry has the model so."""

    def is_so():
        info = stage.instances.entries.get("node-0")
        model = info and info.models[0]
        return model and model.state == state and bool(model.error) == bool(error) and error in model.error and model

    await stage.until(is_so, 15)
    return is_so()


async def serves_again(stage, name):
    sent = request(name, [1, 2], 20)
    await stage.submit(sent)
    await stage.until(lambda: stage.end(name))
    assert stage.output(name) == expected_output(sent, 600)


def dies(server):
    return server.stop()


async def hangs(server):
    server.hangs = True


async def fails(server):
    server.status = 500


async def swaps_its_model(server):
    server.model = "another"


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(
    ("befalls", "why"),
    [
        (dies, "no connection"),
        (hangs, "no answer in time"),
        (fails, "it answers with status 500"),
        (swaps_its_model, "it does not serve there; it serves another"),
    ],
)
async def test_a_server_that_serves_no_more_is_named_and_waited_for(watched, befalls, why, is_streaming):
    server, stage = watched
    if is_streaming:
        await stage.submit(request("r1", [1, 2], 500))
        await stage.until(lambda: len(stage.output("r1")) > 3)
        server.gate.clear()
    await befalls(server)
    shown = await shows(stage, "loading", why)
    assert server.url in shown.error and "unavailable since 20" in shown.error
    assert not shown.is_final and not stage.service.failed.is_set()
    assert stage.instances.entries["node-0"].state == "starting"
    if is_streaming:
        assert stage.end("r1").error.code in (ErrorCode.UNAVAILABLE, ErrorCode.GONE)
    server.hangs, server.status, server.model = False, 200, "there"
    server.gate.set()
    if befalls is dies:
        await server.start()
    await shows(stage, "ready")
    await serves_again(stage, "r2")


async def test_a_server_that_is_not_there_at_the_start_is_named_and_waited_for(nats_settings, watched_closely):
    async with completions_server() as server:
        await server.stop()
        engine = EndpointEngine(server.url, EndpointOptions())
        async with engine_instance_on(nats_settings, engine, "endpoint", until_ready=False) as stage:
            await shows(stage, "loading", "no connection")
            await server.start()
            await shows(stage, "ready")
            await serves_again(stage, "r1")


async def test_a_server_that_does_not_know_its_models_length_before_it_is_loaded(nats_settings, watched_closely):
    async with completions_server() as server:
        server.max_model_len = None
        engine = EndpointEngine(server.url, EndpointOptions())
        async with engine_instance_on(nats_settings, engine, "endpoint") as stage:
            assert (await shows(stage, "ready")).max_model_len == 600


async def test_a_server_that_lists_its_model_but_fails_all_requests_is_given_up(watched):
    server, stage = watched
    server.completions_status = 500
    await stage.submit(request("r1", [1, 2], 20))
    await shows(stage, "loading", "it answers with status 500")
    server.completions_status = 200
    await shows(stage, "ready")
    await serves_again(stage, "r2")


async def test_a_busy_server_that_refuses_some_is_not_given_up(watched):
    server, stage = watched
    server.completions_status = 503
    await stage.submit(request("r1", [1, 2], 20))
    await stage.until(lambda: stage.end("r1"))
    server.completions_status = 200
    await asyncio.sleep(1.5)
    assert stage.instances.entries["node-0"].models[0].state == "ready"
    await serves_again(stage, "r2")


async def test_a_server_without_token_ids_is_refused_by_name(nats_settings):
    async with completions_server(names_ids=False) as server:
        engine = EndpointEngine(server.url, EndpointOptions())
        with pytest.raises(EngineFailed, match="by their ids") as refused:
            await engine.start()
        assert refused.value.is_final
        await engine.stop()


def test_arguments_of_a_server_are_checked_by_name():
    assert EndpointOptions.parse(["--max-num-seqs", "3"]).max_num_seqs == 3
    with pytest.raises(ValueError, match="--dtype"):
        EndpointOptions.parse(["--dtype", "auto"])
    with pytest.raises(ValueError, match="max-num-seqs"):
        EndpointOptions.parse(["--max-num-seqs", "many"])


def test_an_adapter_sees_nothing_of_our_environment_but_two_packages(tmp_path):
    from shared.runtime.engine_environments import EngineEnvironmentError, python_of, search_path

    path = search_path(tmp_path)
    assert sorted(os.listdir(path)) == ["services", "shared"]
    assert search_path(tmp_path) == path
    with pytest.raises(EngineEnvironmentError, match="tideway engine install vllm"):
        python_of("vllm", tmp_path)


def test_an_installation_tells_what_pip_does(tmp_path, monkeypatch, capsys):
    from shared.runtime import engine_environments
    from tideway import command

    pip = tmp_path / "vllm" / "venv" / "bin" / "python"
    pip.parent.mkdir(parents=True)
    pip.write_text(
        "#!/bin/sh\necho Collecting torch\necho Installing collected packages: a, b\necho ERROR: no >&2\nexit $CODE\n"
    )
    pip.chmod(0o755)
    monkeypatch.setenv("TIDEWAY_ENGINES_DIR", str(tmp_path))
    monkeypatch.setitem(engine_environments.RECIPES, ("vllm", "cpu"), engine_environments.Recipe(("a", "b")))
    monkeypatch.setenv("CODE", "1")
    with pytest.raises(command.OperatorError, match=r"-m pip install .* failed:\nCollecting torch\n.*\nERROR: no$"):
        command.install_engine("vllm", "cpu")
    monkeypatch.setenv("CODE", "0")
    command.install_engine("vllm", "cpu")
    said = capsys.readouterr().out
    assert "installing 2 packages" in said
    assert said.endswith(f"vllm for cpu is installed: {pip}\n")
