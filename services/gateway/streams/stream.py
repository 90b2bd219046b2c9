"""One sequence on its way to a client: its output so far, who makes it, and what placing it again needs."""

from __future__ import annotations

from collections.abc import Callable

from shared.messages.requests import ErrorInfo, GenerationRequest, RequestClass
from shared.streams import StreamState

QUIET_S = 2.0
"""A stream without a frame for so long is asked after; each further time the wait doubles, up to `MAX_QUIET_S`."""
MAX_QUIET_S = 16.0


class Stream(StreamState):
    """The output of a sequence, and how this gateway hosts it."""

    def __init__(self, request: GenerationRequest, arrived_at: float, on_news: Callable[[], None]) -> None:
        """`on_news` is called after new tokens, the end or a failure, as all `listeners` are; it must not block.
        `request.timeout_s` counts from `arrived_at` (seconds on the bus's clock), when the client's request came."""
        super().__init__(request.request_id, request.sampling)
        self.failure: ErrorInfo | None = None
        """Set: the stream has ended without success."""
        self.model = request.model
        self.is_online = request.request_class is RequestClass.ONLINE
        self.deadline = arrived_at + request.timeout_s
        self.owner_incarnation: str | None = None
        self.is_open = True
        self.is_enough = False
        """Its client has all that it wants, though it may go on: a stop string came."""
        self.is_placing = False
        self.is_replaying = False
        self.must_place = False
        self.must_announce = False
        """A new scheduler came while this was being placed: the last one, whose answer is on its way, may have taken it."""
        self.heard_at = arrived_at
        self.first_token_at: float | None = None
        self.quiet_s = QUIET_S
        self.listeners = [on_news]
        """Called at news: readers, and who keeps it for those that may come."""
        self.is_kept = False
        """It goes on where this gateway ends: another one may have it then."""
        self.gateway_id = request.gateway_id
        """Whose address its frames go to."""
        self.holder = ""
        """The instance that keeps copies of its KV, as far as is known; empty: none does."""
        self._request = request
        self._arrived_at = arrived_at

    def on_news(self) -> None:
        for listener in tuple(self.listeners):
            listener()

    @property
    def num_tokens(self) -> int:
        return len(self._request.prompt) // 4 + len(self.tokens)

    def to_send(self, now: float) -> GenerationRequest:
        self.must_place = self.must_announce = False
        return self.placed_again(self._request, self._arrived_at, self.first_token_at, now)

    def begin_placement(self) -> None:
        super().begin_placement()
        self.owner_incarnation = None

    def owned_by(self, instance_id: str | None, incarnation: str | None = None) -> None:
        """`incarnation`: None where it is not known."""
        self.owner = instance_id
        self.owner_incarnation = incarnation

    def heard(self, now: float) -> None:
        self.heard_at = now
        self.quiet_s = QUIET_S
        if self.first_token_at is None and self.tokens:
            self.first_token_at = now
