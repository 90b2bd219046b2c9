"""What an operator may ask of a plan: refusals name the field."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from services.placement.fleet import Fleet
from services.placement.footprint import ConfiguredModel
from services.placement.inputs import Inputs
from services.placement.planning import plan
from services.placement.requests import check_plan
from shared.bus.interface import ServiceError
from shared.messages.cluster import DeviceGroup, ModelSpec, NodeInfo
from shared.messages.requests import ErrorCode
from shared.placement.plan import Group
from tests.placement.test_planning import model, node

BAD, CONFLICT, UNAVAILABLE = ErrorCode.BAD_REQUEST, ErrorCode.CONFLICT, ErrorCode.UNAVAILABLE


def pairs(node_id: str, num_stages: int = 1, size: int = 2) -> NodeInfo:
    group = DeviceGroup(("cpu",) * size, num_stages)
    return msgspec.structs.replace(node(node_id, num_instances=2), groups=(group, group))


MODELS = [
    model("a"),
    model("b"),
    model("odd", kv_heads=3),
    model("twice", replicas=2),
    ConfiguredModel(msgspec.structs.replace(model("new").spec, replicas=None), None, "no such folder"),
]
NODES = [node("n"), pairs("two"), pairs("pipe", num_stages=3, size=3), node("none", num_instances=0)]
ALL = ("a", "b", "odd")


def inputs(fleet: Fleet | None = None, held: frozenset[str] = frozenset()) -> Inputs:
    """`ALL` are on instances; "new" cannot be read, "twice" is wanted on two."""
    running = plan([one for one in MODELS if one.spec.name in ALL], [NODES[0]], None)
    return Inputs(MODELS, NODES, held, running, fleet or Fleet(), frozenset())


@pytest.mark.parametrize(
    ("groups", "code", "field", "words"),
    [
        ([("m", (0,), ALL)], BAD, "groups[0].node_id", "'m' is no node: there are n, none, pipe, two"),
        ([("n", (0,), ALL), ("n", (0, 2), ALL)], BAD, "groups[1].devices", "neighbours such as [0, 1], 1, 2, 4, 8"),
        ([("two", (0, 1, 2), ALL)], BAD, "groups[0].devices", "1, 2, 4, 8 of them"),
        ([("n", (1, 2), ALL)], BAD, "groups[0].devices", "n has devices 0 to 1, not 2"),
        ([("none", (0,), ALL)], BAD, "groups[0].devices", "none offers no device, not 0"),
        (
            [("n", (0,), ALL), ("n", (0,), "a")],
            BAD,
            "groups[1].devices",
            "device 0 of n is in groups[0] and in groups[1]",
        ),
        ([("n", (0,), ("a", "x"))], BAD, "groups[0].models", "'x' is no model: there are a, b, new, odd, twice"),
        ([("n", (0,), ("a", "odd"))], BAD, "groups", "b would be on no group"),
        ([("two", (0, 1), ALL)], BAD, "groups[0].devices", "the 3 KV heads of 'odd' cannot be cut over 2 devices"),
        ([("n", (0,), (*ALL, "new"))], CONFLICT, "groups[0].models", "'new' is not known: no such folder"),
        ([("n", (0,), (*ALL, "twice"))], CONFLICT, "groups", "on 2 instances and not on 1: tideway scale twice 1"),
        ([("n", (0,), ALL), ("two", (1,), "a")], CONFLICT, "groups[1].devices", "two-0 is drained: undrain it first"),
        ([("n", (0,), ALL), ("two", (2,), "a")], CONFLICT, "groups[1].devices", "two-2 was taken out by scaling"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(
    groups: list[tuple[str, tuple[int, ...], tuple[str, ...]]], code: ErrorCode, field: str, words: str
) -> None:
    fleet = Fleet(("two-0", "two-2"), ("two-2",)) if "two-" in words else None
    with pytest.raises(ServiceError) as refused:
        check_plan([Group(*group) for group in groups], inputs(fleet))
    assert (refused.value.code, refused.value.info.param) == (code, field)
    assert words in refused.value.info.message


def test_a_plan_that_can_be_is_put_in_order() -> None:
    """A pipeline of three stages is cut into layers, not heads; what runs nowhere now may be left out."""
    groups = [Group("pipe", (2, 0, 1), ("odd", "a")), Group("n", (1,), ("b", "a", "b"))]
    assert check_plan(groups, inputs()).groups == (Group("n", (1,), ("a", "b")), Group("pipe", (0, 1, 2), ("a", "odd")))
    two = [*groups, Group("two", (0,), ("twice",)), Group("two", (1,), ("twice",))]
    assert "twice" in check_plan(two, inputs()).models


def test_while_a_node_may_be_back_nothing_is_set() -> None:
    asked = [Group("n", (0,), ALL)]
    with pytest.raises(ServiceError, match="gone is away") as refused:
        check_plan(asked, inputs(held=frozenset({"gone"})))
    assert refused.value.code is UNAVAILABLE and refused.value.info.retry_after_s
    assert check_plan(asked, replace(inputs(), incumbent=None)).models == set(ALL)


def test_a_plan_has_no_place_for_what_is_put_away() -> None:
    asleep = replace(model("later"), spec=ModelSpec("later", "/later", on_demand=True), asleep="idle")
    with pytest.raises(ServiceError, match="'later' is on demand and put away") as refused:
        check_plan([Group("n", (0,), (*ALL, "later"))], replace(inputs(), models=[*MODELS, asleep]))
    assert refused.value.code is CONFLICT
