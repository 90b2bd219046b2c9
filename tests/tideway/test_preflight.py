from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shared.models.checkpoint import CheckpointMissing, resolve
from shared.runtime.settings import PlacementSettings
from shared.runtime.tls import is_loopback
from tideway.data_folder import DataFolder, OperatorError, State
from tideway.operations import source_told
from tideway.preflight import (
    check_memory,
    check_otlp,
    check_port,
    check_roles,
    check_specs,
    check_tensor_parallel,
    free_memory_bytes,
    free_ports,
    local_host,
    parse_adapters,
    parse_models,
    with_drafts,
    with_engines,
)


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


# ------------------------------------------------------------------------------------------------------- models


def test_models_from_folders_and_hub_ids(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "small")
    specs = parse_models([f"mine={folder}", str(folder), "theirs=org/model-1.5", "org/other"])
    assert [(spec.name, spec.source) for spec in specs] == [
        ("mine", str(folder)),
        ("small", str(folder)),
        ("theirs", "org/model-1.5"),
        ("org/other", "org/other"),
    ]


def test_a_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "models" / "small")
    monkeypatch.chdir(tmp_path)
    assert parse_models(["models/small"])[0].source == str(tmp_path / "models" / "small")


def test_models_on_demand(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text("{}")
    folder = str(tmp_path / "one")
    specs = parse_models(
        [f"a={folder},on-demand", f"b={folder},idle=30", f"c={folder},on-demand,idle=0.5", f"d={folder}"]
    )
    assert [(spec.on_demand, spec.idle_s) for spec in specs] == [(True, 300), (True, 30), (True, 0.5), (False, 300)]
    assert {spec.source for spec in specs} == {folder}
    with pytest.raises(OperatorError, match=r"idle=soon: expected a number of seconds"):
        parse_models([f"a={folder},idle=soon"])
    listed = PlacementSettings(models=f"a={folder},on-demand,idle=30,b={folder}").model_specs()
    assert [(spec.name, spec.on_demand, spec.idle_s) for spec in listed] == [("a", True, 30), ("b", False, 300)]


def test_what_placement_would_refuse_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "one")
    for argument, told in (
        (f"a={folder},idle=-1", "--model a: idle_s is -1: expected 0 to "),
        (f"a={folder},idle=1e9", "--model a: idle_s is 1e+09: expected 0 to "),
        (f"a b={folder}", "--model a b: 'a b' is no model name: "),
    ):
        with pytest.raises(OperatorError, match=re.escape(told)):
            check_specs(parse_models([argument]), [])
    served = with_engines(parse_models([f"a={folder}"]), ["endpoint"], [], ["nowhere"])
    with pytest.raises(OperatorError, match=re.escape("--model a: engine_url 'nowhere': expected http://")):
        check_specs(served, [])
    with pytest.raises(OperatorError, match=re.escape("--adapter ?: '?' is no model name")):
        check_specs([], parse_adapters(["?=a=one/two"], parse_models([f"a={folder}"])))


def test_the_home_of_an_unknown_user_is_no_folder() -> None:
    with pytest.raises(OperatorError, match="~nobody-here/x is neither a folder nor a Hugging Face id"):
        parse_models(["a=~nobody-here/x"])
    with pytest.raises(CheckpointMissing, match="'~nobody-here/x' does not exist"):
        resolve("~nobody-here/x")
    assert source_told("~nobody-here/x") == "~nobody-here/x"
    assert source_told("") == "", "not the folder where the command runs"


def test_the_demonstration_models_are_the_default() -> None:
    assert [spec.name for spec in parse_models([])] == ["tideway-demo-llama", "tideway-demo-opt"]
    assert {spec.quantization for spec in parse_models([], "int8")} == {"int8"}
    with pytest.raises(OperatorError, match="--quantization int3 is not one of int8, int4, fp8"):
        parse_models([], "int3")


def test_how_models_write_calls_of_tools() -> None:
    models = ["a=org/a", "b=org/b"]
    specs = parse_models(models, "", ["b=llama3", "hermes"])
    assert [spec.tool_format for spec in specs] == ["hermes", "llama3"]
    assert [spec.tool_format for spec in parse_models(models)] == ["", ""]
    for argument, sentence in (("xml", "--tool-format xml: write one of harmony"), ("c=json", "no model is named c")):
        with pytest.raises(OperatorError, match=sentence):
            parse_models(models, "", [argument])


