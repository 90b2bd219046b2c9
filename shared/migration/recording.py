"""A recorded host of migrations, and its replay (`shared.recording`): its decisions are its commands, and what it asks and
does of what is around it.

Answers stand in the recording between the call in which they were asked for and what came of it. In a replay they are given
again, in their order; a question that is another one is a difference, as a command is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from typing import Any, TypeGuard, TypeVar, get_args

import msgspec

from shared import recording
from shared.engine import calls as engine_calls
from shared.engine.handover import Detached
from shared.messages.migration import Commit
from shared.messages.requests import ErrorInfo, GenerationRequest
from shared.migration import calls, commands
from shared.migration.commands import Command
from shared.migration.core import MigrationCore
from shared.migration.questions import Around, Question
from shared.recording import Recorder, ReplayMismatch

T = TypeVar("T")


class Answered(calls.Call[None], frozen=True):
    """What a question, or a call of the engine, gave. No input of its own."""

    asked: str
    """Its kind."""
    digest: bytes
    """Digest of the whole answer; 8 bytes."""
    answer: msgspec.Raw
    how: str = ""
    """Empty, "refused" (an `ErrorInfo`), or the name of the exception that it raised, whose text the answer is."""

    def on(self, core: MigrationCore, now: float) -> None:
        """It was given when it was asked for."""


CALLS = recording.decoder_of(calls.Call)
REFUSED = "refused"
_encode = msgspec.msgpack.Encoder(enc_hook=str).encode


class Configuration(msgspec.Struct, frozen=True, tag="migrations", kw_only=True):
    """All that a core is made of; the fields are those of `MigrationCore`."""

    instance_id: str
    address: str | None
    max_migrations: int
    max_stages: int
    rate_share: float
    backup_classes: str = "off"
    backup_min_tokens: int = 512
    fetches: bool = False

    def build(self, around: Around, record: Recorder | None = None) -> MigrationCore:
        return MigrationCore(around, **msgspec.structs.asdict(self), record=record)


def recorded(configuration: Configuration, around: Around, write: Callable[[bytes], object]) -> MigrationCore:
    """A core whose configuration, calls, answers and commands go, encoded, to `write`."""
    record = recording.recorder(configuration, write)

    def put(what: object, now: float) -> None:
        record([_brief(command) for command in what] if _are_commands(what) else what, now)

    return configuration.build(_Recorded(around, record), put)


class _Recorded:
    """Writes the answers down that it passes on."""

    def __init__(self, around: Around, record: Recorder) -> None:
        self._around, self._record = around, record

    def apply(self, call: engine_calls.Call[T], /) -> T:
        return self._put(call, lambda: self._around.apply(call))

    def ask(self, question: Question[T], /) -> T:
        return self._put(question, lambda: self._around.ask(question))

    def _put(self, what: msgspec.Struct, answered: Callable[[], T]) -> T:
        try:
            answer = answered()
        except Exception as error:
            self._write(what, str(error), type(error).__name__)
            raise
        self._write(what, answer, REFUSED if isinstance(answer, ErrorInfo) else "")
        return answer

    def _write(self, what: msgspec.Struct, answer: object, how: str) -> None:
        self._record(Answered(type(what).__name__, _digest(what), msgspec.Raw(_encode(answer)), how), 0.0)


class _Replayed:
    """Gives recorded answers again. Raises `ReplayMismatch` where another question is asked; a core takes that for a fault
    of its own, so it is kept as well."""

    def __init__(self) -> None:
        self.answers: deque[Answered] = deque()
        self.num_given = 0
        self.mismatch: ReplayMismatch | None = None

    def apply(self, call: engine_calls.Call[T], /) -> T:
        return self._give(call)

    def ask(self, question: Question[T], /) -> T:
        return self._give(question)

    def _give(self, what: engine_calls.Call[T] | Question[T]) -> T:
        asked = type(what).__name__
        known = self.answers.popleft() if self.answers else None
        if known is None or (known.asked, known.digest) != (asked, _digest(what)):
            was = "none" if known is None else "another" if known.asked == asked else known.asked
            self.mismatch = ReplayMismatch(f"question {self.num_given} was {was}, and is {what!r:.200}")
            raise self.mismatch
        self.num_given += 1
        if known.how == REFUSED:
            return msgspec.msgpack.decode(known.answer, type=ErrorInfo)  # type: ignore[return-value]
        if known.how:
            raise type(known.how, (Exception,), {})(msgspec.msgpack.decode(known.answer))
        answer: T = _decoder(type(what)).decode(known.answer)
        return answer


@cache
def _decoder(kind: type) -> msgspec.msgpack.Decoder[Any]:
    """Decoder of the answers to a kind of question, but for refusals."""
    (answer,) = get_args(kind.__orig_bases__[0])  # type: ignore[attr-defined]
    if ErrorInfo in get_args(answer):
        (answer,) = (one for one in get_args(answer) if one is not ErrorInfo)
    return msgspec.msgpack.Decoder(answer)


def _digest(what: msgspec.Struct) -> bytes:
    return blake2b(_encode(what), digest_size=8).digest()


def replay(recorded: bytes) -> tuple[MigrationCore, int]:
    """Runs a recording again. Returns the core as it stands at the end and the number of decisions; raises
    `ReplayMismatch` at the first command or question that differs, and where the bytes are no recording of migrations."""
    configuration = recording.header_of(recorded, Configuration)
    around = _Replayed()
    for record in recording.records(recorded):
        if isinstance(record, recording.Applied):
            try:
                call = CALLS.decode(record.call)
            except msgspec.MsgspecError as error:
                raise ReplayMismatch(f"a call of another version: {error}") from None
            if isinstance(call, Answered):
                around.answers.append(call)
    run = _Run(configuration.build(around), around)
    return run.core, recording.replay(recorded, run, CALLS, run.decide)


class _Run:
    """A core that is replayed: what its calls return stands among its decisions."""

    def __init__(self, core: MigrationCore, around: _Replayed) -> None:
        self.core, self._around = core, around
        self._returned: deque[object] = deque()
        self._num_answers = 0
        """Recorded so far."""

    def apply(self, call: calls.Call[Any], now: float) -> None:
        if isinstance(call, Answered):
            self._num_answers += 1
            return
        self._check_asked(now)
        returned = self.core.apply(call, now)
        if self._around.mismatch is not None:
            raise self._around.mismatch
        if returned is not None:
            self._returned.append(returned)

    def decide(self, now: float) -> object:
        self._check_asked(now)
        if self._returned:
            return self._returned.popleft()
        return [_brief(command) for command in self.core.take_commands(now)]

    def _check_asked(self, now: float) -> None:
        if self._num_answers != self._around.num_given:
            raise ReplayMismatch(
                f"before {now:.6f} s {self._num_answers} questions had been asked, and {self._around.num_given} are"
            )


# ---------------------------------------------------------------------------------------------- what is written down


class _Fault(Command, frozen=True, tag="Fault"):
    """In place of the exception, which is no data."""

    error: str


def _are_commands(what: object) -> TypeGuard[list[Command]]:
    return isinstance(what, list) and bool(what) and isinstance(what[0], Command)


def _brief(command: Command) -> Command:
    """Without tokens and images, which the recording has already where the request came or was asked for."""
    match command:
        case commands.BeginOut(request=request):
            return msgspec.structs.replace(command, request=_without_tokens(request))
        case commands.OutOver(request=request, taken=taken):
            return msgspec.structs.replace(command, request=_without_tokens(request), taken=_brief_taken(taken))
        case commands.Ask(message=Commit() as commit):
            return msgspec.structs.replace(command, message=_brief_commit(commit))
        case commands.Adopted(commit=commit):
            return msgspec.structs.replace(command, commit=_brief_commit(commit))
        case commands.Fault(migration_id, error):
            return _Fault(migration_id, f"{type(error).__name__}: {error}")
    return command


def _without_tokens(request: GenerationRequest) -> GenerationRequest:
    return msgspec.structs.replace(request, prompt=b"", prior=b"", images=(), chat=b"")


def _brief_taken(taken: Detached | None) -> Detached | None:
    return None if taken is None else msgspec.structs.replace(taken, request=_without_tokens(taken.request))


def _brief_commit(commit: Commit) -> Commit:
    return msgspec.structs.replace(commit, request=_without_tokens(commit.request))
