"""Which requests' KV is copied to other instances while they run, in which order, and to whom.

What a lost instance computed is computed again elsewhere, unless somebody has a copy. That costs the more the longer a
request's context is, so short ones have none. Copies have what links and host memory leave: one transfer of an instance at a
time, after everything that somebody waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

MAX_HOLDERS = 4
"""Instances among which one's copies are divided, of each model: after a loss, that many go on with its requests."""
TRANSFER_BYTES = 8 << 20
"""About as much of the copies as travels at once; what somebody waits for may have to wait for the end of it."""


class BackupSettings(NamedTuple):
    """Which requests are worth a copy."""

    classes: str = "offline"
    """off | offline | all: of which requests."""
    min_tokens: int = 512
    """Known tokens, prompt and output, from which on one has a copy."""

    def is_worth(self, num_tokens: int, *, is_online: bool) -> bool:
        is_of_class = self.classes == "all" or (self.classes == "offline" and not is_online)
        return is_of_class and num_tokens >= self.min_tokens


NO_BACKUP = BackupSettings("off")


class Running(Protocol):
    """A request that runs."""

    @property
    def request_id(self) -> str: ...
    @property
    def is_online(self) -> bool: ...


def backup_key(running: Running, num_missing: int) -> tuple[int, int, str]:
    """Smallest is copied first: online requests, whose clients wait after a loss, then those that would lose the most.
    `num_missing`: blocks of it that nobody has a copy of."""
    return (not running.is_online, -num_missing, running.request_id)


def _weight(*names: str) -> bytes:
    return blake2b("/".join(names).encode(), digest_size=8).digest()


def choose_holders(source_id: str, here: str, others: Iterable[tuple[str, str]]) -> list[str]:
    """Instances that keep copies for `source_id`, which is on node `here`, `MAX_HOLDERS` at most. `others`: (instance id,
    node) of those that can. On other nodes, where there are any, since a node may be lost whole. Each source has others, and
    mostly the same whenever it asks (rendezvous hashing, Thaler and Ravishankar 1998)."""
    able = [*others]
    elsewhere = [name for name, node in able if node != here]
    names = elsewhere or [name for name, _ in able]
    return sorted(names, key=lambda name: (_weight(source_id, name), name))[:MAX_HOLDERS]


def holder_of(request_id: str, holders: Sequence[str]) -> str | None:
    """The one of the holders that keeps a request's copies; None: there are none."""
    return min(holders, key=lambda name: (_weight(request_id, name), name), default=None)
