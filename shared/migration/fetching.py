"""Prefixes that travel: blocks of a prompt that another instance has, fetched before the request is given to the engine. No
I/O; times are arguments.

    requester -> holder   FetchPrefix(hashes)
    holder -> requester   BackUp(those of them that it has), as for any backup (backup.py, holding.py)
    requester -> holder   BackupRooms
    holder => requester   the blocks, from device or host memory into host memory
    holder -> requester   PrefixSent | a typed error

| at the holder | event | next |
|---|---|---|
| | FetchPrefix, and the first of the blocks are here | asking; they are pinned |
| asking | there is room at the requester | sending |
| asking | refused, or there is none; no answer | over |
| sending | they arrived, or did not | over |

The requester waits for the answer, `WAIT_S` at most, and for blocks that have been sent until they are entered. Whatever
comes of it, the request is computed then, with what is there. Nobody owns anything by a fetch: what comes can be found until
the memory is needed.
"""

from __future__ import annotations

import msgspec

from shared.engine.calls import PinFound, Unpin
from shared.engine.handover import HASH_BYTES, PinnedBlocks
from shared.engine.prefix_hashes import block_hashes
from shared.messages.migration import BackUp, BackupPart, BackupRooms, FetchPrefix, PrefixSent
from shared.messages.requests import ErrorCode, ErrorInfo, GenerationRequest
from shared.migration import commands
from shared.migration.holding import BackupHolder
from shared.migration.limits import pool_of
from shared.migration.outgoing import Site
from shared.migration.questions import BlockBytes, FoundBlocks, NewId, Refusal
from shared.policies.prefix_fetch import MAX_SERVED, WAIT_S


class _Served(msgspec.Struct):
    """A fetch from here."""

    query: FetchPrefix
    pinned: PinnedBlocks
    num_sent: int = 0


