"""Weights of models that were put away, in host memory: in an executor on a CPU, and moved between devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker.executor.executor import Executor
from services.worker.models.host_weights import HostWeights, Storages, tensors_of
from services.worker.models.loading import identity_of, load_model
from shared.messages.cluster import ModelSpec
from tests.e2e.checkpoints import make_llama

CPU = torch.device("cpu")
MERGED_BYTES = 1 << 22


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("host-weights") / "llama")


def executor(host_weights_bytes: int = 1 << 30) -> Executor:
    return Executor(CPU, 4, MERGED_BYTES, 2, host_weights_bytes=host_weights_bytes)


def put_away(one: Executor, name: str) -> bool:
    one.hold_weights(name)
    one.remove_model(name)
    return one.keep_weights(name)


def test_a_model_that_was_put_away_comes_back_without_being_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, spec = executor(), ModelSpec("a", str(folder))
    first = one.prepare_model(spec)
    one.add_model(first)
    assert put_away(one, "a") and one.has_weights("a")
    monkeypatch.setattr("services.worker.executor.preparing.load_model", lambda *_: pytest.fail("it is in host memory"))
    again = one.prepare_model(spec)
    assert again.model is first.model and again.vocabulary is first.vocabulary and not one.has_weights("a")
    one.add_model(again)


def test_without_room_or_another_checkpoint_it_is_read(folder: Path, tmp_path: Path) -> None:
    one = executor(host_weights_bytes=0)
    first = one.prepare_model(ModelSpec("a", str(folder)))
    one.add_model(first)
    assert not put_away(one, "a") and not one.has_weights("a")
    one = executor()
    one.add_model(one.prepare_model(ModelSpec("a", str(folder))))
    assert put_away(one, "a")
    other = one.prepare_model(ModelSpec("a", str(make_llama(tmp_path / "other", seed=1))))
    assert not one.has_weights("a"), "what is kept under the name is another model's"
    one.add_model(other)
    one.drop_weights("a")


def test_a_name_whose_weights_another_has_keeps_none(folder: Path) -> None:
    one = executor()
    for name in "ab":
        one.add_model(one.prepare_model(ModelSpec(name, str(folder))))
    assert not put_away(one, "a") and put_away(one, "b")


def test_those_put_away_first_make_room(folder: Path) -> None:
    free_bytes = 1 << 30
    identity = identity_of(folder, CPU)
    size = sum(num_bytes for _, num_bytes, _ in identity.files)
    kept = HostWeights(CPU, int(2.5 * size), lambda: free_bytes)
    models = {name: load_model(identity, CPU) for name in "abc"}
    assert all(kept.keep(name, identity, one, None) for name, one in models.items())
    assert [name in kept for name in "abc"] == [False, True, True]
    free_bytes = 0
    kept.make_room(1)
    assert [name in kept for name in "abc"] == [False, False, False]
    assert not HostWeights(CPU, -1, lambda: 0).keep("a", identity, models["a"], None) or size == 0


def test_storages_are_emptied_and_filled_again_with_all_views() -> None:
    """The CPU plays a GPU's part."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    model.register_buffer("view", model[0].weight.data[2:4].T)
    inputs = torch.randn(3, 8)
    with torch.inference_mode():
        expected, view = model(inputs), model.view.clone()
        storages = Storages(model, CPU)
        assert len({id(tensor) for tensor in tensors_of(model)}) == 5
        assert storages.num_bytes == 4 * (8 * 8 + 8 + 8 * 4 + 4)
        storages.to_host()
        assert model[0].weight.untyped_storage().nbytes() == 0 and storages.num_bytes == 4 * (8 * 8 + 8 + 8 * 4 + 4)
        storages.to_device()
        assert torch.equal(model(inputs), expected) and torch.equal(model.view, view)


def test_all_tensors_of_a_model_are_found(folder: Path) -> None:
    """Whatever has its weights: else they would stay on the device."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder)
    found = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(reference)}
    assert {parameter.untyped_storage().data_ptr() for parameter in reference.parameters()} <= found
