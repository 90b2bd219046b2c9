"""The requests that this scheduler knows, and where each of them stands.

    QUEUED -----> DISPATCHING -----> ASSIGNED -----> (forgotten: ended, lost, replaced or expired)
      ^   refused   |     | unknown
      +-------------+     v
      +---- not held -- ASKING -- held --> ASSIGNED

A QUEUED request stands in the global queue. DISPATCHING: the submit call to the instance is under way. ASKING: that call's
outcome is unknown and the instance was asked what it holds. ASSIGNED: the instance accepted it; its prompt is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from shared.messages.requests import GenerationRequest, HeldRequest, Priority, RequestClass
from shared.policies.prefix_fetch import Fetch

FOUND_EXPIRY_S = 3600.0
"""After which a request that was found on an instance is forgotten: only the instance knows its deadline."""


class RequestState(Enum):
    QUEUED = auto()
    DISPATCHING = auto()
    ASKING = auto()
    ASSIGNED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class TrackedRequest:
    """One request id in its newest epoch. Times are on the scheduler's clock."""

    request_id: str
    gateway_id: str
    model: str
    is_online: bool
    epoch: int
    gateway_epoch: int
    """The highest that the gateway is known to know; the scheduler may have raised it since."""
    number: int
    """Order of arrival here; breaks ties."""
    arrived_s: float
    """Arrival at the system: the time waited before counts."""
    submitted_s: float
    """Arrival here."""
    deadline_s: float
    state: RequestState
    since_s: float
    """Time at which it entered `state`."""
    request: GenerationRequest | None = None
    """Kept until an instance has accepted it."""
    order_state: Any = None
    """The order policy's."""
    tenant: str = ""
    tenant_weight: float = 1.0
    is_counted: bool = False
    """Among those of its tenant (tenants.py)."""
    promised_s: float | None = None
    """Service that was promised to its tenant with its dispatch; None: it is on no instance, or not counted there."""
    key: tuple[float, ...] = ()
    """Place in its lane of the queue."""
    is_unfit: bool = False
    """It stands in the queue and is too long for all that serve its model now."""
    num_ahead: int = 0
    """Length of the queue at its arrival."""
    instance_id: str = ""
    """Instance on which it is being dispatched, asked for or assigned."""
    chosen_for: tuple[str, float] = ("", 0.0)
    """Why the dispatcher chose its instance, and how free that was."""
    decoder: str = ""
    """The instance that it is handed over to when its prompt is computed; empty: it stays."""
    fetch: Fetch | None = None
    """From where its instance is to fetch its prompt's beginning; None: from nowhere."""
    attempts: int = 0
    num_failures: int = 0
    """Attempts that failed inside an instance (not refusals)."""
    older_owners: dict[str, int] = field(default_factory=dict)
    """Instances that may still run it in an older epoch, with that epoch."""
    is_cancelled: bool = False
    is_confirmed: bool = True
    """False: the instance is its owner by what another one said, and has not said so itself."""
    has_ended: bool = False
    """A report named its end before the submit call returned."""

    @property
    def last_ran_s(self) -> float:
        """A request in the queue has not run as far as its order goes."""
        return self.arrived_s

    @property
    def is_high(self) -> bool:
        """An online request of high priority that is in the queue or on its way."""
        return self.is_online and self.request is not None and self.request.priority == Priority.HIGH

    @property
    def is_rescued(self) -> bool:
        """Whether an instance that had made output for it does not go on with it."""
        return self.request is not None and bool(self.request.prior)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt) // 4 if self.request else 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and the output that the client has."""
        return (len(self.request.prompt) + len(self.request.prior)) // 4 if self.request else 0

    @property
    def num_tokens_at_most(self) -> int:
        """Tokens at its longest (`max_tokens` includes the prior output)."""
        return len(self.request.prompt) // 4 + self.request.sampling.max_tokens if self.request else 0

    @classmethod
    def submitted(cls, request: GenerationRequest, number: int, num_ahead: int, now: float) -> TrackedRequest:
        return cls(
            request_id=request.request_id,
            gateway_id=request.gateway_id,
            model=request.model,
            is_online=request.request_class == RequestClass.ONLINE,
            epoch=request.epoch,
            gateway_epoch=request.epoch,
            number=number,
            arrived_s=now - request.waited_s,
            submitted_s=now,
            deadline_s=now + request.timeout_s,
            state=RequestState.QUEUED,
            since_s=now,
            request=request,
            num_ahead=num_ahead,
            tenant=request.tenant,
            tenant_weight=request.tenant_weight,
        )

    @classmethod
    def held(cls, held: HeldRequest, instance_id: str, number: int, now: float) -> TrackedRequest:
        """A request first heard of from the instance that holds it."""
        return cls(
            request_id=held.request_id,
            gateway_id=held.gateway_id,
            model=held.model,
            is_online=held.is_online,
            epoch=held.epoch,
            gateway_epoch=held.epoch,
            number=number,
            arrived_s=now,
            submitted_s=now,
            deadline_s=now + FOUND_EXPIRY_S,
            state=RequestState.ASSIGNED,
            since_s=now,
            instance_id=instance_id,
            tenant=held.tenant,
            tenant_weight=held.tenant_weight,
        )


class RequestTable:
    """All known requests by id, and by the instance on which they are (being) placed."""

    def __init__(self) -> None:
        self._by_id: dict[str, TrackedRequest] = {}
        self._by_instance: dict[str, dict[str, TrackedRequest]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> TrackedRequest | None:
        return self._by_id.get(request_id)

    def on_instance(self, instance_id: str) -> list[TrackedRequest]:
        return list(self._by_instance.get(instance_id, {}).values())

    def add(self, tracked: TrackedRequest) -> None:
        assert tracked.request_id not in self._by_id
        self._by_id[tracked.request_id] = tracked
        if tracked.instance_id:
            self._by_instance.setdefault(tracked.instance_id, {})[tracked.request_id] = tracked

    def remove(self, tracked: TrackedRequest) -> None:
        del self._by_id[tracked.request_id]
        self._leave(tracked)

    def move(self, tracked: TrackedRequest, state: RequestState, instance_id: str, now: float) -> None:
        """The only place where a request changes its state; `instance_id` is empty exactly for QUEUED."""
        assert (state == RequestState.QUEUED) == (instance_id == "")
        if tracked.instance_id != instance_id:
            self._leave(tracked)
            if instance_id:
                self._by_instance.setdefault(instance_id, {})[tracked.request_id] = tracked
        tracked.instance_id, tracked.state, tracked.since_s = instance_id, state, now
        if state == RequestState.ASSIGNED:
            tracked.request = None

    def _leave(self, tracked: TrackedRequest) -> None:
        if tracked.instance_id:
            placed = self._by_instance[tracked.instance_id]
            del placed[tracked.request_id]
            if not placed:
                del self._by_instance[tracked.instance_id]
