"""Several engines with fake executors and a fake transport: requests move between them, one event at a time.

Every event may be the last of a move: it is given up there and the request goes on, at one of the two ends. What clients
see is collected as a gateway would: only from the owner, without a gap or a repetition.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shared.engine.calls import (
    AddModel,
    Adopt,
    Cancel,
    Detach,
    EndMigration,
    Freeze,
    OnCopy,
    OnStep,
    OnTime,
    Pin,
    PinRest,
    Reattach,
    Release,
    Reserve,
    Submit,
    Unpin,
    Unreserve,
)
from shared.engine.engine import Engine
from shared.engine.handover import Detached, PinnedBlocks, Reservation, rebased
from shared.engine.plan import CopyKind, ModelShape, StepPlan, StepResult
from shared.engine.requests import Ended, Output
from shared.messages.migration import Commit, PreAllocate
from shared.messages.requests import (
    ErrorCode,
    FinishReason,
    GenerationRequest,
    Priority,
    RequestClass,
    next_placement,
    pack_tokens,
    unpack_tokens,
)
from tests.shared.engine.fake_executor import FakeExecutor, expected_output, mostly, next_token

REFUSALS = (ErrorCode.OVERLOADED, ErrorCode.TOO_LONG, ErrorCode.CONFLICT)


class Node:
    def __init__(
        self, engine: Engine, shapes: list[ModelShape], next_token: Callable[[list[int]], int] = next_token
    ) -> None:
        self.next_token = next_token
        self.engine = engine
        self.limits = {shape.name: engine.apply(AddModel(shape), 0.0).max_model_len for shape in shapes}
        self.num_rows = engine.memory.num_free_rows
        self.executor = FakeExecutor(shapes, next_token, mostly(next_token))
        self.in_flight: list[StepPlan] = []
        self.copies: list = []

    def plan(self, now: float) -> bool:
        plan = self.engine.plan(now)
        self.take_copies()
        if plan is not None:
            self.in_flight.append(plan)
            self.executor.launch(plan)
        return plan is not None

    def take_copies(self) -> None:
        """Takes copies as a driver does before whatever it does next."""
        self.copies.extend(self.executor.start(self.engine.next_copies()))

    def step_returns(self, now: float, fails: bool = False, share: float = 0.5) -> None:
        self.take_copies()
        plan = self.in_flight.pop(0)
        if self.engine.take_interrupt(now) == plan.step_id:
            self.engine.apply(OnStep(self.executor.suspend(plan, share)), now)
            return
        result = self.executor.execute(plan)
        self.engine.apply(OnStep(StepResult(plan.step_id, [], error="out of memory") if fails else result), now)

    def copy_ends(self, now: float, ok: bool = True) -> None:
        self.take_copies()
        copy = self.copies.pop(0)
        ok = ok or copy.kind == CopyKind.MOVE
        if ok:
            self.executor.copy(copy)
        self.engine.apply(OnCopy(copy.copy_id, ok), now)


class Moving:
    """One migration as its source drives it."""

    def __init__(self, number: int, request_id: str, source: Node, destination: Node) -> None:
        self.migration_id = f"m{number}"
        self.request_id = request_id
        self.source, self.destination = source, destination
        self.stage = 0
        self.num_sent = 0
        self.transfers: list[tuple[PinnedBlocks, Reservation]] = []
        """Under way."""
        self.ahead: list[int] | None = None
        """Blocks there for blocks that are not filled yet; the stage that announced them is the last."""
        self.is_leaving = False
        self.taken: Detached | None = None
        self.on_host = False
        self.has_all = False
        self.is_frozen = False
        self.is_committed = False


class Cluster:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.now = 0.0
        self.sent: dict[str, GenerationRequest] = {}
        self.limit: dict[str, int] = {}
        """Model length where it was submitted."""
        self.owner: dict[str, tuple[Node, int]] = {}
        """With the epoch."""
        self.output: dict[str, list[int]] = {}
        self.ended: dict[str, Ended] = {}
        self.moving: list[Moving] = []
        self.num_migrations = 0
        self.num_moved = 0

    # ------------------------------------------------------------------------------------------- what clients do

    def submit(self, node: Node, sent: GenerationRequest) -> bool:
        refused = node.engine.apply(Submit(sent), self.now)
        if refused is not None:
            assert refused.code in REFUSALS
            return False
        name = sent.request_id
        self.sent[name], self.limit[name] = sent, node.limits[sent.model]
        self.owner[name] = (node, sent.epoch)
        self.output[name] = unpack_tokens(sent.prior)
        return True

    def cancel(self, name: str) -> None:
        self.owner[name][0].engine.apply(Cancel(name), self.now)
        self.collect()

    def replace(self, name: str, cut: int) -> None:
        """Placed again where it is, after part of its output, whatever it is in the middle of there (but a hand-over)."""
        node, epoch = self.owner[name]
        sent = self.sent[name]
        fits = len(sent.prompt) // 4 + sent.sampling.max_tokens <= node.limits[sent.model]
        if not fits or any(m.request_id == name and m.is_frozen for m in self.moving):
            return
        prior = self.output[name][:cut]
        again = msgspec.structs.replace(sent, epoch=next_placement(epoch), prior=pack_tokens(prior))
        if node.engine.apply(Submit(again), self.now) is None:
            self.sent[name], self.output[name] = again, prior
            self.owner[name], self.limit[name] = (node, again.epoch), node.limits[sent.model]
        self.collect()

    # ----------------------------------------------------------------------------------------------------- moves

    def begin_move(self, source: Node, destination: Node, index: int, include_offline: bool = True) -> Moving | None:
        candidates = source.engine.migration_candidates(self.now, include_offline)
        if source is destination or not candidates:
            return None
        candidate = candidates[index % len(candidates)]
        if any(m.request_id == candidate.request.request_id for m in self.moving):
            return None
        self.num_migrations += 1
        moving = Moving(self.num_migrations, candidate.request.request_id, source, destination)
        self.moving.append(moving)
        if candidate.is_running:
            self.send_filled(moving)
        else:
            self.detach(moving)
        return moving

    def _pre_allocate(self, moving: Moving, pinned: PinnedBlocks, num_ahead: int = 0) -> None:
        sent = self.sent[moving.request_id]
        query = PreAllocate(
            migration_id=moving.migration_id,
            source_id="source",
            request_id=moving.request_id,
            model=pinned.model,
            request_class=sent.request_class,
            priority=sent.priority,
            stage=moving.stage,
            first_block=moving.num_sent,
            num_blocks=len(pinned.blocks) + num_ahead,
            hashes=pinned.hashes,
            block_size=moving.source.engine.memory.queues[pinned.model].shape.block_size,
            block_bytes=1,
            on_host=pinned.on_host,
            max_tokens=len(sent.prompt) // 4 + 1,
        )
        answer = moving.destination.engine.apply(Reserve(query), self.now)
        if not isinstance(answer, Reservation):
            assert answer.code in REFUSALS, answer
            moving.source.engine.apply(Unpin(pinned), 0.0)
            self.give_up(moving)
            return
        assert moving.destination.engine.apply(Reserve(query), self.now) == answer
        assert len(answer.blocks) + answer.num_held == len(pinned.blocks) + num_ahead
        num_blocks = len(answer.blocks) - num_ahead
        if num_ahead:
            moving.ahead = answer.blocks[num_blocks:]
        moving.stage += 1
        self._send(moving, pinned, msgspec.structs.replace(answer, blocks=answer.blocks[:num_blocks]))

    def _send(self, moving: Moving, pinned: PinnedBlocks, reservation: Reservation) -> None:
        moving.transfers.append((pinned, reservation))
        moving.num_sent += len(pinned.blocks)

    def announce_last(self, moving: Moving) -> None:
        """A stage with room for the blocks that will be filled, or begun, until it has left the batch."""
        if moving.is_leaving or moving.ahead is not None:
            return
        pinned = moving.source.engine.apply(Pin(moving.request_id, moving.num_sent), 0.0)
        if pinned is None:
            self.give_up(moving)
        else:
            self._pre_allocate(moving, pinned, num_ahead=2)

    def send_filled(self, moving: Moving) -> None:
        """A stage while it goes on."""
        if moving.is_leaving or moving.ahead is not None:
            return
        pinned = moving.source.engine.apply(Pin(moving.request_id, moving.num_sent), 0.0)
        if pinned is None:
            self.give_up(moving)
        elif pinned.blocks:
            self._pre_allocate(moving, pinned)

    def deliver(self, moving: Moving) -> None:
        """The oldest transfer under way arrives."""
        if not moving.transfers:
            return
        pinned, reservation = moving.transfers.pop(0)
        moving.source.take_copies()
        moving.destination.take_copies()
        source, destination = moving.source.executor, moving.destination.executor
        for block, other in zip(pinned.blocks[reservation.num_held :], reservation.blocks, strict=True):
            if pinned.on_host:
                destination._host[pinned.model, other] = list(source._host[pinned.model, block])
            else:
                destination._block(pinned.model, other)[:] = source._block(pinned.model, block)
        moving.source.engine.apply(Unpin(pinned), 0.0)

    def detach(self, moving: Moving) -> None:
        if moving.is_leaving:
            return
        if moving.source.engine.apply(Detach(moving.request_id), self.now):
            moving.is_leaving = True
            self.collect()
        else:
            self.give_up(moving)

    def send_rest(self, moving: Moving) -> None:
        if moving.taken is None or moving.has_all:
            return
        pinned = moving.source.engine.apply(PinRest(moving.request_id, moving.num_sent), 0.0)
        if pinned is None:
            self.give_up(moving)
            return
        moving.on_host = pinned.on_host
        moving.has_all = True
        if pinned.blocks and moving.ahead is None:
            self._pre_allocate(moving, pinned)
        elif len(pinned.blocks) > len(moving.ahead or []):
            moving.source.engine.apply(Unpin(pinned), 0.0)
            self.give_up(moving)
        elif pinned.blocks:
            self._send(moving, pinned, Reservation(moving.migration_id, 0, moving.ahead[: len(pinned.blocks)]))

    def freeze(self, moving: Moving) -> None:
        if not moving.has_all or moving.transfers or moving.is_frozen:
            return
        if moving.source.engine.apply(Freeze(moving.request_id), 0.0):
            moving.is_frozen = True
        else:
            self.give_up(moving)

    def commit(self, moving: Moving) -> None:
        if not moving.is_frozen or moving.is_committed:
            return
        assert moving.taken is not None
        request, progress = rebased(moving.taken.request, moving.taken.progress, self.now - moving.taken.taken_s)
        request = msgspec.structs.replace(request, epoch=request.epoch + 1)
        commit = Commit(moving.migration_id, "source", request, progress, moving.num_sent, moving.on_host)
        assert unpack_tokens(request.prior) == self.output[moving.request_id]
        refused = moving.destination.engine.apply(Adopt(commit), self.now)
        if refused is not None:
            assert refused.code in REFUSALS, refused
            self.give_up(moving)
            return
        moving.is_committed = True
        self.owner[moving.request_id] = (moving.destination, request.epoch)
        again = moving.destination.engine.apply(Adopt(commit), self.now)
        assert again is not None and again.code == ErrorCode.CONFLICT
        self.num_moved += 1

    def forget(self, moving: Moving) -> None:
        """The source hears of the commit."""
        if not moving.is_committed:
            return
        self.moving.remove(moving)
        if moving.source.engine.apply(Release(moving.request_id), self.now):
            moving.destination.engine.apply(Cancel(moving.request_id), self.now)
        self.collect()

    def give_up(self, moving: Moving, raise_epoch: bool = False) -> None:
        """At any point before the commit."""
        if moving.is_committed:
            return
        self.moving.remove(moving)
        for pinned, _ in moving.transfers:
            moving.source.engine.apply(Unpin(pinned), 0.0)
        moving.destination.engine.apply(Unreserve(moving.migration_id), 0.0)
        node, epoch = self.owner[moving.request_id]
        if moving.is_leaving:
            raised = epoch + 2 if raise_epoch and moving.is_frozen and node is moving.source else None
            moving.source.engine.apply(Reattach(moving.request_id, raised), self.now)
            if raised is not None and moving.request_id not in self.ended:
                self.owner[moving.request_id] = (node, raised)
        else:
            moving.source.engine.apply(EndMigration(moving.request_id), self.now)
        self.collect()

    # ------------------------------------------------------------------------------------------- what is seen of it

    def collect(self) -> None:
        for node in self.nodes:
            for effect in node.engine.effects():
                if isinstance(effect, Detached):
                    (moving,) = [m for m in self.moving if m.request_id == effect.request_id and m.source is node]
                    assert moving.is_leaving or moving.taken is None
                    moving.taken = effect
                elif isinstance(effect, Ended):
                    name = effect.request.request_id
                    if effect.request.epoch == self.owner[name][1]:
                        assert name not in self.ended, "a request ended twice"
                        assert self.owner[name][0] is node
                        self.ended[name] = effect
                else:
                    assert isinstance(effect, Output)
                    self._collect_output(node, effect)

    def _collect_output(self, node: Node, effect: Output) -> None:
        for entry in effect.entries:
            owner, epoch = self.owner[entry.request_id]
            assert owner is node, "two speak for a request"
            assert entry.epoch == epoch
            output = self.output[entry.request_id]
            assert entry.offset == len(output), "a repeated or missing token"
            output.extend(unpack_tokens(entry.tokens))

    def check(self) -> None:
        for node in self.nodes:
            node.engine.check()
            node.engine.load()
        for name in self.sent:
            # The source of a move that is committed has it too, but does nothing with it.
            holders = [node for node in self.nodes if node.engine.held(name) is not None]
            forgetting = [m.source for m in self.moving if m.request_id == name and m.is_committed]
            holders = [node for node in holders if node not in forgetting]
            assert holders == ([] if name in self.ended else [self.owner[name][0]])

    def finish(self) -> None:
        """With no more arrivals everything ends in bounded steps, nothing is left behind, and every output is that of a run
        without moves."""
        for _ in range(8000):
            self.now += 0.01
            for moving in list(self.moving):
                if moving.is_committed:
                    self.forget(moving)
                else:
                    self.give_up(moving)
            is_idle = True
            for node in self.nodes:
                while len(node.in_flight) < node.engine.steps.max_in_flight and node.plan(self.now):
                    pass
                node.take_copies()
                node.engine.apply(OnTime(), self.now)
                is_idle = is_idle and not node.in_flight and not node.copies and node.engine.memory.demand is None
                if node.in_flight:
                    node.step_returns(self.now)
                while node.copies:
                    node.copy_ends(self.now)
            self.collect()
            if is_idle:
                break
        self.check()
        assert set(self.ended) == set(self.sent)
        for node in self.nodes:
            engine = node.engine
            assert not engine.all_held() and engine.memory.num_free_rows == node.num_rows
            assert engine.pool.used_merged() == 0
            assert engine.memory.host.pool is None or engine.memory.host.pool.used_merged() == 0
        for name, ended in self.ended.items():
            expected = expected_output(self.sent[name], self.limit[name], self.nodes[0].next_token)
            if ended.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert self.output[name] == expected, name
                assert ended.num_output_tokens == len(expected)
            else:
                assert self.output[name] == expected[: len(self.output[name])], name


def classes(offline: bool, high: bool) -> dict[str, object]:
    return {
        "request_class": RequestClass.OFFLINE if offline else RequestClass.ONLINE,
        "priority": Priority.HIGH if high else Priority.NORMAL,
    }
