"""One link with the transfers on it: reads its control messages and fails the transfers when it breaks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

import numpy as np

from services.worker.kv_transport.errors import LinkError, TransferError, TransferReason
from services.worker.kv_transport.links import Link, name_of
from services.worker.kv_transport.receiving import Incoming
from services.worker.kv_transport.sending import Outgoing
from services.worker.kv_transport.wire import (
    CONTROL_BYTES,
    CONTROL_TAG,
    Accept,
    Cancel,
    Control,
    Ended,
    Open,
    Sent,
    decode_control,
    encode_control,
)
from shared.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)


class Connection:
    """`on_open` hears each Open; `on_lost` that the connection is of no further use."""

    def __init__(
        self,
        link: Link,
        tasks: TaskSet,
        on_open: Callable[[Connection, Open], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.link = link
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        self.is_lost = False
        self.has_opened = False
        """The peer has asked for a transfer."""
        self._numbers = itertools.count(1)
        self._tasks = tasks
        self._on_open = on_open
        self._on_lost = on_lost
        self._reader = tasks.start(self._read())

    @property
    def is_idle(self) -> bool:
        return not (self.outgoing or self.incoming)

    def new_transfer(self, outgoing: Outgoing) -> None:
        outgoing.transfer = next(self._numbers)
        self.outgoing[outgoing.transfer] = outgoing

    async def say(self, message: Control) -> None:
        """Raises `LinkError`."""
        await self.link.send(CONTROL_TAG, encode_control(message))

    async def lose(self, why: str, reason: TransferReason = TransferReason.PEER_LOST) -> None:
        """Breaks the link; every transfer on it fails."""
        if not self.is_lost:
            self.is_lost = True
            if not self.is_idle:
                logger.warning("the connection with %s is lost: %s", name_of(self.link.peer), why)
            for outgoing in self.outgoing.values():
                outgoing.fail(TransferError(reason, why))
            for incoming in self.incoming.values():
                incoming.fail(TransferError(reason, why))
                if not incoming.sent.done():
                    incoming.sent.set_exception(LinkError(why))
            self._on_lost(self)
            if self._reader is not asyncio.current_task():
                self._reader.cancel()
        await self.link.abort()

    async def _read(self) -> None:
        frame = np.zeros(CONTROL_BYTES, dtype=np.uint8)
        try:
            while True:
                await self.link.receive(CONTROL_TAG, frame)
                message = decode_control(frame)
                if isinstance(message, Open):
                    self.has_opened = True
                    self._on_open(self, message)
                elif isinstance(message, Sent):
                    if (incoming := self.incoming.get(message.transfer)) and not incoming.sent.done():
                        incoming.sent.set_result(message)
                elif (outgoing := self.outgoing.get(message.transfer)) is None:
                    continue  # it ended here in the meantime
                elif isinstance(message, Ended):
                    outgoing.end(message)
                elif isinstance(message, Cancel):
                    outgoing.stop()
                elif isinstance(message, Accept) and not outgoing.accepted.done():
                    outgoing.accepted.set_result(message)
        except LinkError as error:
            await self.lose(str(error))