def test_draft_models_are_of_all_models_or_of_one(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "small")
    models = parse_models(["a=org/a", "b=org/b"])
    specs = with_drafts(models, [f"b={folder}", "org/small"])
    assert [spec.draft for spec in specs] == ["org/small", str(folder)]
    with pytest.raises(OperatorError, match="neither a folder nor a Hugging Face id"):
        with_drafts(models, ["b=missing"])


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["m=./missing"], "neither a folder nor a Hugging Face id"),
        (["m=/no/such/folder"], "neither a folder nor a Hugging Face id"),
        (["no-slash"], "neither a folder nor a Hugging Face id"),
        (["m="], "neither a folder nor a Hugging Face id"),
        (["m=a/b", "m=c/d"], "Two models are named m"),
        (["m=/"], "holds no config.json"),
    ],
)
def test_models_that_cannot_be(arguments: list[str], sentence: str) -> None:
    with pytest.raises(OperatorError, match=sentence):
        parse_models(arguments)


@pytest.mark.parametrize(
    "file, text, source, sentence",
    [
        ("adapter_config.json", '{"base_model_name_or_path": "org/base"}', "", "is an adapter of org/base"),
        ("model.gguf", "", "", r"holds GGUF files \(model\.gguf\), which are not supported"),
        ("model.gguf", "", "model.gguf", "is a GGUF file, which is not supported"),
    ],
)
def test_a_model_of_another_form_is_told(tmp_path: Path, file: str, text: str, source: str, sentence: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(OperatorError, match=sentence):
        parse_models([f"m={tmp_path / source}"])


# ------------------------------------------------------------------------------------------------------ network


def test_a_taken_port_is_named_with_a_way_out() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OperatorError, match=rf"Port {port} on 127.0.0.1 is taken.*--port {port + 1}"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    with pytest.raises(OperatorError, match="65535 is the last"):
        check_port("127.0.0.1", 65536)


def test_a_host_that_is_none() -> None:
    with pytest.raises(OperatorError, match="is no address to listen on"):
        check_port("no.such.host.invalid", 8000)
    with pytest.raises(OperatorError, match=r"Nothing can listen on 192\.0\.2\.1:8000"):
        check_port("192.0.2.1", 8000)


def test_free_ports_are_in_a_row() -> None:
    ports = free_ports(20)
    assert ports == list(range(ports[0], ports[0] + 20))
    assert ports[-1] < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]), "of no connection"
    for port in ports:
        check_port("127.0.0.1", port)


def test_hosts() -> None:
    assert [local_host(host) for host in ("127.0.0.1", "0.0.0.0", "::", "::1", "example")] == [
        "127.0.0.1", "127.0.0.1", "[::1]", "[::1]", "example"
    ]  # fmt: skip
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example")


# ------------------------------------------------------------------------------------------------------- memory


def test_memory_is_the_least_of_machine_and_control_group(tmp_path: Path) -> None:
    def write(**files: object) -> None:
        for name, value in files.items():
            path = tmp_path / name.replace("__", "/").replace("_stat", ".stat").replace("memory_", "memory.")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")

    assert free_memory_bytes(tmp_path) is None
    write(proc__meminfo="MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:    4194304 kB")
    assert free_memory_bytes(tmp_path) == 4 << 30
    group = "sys__fs__cgroup__memory_"
    write(**{group + "max": "max", group + "current": 1000, group + "stat": "anon 5\ninactive_file 0"})
    assert free_memory_bytes(tmp_path) == 4 << 30
    write(**{group + "max": 3 << 30, group + "current": 2 << 30})
    assert free_memory_bytes(tmp_path) == 1 << 30
    write(**{group + "stat": f"anon 5\ninactive_file {1 << 30}"})
    assert free_memory_bytes(tmp_path) == 2 << 30
    write(**{group + "current": 5 << 30})
    assert free_memory_bytes(tmp_path) == 0


def test_too_little_memory() -> None:
    check_memory(None)
    check_memory(2 << 30)
    with pytest.raises(OperatorError, match=r"Only 1\.5 GB of memory are free"):
        check_memory(3 << 29)


