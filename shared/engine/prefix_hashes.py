"""Hashes of a request's full blocks, as engines find them in their caches, without an engine."""

from __future__ import annotations

from collections.abc import Iterator

from shared.engine.memory.blocks import chain_hash, prefix_root, root_hash
from shared.messages.requests import GenerationRequest


def block_hashes(request: GenerationRequest, block_size: int, max_blocks: int) -> Iterator[bytes]:
    """Chained hashes of the full blocks of the prompt, and of the output that the request brings, but for the last token,
    which is computed in any case; those of `Sequence.extend_hashes`. Each is computed when it is asked for."""
    known = request.prompt + request.prior if request.prior else request.prompt
    num_blocks = min(max_blocks, (len(known) // 4 - 1) // block_size)
    if num_blocks <= 0:
        return
    adapter = "" if request.adapter is None else request.adapter.version
    previous = prefix_root(root_hash(request.model), adapter, request.prefix_salt)
    for image in request.images:  # for which all prompts have the same placeholders
        previous = chain_hash(previous, f"image {image.url}\n".encode() + image.data)
    for at in range(0, 4 * block_size * num_blocks, 4 * block_size):
        previous = chain_hash(previous, known[at : at + 4 * block_size])
        yield previous
