"""Plugin of pytest: `-p tests.emulated_cuda.plugin` makes the emulated device this process's, and each test fails in which
an access was in no order, memory was given back too early, or a copy that should not wait does."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.emulated_cuda import runtime

runtime.install()

from transformers import PreTrainedModel  # noqa: E402

from services.worker.kv.kv_store import KvStore  # noqa: E402
from tests.emulated_cuda import flashinfer, nccl  # noqa: E402
from tests.emulated_cuda.tensors import DeviceTensor, device  # noqa: E402
from tests.stalls import whatever_the_machine_does  # noqa: E402
from tests.worker import checkpoints  # noqa: E402

flashinfer.install(sys.modules)
nccl.install()
for name in ("reference_outputs", "write_checkpoint"):
    # What the device is held against is computed without it.
    setattr(checkpoints, name, runtime.host_alone()(getattr(checkpoints, name)))
# It builds models in the host's memory, in modes of its own.
PreTrainedModel.from_pretrained = classmethod(runtime.host_alone()(PreTrainedModel.from_pretrained.__func__))
_made = KvStore.__init__


def _with_scratch(self: KvStore, *args: object, **kwargs: object) -> None:
    """Whatever lands in the scratch block, in whatever order, is read by nobody."""
    _made(self, *args, **kwargs)  # type: ignore[arg-type]
    if isinstance(self.slab, DeviceTensor):
        device.exempt.append(device.span(self.slab.inner[self.num_merged * self.merged_bytes :]))


KvStore.__init__ = _with_scratch  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _no_reports() -> Iterator[None]:
    device.reports.clear()
    device.syncs.clear()
    yield
    found = [f"{report.kind}: {report.text}" for report in device.reports]
    device.reports.clear()
    device.exempt.clear()
    with whatever_the_machine_does():
        assert not found, "\n".join(found)


@pytest.fixture(params=["2.11", "2.12", "2.14"])
def torch_version(request: pytest.FixtureRequest) -> Iterator[str]:
    """Version of torch whose behaviour after a failed capture the device has."""
    device.torch_version = request.param
    yield request.param
    device.torch_version = "2.13"
    for pool in device._pools.values():
        pool.is_recording = False
