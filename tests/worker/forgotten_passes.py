"""A process that computes layers again and again, and changes what it asked for as soon as it has come: a thread of the team
that reads it then computes layers that there are not. Run by test_native.py, as it may crash or hang."""

from __future__ import annotations

import ctypes

import torch

from services.worker.native.library import (
    BatchStruct,
    DecoderStruct,
    Kernels,
    KvStruct,
    LayerStruct,
    PackedWeight,
    PassStruct,
    RanksStruct,
    _library,
    address,
)

WIDTH = 32
NUM_THREADS = 4
NUM_PASSES = 1_000


def main() -> None:
    library = _library()
    assert library is not None
    kernels = Kernels(library, NUM_THREADS)
    norm = torch.ones(WIDTH)
    qkv, gate_up = (PackedWeight(torch.randn(n * WIDTH, WIDTH)) for n in (3, 2))
    out, down, gated = PackedWeight(torch.eye(WIDTH)), PackedWeight(torch.eye(WIDTH)), gate_up.gated("silu")
    layer = LayerStruct(address(norm), address(norm), None, None, qkv.struct, out.struct, gated.struct, down.struct, 0)
    decoder = DecoderStruct(ctypes.pointer(layer), WIDTH, WIDTH, 1, 1, WIDTH, 0, 0, 1e-6)
    zero, counts = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    blocks, starts = torch.zeros(2, dtype=torch.int32), torch.tensor([0, 1])
    batch = BatchStruct(
        1, 1, 1, 16, address(zero), address(counts), address(starts), address(blocks), address(blocks), address(zero)
    )
    pool = torch.zeros(2, 16, WIDTH)
    kv = KvStruct(address(pool[0]), address(pool[1]), 16 * WIDTH, 16 * WIDTH)
    work = [torch.zeros(n * WIDTH) for n in (1, 1, 1, 3, 1, 1)]
    hidden, pending, *scratch = map(address, work)
    rope = torch.zeros(WIDTH)
    nobody = RanksStruct(size=1)
    for _ in range(NUM_PASSES):
        asked = PassStruct(
            ctypes.pointer(batch), ctypes.pointer(kv), hidden, pending, address(rope), address(rope), *scratch, 0, 2, 0
        )
        kernels.run_parts(decoder, asked)
        asked.last, asked.ranks = 1 << 40, ctypes.pointer(nobody)
    print("done")


if __name__ == "__main__":
    main()
