"""The request that `tideway up` suggests: one that a model of those it serves can answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.messages.cluster import ModelSpec
from shared.models.checkpoint import CheckpointError, read_config, read_pooling
from shared.models.pooling import Pooling

QUESTION = "What is a compiler?"


def first_request(models: Sequence[ModelSpec]) -> tuple[str, dict[str, Any]]:
    """Path and body: of a chat, where a model writes text."""
    pooling = {spec.name: _pooling(spec) for spec in models}
    name = next((name for name, one in pooling.items() if one is None), models[0].name)
    if (pooled := pooling[name]) is None:
        return "/v1/chat/completions", {
            "model": name,
            "stream": True,
            "messages": [{"role": "user", "content": QUESTION}],
        }
    if pooled.task == "embed":
        return "/v1/embeddings", {"model": name, "input": QUESTION}
    documents = ["A program that translates programs.", "A kind of bread."]
    return "/v1/rerank", {"model": name, "query": QUESTION, "documents": documents}


def _pooling(spec: ModelSpec) -> Pooling | None:
    """What the model makes instead of text; None: it writes text, or its checkpoint is not on this machine."""
    try:
        folder = _folder(spec.source)
        return read_pooling(folder, read_config(folder))
    except (CheckpointError, OSError, ValueError):
        return None


def _folder(source: str) -> Path:
    """Folder of the checkpoint, without fetching it. Raises `OSError`, `ValueError`."""
    path = Path(os.path.expanduser(source))
    if path.is_dir() or source.startswith(("/", ".", "~")) or source.count("/") != 1:
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, local_files_only=True))
