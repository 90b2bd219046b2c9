"""The scheduler's neighbours, played on the bus: instances that hold or generate, gateways that keep the stream's rules."""

from __future__ import annotations

import asyncio
import contextlib
import math
import zlib
from collections.abc import Awaitable, Callable

import msgspec

from shared.bus.interface import Bus, BusError, ServiceError, Subscription
from shared.messages.catalogue import (
    GATEWAY_FRAMES,
    GATEWAY_LOST,
    INSTANCE_CANCEL,
    INSTANCE_EXITED,
    INSTANCE_HELD,
    INSTANCE_SUBMIT,
    INSTANCES,
    LOAD_REPORTS,
    SCHEDULER_ANNOUNCE,
    SCHEDULER_CANCEL,
    SCHEDULER_SUBMIT,
)
from shared.messages.cluster import FinishedStats, InstanceExited, LeaseHolder
from shared.messages.requests import (
    Accepted,
    Cancel,
    ErrorCode,
    FinishReason,
    GenerationRequest,
    HeldRequest,
    HeldRequests,
    ListHeldRequests,
    LostRequest,
    RequestClass,
    RequestsLost,
    TokenEntry,
    TokenFrame,
    next_placement,
    pack_tokens,
    unpack_tokens,
)
from tests.shared.scheduling.samples import make_info, make_report

HEARTBEAT_S = 0.2
REPORT_DELAY_S = 0.01


async def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Returns when the condition is true; fails by the deadline."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def token_at(request_id: str, position: int) -> int:
    """The output that every instance generates: a function of the request alone, as with a seed."""
    return zlib.crc32(f"{request_id}/{position}".encode()) % 32000


