"""Recordings, whatever is recorded: files that end where they have to, and differences that are named."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import msgspec
import pytest

from shared.recording import Call, ReplayMismatch, difference, file_writer, frames, header_of, recorder, replay


class Header(msgspec.Struct, tag="sum"):
    start: int


class Add(Call, frozen=True):
    number: int


class Sum:
    """A core whose decision is its sum."""

    def __init__(self, start: int) -> None:
        self.total = start

    def apply(self, call: Add, now: float) -> None:
        self.total += call.number

    def decide(self, now: float) -> dict[str, int]:
        return {"total": self.total, "at": int(now)}


def run_again(recording: bytes) -> int:
    core = Sum(header_of(recording, Header).start)
    return replay(recording, core, msgspec.msgpack.Decoder(Add), core.decide)


@pytest.fixture
def recording() -> bytes:
    written: list[bytes] = []
    core = Sum(3)
    record = recorder(Header(3), written.append)
    for number in range(5):
        record(Add(number), float(number))
        core.apply(Add(number), float(number))
        record(core.decide(float(number)), float(number))
    return b"".join(written)


def test_it_runs_again_and_a_torn_end_is_ignored(recording: bytes) -> None:
    assert run_again(recording) == 5
    assert run_again(recording[:-1]) == 4


def test_the_first_difference_is_named(recording: bytes) -> None:
    header, *rest = (len(frame).to_bytes(4, "little") + frame for frame in frames(recording))
    with pytest.raises(ReplayMismatch, match=r"decision 2 at 3\.000000 s differs: \.total was 9, and is 7$"):
        run_again(b"".join([header, *rest[:4], *rest[6:]]))


@pytest.mark.parametrize("noise", [b"", b"no recording", b"\x03\x00\x00\x00abc"])
def test_other_bytes_are_refused_with_a_sentence(noise: bytes) -> None:
    with pytest.raises(ReplayMismatch, match="not a recording"):
        run_again(noise)


def test_differences() -> None:
    assert difference([1, {"a": [2]}], [1, {"a": [3]}]) == "[1].a[0] was 2, and is 3"
    assert difference([1], [1, 2]) == "[1:] was [], and is [2]"
    assert difference(None, [1]) == "all of it was None, and is [1]"


def test_a_file_ends_with_a_whole_record_within_its_bound(
    recording: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    write = file_writer(str(path), 200)
    for frame in frames(recording):
        write(len(frame).to_bytes(4, "little") + frame)
    size = path.stat().st_size
    assert 150 < size <= 200 and recording.startswith(path.read_bytes())
    assert run_again(path.read_bytes()) >= 1 and sum(4 + len(frame) for frame in frames(path.read_bytes())) == size
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "said once"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "it holds what clients wrote"


def test_a_full_disk_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    write = file_writer("/dev/full", 100)
    write(b"x")
    write(b"x")
    assert "/dev/full ends here" in caplog.text and len(caplog.records) == 1
