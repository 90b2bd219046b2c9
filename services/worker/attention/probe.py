"""Prints what the attention back ends of this machine's GPUs take, as JSON, for the node agent, which does not import torch:
`python -m services.worker.attention.probe`."""

from __future__ import annotations

import msgspec
import torch

from services.worker.attention.choice import choose_backends

if __name__ == "__main__":
    print(msgspec.json.encode([backend.facts for backend in choose_backends(torch.device("cuda"))]).decode())