class PrefixFetches:
    """Fetches into an instance, and those that it serves."""

    def __init__(self, site: Site, holder: BackupHolder, *, gives: bool) -> None:
        """`holder`: takes what comes. `gives`: others are given prefixes."""
        self._site = site
        self._gives = gives
        self._holder = holder
        holder.on_settled = self._on_settled
        self._asked: dict[str, str] = {}
        """By fetch id: the request, until it need not wait any more."""
        self._arriving: dict[str, int] = {}
        """By fetch id: blocks that were sent and are not entered yet."""
        self._served: dict[str, _Served] = {}
        """By fetch id."""
        self.is_stopping = False

    @property
    def num_served(self) -> int:
        """Fetches from here under way."""
        return len(self._served)

    def serves(self, fetch_id: str) -> bool:
        """Whether it is a fetch from here."""
        return fetch_id in self._served

    # ------------------------------------------------------------------------------------------------- into here

    def fetch(self, request: GenerationRequest, block_size: int, now: float) -> None:
        """Fetches what the request names of its prompt from whom it names, but for what is here. Ends with `Fetched`."""
        site, fetch_id = self._site, self._site.around.ask(NewId())
        self._asked[fetch_id] = request.request_id
        hashes = b"".join(block_hashes(request, block_size, request.prefix_tokens // block_size))
        num_here = site.around.ask(FoundBlocks(request.model, hashes))
        missing = hashes[num_here * HASH_BYTES :]
        if not missing or site.address is None or self.is_stopping:
            self._tell(fetch_id, "held" if hashes and not missing else "refused", 0)
            return
        query = FetchPrefix(fetch_id, site.instance_id, request.model, missing, block_size)
        site.say(commands.AskPrefix(fetch_id, request.prefix_holder, query, WAIT_S))

    def on_answer(self, fetch_id: str, sent: PrefixSent | None, error: ErrorInfo | None, now: float) -> None:
        """The holder's answer; neither: none came."""
        if sent is not None and self._holder.expects(fetch_id):
            self._arriving[fetch_id] = sent.num_blocks
        elif sent is not None:
            self._tell(fetch_id, "fetched", sent.num_blocks)
        else:
            is_answered = error is not None and error.code not in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE)
            self._tell(fetch_id, "refused" if is_answered else "late", 0)

    def _on_settled(self, fetch_id: str, is_in: bool) -> None:
        num_blocks = self._arriving.pop(fetch_id, None)
        if num_blocks is not None:
            self._tell(fetch_id, "fetched" if is_in else "failed", num_blocks if is_in else 0)

    def _tell(self, fetch_id: str, outcome: str, num_blocks: int) -> None:
        if (request_id := self._asked.pop(fetch_id, None)) is not None:
            self._site.say(commands.Fetched(fetch_id, request_id, outcome, num_blocks))

    # -------------------------------------------------------------------------------------------------- from here

    def on_fetch(self, query: FetchPrefix, now: float) -> None:
        """Answered by `AnswerPrefix`."""
        if query.fetch_id in self._served:
            return  # asked twice: the one answer goes to both
        refused = self._refusal(query)
        pinned = None if refused is not None else self._site.around.apply(PinFound(query.model, query.hashes))
        block_bytes = (
            None if pinned is None else self._site.around.ask(BlockBytes(pool_of(query.model, pinned.on_host)))
        )
        if pinned is None or block_bytes is None:
            gone = ErrorInfo(ErrorCode.GONE, "these blocks are not here any more")
            self._site.say(commands.AnswerPrefix(query.fetch_id, refused or gone))
            return
        self._served[query.fetch_id] = _Served(query, pinned)
        # No source: what comes of it is nobody's.
        asked = BackUp(
            backup_id=query.fetch_id,
            source_id="",
            model=query.model,
            parts=(BackupPart("", 0, pinned.hashes),),
            block_size=query.block_size,
            block_bytes=block_bytes,
            deadline_s=2 * WAIT_S,
            source_address=self._site.address or "",
        )
        self._site.say(commands.AskBackup(query.fetch_id, query.requester_id, asked, WAIT_S))

    def _refusal(self, query: FetchPrefix) -> ErrorInfo | None:
        if (refused := self._site.around.ask(Refusal(query.model, None))) is not None:
            return refused
        if not self._gives or self.is_stopping or self._site.address is None:
            return ErrorInfo(ErrorCode.GONE, "no prefixes are given from here")
        if len(self._served) >= MAX_SERVED:
            return ErrorInfo(ErrorCode.BUSY, f"{len(self._served)} prefixes are being sent already")
        if len(query.hashes) % HASH_BYTES:
            return ErrorInfo(ErrorCode.BAD_REQUEST, f"hashes are {HASH_BYTES} bytes each", "hashes")
        return None

    def on_rooms(self, fetch_id: str, reply: BackupRooms | ErrorInfo | None, now: float) -> None:
        """The requester's answer to BackUp; None: none came."""
        served = self._served[fetch_id]
        if not isinstance(reply, BackupRooms) or len(reply.rooms) != 1:
            error = reply if isinstance(reply, ErrorInfo) else None
            self._end(fetch_id, error or ErrorInfo(ErrorCode.UNAVAILABLE, "the requester did not answer"))
            return
        (room,) = reply.rooms
        blocks = served.pinned.blocks[room.num_held : room.num_taken]
        if not blocks or not reply.ticket:
            self._end(fetch_id, PrefixSent(fetch_id, 0))
            return
        served.num_sent = len(blocks)
        pool = pool_of(served.query.model, served.pinned.on_host)
        self._site.say(
            commands.SendBackup(fetch_id, reply.address, reply.ticket, pool, blocks, 2 * WAIT_S, is_urgent=True)
        )

    def on_sent(self, fetch_id: str, is_sent: bool, now: float) -> None:
        """The blocks are there, or will not be."""
        num_sent = self._served[fetch_id].num_sent
        failed = ErrorInfo(ErrorCode.INTERNAL, "the blocks did not arrive")
        self._end(fetch_id, PrefixSent(fetch_id, num_sent) if is_sent else failed)

    def _end(self, fetch_id: str, answer: PrefixSent | ErrorInfo) -> None:
        self._site.around.apply(Unpin(self._served.pop(fetch_id).pinned))
        self._site.say(commands.AnswerPrefix(fetch_id, answer))
