"""The process of one further rank of an instance: `python -m services.worker.ranks.rank_main DESCRIPTOR`, started by rank 0
(starting.py), at the other end of the socket that it inherits.

It does what rank 0 says, in that order, and ends when rank 0 does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

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
    SetUp,
    StepEnded,
    StepFailed,
    Stream,
    ToRank,
    framed,
)
from shared.runtime.garbage import freeze_heap
from shared.runtime.service import set_up_logging
from shared.runtime.struct_types import prepare_struct_types

if TYPE_CHECKING:
    from services.worker.executor.executor import Executor
    from services.worker.executor.preparing import PreparedModel
    from shared.engine.plan import ModelShape

logger = logging.getLogger(__name__)

IDLE_S = 0.05
"""Without a message, after which steps that run are waited for; at once by the rank whose tokens count."""
MAX_IN_FLIGHT = 2
"""Steps that may run when a third is to be launched."""


class Member:
    """One of the other ranks."""

    def __init__(self, stream: Stream[ToRank], executor: Executor, *, tells_results: bool) -> None:
        """`tells_results`: this rank's tokens are those that count."""
        self._stream = stream
        self._executor = executor
        self._tells_results = tells_results
        self._idle_s = 0.0 if tells_results else IDLE_S
        self._prepared: dict[int, PreparedModel] = {}
        self._num_collected = 0
        executor.on_copy_finished(self._tell_copies)

    def serve(self) -> None:
        """Until rank 0 is gone, or says that it is over. Raises what leaves this rank behind the others."""
        while True:
            try:
                message = self._stream.receive(self._idle_s if self._executor.num_in_flight else None)
            except TimeoutError:
                self._collect()
                continue
            if message is None or isinstance(message, Close):
                return
            self._carry_out(message)

    def _carry_out(self, message: ToRank) -> None:
        executor = self._executor
        match message:
            case Launch(plan):
                while executor.num_in_flight >= MAX_IN_FLIGHT:
                    self._collect()
                executor.launch(plan)
                if executor.launching_computes:
                    self._collect()
            case Copy(copy, num_collected):
                while self._num_collected < num_collected:
                    self._collect()
                executor.start_copy(copy)
            case Claim(call_id, model, blocks):
                self._answer(call_id, lambda: self._claim(model, blocks))
            case MoveWindow(call_id, model, blocks, outward):
                self._answer(call_id, lambda: executor.move_window(model, blocks, outward))
            case Prepare():
                threading.Thread(target=self._prepare, args=(message,), name="loader", daemon=True).start()
            case Add(call_id, prepared):
                self._answer(call_id, lambda: executor.add_model(self._prepared[prepared]))
            case Forget(prepared):
                self._prepared.pop(prepared, None)
            case Check(call_id, model):
                self._tell(Answer(call_id, is_sound=executor.is_sound(model)))
            case Remove(name, keeps_weights):
                if keeps_weights:
                    executor.hold_weights(name)
                executor.remove_model(name)
                if keeps_weights:
                    threading.Thread(target=executor.keep_weights, args=(name,), name="keeper", daemon=True).start()
            case DropWeights(name):
                executor.drop_weights(name)
            case LoadAdapter():
                threading.Thread(target=self._load_adapter, args=(message,), name="loader", daemon=True).start()
            case DropAdapter(version):
                executor.drop_adapter(version)
            case CompileGrammar(model, grammar):
                executor.compile_grammar(model, grammar)
            case EnterTokens(step_id, tokens):
                executor.enter_tokens(step_id, tokens)
            case SetLayersPerSafepoint(name, num_layers):
                executor.set_layers_per_safepoint(name, num_layers)

    def _claim(self, model: str, blocks: list[int]) -> None:
        self._executor.claim_blocks(model, blocks)

    def _prepare(self, message: Prepare) -> None:
        def prepare() -> None:
            self._prepared[message.call_id] = self._executor.prepare_model(message.spec)

        self._answer(message.call_id, prepare)

    def _load_adapter(self, message: LoadAdapter) -> None:
        def load() -> None:
            self._executor.load_adapter(message.model, message.adapter)

        self._answer(message.call_id, load)

    def _answer(self, call_id: int, call: Callable[[], ModelShape | None]) -> None:
        """An error is for rank 0 to compare with its own. Raises `GroupError`: this rank is behind the others."""
        from services.worker.ranks.group import GroupError

        try:
            answer = Answer(call_id, call())
        except GroupError:
            raise
        except Exception as error:
            logger.exception("what rank 0 asked for failed")
            answer = Answer(call_id, error=f"{type(error).__name__}: {error}")
        self._tell(answer)

    def _collect(self) -> None:
        result = self._executor.collect()
        self._num_collected += 1
        if result.error:
            self._tell(StepFailed(result.step_id, result.error))
        elif self._tells_results:
            self._tell(StepEnded(result))

    def _tell_copies(self) -> None:
        """In the thread that copies."""
        for copy_id, ok, _ in self._executor.finished_copies():
            self._tell(CopyEnded(copy_id, ok))

    def _tell(self, message: FromRank) -> None:
        # Rank 0 is gone: so is this process, at its next message.
        with contextlib.suppress(OSError):
            self._stream.send(framed(message))


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they are for rank 0, which ends this one when it has drained
    stream = Stream[ToRank](socket.socket(fileno=int(sys.argv[1])), ToRank)
    setup = stream.receive()
    if not isinstance(setup, SetUp):
        return
    set_up_logging(f"worker rank {setup.rank}", setup.log_level, setup.log_format)
    try:
        _serve(stream, setup)
    except Exception as error:
        logger.exception("rank %d ends", setup.rank)
        with contextlib.suppress(OSError):
            stream.send(framed(Failed(f"{type(error).__name__}: {error}")))
        os._exit(1)


def _serve(stream: Stream[ToRank], setup: SetUp) -> None:
    import torch

    from services.worker.ranks.building import join
    from services.worker.ranks.shared_memory import RankMemory

    prepare_struct_types()
    if setup.device == "cpu" and setup.num_threads:
        torch.set_num_threads(setup.num_threads)
    os.nice(setup.niceness)
    executor, group = join(setup, RankMemory(setup.memory, setup.num_ranks, setup.region_bytes))
    member = Member(
        stream, executor, tells_results=group.is_last_stage and not group.is_first_stage and group.rank == 0
    )
    stream.send(framed(Ready()))
    freeze_heap()
    member.serve()
    executor.close()
    group.close()


if __name__ == "__main__":
    main()
