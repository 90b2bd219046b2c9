"""The executor of an instance of several devices, as rank 0 has it: what it is told to do, all ranks do in the same order.

Each rank has an `Executor` of its part of the models. Rank 0 sends what it is told to the others and then does its own part;
no answer is awaited while steps run. They compute the same from the same plans, and meet in the models' collective calls
(group.py); the tokens that count are those of rank 0.

A rank that is lost, or fails where others do not, leaves the group of no more use: `on_lost` ends the process, whatever its
threads wait for. The node agent starts the instance again, and its requests go on elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from services.worker.executor.executor import Executor
from services.worker.executor.first_steps import UNSOUND
from services.worker.executor.grammars import Compiled, GrammarCounters
from services.worker.executor.preparing import PreparedModel
from services.worker.kv.kv_store import BlockParts, KvBlocks, WindowedBlocks
from services.worker.ranks.group import GroupError, RankGroup
from services.worker.ranks.messages import (
    Add,
    Answer,
    Check,
    Claim,
    Close,
    CompileGrammar,
    Copy,
    CopyEnded,
    DropAdapter,
    DropWeights,
    EnterTokens,
    Failed,
    Forget,
    FromRank,
    Launch,
    LoadAdapter,
    MoveWindow,
    Prepare,
    Ready,
    Remove,
    SetLayersPerSafepoint,
    StepEnded,
    StepFailed,
    ToRank,
    framed,
)
from shared.engine.plan import CopyKind, EndedCopy, KvCopy, ModelShape, StepPlan, StepResult
from shared.messages.cluster import ModelSpec
from shared.messages.requests import Adapter
from shared.models.checkpoint import CheckpointError, CheckpointMissing

if TYPE_CHECKING:
    from services.worker.ranks.starting import RankProcess

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 60.0
"""Time for the other ranks, after rank 0 has done its part."""
READ_TIMEOUT_S = 900.0
"""Time limit where each rank reads files of its own. One that dies is noticed at once."""
SAMPLE_TIMEOUT_S = 2.5 * ANSWER_TIMEOUT_S
"""Time for the stages after the first, whose grammars may take `MAX_MASK_WAIT_S`; more than a step may take
(STUCK_STEP_S)."""
AGREE_TIMEOUT_S = 10.0
"""A step that fails on one rank has failed on all by then; else the ranks are not where they should be."""
CLOSE_TIMEOUT_S = 5.0


def end_process(reason: str) -> None:
    """Not by an exception: the thread that would raise it may wait for the rank that is lost."""
    logger.critical("the instance ends: %s", reason)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1)


class Prepared:
    """A model that all ranks have read."""

    def __init__(self, number: int, own: PreparedModel) -> None:
        self.number = number
        self.own = own


class _Call:
    """The answers of the other ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._missing = num_ranks
        self.answers: list[Answer] = []
        self.done = threading.Event()

    def add(self, answer: Answer) -> None:
        self.answers.append(answer)
        if len(self.answers) == self._missing:
            self.done.set()


