"""`tideway up` with the real nats-server and quick stand-ins for the services."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import msgspec
import nats
import nats.errors
import pytest
from rich.console import Console

from services.worker.node.processes import STOP_MARGIN_S
from shared.messages.cluster import ModelSpec
from shared.runtime.settings import InstanceSettings, SettingsError
from tests.conftest import NatsServer
from tests.tideway.test_supervisor import is_alive, until
from tideway import readiness, status, tree
from tideway import up as up_module
from tideway.console import Reporter
from tideway.data_folder import DataFolder, OperatorError
from tideway.first_request import first_request
from tideway.preflight import REPOSITORY, free_ports
from tideway.supervisor import KILL_WAIT_S, Backoff, ProcessSpec
from tideway.tree import Service, UpOptions
from tideway.up import Up, _wanted

ROLES = {"scheduler": "plain", "placement": "placement", "worker": "worker", "gateway": "gateway"}
MODELS = [ModelSpec(name="tide", source="org/tide"), ModelSpec(name="ebb", source="org/ebb")]


class Run:
    """One `up` in this process, with what it printed."""

    def __init__(self, data_dir: Path, *, roles: dict[str, str] | None = None, **options: object) -> None:
        self.roles = ROLES | (roles or {})
        self.output = io.StringIO()
        defaults = {"models": MODELS, "port": free_ports(1)[0], "timeout_s": 30.0}
        self.options = UpOptions(data_dir=data_dir, **(defaults | options))  # type: ignore[arg-type]
        self.up = Up(
            self.options,
            Reporter(Console(file=self.output, width=400, highlight=False, soft_wrap=True)),
            make_services=self._services,
            free_memory_bytes=lambda: 4 << 30,
            backoff=Backoff(initial_s=0.05, ceiling_s=0.1),
        )
        self.task: asyncio.Task[None] | None = None

    def _services(self, options: UpOptions, bus: dict[str, str], passwords: Mapping[str, str]) -> list[Service]:
        common = {**bus, "FAKE_MODELS": msgspec.json.encode(options.models).decode(), "PYTHONPATH": str(REPOSITORY)}
        result = []
        for (name, role), port in zip(self.roles.items(), free_ports(len(self.roles)), strict=True):
            api_port = options.addresses.get(name, "").rpartition(":")[2]
            environment = {**common, "TIDEWAY_METRICS_PORT": str(port), "TIDEWAY_PORT": api_port}
            if name in passwords:
                environment |= {"TIDEWAY_NATS_USER": name, "TIDEWAY_NATS_PASSWORD": passwords[name]}
            command = [sys.executable, "-m", "tests.tideway.fake_service", role]
            grace_s = 0.2 if role == "deaf" else 5.0
            phase = 0 if name == "gateway" else 1
            result.append(Service(ProcessSpec(name, command, environment, phase, grace_s), port))
        return result

    @property
    def text(self) -> str:
        return self.output.getvalue()

    def start(self) -> asyncio.Task[None]:
        self.task = asyncio.create_task(self.up.run())
        return self.task

    async def until(self, condition: Callable[[], bool]) -> None:
        assert self.task is not None
        await until(lambda: self.task.done() or condition(), 40.0)  # type: ignore[union-attr]
        if self.task.done():
            self.task.result()
        assert condition(), self.text

    async def until_ready(self) -> None:
        self.start()
        await self.until(lambda: self.state()["phase"] == "ready")

    def state(self) -> dict[str, object]:
        path = self.options.data_dir / "state.json"
        return json.loads(path.read_text()) if path.exists() else {"phase": "", "processes": []}

    def pids(self) -> dict[str, int]:
        return {process["name"]: process["pid"] for process in self.state()["processes"]}  # type: ignore[attr-defined]

    async def stop(self) -> None:
        assert self.task is not None
        self.up.request_stop()
        await asyncio.wait_for(self.task, 20.0)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TIDEWAY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TIDEWAY_NODE_ID", "node")


async def test_everything_comes_up_is_kept_up_and_goes_down(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.until_ready()
    pids = run.pids()
    assert set(pids) == {"nats", "scheduler", "placement", "worker", "gateway"}
    for line in ("NATS version", "scheduler", "placement", "worker", "API on " + run.options.address,
                 "model tide on 1 instance", "model ebb on 1 instance"):  # fmt: skip
        assert line in run.text
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(run.options.address + "/ready")).status_code == 200

    os.kill(pids["scheduler"], signal.SIGKILL)
    await run.until(lambda: "scheduler was started again" in run.text)
    assert "scheduler ended (SIGKILL); it is started again in 0.1 s" in run.text
    assert run.pids()["scheduler"] != pids["scheduler"]

    pids = run.pids()
    await run.stop()
    assert not any(is_alive(pid) for pid in pids.values())
    assert not (tmp_path / "state.json").exists()
    assert run.text.rstrip().endswith("Stopped")


async def test_the_line_to_paste_is_one_that_a_shell_takes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.until_ready()
    await run.stop()
    match = re.search(r"^  curl (.* \\\n.*)$", run.text, re.MULTILINE)
    assert match is not None
    # shlex does not join lines as a shell does.
    words = shlex.split(match[1].replace("\\\n", ""))
    assert words[:2] == ["-N", run.options.address + "/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "tide"


@pytest.mark.parametrize(
    ("architecture", "path", "fields"),
    [
        ("BertForSequenceClassification", "/v1/rerank", {"model", "query", "documents"}),
        ("BertModel", "/v1/embeddings", {"model", "input"}),
        ("LlamaForCausalLM", "/v1/chat/completions", {"model", "messages", "stream"}),
    ],
)
def test_the_request_to_paste_is_one_that_the_model_answers(
    tmp_path: Path, architecture: str, path: str, fields: set[str]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": [architecture], "model_type": "bert", "num_labels": 1, "hidden_size": 8})
    )
    own = ModelSpec(name="own", source=str(tmp_path))
    found, body = first_request([own])
    assert (found, body.keys(), body["model"]) == (path, fields, "own")
    found, body = first_request([own, ModelSpec(name="tide", source="org/tide")])
    assert found == "/v1/chat/completions" and body["model"] == ("own" if path == found else "tide")


async def test_nats_wants_the_credentials_and_comes_back_with_them(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.until_ready()
    url = str(run.state()["nats_url"])
    with pytest.raises(nats.errors.Error):
        await nats.connect(url, allow_reconnect=False, connect_timeout=2)
    credentials = run.up._data.credentials()
    os.kill(run.pids()["nats"], signal.SIGKILL)
    await run.until(lambda: "nats was started again" in run.text)
    user, password = "operator", credentials.nats_passwords["operator"]
    client = await nats.connect(url, user=user, password=password, inbox_prefix="_INBOX.operator")
    assert client.max_payload == 1024 * 1024
    assert (await client.jetstream().get_last_msg("KV_tideway_plans", "$KV.tideway_plans.current")).data
    await client.close()
    await run.stop()
    config = tmp_path / "nats.conf"
    assert config.stat().st_mode & 0o077 == 0 and "127.0.0.1:" in config.read_text()
    assert json.loads(config.read_text())["jetstream"]["sync_interval"] == "1s", "what a power loss may take"


async def test_what_runs_and_does_not_answer_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWAY_WATCHDOG_S", "1.5")
    for module, deadline in (
        (readiness, "PROBE_TIMEOUT_S"),
        (readiness, "RESPONSE_TIMEOUT_S"),
        (status, "CONNECT_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, deadline, 0.5)
    run = Run(tmp_path)
    await run.until_ready()
    pids = run.pids()
    output = io.StringIO()
    for name in ("nats", "gateway"):
        os.kill(pids[name], signal.SIGSTOP)
    with contextlib.suppress(OperatorError):  # NATS does not answer
        await status.show_status(DataFolder(tmp_path), Console(file=output, width=200))
    assert f"Tideway is not ready on {run.options.address}" in output.getvalue()
    for name in ("nats", "gateway"):
        await run.until(lambda name=name: f"{name} was started again" in run.text)  # type: ignore[misc]
        assert f"{name} ended (it has not answered for 1.5 s, and was killed); it is started again in" in run.text
    assert not is_alive(pids["gateway"])
    async with httpx.AsyncClient(trust_env=False) as http:
        await until_answered(http, run.options.address + "/ready")
    await run.stop()


async def until_answered(http: httpx.AsyncClient, url: str) -> None:
    async with asyncio.timeout(20):
        while await readiness.answers(http, url)() is None:
            await asyncio.sleep(0.05)


async def test_stopping_in_the_middle_of_the_start(tmp_path: Path) -> None:
    run = Run(tmp_path, roles={"gateway": "plain"})  # never ready
    run.start()
    await run.until(lambda: len(run.pids()) == 5)
    pids = run.pids()
    await run.stop()
    assert not any(is_alive(pid) for pid in pids.values())


async def test_a_process_that_does_not_stop_is_killed_and_named(tmp_path: Path) -> None:
    run = Run(tmp_path, roles={"scheduler": "deaf"})
    await run.until_ready()
    await run.stop()
    assert "scheduler did not stop in time and was killed" in run.text


async def test_a_service_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    run = Run(tmp_path, roles={"placement": "broken"})
    with pytest.raises(OperatorError) as failure:
        await run.start()
    assert "placement does not start (exit code 1)" in str(failure.value)
    assert "  | the cause stands here" in str(failure.value)
    assert not any(is_alive(pid) for pid in run.pids().values())


async def test_a_service_that_refuses_its_settings_is_quoted(tmp_path: Path) -> None:
    run = Run(tmp_path, roles={"worker": "refusing"})
    with pytest.raises(OperatorError, match=r"^worker: TIDEWAY_PORT='x': expected int$"):
        await run.start()


async def test_what_is_not_ready_in_time_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, roles={"gateway": "plain"}, timeout_s=8.0)
    with pytest.raises(OperatorError, match=r"Not ready in time: API\. The log of gateway ends:\n  \| plain starts"):
        await run.start()


async def test_a_model_that_cannot_be_placed_is_said_and_the_others_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "FAILURE_STANDS_AFTER_S", 0.2)
    huge, removed = ModelSpec(name="huge", source="none/huge"), ModelSpec(name="removed", source="removed/one")
    run = Run(tmp_path, models=[*MODELS, huge, removed])
    await run.until_ready()
    await run.stop()
    assert "model huge: it is too large" in run.text
    assert "model removed: it was removed while Tideway ran" in run.text
    assert "model tide on 1 instance" in run.text


async def test_models_of_an_earlier_start_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.until_ready()
    await run.stop()
    assert "earlier start" not in run.text
    run = Run(tmp_path, models=MODELS[:1])
    await run.until_ready()
    await run.stop()
    assert "model ebb is kept from an earlier start (DELETE /admin/models/ebb drops it)" in run.text


async def test_a_name_that_is_asked_for_with_another_checkpoint_has_that(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.until_ready()
    await run.stop()
    changed = ModelSpec("tide", "org/new", max_model_len=64, quantization="int8")
    run = Run(tmp_path, models=[changed, MODELS[1]])
    await run.until_ready()
    await run.stop()
    assert "model tide is org/new, quantization int8 now, and was org/tide" in run.text
    log = run.up._supervisor.children["gateway"].log_path.read_text()
    assert log.count("DELETE /admin/models/tide") == 1 and log.count("POST /admin/models") == 1
    body = json.loads(next(line for line in log.splitlines() if "org/new" in line).partition(" ")[2])
    assert body == {"name": "tide", "source": "org/new", "max_model_len": 64, "quantization": "int8"}
    # One that is refused leaves the earlier one.
    run = Run(tmp_path, models=[ModelSpec("tide", "bad/one"), MODELS[1]])
    with pytest.raises(OperatorError, match=r"model tide: its template is broken\. It stays what it was, org/tide"):
        await run.start()
    log = run.up._supervisor.children["gateway"].log_path.read_text()
    assert [json.loads(line.partition(" ")[2])["source"] for line in log.splitlines() if "{" in line][-2:] == [
        "bad/one",
        "org/tide",
    ]


async def test_a_changed_checkpoint_waits_for_a_placement_that_takes_over(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.until_ready()
    await run.stop()
    run = Run(tmp_path, models=[ModelSpec("tide", "late/one"), MODELS[1]])
    await run.until_ready()
    await run.stop()
    assert "model tide is late/one now, and was org/tide" in run.text
    log = run.up._supervisor.children["gateway"].log_path.read_text()
    assert log.count('"late/one"') == 3


async def test_a_name_that_is_asked_for_on_another_engine_or_on_demand_has_that(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.until_ready()
    await run.stop()
    hosted = ModelSpec("tide", "org/tide", engine="vllm", engine_args="--seed 1")
    on_demand = ModelSpec("ebb", "org/ebb", on_demand=True, idle_s=0.0)
    run = Run(tmp_path, models=[hosted, on_demand])
    await run.until_ready()
    await run.stop()
    assert "model tide is org/tide on the engine vllm now, and was org/tide" in run.text
    assert "model ebb is org/ebb, on demand and idle for 0 s now, and was org/ebb" in run.text
    log = run.up._supervisor.children["gateway"].log_path.read_text()
    assert [json.loads(line.partition(" ")[2]) for line in log.splitlines() if "{" in line] == [
        {"name": "tide", "source": "org/tide", "engine": "vllm", "engine_args": "--seed 1"},
        {"name": "ebb", "source": "org/ebb", "on_demand": True, "idle_s": 0.0},
    ]


async def test_a_name_that_is_asked_for_with_other_options_has_them(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.until_ready()
    await run.stop()
    changed = [
        ModelSpec("tide", "org/tide", quantization="int8"),
        ModelSpec("ebb", "org/ebb", tool_format="hermes", draft="org/d"),
    ]
    run = Run(tmp_path, models=changed)
    await run.until_ready()
    await run.stop()
    assert "model tide is org/tide, quantization int8 now, and was org/tide" in run.text
    assert "model ebb is org/ebb, tool format hermes, draft org/d now, and was org/ebb" in run.text


def test_what_a_later_start_does_not_say_stays() -> None:
    earlier = ModelSpec("tide", "org/tide", quantization="int8", draft="org/d", replicas=2)
    assert _wanted(earlier, ModelSpec("tide", "org/tide")) == earlier
    with_format = msgspec.structs.replace(earlier, tool_format="hermes")
    assert _wanted(earlier, ModelSpec("tide", "org/tide", tool_format="hermes")) == with_format
    other = ModelSpec("tide", "org/other", tool_format="hermes")
    assert _wanted(earlier, other) == other


async def test_what_was_drained_is_named_and_may_be_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "FAILURE_STANDS_AFTER_S", 0.2)
    monkeypatch.setenv("FAKE_DRAINING", '[["two", "three"], ["three"]]')
    run = Run(tmp_path)
    await run.until_ready()
    await run.stop()
    line = "drained earlier, and left out: two (tideway drain INSTANCE --undo brings one back)"
    assert line in run.text
    assert "  curl " in run.text
    run = Run(tmp_path, models=[ModelSpec(name="held", source="none/held")])
    await run.until_ready()
    await run.stop()
    assert line in run.text and "model held is on no instance: it is too large" in run.text
    assert "Ready in" in run.text and "  curl " not in run.text


async def test_all_gateways_are_waited_for_and_told(tmp_path: Path) -> None:
    run = Run(tmp_path, roles={"gateway-2": "gateway"}, num_gateways=2)
    await run.until_ready()
    await run.stop()
    first, second = run.options.addresses.values()
    assert f" s on {first}, {second}\n" in run.text
    assert f"API on {first}\n" in run.text and f"API on {second}\n" in run.text


async def test_a_placement_that_was_chosen_earlier_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen in ("", "1"):
        monkeypatch.setenv("FAKE_CHOSEN", chosen)
        run = Run(tmp_path)
        await run.until_ready()
        await run.stop()
        told = "stays, whatever --instances and --tensor-parallel say (tideway plan --set FILE"
        assert (told in " ".join(run.text.split())) == bool(chosen)


async def test_no_model_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "FAILURE_STANDS_AFTER_S", 0.2)
    run = Run(tmp_path, models=[ModelSpec(name="huge", source="none/huge")])
    with pytest.raises(OperatorError, match="No model can be served"):
        await run.start()
    assert "model huge: it is too large" in run.text


async def test_a_second_one_on_the_same_folder(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.until_ready()
    # A lock is its process's, so the second one must be another process.
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tideway", "up", "--data-dir", str(tmp_path), "--model", "a/b",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY,
    )  # fmt: skip
    _, error = await second.communicate()
    assert second.returncode == 2
    assert re.fullmatch(
        rf"tideway: Tideway runs here already on {re.escape(run.options.address)} \(process {os.getpid()}\)\..*\n",
        error.decode(),
    )
    await run.stop()


async def test_a_taken_port_and_too_little_memory_start_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.up._free_memory_bytes = lambda: 1 << 30
    with pytest.raises(OperatorError, match=r"Only 1\.0 GB of memory are free"):
        await run.start()
    with socket.socket() as other:
        other.bind(("127.0.0.1", run.options.port))
        other.listen()
        with pytest.raises(OperatorError, match=f"Port {run.options.port} on 127.0.0.1 is taken"):
            await Run(tmp_path, port=run.options.port).start()
    assert list((tmp_path / "logs").iterdir()) == []


async def test_a_store_that_nats_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "nats").write_text("not a folder")
    with pytest.raises(OperatorError, match=r"nats does not start .* If its store is damaged, move .*/nats away"):
        await Run(tmp_path).start()


def test_settings_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWAY_MAX_IN_FLIGHT", "many")
    with pytest.raises(SettingsError, match="TIDEWAY_MAX_IN_FLIGHT='many': expected int"):
        Run(tmp_path)


async def test_an_external_nats(tmp_path: Path, nats_server: NatsServer, nats_settings: object) -> None:
    run = Run(tmp_path, nats_url=nats_server.url)
    await run.until_ready()
    assert "nats" not in run.pids()
    await run.stop()


async def test_an_external_nats_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up_module, "NATS_TIMEOUT_S", 0.5)
    with pytest.raises(OperatorError, match=r"NATS at nats://127.0.0.1:\d+ does not answer"):
        await Run(tmp_path, nats_url=f"nats://127.0.0.1:{free_ports(1)[0]}").start()


def test_api_keys_get_a_key_for_admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWAY_API_KEYS", "secret")
    run = Run(tmp_path)
    assert run.up._admin_key() == {"TIDEWAY_ADMIN_API_KEY": run.up._data.credentials().admin_api_key}
    monkeypatch.setenv("TIDEWAY_ADMIN_API_KEY", "mine")
    assert Run(tmp_path).up._admin_key() == {}


def test_the_services_get_the_time_and_the_room_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(**options: int) -> dict[str, ProcessSpec]:
        up = UpOptions(models=MODELS, data_dir=tmp_path, **options)  # type: ignore[arg-type]
        return {service.spec.name: service.spec for service in tree.services(up, {}, {})}

    specs = made(num_instances=2, max_instances=6)
    assert specs["worker"].environment["TIDEWAY_NUM_INSTANCES"] == "2"
    assert specs["worker"].environment["TIDEWAY_MAX_NODE_INSTANCES"] == "6"
    assert made(tensor_parallel=2)["worker"].environment["TIDEWAY_TENSOR_PARALLEL"] == "2"
    assert all("TIDEWAY_MAX_NODE_INSTANCES" not in spec.environment for name, spec in specs.items() if name != "worker")
    gateways = [spec for name, spec in made(num_gateways=2, port=9000).items() if name.startswith("gateway")]
    assert [gateway.environment["TIDEWAY_PORT"] for gateway in gateways] == ["9000", "9001"]
    assert specs["worker"].stop_grace_s > InstanceSettings().drain_grace_s + STOP_MARGIN_S
    nats = tree.nats_spec("nats-server", DataFolder(tmp_path))

    def stop_s() -> float:
        by_phase: dict[int, float] = {}
        for spec in (*made().values(), nats):
            by_phase[spec.stop_phase] = max(by_phase.get(spec.stop_phase, 0.0), spec.stop_grace_s + KILL_WAIT_S)
        return sum(by_phase.values())

    assert stop_s() < tree.down_timeout_s(), "`tideway down` waits for all of it"
    monkeypatch.setenv("TIDEWAY_DRAIN_GRACE_S", "60")
    assert made()["worker"].stop_grace_s > 60 + STOP_MARGIN_S
    assert stop_s() < tree.down_timeout_s()
