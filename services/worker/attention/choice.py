"""Which attention back ends an executor has; chosen once at its start.

`python -m services.worker.attention.choice DEVICE` prints as JSON what those of this machine's GPUs (`cuda`) or of its CPU
(`cpu`) take. It is for the node agent, which does not import torch.

Other packages bring back ends as entry points of the group `tideway.attention_backends`. Each is called with the device, and
what it makes goes before those here. One that raises is left out, with a warning.
"""

from __future__ import annotations

import logging
import sys

import msgspec
import torch

from services.worker.attention.compiled_backend import CompiledBackend
from services.worker.attention.interface import AttentionBackend
from services.worker.attention.tile_backend import SMALL_SEGMENT_KEYS, SMALL_TILE_ROWS, TileBackend
from services.worker.attention.torch_backend import TorchBackend
from services.worker.native.library import kernels
from shared.plugins import import_path, installed

logger = logging.getLogger(__name__)


def choose_backends(device: torch.device, *, deterministic: bool = False) -> list[AttentionBackend]:
    """Fastest first. A model takes the first that runs its heads in its dtype; torch, the last, runs all. `deterministic`:
    those whose result for a token depends on its sequence alone, none of other packages."""
    return [*([] if deterministic else _brought(device)), *_own(device, deterministic)]


def _brought(device: torch.device) -> list[AttentionBackend]:
    """Those of other packages that run here."""
    found: list[AttentionBackend] = []
    for name, point in installed("tideway.attention_backends").items():
        try:
            found.append(import_path(point.value, "attention back end")(device))
        except Exception as error:  # whatever a module of somebody else raises
            logger.warning("attention back end %r is not used: %s", name, error)
    return found


def _own(device: torch.device, deterministic: bool) -> list[AttentionBackend]:
    fallbacks: list[AttentionBackend] = [TorchBackend(device)]
    if deterministic:
        small = TileBackend(device, decode_rows=SMALL_TILE_ROWS, key_step=SMALL_SEGMENT_KEYS)
        fallbacks = [small, TileBackend(device)]
    if device.type != "cuda":
        compiled = kernels()
        return fallbacks if compiled is None else [CompiledBackend(compiled), *fallbacks]
    from services.worker.attention.flash_backend import FlashBackend, FlashUnavailable
    from services.worker.attention.flashinfer_backend import FlashInferBackend, FlashInferUnavailable

    found = fallbacks
    try:
        found.insert(0, FlashBackend(device, is_split=not deterministic))
    except FlashUnavailable as error:
        # Its text alone: a record that is kept would keep the model that is being loaded, by the frames of the error.
        logger.warning("flash attention is not used: %s", str(error))
    if not deterministic:  # how it divides a context over processors depends on what else is in the step
        try:
            has_flash = len(found) > 1
            found.insert(0, FlashInferBackend(device, found[0], takes_prompts=not has_flash))
        except FlashInferUnavailable as error:
            logger.warning("FlashInfer is not used: %s", str(error))
    return found


if __name__ == "__main__":
    print(msgspec.json.encode([backend.facts for backend in choose_backends(torch.device(sys.argv[1]))]).decode())
