"""Pairs as messages: begun at once, repeated while they live, ended with one more."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest

import shared.scheduling.rescheduling as rescheduling
from shared.messages.cluster import KEY_BYTES, LoadReport, MigrationOutcome, NextMove, Role, mark_positions
from shared.messages.migration import MigrationReason, Rebalance
from shared.migration.limits import DRAIN_CONCURRENCY
from shared.scheduling.actions import Paired, SendRebalance
from shared.scheduling.calls import OnRegistry, OnReport
from shared.scheduling.prefixes import prompt_keys
from tests.shared.scheduling.driver import Driver
from tests.shared.scheduling.samples import BLOCK_SIZE, make_info, make_report, make_request

LEASE_S = 0.5


def cluster(*names: str, **settings: object) -> Driver:
    driver = Driver(**settings)
    for name in names:
        driver.up(name)
    return driver


def sent(driver: Driver) -> list[tuple[str, list[str]]]:
    return [(action.instance_id, action.rebalance.destinations) for action in driver.take(SendRebalance)]


def test_a_source_is_told_at_once_again_and_at_the_end() -> None:
    driver = cluster("a", "b", "c")
    driver.report("a", migration_freeness=5.0, num_running=10)
    driver.report("b", migration_freeness=300.0, num_running=10)
    driver.pass_time(0.03)
    (first,) = driver.take(SendRebalance)
    assert first == SendRebalance("a", Rebalance(["c"], MigrationReason.BALANCE, LEASE_S, 1)), "the idle one is freest"
    assert [(paired.instance_id, paired.freeness) for paired in driver.take(Paired)] == [("a", 5.0)]
    driver.pass_time(1.0)
    again = sent(driver)
    assert 4 <= len(again) <= 10 and set(map(str, again)) == {str(("a", ["c"]))}
    assert driver.take(Paired) == []
    driver.report("a", migration_freeness=200.0, num_running=8)
    driver.pass_time(0.03)
    assert sent(driver) == [("a", [])]
    driver.pass_time(1.0)
    assert sent(driver) == [] and driver.core.rescheduler.next_wakeup() is None, "no work where nothing is wrong"


def test_a_report_of_an_older_version_names_the_requests_that_may_move() -> None:
    driver = cluster("a")
    of_now = msgspec.structs.replace(
        make_report("a", 2), next_migration_model="m", next_migration_tokens=300, late_model="n", late_tokens=40,
        late_starts_s=2.0,
    )  # fmt: skip
    told: list[object] = msgspec.msgpack.decode(msgspec.msgpack.encode(of_now))
    older = msgspec.msgpack.encode(told[: LoadReport.__struct_fields__.index("next_moves")])
    driver.core.apply(OnReport(msgspec.msgpack.decode(older, type=LoadReport)), driver.now)
    state = driver.core.cluster.get("a")
    view = state.rebalancing_view() if state is not None else None
    assert view is not None and (view.next_moves, view.late_move) == ((NextMove("m", 300),), NextMove("n", 40))


def test_leases_outlast_the_rarer_looks_of_a_large_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescheduling, "LOOK_S", 0.2)  # three instances as if they were six thousand
    driver = cluster("a", "b", "c")
    driver.report("a", migration_freeness=5.0, num_running=10)
    told_s: list[float] = []
    for _ in range(45):
        driver.pass_time(0.05)
        for message in driver.take(SendRebalance):
            told_s.append(driver.now)
            assert message.rebalance.lease_s == pytest.approx(1.8)
    gaps_s = [later - earlier for earlier, later in pairwise(told_s)]
    assert gaps_s == pytest.approx([0.6] * 3)


def test_an_instance_without_a_transport_neither_gives_nor_takes() -> None:
    driver = Driver()
    driver.up("a")
    driver.up("b", kv_address="")
    driver.report("a", migration_freeness=5.0, num_running=10)
    driver.pass_time(0.5)
    assert sent(driver) == []
    driver.up("c")
    driver.report("b", migration_freeness=5.0, num_running=10)
    driver.report("a", migration_freeness=math.inf)
    driver.pass_time(0.5)
    assert sent(driver) == []


def test_a_draining_instance_gives_to_all_that_can_take() -> None:
    driver = cluster("a", "b", "c", "other")
    driver.core.apply(OnRegistry("other", make_info("other", "x")), driver.now)
    driver.report("a", migration_freeness=500.0, num_running=3)
    driver.report("b", migration_freeness=150.0, num_running=20)
    driver.core.apply(OnRegistry("a", make_info("a", state="draining")), driver.now)
    driver.pass_time(0.03)
    (message,) = driver.take(SendRebalance)
    assert message == SendRebalance("a", Rebalance(["c", "b"], MigrationReason.DRAIN, LEASE_S, DRAIN_CONCURRENCY))
    driver.core.apply(OnRegistry("c", None), driver.now)
    driver.pass_time(0.11)
    assert sent(driver) == [("a", ["b"])], "at once when the list changes"
    driver.report("a")
    driver.pass_time(0.2)
    assert sent(driver) == [("a", [])], "it is empty"


def test_who_drains_is_told_which_request_goes_where_its_prefix_is() -> None:
    driver = cluster("a", "b", "c", "d")
    requests = {name: make_request(name, num_prompt=100 + 40 * n) for n, name in enumerate(("held by c", "by nobody"))}
    chains = {name: list(prompt_keys(sent, BLOCK_SIZE)) for name, sent in requests.items()}
    driver.report("b", migration_freeness=800.0, num_running=3, cache_held=b"".join(chains["held by c"][:2]))
    driver.report("c", migration_freeness=150.0, num_running=20, cache_held=b"".join(chains["held by c"]))
    chains["by nobody"] = [key[::-1] for key in chains["by nobody"]]
    moves = tuple(
        NextMove("m", 100, name, BLOCK_SIZE, len(chain), b"".join(chain[p - 1] for p in mark_positions(len(chain))))
        for name, chain in chains.items()
    )
    driver.report("a", migration_freeness=500.0, num_running=2, next_moves=moves)
    driver.core.apply(OnRegistry("a", make_info("a", state="draining")), driver.now)
    driver.pass_time(0.03)
    (message,) = driver.take(SendRebalance)
    assert message.rebalance.destinations == ["d", "b", "c"]
    assert message.rebalance.preferred == {"held by c": "c"}
    driver.core.apply(OnRegistry("c", None), driver.now)
    driver.pass_time(0.11)
    assert driver.take(SendRebalance)[-1].rebalance.preferred == {"held by c": "b"}, "the next best is still there"


def test_requests_that_leave_with_a_prefix_that_nobody_else_holds_go_to_one_place() -> None:
    driver = cluster("a", "b", "c")
    chain = list(prompt_keys(make_request("r", num_prompt=400), BLOCK_SIZE))

    def move(name: str, num_common: int) -> NextMove:
        own = (name.encode().ljust(KEY_BYTES)[: KEY_BYTES - 1] + bytes([at]) for at in range(num_common, len(chain)))
        keys = [*chain[:num_common], *own]
        marks = b"".join(keys[position - 1] for position in mark_positions(len(keys)))
        return NextMove("m", 400, name, BLOCK_SIZE, len(keys), marks)

    moves = (move("first", len(chain)), move("second", 15), move("other", 0))
    driver.report("a", migration_freeness=500.0, num_running=3, next_moves=moves)
    driver.core.apply(OnRegistry("a", make_info("a", state="draining")), driver.now)
    driver.pass_time(0.03)
    (message,) = driver.take(SendRebalance)
    assert message.rebalance.preferred == {"second": message.rebalance.destinations[0]}


def test_a_source_gives_to_the_holder_of_its_next_requests_prefix() -> None:
    driver = cluster("a", "b", "c")
    chain = list(prompt_keys(make_request("r", num_prompt=200), BLOCK_SIZE))
    move = NextMove("m", 200, "r", BLOCK_SIZE, len(chain), b"".join(chain[p - 1] for p in mark_positions(len(chain))))
    driver.report("b", migration_freeness=900.0, num_running=3)
    driver.report("c", migration_freeness=700.0, num_running=3, cache_held=b"".join(chain))
    driver.report("a", migration_freeness=5.0, num_running=10, next_moves=(move,))
    driver.pass_time(0.03)
    assert sent(driver) == [("a", ["c"])]


@pytest.mark.parametrize("drains", [False, True])
def test_a_request_that_decodes_does_not_go_back_to_where_its_prompt_was_computed(drains: bool) -> None:
    driver = cluster("a", "b", "c")
    prefill = msgspec.structs.replace(make_info("p"), role=Role.PREFILL, is_role_fixed=True)
    driver.core.apply(OnRegistry("p", prefill), driver.now)
    chain = list(prompt_keys(make_request("r", num_prompt=200), BLOCK_SIZE))
    move = NextMove("m", 200, "r", BLOCK_SIZE, len(chain), b"".join(chain[p - 1] for p in mark_positions(len(chain))))
    driver.report("p", cache_held=b"".join(chain))
    driver.report("b", migration_freeness=900.0, num_running=3)
    driver.report("c", migration_freeness=700.0, num_running=3, cache_held=b"".join(chain[:4]))
    driver.report("a", migration_freeness=5.0, num_running=10, next_moves=(move,))
    if drains:
        driver.core.apply(OnRegistry("a", make_info("a", state="draining")), driver.now)
    driver.pass_time(0.03)
    (message,) = driver.take(SendRebalance)
    assert "p" not in message.rebalance.destinations
    assert message.rebalance.preferred == ({"r": "c"} if drains else {})
    assert drains or message.rebalance.destinations == ["c"]


def test_a_draining_instance_gives_to_one_that_computes_prompts_what_no_other_serves() -> None:
    driver = cluster("a", "p")
    driver.up("d", "n")
    prefill = msgspec.structs.replace(make_info("p"), role=Role.PREFILL, is_role_fixed=True)
    driver.core.apply(OnRegistry("p", prefill), driver.now)
    driver.report("a", num_running=2)
    driver.core.apply(OnRegistry("a", make_info("a", state="draining")), driver.now)
    driver.pass_time(0.03)
    assert sent(driver) == [("a", ["p"])]


def test_offline_requests_leave_a_draining_instance_too() -> None:
    driver = cluster("a", "b")
    driver.report("a", waiting={"m": 3}, offline={"m": 3})
    driver.core.apply(OnRegistry("a", make_info("a", state="draining", kv_address="")), driver.now)
    driver.pass_time(0.03)
    assert sent(driver) == [("a", ["b"])]


def test_requests_of_a_model_that_is_unloaded_go_where_it_is_served() -> None:
    driver = cluster("a", "b")
    driver.up("n", "n")
    driver.report("a", num_running=2, migration_freeness=900.0)
    driver.core.apply(OnRegistry("a", make_info("a", model_state="unloading")), driver.now)
    driver.pass_time(0.03)
    assert sent(driver) == [("a", ["b"])]


def test_failed_moves_leave_a_destination_out_for_a_while() -> None:
    driver = cluster("a", "b")
    driver.report("a", migration_freeness=5.0, num_running=10)
    driver.pass_time(0.03)
    assert sent(driver) == [("a", ["b"])]
    driver.report(
        "a", migration_freeness=5.0, num_running=10, migrations=[MigrationOutcome("r", "b", 0, False, "refused")]
    )
    driver.pass_time(0.12)
    assert sent(driver) == [("a", [])]
    driver.pass_time(0.6)
    assert ("a", ["b"]) in sent(driver)


def test_nothing_moves_where_that_is_off() -> None:
    driver = cluster("a", "b", migration="off")
    driver.report("a", migration_freeness=5.0, num_running=10)
    driver.core.apply(OnRegistry("a", make_info("a", state="draining")), driver.now)
    driver.pass_time(1.0)
    assert driver.take(SendRebalance) == []


def test_a_long_prompt_goes_where_it_fits_or_will_fit_soonest_and_makes_room_come() -> None:
    """Pools of 100 merged blocks of 64 tokens. No instance is idle, so that freeness alone would say: always a."""
    driver = Driver()
    for name in "abc":
        driver.up(name, max_model_len=6400)
    driver.report("a", freeness=10.0, num_running=2, migration_freeness=640.0)
    driver.report("b", freeness=3.0, num_running=10, migration_freeness=190.0)
    driver.report("c", freeness=1.9, num_running=10, migration_freeness=120.0)
    driver.submit(make_request("short", num_prompt=64))
    assert driver.dispatches() == {"short": "a"}
    driver.report("a", freeness=9.5, num_running=2, migration_freeness=600.0, admitted=["short"])
    driver.submit(make_request("long", num_prompt=64 * 24, max_tokens=1))
    assert driver.dispatches() == {"long": "b"}, "the only one with 24 blocks to spare"
    driver.report("b", freeness=0.5, num_running=11, migration_freeness=180.0, admitted=["long"])
    driver.report("a", freeness=5.0, num_running=2, migration_freeness=320.0)
    driver.submit(make_request("longest", num_prompt=64 * 30, max_tokens=1))
    assert driver.dispatches() == {"longest": "c"}, "where least is missing, and not never"
    # The head of its queue does not fit: below 0, it is a source, and even those between the thresholds take from it.
    driver.report("c", freeness=-1.0, num_running=10, waiting={"m": 1}, migration_freeness=-130.0, admitted=["longest"])
    driver.report("a", freeness=0.5, num_running=2, migration_freeness=100.0)
    driver.pass_time(0.1)
    assert ("c", ["b"]) in sent(driver)


def test_headroom_is_kept_from_normal_requests_only() -> None:
    """a keeps some beside a request of high priority."""
    driver = cluster("a", "b", max_waiting_per_model=4)
    driver.report("a", freeness=0.5, freeness_high=3.0, num_running=20, num_high=1)
    driver.report("b", freeness=1.0, freeness_high=1.0, num_running=10)
    driver.submit(make_request("high", high=True))
    driver.submit(make_request("normal"))
    assert driver.dispatches() == {"high": "a", "normal": "b"}


def test_waiting_normal_requests_do_not_keep_high_ones_away() -> None:
    driver = cluster("a", max_waiting_per_model=1)
    driver.report("a", freeness=1.0, num_running=4, waiting={"m": 1})
    driver.submit(make_request("normal"))
    driver.submit(make_request("high", high=True))
    assert driver.dispatches() == {"high": "a"}
    driver.submit(make_request("another", high=True))
    assert driver.dispatches() == {}, "the number is bounded all the same"