class ScriptedInstance:
    """Holds what it is given until told to `finish` it, or generates (`seconds_per_token`)."""

    def __init__(
        self,
        bus: Bus,
        instance_id: str,
        *models: str,
        incarnation: str = "1",
        seconds_per_token: float | None = None,
        max_running: int = 8,
    ) -> None:
        self.bus = bus
        self.instance_id = instance_id
        self.incarnation = incarnation
        self.info = make_info(instance_id, *models, incarnation=incarnation)
        self.held: dict[str, GenerationRequest] = {}
        self.received: list[GenerationRequest] = []
        self.on_submit: Callable[[GenerationRequest], Awaitable[None]] | None = None
        """Runs first; may raise or never return."""
        self.is_answering_held = True
        self.offline_room = 100_000
        """Tokens, with those that it holds."""
        self._seconds_per_token = seconds_per_token
        self._max_running = max_running
        self._outputs: dict[str, list[int]] = {}
        self._arrived_s: dict[str, float] = {}
        self._admitted: list[str] = []
        self._ended: list[str] = []
        self._finished: list[FinishedStats] = []
        self._sequence = 0
        self._is_report_due = False
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        name = self.instance_id
        self._subscriptions = [
            await self.bus.serve(INSTANCE_SUBMIT.at(instance_id=name), self._submit),
            await self.bus.serve(INSTANCE_HELD.at(instance_id=name), self._list_held),
            await self.bus.subscribe(INSTANCE_CANCEL.at(instance_id=name), self._cancel),
        ]
        registry = await self.bus.key_value(INSTANCES)

        async def register() -> None:
            while True:
                with contextlib.suppress(BusError):
                    await registry.put(name, self.info)
                await asyncio.sleep(2 * HEARTBEAT_S)

        async def beat() -> None:
            while True:
                self.report()
                await asyncio.sleep(HEARTBEAT_S)

        self._tasks = [asyncio.create_task(register()), asyncio.create_task(beat())]
        if self._seconds_per_token is not None:
            self._tasks.append(asyncio.create_task(self._generate(self._seconds_per_token)))

    async def die(self, exit_code: int | None = None) -> None:
        """Without a word; with an exit code its node agent tells everyone."""
        for task in self._tasks:
            task.cancel()
        for subscription in self._subscriptions:
            await subscription.stop()
        if exit_code is not None:
            self.bus.publish(INSTANCE_EXITED, InstanceExited(self.instance_id, self.incarnation, "node", exit_code))

    def report(self) -> None:
        self._sequence += 1
        num_waiting = max(0, len(self.held) - self._max_running)
        report = make_report(
            self.instance_id,
            self._sequence,
            incarnation=self.incarnation,
            freeness=100.0 / len(self.held) if self.held else math.inf,
            num_running=len(self.held) - num_waiting,
            waiting={model.name: num_waiting for model in self.info.models},
            admitted=self._admitted,
            ended=self._ended,
            finished=self._finished,
            room=max(0, self.offline_room - self._held_offline_tokens()),
        )
        self._admitted, self._ended, self._finished = [], [], []
        self.bus.publish(LOAD_REPORTS, report)

    def _held_offline_tokens(self) -> int:
        offline = [request for request in self.held.values() if request.request_class == RequestClass.OFFLINE]
        return sum(len(request.prompt) // 4 + request.sampling.max_tokens for request in offline)

    def _report_soon(self) -> None:
        if not self._is_report_due:
            self._is_report_due = True
            asyncio.get_running_loop().call_later(REPORT_DELAY_S, self._report_now)

    def _report_now(self) -> None:
        self._is_report_due = False
        if not self._tasks or not self._tasks[0].cancelled():
            self.report()

    async def _submit(self, request: GenerationRequest) -> Accepted:
        self.received.append(request)
        if self.on_submit is not None:
            await self.on_submit(request)
        self.hold(request)
        return Accepted(request.request_id)

    def hold(self, request: GenerationRequest) -> None:
        known = self.held.get(request.request_id)
        if known is not None and known.epoch >= request.epoch:
            return
        self.held[request.request_id] = request
        self._outputs[request.request_id] = unpack_tokens(request.prior)
        self._arrived_s[request.request_id] = self.bus.now() - request.waited_s
        self._admitted.append(request.request_id)
        self._report_soon()

    async def _list_held(self, query: ListHeldRequests) -> HeldRequests:
        if not self.is_answering_held:
            raise ServiceError.of(ErrorCode.UNAVAILABLE, "not now")
        return HeldRequests(
            [
                HeldRequest(
                    request_id=r.request_id,
                    gateway_id=r.gateway_id,
                    epoch=r.epoch,
                    model=r.model,
                    num_tokens=1,
                    running=True,
                )
                for r in self.held.values()
            ]
        )

    def _cancel(self, cancel: Cancel) -> None:
        held = self.held.get(cancel.request_id)
        if held is not None and (cancel.epoch is None or held.epoch <= cancel.epoch):
            self.finish(cancel.request_id, FinishReason.CANCELLED)

    def emit(self, request_id: str, num_tokens: int, reason: FinishReason | None = None) -> None:
        """A frame with the next tokens of one request."""
        request, output = self.held[request_id], self._outputs[request_id]
        offset = len(output)
        output += [token_at(request_id, offset + index) for index in range(num_tokens)]
        entry = TokenEntry(
            request_id=request_id,
            epoch=request.epoch,
            offset=offset,
            tokens=pack_tokens(output[offset:]),
            finish_reason=reason,
        )
        self.bus.publish(GATEWAY_FRAMES.at(gateway_id=request.gateway_id), TokenFrame(self.instance_id, [entry]))

    def finish(self, request_id: str, reason: FinishReason = FinishReason.LENGTH, num_tokens: int = 0) -> None:
        self.emit(request_id, num_tokens, reason)
        request, output = self.held.pop(request_id), self._outputs.pop(request_id)
        num_prompt = len(request.prompt) // 4
        self._finished.append(
            FinishedStats(
                model=request.model,
                request_class=request.request_class,
                prompt_tokens=num_prompt,
                output_tokens=len(output),
                queued_s=0.0,
                execution_s=0.1,
                finish_reason=reason,
                device_s=0.05,
                latency_s=self.bus.now() - self._arrived_s.pop(request_id),
                is_ttft_met=True,
            )
        )
        self._ended.append(request_id)
        self._report_soon()

    async def _generate(self, seconds_per_token: float) -> None:
        while True:
            await asyncio.sleep(seconds_per_token)
            for request_id, request in list(self.held.items())[: self._max_running]:
                if len(self._outputs[request_id]) + 1 >= request.sampling.max_tokens:
                    self.finish(request_id, num_tokens=1)
                else:
                    self.emit(request_id, 1)


class ScriptedGateway:
    """Keeps the rules of a stream: tokens by offset, only from the highest epoch seen, one end."""

    def __init__(self, bus: Bus, gateway_id: str = "g0") -> None:
        self.bus = bus
        self.gateway_id = gateway_id
        self.frames: list[TokenFrame] = []
        self.lost: list[RequestsLost] = []
        self.announced: list[LeaseHolder] = []
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, TokenEntry] = {}
        self._unfinished: dict[str, GenerationRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.bus.subscribe(GATEWAY_FRAMES.at(gateway_id=self.gateway_id), self._on_frame)
        await self.bus.subscribe(GATEWAY_LOST.at(gateway_id=self.gateway_id), self._on_lost)
        await self.bus.subscribe(SCHEDULER_ANNOUNCE, self._on_announce)

    async def submit(self, request: GenerationRequest, timeout_s: float = 2.0) -> None:
        """Once; raises `BusError`."""
        self._unfinished.setdefault(request.request_id, request)
        self.outputs.setdefault(request.request_id, [])
        await self.bus.request(SCHEDULER_SUBMIT, request, timeout_s=timeout_s)

    async def submit_until_accepted(self, request_id: str) -> None:
        while (request := self._unfinished.get(request_id)) is not None:
            try:
                await self.submit(msgspec.structs.replace(request, prior=pack_tokens(self.outputs[request_id])))
                return
            except BusError as error:
                if error.code in (ErrorCode.TOO_LONG, ErrorCode.BAD_REQUEST):
                    raise
                await asyncio.sleep(0.05)

    def want(self, request: GenerationRequest) -> None:
        """Submits again and again, in the background, until it is accepted."""
        self._unfinished[request.request_id] = request
        self.outputs.setdefault(request.request_id, [])
        task = asyncio.create_task(self.submit_until_accepted(request.request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, request_id: str) -> None:
        self._unfinished.pop(request_id, None)
        self.bus.publish(SCHEDULER_CANCEL, Cancel(request_id))

    def end_of(self, request_id: str) -> FinishReason | None:
        return self.ends[request_id].finish_reason if request_id in self.ends else None

    def _on_frame(self, frame: TokenFrame) -> None:
        self.frames.append(frame)
        for entry in frame.entries:
            request = self._unfinished.get(entry.request_id)
            if request is None or entry.epoch < request.epoch:
                continue
            if entry.epoch > request.epoch:
                self._unfinished[entry.request_id] = msgspec.structs.replace(request, epoch=entry.epoch)
            output, tokens = self.outputs[entry.request_id], unpack_tokens(entry.tokens)
            assert entry.offset <= len(output), "a token is missing"
            output += tokens[len(output) - entry.offset :]
            if entry.finish_reason is not None:
                self.ends[entry.request_id] = entry
                del self._unfinished[entry.request_id]

    def _on_lost(self, lost: RequestsLost) -> None:
        self.lost.append(lost)
        for item in lost.requests:
            self._place_again(item)

    def _place_again(self, item: LostRequest) -> None:
        request = self._unfinished.get(item.request_id)
        if request is not None and item.epoch >= request.epoch:
            self.want(msgspec.structs.replace(request, epoch=next_placement(item.epoch)))

    def _on_announce(self, info: LeaseHolder) -> None:
        self.announced.append(info)
        for request in list(self._unfinished.values()):
            self.want(request)
