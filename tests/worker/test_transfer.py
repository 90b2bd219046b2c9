"""Arrays that go to a device in one copy arrive as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from services.worker.kv.transfer import Field, StaticInputs, pack, pack_to_device, unpack

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]

ARRAYS = st.lists(
    st.sampled_from(["int32", "int64", "float32", "bool"]).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=9))
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25)
@given(ARRAYS)
def test_what_is_packed_is_unpacked(values: list[np.ndarray]) -> None:
    packed, places = pack(values, pinned=False)
    for value, got in zip(values, unpack(packed, values, places), strict=True):
        np.testing.assert_array_equal(got.numpy(), value)
        assert got.numpy().dtype == value.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_packed_arrays_arrive(device: str) -> None:
    values = [np.arange(7, dtype=np.int64), np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2], np.ones(5, np.float32)]
    for value, got in zip(values, pack_to_device(values, torch.device(device)), strict=True):
        assert got.device.type == device
        np.testing.assert_array_equal(got.cpu().numpy(), value)


@pytest.mark.parametrize("device", DEVICES)
def test_static_inputs_are_filled_in_place(device: str) -> None:
    fields = {"a": Field(np.int64, 3), "b": Field(np.int32, 5), "c": Field(np.int32, 8)}
    inputs = StaticInputs(fields, torch.device(device))
    addresses = {name: tensor.data_ptr() for name, tensor in inputs.tensors.items()}
    for count in (8, 2, 5):
        a, b, c = np.full(3, count), np.arange(5, dtype=np.int64) + count, np.arange(count, dtype=np.int32)
        before = inputs.tensors["c"].tolist()
        inputs.fill({"c": c, "a": a, "b": b})
        assert inputs.tensors["a"].tolist() == a.tolist() and inputs.tensors["b"].tolist() == b.tolist()
        assert inputs.tensors["c"].tolist() == c.tolist() + before[count:]
    assert addresses == {name: tensor.data_ptr() for name, tensor in inputs.tensors.items()}
