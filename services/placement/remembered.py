"""The models that were configured last, outside of the store: in this process, and in a file where one is named. What was
added at run time comes back from there when NATS has lost its store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shared.messages.cluster import ModelSpec

logger = logging.getLogger(__name__)


class RememberedModels:
    def __init__(self, path: str) -> None:
        """`path`: empty for no file."""
        self._path = Path(path) if path else None
        self._models: list[ModelSpec] = []

    async def load(self) -> list[ModelSpec]:
        """None are known where nothing was kept, or where it cannot be read, which is logged."""
        if self._models or self._path is None:
            return self._models
        try:
            return msgspec.json.decode(await asyncio.to_thread(self._path.read_bytes), type=list[ModelSpec])
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            logger.error("%s cannot be read, so models that were added at run time are lost: %s", self._path, error)
        return []

    async def keep(self, models: Mapping[str, ModelSpec]) -> None:
        """A file that cannot be written is logged: what is stored is what counts."""
        self._models = list(models.values())
        if self._path is not None:
            try:
                await asyncio.to_thread(_write, self._path, msgspec.json.format(msgspec.json.encode(self._models)))
            except OSError as error:
                logger.error("%s does not have the models as they are: %s", self._path, error)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(data)
    temporary.replace(path)
