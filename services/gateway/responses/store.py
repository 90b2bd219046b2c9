"""Responses that may be read and continued by their ids: in JetStream, for a day, within a bound in bytes."""

from __future__ import annotations

import logging
import re

import msgspec

from services.gateway.batch.files import is_id
from services.gateway.http.errors import ApiError, invalid
from services.gateway.metrics import GatewayMetrics
from services.gateway.requests.writes import ELECTION_S, patiently
from services.gateway.responses.conversion import items_of_output
from services.gateway.responses.messages import REFERENCE, InputItem, ResponseFailure, ResponseObject, ResponseStatus
from shared.bus.interface import Bus, BusError, KeyValue, RevisionConflict
from shared.messages.catalogue import RESPONSES
from shared.messages.channels import MAX_MESSAGE_BYTES
from shared.messages.responses import StoredResponse

logger = logging.getLogger(__name__)

ID_PREFIX = "resp_"
_ITEM_ID = re.compile(r"[a-z]+_(.+)_([0-9]{1,4})")
MAX_RESPONSE_BYTES = MAX_MESSAGE_BYTES - 4096
"""Most bytes of a response with its whole conversation."""

_ITEMS = msgspec.json.Decoder(list[InputItem])


class Answered(msgspec.Struct):
    """What is asked of a stored response."""

    status: ResponseStatus
    output: list[msgspec.Raw]
    background: bool = False

    @property
    def is_over(self) -> bool:
        return self.status not in ("queued", "in_progress")


_ANSWERED = msgspec.json.Decoder(Answered)


_RESPONSE = msgspec.json.Decoder(ResponseObject)


def response_of(stored: StoredResponse) -> ResponseObject:
    return _RESPONSE.decode(stored.body)


def item_id(prefix: str, response_id: str, index: int) -> str:
    """Id of an item of a response's output, which says whose it is: whoever makes the response again makes the same."""
    return f"{prefix}{response_id.removeprefix(ID_PREFIX)}_{index}"


def answered_of(stored: StoredResponse) -> Answered:
    return _ANSWERED.decode(stored.body)


class Responses:
    def __init__(self, bus: Bus, metrics: GatewayMetrics, max_bytes: int) -> None:
        self._bus = bus
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._stored: KeyValue[StoredResponse]

    async def start(self) -> None:
        self._stored = await self._bus.key_value(RESPONSES, max_bytes=self._max_bytes)

    async def keep(
        self, response: ResponseObject, tenant: str, items: list[InputItem], within_s: float = ELECTION_S
    ) -> BusError | None:
        """`items`: the conversation up to its answer. `within_s`: time for JetStream to take it. Where it cannot be kept its
        `store` says so, and a metric; what came of it, where NATS is why."""
        if not response.store:
            return None
        failure = None
        conversation = msgspec.json.encode(items + items_of_output(response.output))
        stored = StoredResponse(tenant, msgspec.json.encode(response), conversation)
        outcome = "stored"
        if len(stored.body) + len(stored.conversation) > MAX_RESPONSE_BYTES:
            outcome = "too_large"
        else:
            try:
                what = f"{response.id} is not stored"
                is_stored = await patiently(what, lambda: self._put(response.id, stored), within_s)
                outcome = "stored" if is_stored else "deleted"
            except BusError as error:
                outcome, failure = "failed", error
        response.store = outcome == "stored"
        self._metrics.stored_responses.labels(outcome).inc()
        return failure

    async def _put(self, response_id: str, stored: StoredResponse) -> bool:
        """Whether it is stored: one that was deleted stays so, whoever makes it still. Raises `BusError`."""
        while True:
            present = await self._stored.get(response_id)
            if present is None and await self._stored.is_deleted(response_id):
                return False
            try:
                if present is None:
                    await self._stored.create(response_id, stored)
                else:
                    await self._stored.update(response_id, stored, present.revision)
                return True
            except RevisionConflict:
                continue  # it was written or deleted at the same time

    async def get(self, response_id: str, tenant: str, param: str = "response_id") -> StoredResponse:
        """Raises `ApiError` 404, `BusError`."""
        entry = await self._stored.get(response_id) if is_id(response_id, ID_PREFIX) else None
        if entry is None or entry.value.tenant != tenant:
            message = f"There is no response '{response_id[:100]}': it is not kept any more, or never was."
            raise ApiError(404, message, param=param, code="response_not_found")
        return entry.value

    async def conversation(self, response_id: str, tenant: str) -> list[InputItem]:
        """Up to and with its answer. Raises as `get`, and `ApiError` 400 where it has none yet."""
        stored = await self.get(response_id, tenant, "previous_response_id")
        if not answered_of(stored).is_over:
            message = f"The response '{response_id}' is not over: it can be continued when it is."
            raise invalid("previous_response_id", message, "response_not_over")
        return _ITEMS.decode(stored.conversation)

    async def input_items(self, response_id: str, tenant: str) -> list[InputItem]:
        """The conversation up to its answer. Raises as `get`."""
        stored = await self.get(response_id, tenant)
        conversation = _ITEMS.decode(stored.conversation)
        num_answered = len(answered_of(stored).output)
        return conversation[: len(conversation) - num_answered]

    async def resolved(self, items: list[InputItem], tenant: str) -> list[InputItem]:
        """With items of stored responses in place of what refers to them. Raises `ApiError` 404, `BusError`."""
        outputs: dict[str, list[InputItem]] = {}
        found = []
        for item in items:
            if item.type == REFERENCE:
                item = await self._referenced(item.id or "", tenant, outputs)
            found.append(item)
        return found

    async def _referenced(self, item_id: str, tenant: str, outputs: dict[str, list[InputItem]]) -> InputItem:
        """`outputs`: of responses that were read before, by their ids. Raises as `resolved`."""
        place = _ITEM_ID.fullmatch(item_id)
        response_id, index = (ID_PREFIX + place[1], int(place[2])) if place else ("", 0)
        if place and response_id not in outputs:
            stored = await self.get(response_id, tenant, "input")
            conversation = _ITEMS.decode(stored.conversation)
            outputs[response_id] = conversation[len(conversation) - len(answered_of(stored).output) :]
        if index >= len(outputs.get(response_id, ())):
            message = f"There is no item '{item_id[:100]}' in the output of a stored response."
            raise ApiError(404, message, param="input", code="response_not_found")
        return outputs[response_id][index]

    async def fail(self, response_id: str, tenant: str, why: str) -> None:
        """One that is not over will never be. Raises as `get`."""
        stored = await self.get(response_id, tenant)
        response = _RESPONSE.decode(stored.body)
        if response.status in ("queued", "in_progress"):
            response.status, response.error = "failed", ResponseFailure("server_error", why)
            failed = StoredResponse(tenant, msgspec.json.encode(response), stored.conversation)
            await self._put(response_id, failed)

    async def delete(self, response_id: str, tenant: str) -> None:
        """Removes a response for good: a mark keeps a gateway that still makes it from storing it. Responses that continue
        it keep what they have of it. Raises as `get`."""
        await self.get(response_id, tenant)
        await patiently(f"{response_id} is not deleted", lambda: self._stored.delete(response_id), ELECTION_S)
