"""`tideway profile` measures a checkpoint, prints what it found and stores it where instances look."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from shared.bus.nats_bus import NatsBus
from shared.costs.model import CostModel, StepShape
from shared.messages.catalogue import COST_MODELS
from shared.messages.channels import bucket_key
from shared.runtime.settings import BusSettings
from tests.worker.checkpoints import write_checkpoint
from tideway import profile
from tideway.data_folder import OperatorError
from tideway.scenario import Setting, build, parse


@pytest.fixture(autouse=True)
def threads():
    """The command takes as many as an instance would."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*models: str, data_dir: Path, tensor_parallel: int = 1, hardware: Path | None = None) -> None:
    profile.profile(
        list(models), brief=True, instances=2, tensor_parallel=tensor_parallel, data_dir=data_dir, hardware=hardware
    )


def test_a_model_is_measured_and_stored(
    tmp_path: Path,
    nats_settings: BusSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TIDEWAY_NATS_URL", nats_settings.nats_url)
    monkeypatch.setenv("TIDEWAY_NATS_USER", nats_settings.nats_user)
    monkeypatch.setenv("TIDEWAY_NATS_PASSWORD", nats_settings.nats_password)
    monkeypatch.setenv("TIDEWAY_TOKEN_BUDGET", "100")
    path = write_checkpoint(tmp_path, "llama")
    run(f"small={path}", data_dir=tmp_path / "data")
    said = capsys.readouterr().out
    assert "Steps of small" in said and "held out" in said and "median error" in said and "and NATS." in said

    folder = tmp_path / "data" / profile.FOLDER
    (file,) = folder.rglob("*.json")
    stored = msgspec.json.decode(file.read_bytes(), type=CostModel)
    assert stored.num_layers == 3 and stored.fixed_s > 0 and 0 < stored.median_error < 1

    async def entries() -> dict[str, CostModel]:
        bus = await NatsBus.connect(nats_settings, "test", "test")
        bucket = await bus.key_value(COST_MODELS)
        found = {
            key: msgspec.json.decode(entry.value.cost_model, type=CostModel)
            for key, entry in (await bucket.entries()).items()
            if entry.value.key.startswith("LlamaForCausalLM_3-layers")
        }
        await bus.close()
        return found

    key = str(file.relative_to(folder)).removesuffix(".json")
    assert asyncio.run(entries()) == {key: stored}
    assert bucket_key("LlamaForCausalLM_3-layers") in key


def test_without_nats_the_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TIDEWAY_NATS_URL", raising=False)
    hardware, checkpoint = tmp_path / "mine.toml", write_checkpoint(tmp_path, "opt")
    run(f"small={checkpoint}", data_dir=tmp_path / "data", hardware=hardware)
    (file,) = (tmp_path / "data" / profile.FOLDER).rglob("*.json")
    said = capsys.readouterr().out
    assert f"Stored in {file}." in said and "Kind of device 'mine' written" in said

    model = {"name": "small", "checkpoint": str(checkpoint)}
    content = {
        "nodes": [{"hardware": "here", "devices": 2}],
        "hardware": {"here": {"file": str(hardware)}},
        "models": [model, model | {"name": "other"}],
        "traffic": [{"name": "t", "models": "small", "arrivals": "poisson:1", "prompt_tokens": 5, "output_tokens": 5}],
    }
    problem = build(Setting("test", parse(content), tmp_path)).problem
    small, other = problem.models
    measured = msgspec.json.decode(file.read_bytes(), type=CostModel)
    assert problem.nodes[0].kind == "cpu-here" and problem.nodes[0].memory_bytes > 1 << 20
    assert small.costs["cpu-here", 1] == measured
    # the same shape under a name that was not measured, by what was measured
    assert other.costs["cpu-here", 1].fixed_s == pytest.approx(measured.fixed_s, rel=0.05)


@pytest.mark.parametrize(("median", "p99", "is_told"), [(0.05, 0.2, False), (0.051, 0.1, True), (0.01, 0.21, True)])
def test_large_errors_are_told(median: float, p99: float, is_told: bool) -> None:
    seconds = dict.fromkeys(
        ("fixed_s", "prefill_token_s", "prefill_attention_s", "decode_s", "decode_context_s"), 0.001
    )
    doubt = profile.doubt_about(CostModel(**seconds, median_error=median, p99_error=p99))
    assert ("measure again" in doubt) is is_told


@pytest.mark.long
def test_several_devices_are_measured_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEWAY_NATS_URL", raising=False)
    monkeypatch.setenv("TIDEWAY_TOKEN_BUDGET", "32")
    monkeypatch.setenv("TIDEWAY_MAX_RUNNING", "2")
    run(str(write_checkpoint(tmp_path, "llama")), data_dir=tmp_path / "data", tensor_parallel=2)
    (file,) = (tmp_path / "data" / profile.FOLDER).rglob("*.json")
    assert file.name.endswith("tp2.json")
    # which part of so short a step its noise falls to, is chance
    assert msgspec.json.decode(file.read_bytes(), type=CostModel).predict(StepShape(0, 0.0, 1, 16)) > 0


def test_without_the_worker_it_says_where_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "services.worker.executor.profiled_steps", None)
    with pytest.raises(OperatorError, match="say in its container"):
        run(data_dir=tmp_path)


def test_what_is_no_checkpoint_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(OperatorError, match=r"config\.json"):
        run(str(tmp_path / "empty"), data_dir=tmp_path / "data")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(OperatorError, match="supported"):
        run(str(tmp_path / "empty"), data_dir=tmp_path / "data")
