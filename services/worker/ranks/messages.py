"""What rank 0 of an instance and its other ranks tell each other, and the stream that carries it.

Rank 0 plans, and tells the others what it does itself, in the order in which it does it; it does not wait for an answer but
where a message has a `call_id`. What the others tell is of copies, of calls, and of what went wrong.
"""

from __future__ import annotations

import select
import socket
import threading
from struct import Struct
from typing import Generic, TypeVar

import msgspec

from shared.engine.plan import KvCopy, ModelShape, StepPlan, StepResult
from shared.messages.cluster import ModelSpec
from shared.messages.requests import Adapter

# ------------------------------------------------------------------------------------------ rank 0 to the others


class SetUp(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message: what the process is."""

    device: str
    """cpu | cuda"""
    num_merged: int
    merged_bytes: int
    """Bytes of this rank's part of a merged block."""
    num_rows: int
    deterministic: bool = False
    host_weights_bytes: int = 0
    """Host memory for weights of this rank; see `HostWeights`."""
    num_host_merged: int = 0
    num_window_merged: int = 0
    """Merged blocks of host memory through which blocks on the device are reached; 0: the device's memory is shared (CPU),
    or nobody reaches them."""
    num_threads: int = 0
    """On CPU; 0: torch's own choice."""
    niceness: int = 0
    log_level: str = "INFO"
    log_format: str = "text"
    rank: int = 0
    """Over all stages."""
    num_ranks: int = 1
    """Ranks of all stages."""
    num_stages: int = 1
    folder: str = ""
    """Folder in which the ranks find each other."""
    memory: str = ""
    """Path of the `RankMemory`."""
    region_bytes: int = 0


class Launch(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class Copy(msgspec.Struct, frozen=True, tag=True):
    copy: KvCopy
    num_collected: int
    """Steps that have come to their end on rank 0: what a checkpoint copies was written by then."""


class Claim(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    model: str
    blocks: list[int]


class MoveWindow(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    model: str
    blocks: list[int]
    outward: bool


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Beside everything else."""

    call_id: int
    spec: ModelSpec


class Add(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    prepared: int
    """The call that prepared the model."""


class Forget(msgspec.Struct, frozen=True, tag=True):
    """A prepared model that will not be added (again)."""

    prepared: int


class Remove(msgspec.Struct, frozen=True, tag=True):
    name: str
    keeps_weights: bool = False


class DropWeights(msgspec.Struct, frozen=True, tag=True):
    """Those of a removed model that were kept."""

    name: str


class Check(msgspec.Struct, frozen=True, tag=True):
    """Between steps: see `Executor.is_sound`."""

    call_id: int
    model: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Beside everything else."""

    call_id: int
    model: str
    adapter: Adapter


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    version: str


class CompileGrammar(msgspec.Struct, frozen=True, tag=True):
    """Beside everything else."""

    model: str
    grammar: str


class SetLayersPerSafepoint(msgspec.Struct, frozen=True, tag=True):
    name: str
    num_layers: int


class EnterTokens(msgspec.Struct, frozen=True, tag=True):
    """Message to the first stage: what the last one has sampled in a step."""

    step_id: int
    tokens: list[int]


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


ToRank = (
    SetUp | Launch | Copy | Claim | MoveWindow | Prepare | Add | Forget | Remove | Check | DropWeights | LoadAdapter
    | DropAdapter | CompileGrammar | SetLayersPerSafepoint | EnterTokens | Close
)  # fmt: skip

# ------------------------------------------------------------------------------------------ the others to rank 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All ranks have found each other."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    shape: ModelShape | None = None
    """Shape of a model that was added."""
    is_sound: bool = True
    """Whether the model that was checked computes finite logits."""
    error: str = ""


class CopyEnded(msgspec.Struct, frozen=True, tag=True):
    copy_id: int
    ok: bool


class StepEnded(msgspec.Struct, frozen=True, tag=True):
    """Message from the first rank of the last of several stages."""

    result: StepResult


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    step_id: int
    error: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank ends."""

    error: str


FromRank = Ready | Answer | CopyEnded | StepEnded | StepFailed | Failed

# ---------------------------------------------------------------------------------------------------- the stream

SEND_TIMEOUT_S = 60.0
"""Time for the other end to take anything of what is sent."""
_length = Struct("<I")
_timeval = Struct("ll")
_BUFFER_BYTES = 1 << 20
"""Buffer of a socket: plans with new prompts do not make the sender wait."""
_READ_BYTES = 1 << 18

T = TypeVar("T")


class Stream(Generic[T]):
    """One end of a socket; messages of the union `incoming` come in. Sent by any thread, received by one."""

    def __init__(self, end: socket.socket, incoming: object) -> None:
        self._socket = end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        timeout = _timeval.pack(*divmod(int(SEND_TIMEOUT_S * 1e6), 1_000_000))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(incoming)
        self._received = bytearray()
        self._sending = threading.Lock()

    def send(self, frame: bytes) -> None:
        """What `framed` made. Waits where the other end is far behind. Raises `OSError` where it is gone, or takes
        nothing for `SEND_TIMEOUT_S`."""
        with self._sending:
            self._socket.sendall(frame)

    def receive(self, timeout_s: float | None = None) -> T | None:
        """The next message; None: the other end is gone. Raises `TimeoutError` if none has begun to come within
        `timeout_s`, and `msgspec.MsgspecError`."""
        try:
            while (body := self._next()) is None:
                if timeout_s is not None and not select.select([self._socket], [], [], timeout_s)[0]:
                    raise TimeoutError
                if not (data := self._socket.recv(_READ_BYTES)):
                    return None
                self._received += data
        except (OSError, ValueError) as error:  # reset, or closed here
            if isinstance(error, TimeoutError):
                raise
            return None
        return self._decoder.decode(body)

    def _next(self) -> bytes | None:
        received = self._received
        if len(received) < _length.size:
            return None
        end = _length.size + _length.unpack_from(received)[0]
        if len(received) < end:
            return None
        body = bytes(received[_length.size : end])
        del received[:end]
        return body

    def close(self) -> None:
        self._socket.close()


def framed(message: ToRank | FromRank) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _length.pack(len(body)) + body
