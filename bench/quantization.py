"""What products with weights of few bits take beside those in bfloat16, for a decode of 1 to 32 rows and a prefill of 256:
the linear layers of a 135M-parameter Llama, on one thread, by its processor time; and what rounding does to what they give.

    python -m bench.quantization [--rounds 5] [--layers 10]
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F

from services.worker.models.linear import Linear
from services.worker.models.quantized_linear import AnyLinear, quantized

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""[outputs, inputs] of a layer: queries, keys and values; attention's output; gate and up; down."""
ROWS = (1, 8, 32, 256)
KINDS = ("bfloat16", "int8", "int4")


def made(kind: str, weight: torch.Tensor) -> AnyLinear:
    return Linear(weight.clone()) if kind == "bfloat16" else quantized(weight, None, kind)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = [torch.randn(shape).mul_(0.02).bfloat16() for shape in SHAPES * arguments.layers]
    layers = {kind: [made(kind, weight) for weight in weights] for kind in KINDS}
    for kind in KINDS:
        x = torch.randn(64, SHAPES[0][1]).bfloat16()
        exact = F.linear(x.float(), weights[0].float())
        error = (layers[kind][0](x).float() - exact).norm() / exact.norm()
        print(f"{kind}: relative error of a product {error:.4f}")
    for rows in ROWS:
        inputs = {size: torch.randn(rows, size).bfloat16() for size in {shape[1] for shape in SHAPES}}
        least = dict.fromkeys(KINDS, float("inf"))
        for number in range(arguments.rounds):
            for kind in KINDS if number % 2 else KINDS[::-1]:
                begin = time.thread_time()
                for linear, weight in zip(layers[kind], weights, strict=True):
                    linear(inputs[weight.shape[1]])
                least[kind] = min(least[kind], time.thread_time() - begin)
        shown = ", ".join(f"{kind} {least['bfloat16'] / seconds:.2f}" for kind, seconds in least.items())
        print(f"{rows} rows: {1e3 * least['bfloat16']:.1f} ms; speed: {shown}", flush=True)


if __name__ == "__main__":
    main()
