"""Prints how many tokens a KV block has on this machine's GPUs, for the node agent, which does not import torch:
`python -m services.worker.attention.probe`."""

from __future__ import annotations

import torch

from services.worker.attention.choice import choose_backends

HEAD_DIM, DTYPE = 128, torch.bfloat16
"""Of ordinary models. Where a model's heads need another back end its blocks are no larger."""


def page_tokens(device: torch.device) -> int:
    return next(pages[0] for b in choose_backends(device) if (pages := b.supported_page_tokens(HEAD_DIM, DTYPE)))


if __name__ == "__main__":
    print(page_tokens(torch.device("cuda")))
