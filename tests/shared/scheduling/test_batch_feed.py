"""What a gateway's batches are granted, account by account."""

from __future__ import annotations

from functools import partial

from shared.messages.batches import GrantReply, OfflineDemand, OfflineGrant
from shared.scheduling.batch_feed import BatchFeed


def test_a_model_and_its_adapters_are_granted_in_the_order_of_their_demands() -> None:
    feed, taken = BatchFeed("g"), list[str]()
    for name in ("m", "poet"):
        account = feed.open("b", name, lambda wanted: OfflineDemand("b", "t", "m", wanted, 0, 1.0))
        account.want(100, partial(taken.append, name))
    query = feed.ask(0.0)
    assert query is not None and [demand.model for demand in query.demands] == ["m", "m"]
    feed.answered(GrantReply([OfflineGrant("b", 0, "m"), OfflineGrant("b", 100, "m")], 0.05, {"m": 30.0}), 0.0)
    assert taken == ["poet"]
    assert feed.share_per_s("m") == 15.0, "both may hope for half"


def test_nobody_refuses_what_nobody_asks_for() -> None:
    feed = BatchFeed("g")
    ticket = feed.open("b", "m", lambda wanted: OfflineDemand("b", "t", "m", wanted, 0, 1.0)).want(100, lambda: None)
    assert feed.ask(0.0) is not None
    feed.answered(None, 1.0)
    assert feed.is_refused
    ticket.settle()
    assert feed.ask(2.0) is None and not feed.is_refused
