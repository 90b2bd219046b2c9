"""Which attention back ends an executor has; chosen once at its start. `python -m services.worker.attention.choice` prints
what those of this machine's GPUs take, as JSON, for the node agent, which does not import torch."""

from __future__ import annotations

import logging

import msgspec
import torch

from services.worker.attention.compiled_backend import CompiledBackend
from services.worker.attention.interface import AttentionBackend
from services.worker.attention.tile_backend import SMALL_SEGMENT_KEYS, SMALL_TILE_ROWS, TileBackend
from services.worker.attention.torch_backend import TorchBackend
from services.worker.native.library import kernels

logger = logging.getLogger(__name__)


def choose_backends(device: torch.device, *, deterministic: bool = False) -> list[AttentionBackend]:
    """Fastest first. A model takes the first that runs its heads in its dtype; torch, the last, runs all. `deterministic`:
    those whose result for a token depends on its sequence alone."""
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
    print(msgspec.json.encode([backend.facts for backend in choose_backends(torch.device("cuda"))]).decode())