# -------------------------------------------------------------------------------------------------- data folder


def test_credentials_are_made_once_and_private(tmp_path: Path) -> None:
    data = DataFolder(tmp_path / "data")
    data.prepare()
    credentials = data.credentials()
    assert len(set(credentials.nats_passwords.values())) == 5
    assert all(len(password) >= 24 for password in credentials.nats_passwords.values())
    assert DataFolder(tmp_path / "data").credentials() == credentials
    assert stat.S_IMODE((tmp_path / "data" / "credentials.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


def test_damaged_credentials(tmp_path: Path) -> None:
    data = DataFolder(tmp_path)
    (tmp_path / "credentials.json").write_text('{"nats_user": 3')
    with pytest.raises(OperatorError, match=r"credentials\.json cannot be read .* Remove it"):
        data.credentials()


def test_a_data_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorError, match=r"The data folder .*file cannot be used"):
        DataFolder(tmp_path / "file").prepare()


def test_one_supervisor_at_a_time(tmp_path: Path) -> None:
    script = f"""
import os, pathlib, sys
from shared.runtime.settings import PlacementSettings
from tideway.data_folder import DataFolder
data = DataFolder(pathlib.Path({str(tmp_path)!r}))
data.acquire()
print(os.getpid(), flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    data = DataFolder(tmp_path)
    assert data.holder_pid() == holder.pid
    with pytest.raises(OperatorError, match=rf"Tideway runs here already \(process {holder.pid}\)"):
        data.acquire()
    holder.communicate("")
    assert data.holder_pid() is None
    data.acquire()
    assert data.holder_pid() == os.getpid()
    data.release()


def test_state_is_read_back_and_nonsense_is_none(tmp_path: Path) -> None:
    data = DataFolder(tmp_path)
    assert data.read_state() is None
    state = State(pid=1, phase="ready", address="http://a", nats_url="nats://b", started_unix_s=1.5, processes=[])
    data.write_state(state)
    assert data.read_state() == state
    (tmp_path / "state.json").write_text("[]")
    assert data.read_state() is None


def test_weights_are_cut_in_halves() -> None:
    for num_ranks in (1, 2, 4, 8):
        check_tensor_parallel(num_ranks)
    with pytest.raises(OperatorError, match=r"--tensor-parallel 6: .* power of two"):
        check_tensor_parallel(6)


@pytest.mark.parametrize("roles", ["prefill,boss", "prefill,", "prefill, decode"])
def test_roles_of_instances_are_known_ones(roles: str) -> None:
    for known in ("", "auto", "prefill,decode,both,auto"):
        check_roles(known)
    with pytest.raises(OperatorError, match=rf"--role {roles}: '.*' is none of both, prefill, decode, auto\."):
        check_roles(roles)


def test_where_traces_go_is_a_url() -> None:
    for url in ("", "http://127.0.0.1:4318", "https://collector/otlp"):
        check_otlp(url)
    for url in ("127.0.0.1:4318", "localhost:4318", "nonsense", "http://", "grpc://collector:4317", "http://["):
        with pytest.raises(OperatorError, match=r"--otlp .*http://127\.0\.0\.1:4318"):
            check_otlp(url)


def test_engines_of_models_are_told_for_all_or_for_one() -> None:
    models = parse_models(["a=org/a", "b=org/b"])
    specs = with_engines(models, ["b=vllm"], ["b=--max-num-seqs 8"], ["a=http://127.0.0.1:8100"])
    assert [(spec.engine, spec.engine_args, spec.engine_url) for spec in specs] == [
        ("endpoint", "", "http://127.0.0.1:8100"),
        ("vllm", "--max-num-seqs 8", ""),
    ]
    assert {spec.engine for spec in with_engines(models, ["vllm"], ["--dtype=float32"], [])} == {"vllm"}
    with pytest.raises(OperatorError, match="--engine sglang: write one of native, vllm, endpoint"):
        with_engines(models, ["sglang"], [], [])
    with pytest.raises(OperatorError, match="--engine a=vllm"):
        with_engines(models, [], ["--max-num-seqs 8"], [])
    with pytest.raises(OperatorError, match="--engine-url"):
        with_engines(models, ["endpoint"], [], [])
