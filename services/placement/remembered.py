"""The models, or adapters, that were configured last, outside of the store: in this process, and in a file where one is
named. What was added at run time comes back from there when NATS has lost its store. Whoever leads keeps what it changes; a
replica that stands by follows what is stored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from shared.bus.interface import Bus, BusError, KeyValue, Watch
from shared.messages.channels import Bucket, bucket_key
from shared.messages.cluster import AdapterSpec, ModelSpec
from shared.runtime.files import write_whole

logger = logging.getLogger(__name__)

RETRY_S = 1.0


Spec = TypeVar("Spec", bound=ModelSpec | AdapterSpec)


class Remembered(Generic[Spec]):
    def __init__(self, path: str, bucket: Bucket[Spec], decoder: msgspec.json.Decoder[list[Spec]]) -> None:
        """`path`: empty for no file."""
        self._path = Path(path) if path else None
        self._bucket: Bucket[Spec] = bucket
        self._decoder: msgspec.json.Decoder[list[Spec]] = decoder
        self._specs: list[Spec] = []
        self._writing = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    async def follow(self, bus: Bus, leads: Callable[[], bool]) -> None:
        """Until `stop`; not while this replica leads."""
        changed = asyncio.Event()
        changed.set()
        stored = await bus.key_value(self._bucket)
        watch = await stored.watch(lambda *_: changed.set())
        self._following = asyncio.create_task(self._follow(stored, watch, changed, leads), name="models stored")

    async def _follow(
        self, stored: KeyValue[Spec], watch: Watch[Spec], changed: asyncio.Event, leads: Callable[[], bool]
    ) -> None:
        try:
            while True:
                await changed.wait()
                changed.clear()
                try:
                    known = {spec.name: spec for spec in watch.entries.values()}
                    lost = await self.lost(stored, known)
                except BusError as error:
                    logger.info("what is stored is not known, trying again: %s", error)
                    changed.set()
                    await asyncio.sleep(RETRY_S)
                    continue
                if not leads():
                    await self.keep(known | {spec.name: spec for spec in lost})
        finally:
            await watch.stop()

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def lost(self, stored: KeyValue[Spec], known: Container[str]) -> list[Spec]:
        """Remembered specs that are not stored under `known` names, though nobody removed them: the store, or its part with
        them, was lost. Raises `BusError`."""
        absent = [spec for spec in await self.load() if spec.name not in known]
        return [spec for spec in absent if not await stored.is_deleted(bucket_key(spec.name))]

    async def load(self) -> list[Spec]:
        """None are known where nothing was kept, or where it cannot be read, which is logged."""
        if self._specs or self._path is None:
            return self._specs
        try:
            found: list[Spec] = self._decoder.decode(await asyncio.to_thread(self._path.read_bytes))
            return found
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            logger.error("%s cannot be read, so what was added at run time is lost: %s", self._path, error)
        return []

    async def keep(self, specs: Mapping[str, Spec]) -> None:
        """A file that cannot be written is logged: what is stored is what counts."""
        self._specs = list(specs.values())
        if self._path is not None:
            try:
                async with self._writing:
                    await asyncio.to_thread(
                        write_whole, self._path, msgspec.json.format(msgspec.json.encode(self._specs))
                    )
            except OSError as error:
                logger.error("%s does not have what is configured now: %s", self._path, error)
