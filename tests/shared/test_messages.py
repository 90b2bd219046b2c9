"""The catalogue: distinct, well-formed subjects; messages survive the wire; old and new peers understand each other."""

from __future__ import annotations

import types
import typing
from enum import Enum
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus.codec import (
    UNREADABLE,
    DamagedError,
    decode_reply,
    decoder,
    encode,
    error_headers,
    opened,
    parse_headers,
    request_headers,
    sealed,
)
from shared.bus.interface import BusError, ServiceError
from shared.bus.metrics import subject_pattern
from shared.messages import admin, batches, catalogue, channels, cluster, migration, requests
from shared.messages.channels import Bucket, Endpoint, Topic
from shared.messages.requests import ErrorCode, ErrorInfo

CHANNELS = {name: value for name, value in vars(catalogue).items() if isinstance(value, Topic | Endpoint)}
BUCKETS = {name: value for name, value in vars(catalogue).items() if isinstance(value, Bucket)}
STRUCTS = [
    value
    for module in (admin, batches, cluster, migration, requests)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
]


def sample(kind: Any) -> Any:
    """A value of `kind` that is not its default."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return sample(next(argument for argument in arguments if argument is not type(None)))
    if origin is typing.Literal:
        return arguments[-1]
    if origin is tuple:
        return tuple(sample(argument) for argument in arguments if argument is not Ellipsis)
    if origin is list:
        return [sample(arguments[0])]
    if origin is dict:
        return {sample(arguments[0]): sample(arguments[1])}
    if issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(**{field: sample(hints[field]) for field in kind.__struct_fields__})
    if issubclass(kind, Enum):
        return list(kind)[-1]
    return {str: "text", int: 7, float: 0.25, bool: True, bytes: b"\x01\x00\x00\x00"}[kind]


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind: type[msgspec.Struct]) -> None:
    value = sample(kind)
    assert decoder(kind).decode(encode(value)) == value


@pytest.mark.parametrize("devices", [1, ["cpu"]])
def test_a_peer_whose_blocks_are_parts_by_device_does_not_misread_them(devices: object) -> None:
    builtins = msgspec.to_builtins(sample(migration.PreAllocate), builtin_types=(bytes,))
    builtins.insert(migration.PreAllocate.__struct_fields__.index("on_host"), devices)
    with pytest.raises(UNREADABLE):
        decoder(migration.PreAllocate).decode(encode(builtins))


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_a_newer_peer_may_add_fields_at_the_end(kind: type[msgspec.Struct]) -> None:
    value = sample(kind)
    builtins = msgspec.to_builtins(value, builtin_types=(bytes,))
    extended = [*builtins, "new"] if isinstance(builtins, list) else {**builtins, "a_new_field": 1}
    assert decoder(kind).decode(encode(extended)) == value


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_a_checksum_is_skipped_by_who_knows_none_and_not_asked_of_who_sends_none(kind: type[msgspec.Struct]) -> None:
    value = sample(kind)
    body = encode(value)
    whole = sealed(body)
    assert opened(whole) == body == opened(body)
    assert decoder(kind).decode(whole) == value
    assert (len(whole) == len(body) + 6) == kind.__struct_config__.array_like


@pytest.mark.parametrize(
    "value", [sample(requests.TokenFrame), sample(requests.GenerationRequest)], ids=["0x92", "0xdc"]
)
def test_no_flipped_bit_changes_what_is_read(value: Any) -> None:
    whole, num_damaged = sealed(encode(value)), 0
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert decoder(type(value)).decode(opened(bytes(flipped))) == value, bit
        except DamagedError:
            num_damaged += 1
        except UNREADABLE:
            pass
    assert num_damaged == 8 * (len(whole) - 2), "all but those of the mark itself"


def test_a_reply_that_was_damaged_counts_as_none() -> None:
    whole = bytearray(sealed(encode(sample(requests.ReplayReply))))
    whole[5] ^= 4
    with pytest.raises(BusError, match="was damaged") as raised:
        decode_reply(requests.ReplayReply, "subject", {}, bytes(whole))
    assert raised.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", 2**62),
        ("epoch", -1),
        ("timeout_s", float("nan")),
        ("waited_s", float("inf")),
        ("sampling", [7, -1]),
        ("gateway_id", "x" * 70_000),
    ],
)
def test_what_would_leave_the_arithmetic_is_not_read(field: str, value: Any) -> None:
    fields = [value if name == field else each for name, each in zip(
        requests.GenerationRequest.__struct_fields__,
        msgspec.to_builtins(sample(requests.GenerationRequest), builtin_types=(bytes,)),
        strict=True,
    )]  # fmt: skip
    with pytest.raises(UNREADABLE):
        decoder(requests.GenerationRequest).decode(encode(fields))
    with pytest.raises(UNREADABLE):
        decoder(requests.ListHeldRequests).decode(b"\x91" * 100_000 + b"\xc0")


def test_hot_path_messages_are_arrays() -> None:
    for kind in (requests.TokenFrame, requests.TokenEntry, requests.GenerationRequest, cluster.LoadReport):
        assert kind.__struct_config__.array_like


def test_subjects_are_distinct_and_prefixed() -> None:
    subjects = [channel.subject for channel in CHANNELS.values()]
    assert len(set(subjects)) == len(subjects)
    assert all(subject.startswith(catalogue.PREFIX + ".") for subject in subjects)
    assert len({bucket.name for bucket in BUCKETS.values()}) == len(BUCKETS)


def test_subjects_are_filled_and_recognised() -> None:
    channel = catalogue.INSTANCE_SUBMIT.at(instance_id="node-a-0")
    assert channel.subject == "tideway.v1.instance.node-a-0.submit"
    assert subject_pattern(channel.subject) == "instance.{instance_id}.submit"
    assert subject_pattern(catalogue.LOAD_REPORTS.subject) == "load"
    assert subject_pattern("tideway.v1.instance.a.b.submit") == "other"
    for bad in ("", "a.b", "a b", "*", ">", "a\r\nPUB x"):
        with pytest.raises(ValueError, match="cannot be part of a subject"):
            catalogue.INSTANCE_SUBMIT.at(instance_id=bad)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_tokens_are_packed_as_little_endian_int32(tokens: list[int]) -> None:
    packed = requests.pack_tokens(tokens)
    assert packed == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert requests.unpack_tokens(packed) == tokens


@given(st.text(min_size=1), st.text(min_size=1))
def test_bucket_keys_are_valid_and_distinct(one: str, other: str) -> None:
    key = channels.bucket_key(one)
    assert all(c.isascii() and (c.isalnum() or c in "_/-=") for c in key)
    assert (key == channels.bucket_key(other)) == (one == other)


# ------------------------------------------------------------------------------------------------------ header blocks


@given(st.sampled_from(ErrorCode), st.text(), st.text(), st.floats(0, 1e6))
def test_errors_travel_whole(code: ErrorCode, message: str, param: str, retry_after_s: float) -> None:
    info = ErrorInfo(code, message, param, retry_after_s)
    fields = parse_headers(error_headers(info))
    assert b"Nats-Service-Error" in fields and int(fields[b"Nats-Service-Error-Code"]) >= 400
    with pytest.raises(ServiceError) as raised:
        decode_reply(ErrorInfo, "subject", fields, encode(info))
    assert raised.value.info == info


def test_errors_of_other_services_are_internal() -> None:
    fields = parse_headers(b"NATS/1.0\r\nNats-Service-Error: out of cheese\r\nNats-Service-Error-Code: 500\r\n\r\n")
    with pytest.raises(BusError) as raised:
        decode_reply(ErrorInfo, "subject", fields, b"")
    assert raised.value.info == ErrorInfo(ErrorCode.INTERNAL, "out of cheese")


def test_header_blocks_are_parsed() -> None:
    assert parse_headers(request_headers(1.5, "00-ab-cd-01")) == {
        b"Tideway-Timeout": b"1.500",
        b"traceparent": b"00-ab-cd-01",
    }
    assert parse_headers(request_headers(0.25, "")) == {b"Tideway-Timeout": b"0.250"}
    assert parse_headers(b"NATS/1.0 503\r\n\r\n") == {b"Status": b"503"}
    assert parse_headers(b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer:9\r\n\r\n") == {
        b"Status": b"100",
        b"Nats-Last-Consumer": b"9",
    }