class GroupExecutor:
    """Executor of a group of ranks. Which thread may call what is as in `Executor`."""

    def __init__(
        self,
        others: Sequence[RankProcess],
        folder: Path,
        join: Callable[[], tuple[Executor, RankGroup]],
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        """`others` know their set-up; `join` finds them. `folder` is removed at the end. Raises `GroupError`."""
        self._others = others
        self._folder = folder
        self._on_lost = on_lost
        self._lock = threading.Lock()
        """Lock of what the listening threads write."""
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0
        self._copies: dict[int, tuple[int, bool]] = {}
        """By id: ranks that have not ended it, and whether those that have succeeded."""
        self._ended_copies: deque[tuple[int, bool]] = deque()
        self._copy_s: dict[int, float] = {}
        """How long copies took on rank 0."""
        self._on_copy_finished: Callable[[], None] = lambda: None
        self._window_lock = threading.Lock()
        """Also held while a model comes, for then ranks answer nothing else, and while one goes: else it would on some ranks
        before its blocks are moved, and on others after it."""
        self._num_collected = 0
        self._forgotten: deque[int] = deque()
        """Prepared models that nobody has any more: told with the next message, as they may go at any time."""
        self._changes = threading.Condition(self._lock)
        self._failed_here: set[int] = set()
        self._held: set[str] = set()
        """Models whose weights are to be kept when they are removed."""
        self._failed_there: dict[int, int] = {}
        """Steps, and how many of the other ranks they failed on."""
        self._results: deque[StepResult] = deque()
        """Results that the last of several stages has sent."""
        self._is_over = False
        self._ready = threading.Semaphore(0)
        for other in others:
            threading.Thread(target=self._listen, args=(other,), name=f"rank {other.rank}", daemon=True).start()
        self._own, self._group = join()
        for _ in others:
            if not self._ready.acquire(timeout=ANSWER_TIMEOUT_S):
                self._lose(f"not all ranks are ready {ANSWER_TIMEOUT_S:g} s after rank 0")
        self.device = self._own.device
        self.num_rows = self._own.num_rows

    # ----------------------------------------------------------------------------------------------- models

    def prepare_model(self, spec: ModelSpec) -> Prepared:
        """Raises `CheckpointError`, also where another rank cannot read its part."""
        number, call = self._begin_call()
        self._tell(Prepare(number, spec))
        try:
            with self._read(call, f"reading {spec.name!r}"):
                own = self._own.prepare_model(spec)
        except BaseException:
            self._forgotten.append(number)
            raise
        prepared = Prepared(number, own)
        weakref.finalize(prepared, self._forgotten.append, number)
        return prepared

    def add_model(self, prepared: Prepared) -> ModelShape:
        with self._window_lock:
            number, call = self._begin_call()
            self._tell(Add(number, prepared.number))
            with self._settled(call, "adding a model"):
                shape = self._own.add_model(prepared.own)
        if any(answer.shape != shape for answer in call.answers):
            self._lose(f"ranks differ in the shape of {shape.name!r}: {shape} and {call.answers}")
        if not self.is_sound(shape.name):
            self.remove_model(shape.name)
            raise CheckpointError(UNSOUND)
        return shape

    def is_sound(self, name: str) -> bool:
        """Whether the last stage finds the model sound (`Executor.is_sound`), and no other rank fails."""
        number, call = self._begin_call()
        self._tell(Check(number, name))
        with self._settled(call, f"checking {name!r}"):
            is_sound = self._own.is_sound(name)
        return is_sound and all(answer.is_sound for answer in call.answers)

    def remove_model(self, name: str) -> None:
        with self._window_lock:
            self._tell(Remove(name, name in self._held))
            self._held.discard(name)
            self._own.remove_model(name)

    def hold_weights(self, name: str) -> None:
        """`Executor.hold_weights` and, below, `keep_weights`: each rank keeps its part, as far as it has room."""
        self._held.add(name)
        self._own.hold_weights(name)

    def keep_weights(self, name: str) -> bool:
        return self._own.keep_weights(name)

    def drop_weights(self, name: str) -> None:
        self._tell(DropWeights(name))
        self._own.drop_weights(name)

    def has_weights(self, name: str) -> bool:
        return self._own.has_weights(name)

    def adapter_bytes(self, model: str, adapter: Adapter) -> int:
        """Bytes of rank 0's part of an adapter. Raises `CheckpointError`."""
        return self._own.adapter_bytes(model, adapter)

    def load_adapter(self, model: str, adapter: Adapter) -> None:
        """Returns when all ranks have it. Raises `CheckpointError`, also where another rank cannot read its part; some have
        it then."""
        number, call = self._begin_call()
        self._tell(LoadAdapter(number, model, adapter))
        with self._read(call, f"reading the adapter {adapter.name!r}"):
            self._own.load_adapter(model, adapter)

    def drop_adapter(self, version: str) -> None:
        self._tell(DropAdapter(version))
        self._own.drop_adapter(version)

    def set_layers_per_safepoint(self, name: str, num_layers: int) -> None:
        self._tell(SetLayersPerSafepoint(name, num_layers))
        self._own.set_layers_per_safepoint(name, num_layers)

    def free_memory_bytes(self) -> int:
        return self._own.free_memory_bytes()

    # ------------------------------------------------------------------------------------------------- steps

    def compile_grammar(self, model: str, grammar: str) -> Compiled:
        """Rank 0's."""
        self._tell(CompileGrammar(model, grammar))
        return self._own.compile_grammar(model, grammar)

    @property
    def grammar_counters(self) -> GrammarCounters:
        """Grammar counters of this rank; the last of several stages has its own."""
        return self._own.grammar_counters

    @property
    def is_alone(self) -> bool:
        return False

    @property
    def launching_computes(self) -> bool:
        return self._own.launching_computes

    def execute(self, plan: StepPlan) -> StepResult:
        self.launch(plan)
        return self.collect()

    def launch(self, plan: StepPlan) -> None:
        self._tell(Launch(plan))
        self._own.launch(plan)

    def interrupt(self, step_id: int) -> None:
        """The others do what rank 0 decides at each safepoint (agreement.py)."""
        self._own.interrupt(step_id)

    def collect(self) -> StepResult:
        result = self._own.collect()
        self._num_collected += 1
        if result.error:
            self._agree_on_failure(result)
        elif not self._group.is_last_stage:
            result = self._sampled(result.step_id)
        return result

    def _sampled(self, step_id: int) -> StepResult:
        """By the last stage; the first one is told, before a later step computes these tokens."""
        with self._changes:
            self._changes.wait_for(lambda: self._results or self._is_over, SAMPLE_TIMEOUT_S)
            if self._is_over:
                raise GroupError("a rank is lost")
            result = self._results.popleft() if self._results else None
        if result is None:
            self._lose(f"the last stage has not ended step {step_id} {SAMPLE_TIMEOUT_S:g} s after the first")
        assert result.step_id == step_id, "stages compute the steps in one order"
        self._tell(EnterTokens(step_id, result.tokens), self._others[: self._group.size - 1])
        self._own.enter_tokens(step_id, result.tokens)
        return result

    def _agree_on_failure(self, result: StepResult) -> None:
        """What is wrong with a plan every rank finds by itself before it computes. Any other failure leaves ranks behind the
        others."""
        step_id = result.step_id
        with self._changes:
            self._failed_here.add(step_id)
            agree = self._changes.wait_for(
                lambda: self._failed_there.get(step_id) == len(self._others), AGREE_TIMEOUT_S
            )
            self._failed_there.pop(step_id, None)
        if not agree:
            self._lose(f"step {step_id} failed on rank 0 and not on all others: {result.error}")

    # ------------------------------------------------------------------------------------------------ copies

    def start_copy(self, copy: KvCopy) -> None:
        """Starts a copy. Where rank 0 may read the blocks of all ranks (CPU), a move has taken place on all when this
        returns."""
        with self._lock:
            self._copies[copy.copy_id] = (1 + len(self._others), True)
        self._tell(Copy(copy, self._num_collected))
        self._own.start_copy(copy)
        if copy.kind == CopyKind.MOVE and self.launching_computes:
            with self._changes:
                # the last one is rank 0's own, which `finished_copies` counts
                is_done = self._changes.wait_for(lambda: self._copies[copy.copy_id][0] == 1, ANSWER_TIMEOUT_S)
            if not is_done:
                self._lose(f"a move of blocks of {copy.model!r} is not done on all ranks after {ANSWER_TIMEOUT_S:g} s")

    def finished_copies(self) -> list[EndedCopy]:
        for own in self._own.finished_copies():
            self._copy_s[own.copy_id] = own.seconds
            self._on_copy_ended(own.copy_id, own.ok)
        ended = self._ended_copies
        known = [ended.popleft() for _ in range(len(ended))]
        return [EndedCopy(copy_id, ok, self._copy_s.pop(copy_id, 0.0)) for copy_id, ok in known]

    def on_copy_finished(self, callback: Callable[[], None]) -> None:
        self._on_copy_finished = callback
        self._own.on_copy_finished(callback)

    def _on_copy_ended(self, copy_id: int, ok: bool) -> None:
        with self._lock:
            missing, all_ok = self._copies[copy_id]
            self._copies[copy_id] = missing, all_ok = missing - 1, all_ok and ok
            self._changes.notify_all()
            if missing:
                return
            del self._copies[copy_id]
        self._ended_copies.append((copy_id, all_ok))

    def claim_blocks(self, model: str, blocks: list[int]) -> torch.cuda.Event | None:
        """Returns when all ranks have them."""
        number, call = self._begin_call()
        self._tell(Claim(number, model, blocks))
        with self._settled(call, f"claiming blocks of {model!r}"):
            return self._own.claim_blocks(model, blocks)

    def block_rows(self, model: str, on_host: bool) -> KvBlocks:
        rows = self._own.block_rows(model, on_host)
        if on_host or not self._own.has_window:
            return rows
        assert isinstance(rows, BlockParts)
        move = functools.partial(self._move_window, model)
        return WindowedBlocks(self._own.num_blocks(model), rows, move, self._window_lock)

    def kv_key(self, model: str) -> str:
        """See `Executor.kv_key`: whole blocks are the same for any number of ranks."""
        return self._own.kv_key(model)

    def _move_window(self, model: str, blocks: Sequence[int], outward: bool) -> None:
        """In a thread beside the loop's, which has the window's lock."""
        self._own.num_blocks(model)  # raises, before the others are told
        number, call = self._begin_call()
        self._tell(MoveWindow(number, model, [*blocks], outward))
        with self._settled(call, f"moving blocks of {model!r}"):
            self._own.move_window(model, blocks, outward)

    def close(self) -> None:
        """Ends the other ranks too."""
        self._is_over = True
        for other in self._others:
            with contextlib.suppress(OSError):  # it is gone
                other.stream.send(framed(Close()))
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for other in self._others:
            try:
                other.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("rank %d does not end; killing it", other.rank)
                other.process.kill()
                other.process.wait()
            other.stream.close()
        self._own.close()
        self._group.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --------------------------------------------------------------------------------------- the other ranks

    def _tell(self, message: ToRank, ranks: Sequence[RankProcess] | None = None) -> None:
        """All the others, or some. Raises `OSError` where a rank is gone."""
        while self._forgotten:
            with contextlib.suppress(IndexError):  # another thread has told it
                forget = framed(Forget(self._forgotten.popleft()))
                for other in self._others:
                    other.stream.send(forget)
        frame = framed(message)
        for other in self._others if ranks is None else ranks:
            other.stream.send(frame)

    def _begin_call(self) -> tuple[int, _Call]:
        with self._lock:
            self._num_calls += 1
            call = self._calls[self._num_calls] = _Call(len(self._others))
            return self._num_calls, call

    @contextlib.contextmanager
    def _settled(self, call: _Call, what: str) -> Iterator[None]:
        """What is done within the others do as well; all succeed or all fail."""
        failed: Exception | None = None
        try:
            yield
        except GroupError as error:
            self._lose(str(error))
        except Exception as error:
            failed = error
        is_answered = call.done.wait(ANSWER_TIMEOUT_S)
        failures = [answer.error for answer in call.answers]
        if not is_answered or any(bool(error) != (failed is not None) for error in failures):
            here = "succeeded" if failed is None else f"{type(failed).__name__}: {failed}"
            told = "; ".join(error or "succeeded" for error in failures)
            self._lose(f"ranks differ in {what}: rank 0: {here}; the others: {told or 'no word'}")
        if failed is not None:
            raise failed

    @contextlib.contextmanager
    def _read(self, call: _Call, what: str) -> Iterator[None]:
        """What is read within the others read as well, without a call to each other. Raises what one of them failed with."""
        try:
            yield
        finally:
            if not call.done.wait(READ_TIMEOUT_S):
                self._lose(f"not all ranks have ended {what} {READ_TIMEOUT_S:g} s after rank 0")
        if failed := next((answer.error for answer in call.answers if answer.error), ""):
            kind, _, reason = failed.partition(": ")
            error = {one.__name__: one for one in (CheckpointError, CheckpointMissing)}.get(kind)
            raise RuntimeError(f"another rank failed in {what}: {failed}") if error is None else error(reason)

    def _listen(self, other: RankProcess) -> None:
        """In a thread of its own."""
        try:
            while (message := other.stream.receive()) is not None:
                self._on_message(other, message)
        except Exception as error:
            logger.exception("what rank %d said", other.rank)
            self._lose_from_beside(f"rank {other.rank} is not understood: {error}")
        if not self._is_over:
            self._lose_from_beside(f"rank {other.rank} {other.how_it_ended()}")

    def _on_message(self, other: RankProcess, message: FromRank) -> None:
        match message:
            case Ready():
                self._ready.release()
            case Answer(call_id):
                with self._lock:
                    call = self._calls[call_id]
                    call.add(message)
                    if call.done.is_set():
                        del self._calls[call_id]
            case CopyEnded(copy_id, ok):
                self._on_copy_ended(copy_id, ok)
                self._on_copy_finished()
            case StepEnded(result):
                with self._changes:
                    self._results.append(result)
                    self._changes.notify_all()
            case StepFailed(step_id, error):
                with self._changes:
                    self._failed_there[step_id] = self._failed_there.get(step_id, 0) + 1
                    self._changes.notify_all()
                check = threading.Timer(AGREE_TIMEOUT_S, self._check_failure, (other.rank, step_id, error))
                check.daemon = True
                check.start()
            case Failed(error):
                self._lose_from_beside(f"rank {other.rank} failed: {error}")

    def _check_failure(self, rank: int, step_id: int, error: str) -> None:
        with self._lock:
            is_agreed = step_id in self._failed_here
        if not is_agreed and not self._is_over:
            self._lose_from_beside(f"step {step_id} failed on rank {rank} alone: {error}")

    def _lose_from_beside(self, reason: str) -> None:
        self._is_over = True
        shutil.rmtree(self._folder, ignore_errors=True)
        self._on_lost(reason)
        with self._changes:
            self._changes.notify_all()

    def _lose(self, reason: str) -> NoReturn:
        self._lose_from_beside(reason)
        raise GroupError(reason)
