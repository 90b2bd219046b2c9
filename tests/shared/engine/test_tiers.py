"""Prefixes of ended requests, after the device has lost them: from host memory, from disk, or computed again."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from shared.engine.calls import (
    AddModel,
    Cancel,
    ClearPrefixCache,
    FlushTiers,
    FoundOnDisk,
    GiveUpReads,
    OnCopy,
    OnStep,
    RemoveModel,
    SetCostModel,
    Submit,
)
from shared.engine.engine import Engine
from shared.engine.memory import tiers as tiers_module
from shared.engine.plan import CopyKind, ModelShape
from shared.engine.prefix_hashes import block_hashes
from shared.engine.requests import Ended
from shared.messages.cluster import KEY_BYTES
from shared.policies.catalogue import ordering_policy
from shared.policies.token_budget import FixedTokenBudget
from tests.shared.costs import costs
from tests.shared.engine.fake_executor import FakeExecutor, expected_output, request

PAGE, PER_MERGED = 4, 2
SHAPE = ModelShape("a", PAGE, PER_MERGED, 80)
SLOW = costs(0.01, 0.01)
"""Computing a token takes 10 ms: all that was computed is worth keeping."""


class Instance:
    """One engine, whose copies end at once, but for those of the kinds that are held."""

    def __init__(
        self, *, host: int = 40, offload: str = "disk", disk: dict | None = None, cost=SLOW, **options
    ) -> None:
        options = {"offload_start": 0.0, "steps_in_flight": 1, **options}
        self.engine = Engine(
            10, 4, ordering_policy("fcfs"), FixedTokenBudget(64), num_host_merged=host, offload=offload, **options
        )  # fmt: skip
        self.engine.apply(AddModel(SHAPE), 0.0)
        if cost is not None:
            self.engine.apply(SetCostModel("a", cost), 0.0)
        self.executor = FakeExecutor([SHAPE])
        if disk is not None:
            self.executor.disk = disk
            self.engine.apply(FoundOnDisk("a", [block_hash for _, block_hash in disk]), 0.0)
        self.held: set[CopyKind] = set()
        self.waiting: list = []
        self.copies: Counter[CopyKind] = Counter()
        self.output: dict[str, list[int]] = {}
        self.ended: dict[str, Ended] = {}
        self.sent: dict = {}
        self.now = 0.0

    def submit(self, name: str, prompt: list[int], max_tokens: int = 2, **fields) -> None:
        self.sent[name] = request(name, prompt, max_tokens, **fields)
        assert self.engine.apply(Submit(self.sent[name]), self.now) is None

    def turn(self) -> bool:
        self.now += 0.01
        plan = self.engine.plan(self.now)
        copies = self.executor.start(self.engine.next_copies())
        if plan is not None:
            self.engine.apply(OnStep(self.executor.execute(plan)), self.now)
            copies += self.executor.start(self.engine.next_copies())
        self.waiting += copies
        ended = [copy for copy in self.waiting if copy.kind not in self.held]
        for copy in ended:
            self.waiting.remove(copy)
            self.copies[copy.kind] += len(copy.host_blocks)
            self.engine.apply(OnCopy(copy.copy_id, self.executor.copy(copy), 0.0001), self.now)
        self.engine.check()
        for effect in self.engine.effects():
            if isinstance(effect, Ended):
                self.ended[effect.request.request_id] = effect
            else:
                for entry in effect.entries:
                    self.output.setdefault(entry.request_id, []).extend(memoryview(entry.tokens).cast("i"))
        return plan is not None or bool(ended)

    def settle(self) -> None:
        while self.turn():
            pass

    def answer(self, name: str, prompt: list[int], max_tokens: int = 2, **fields) -> Ended:
        self.submit(name, prompt, max_tokens, **fields)
        self.settle()
        assert self.output[name] == expected_output(self.sent[name], SHAPE.max_model_len)
        return self.ended[name]

    def hashes_of(self, prompt: list[int]) -> list[bytes]:
        return list(block_hashes(request("any", prompt, 1), PAGE, len(prompt)))

    def lose_device(self) -> None:
        self.engine.pool.clear_cache()

    def lose_host(self) -> None:
        self.engine.memory.host.pool.clear_cache()


PROMPT = list(range(30))


def of_prompt_on_disk() -> Instance:
    """One that has answered `PROMPT`, whose blocks lie on disk alone."""
    it = Instance()
    it.answer("first", PROMPT)
    it.lose_device()
    it.lose_host()
    return it


def test_a_prefix_that_the_device_lost_comes_back_from_host_memory():
    it = Instance(offload="host")
    assert it.answer("first", PROMPT).num_cached_tokens == 0
    it.lose_device()
    again = it.answer("again", [*PROMPT, 1, 2, 3])
    assert (again.num_cached_tokens, again.num_host_tokens, again.num_disk_tokens) == (28, 28, 0)
    assert it.copies == {CopyKind.CHECKPOINT: 8, CopyKind.RESTORE: 7}, "and the new block is kept too"
    assert it.engine.counters.offloaded_blocks["a"] == 8
    assert it.engine.counters.cached_tokens == {"host": 28}


def test_a_prefix_that_host_memory_lost_too_comes_back_from_disk():
    it = of_prompt_on_disk()
    again = it.answer("again", [*PROMPT, 1, 2, 3])
    assert (again.num_cached_tokens, again.num_host_tokens, again.num_disk_tokens) == (28, 0, 28)
    assert it.copies[CopyKind.READ] == 7 and it.copies[CopyKind.WRITE] == 8, "and the new block is kept too"
    assert it.engine.counters.cached_tokens == {"disk": 28}


def test_another_instance_finds_what_one_wrote_and_another_tenant_does_not():
    first = Instance()
    first.answer("first", PROMPT, prefix_salt="one")
    other = Instance(disk=first.executor.disk)
    assert other.answer("same", PROMPT, prefix_salt="one").num_disk_tokens == 28
    assert other.answer("not the same", PROMPT, prefix_salt="two").num_cached_tokens == 0
    assert other.answer("nobody's", PROMPT).num_cached_tokens == 0
    assert other.copies[CopyKind.READ] == 7


def test_of_a_run_with_a_damaged_block_what_comes_before_it_is_used():
    it = Instance()
    it.answer("first", PROMPT)
    damaged = it.hashes_of(PROMPT)[3]
    it.lose_device()
    it.lose_host()
    del it.executor.disk["a", damaged]
    again = it.answer("again", [*PROMPT, 1, 2, 3])
    assert again.num_disk_tokens == 12
    assert it.engine.counters.unreadable_blocks["a"] == 1
    assert ("a", damaged) in it.executor.disk, "it was computed, and written anew"


def test_with_nothing_readable_all_is_computed():
    it = of_prompt_on_disk()
    it.executor.disk.clear()
    again = it.answer("again", [*PROMPT, 1, 2, 3])
    assert again.num_cached_tokens == 0 and again.num_preemptions == 0
    assert it.engine.counters.unreadable_blocks["a"] == 7
    it.engine.pool.clear_cache()
    assert it.engine.memory.host.pool.used_merged() == 0


def test_two_prompts_share_the_reads_of_what_they_have_in_common():
    it = of_prompt_on_disk()
    it.held = {CopyKind.READ}
    it.submit("one", [*PROMPT, 1, 2, 3])
    it.submit("two", [*PROMPT, 4, 5, 6])
    it.settle()
    assert len(it.waiting) == 7 and not it.ended.keys() & {"one", "two"}
    it.submit("beside", [7, 7, 7])
    it.settle()
    assert "beside" in it.ended, "a read keeps nobody else"
    it.held = set()
    it.settle()
    assert it.copies[CopyKind.READ] == 7
    assert [it.ended[name].num_disk_tokens for name in ("one", "two")] == [28, 28]


def test_what_waits_for_a_disk_that_hangs_is_computed():
    it = of_prompt_on_disk()
    it.held = {CopyKind.READ}
    it.submit("waits", [*PROMPT, 1, 2, 3])
    it.settle()
    assert "waits" not in it.ended
    it.engine.apply(GiveUpReads(), it.now)
    it.settle()
    assert it.ended["waits"].num_cached_tokens == 0
    assert it.answer("beside", [*PROMPT, 4, 5, 6]).num_disk_tokens == 0, "nobody asks the disk"
    assert len(it.waiting) == 7
    it.held = set()
    it.settle()
    it.engine.apply(FoundOnDisk("a", it.hashes_of(PROMPT)), it.now)
    it.lose_device()
    it.lose_host()
    assert it.answer("again", [*PROMPT, 7, 8, 9]).num_disk_tokens == 28


def test_blocks_of_host_memory_and_of_disk_are_told_apart():
    it = Instance(offload_start=0.0)
    it.answer("short", PROMPT[:16])
    it.lose_device()
    it.lose_host()
    it.answer("long", [*PROMPT, 1], stop_token_ids=[])
    it.lose_device()
    again = it.answer("again", [*PROMPT, 2])
    assert (again.num_host_tokens, again.num_disk_tokens) == (28, 0)


def test_what_is_on_its_way_when_the_cache_is_cleared_is_not_found():
    it = Instance(offload_start=0.0)
    it.held = {CopyKind.CHECKPOINT}
    it.submit("first", PROMPT)
    it.settle()
    it.engine.apply(ClearPrefixCache(), it.now)
    it.held = set()
    it.settle()
    assert it.answer("again", PROMPT).num_cached_tokens == 0


def test_what_a_waiting_prompt_needs_is_read_before_it_is_admitted():
    it = of_prompt_on_disk()
    for number in range(4):
        it.submit(f"row {number}", [50 + number] * 3, 40)
    it.turn()
    it.submit("waits", [*PROMPT, 1, 2, 3])
    it.turn()
    it.turn()
    assert it.engine.held("waits").state == 0 and it.copies[CopyKind.READ] == 7
    it.settle()
    assert it.ended["waits"].num_disk_tokens == 28 and it.copies[CopyKind.READ] == 7


def test_one_that_is_cancelled_while_it_is_read_leaves_nothing_behind():
    it = of_prompt_on_disk()
    it.held = {CopyKind.READ}
    it.submit("gone", [*PROMPT, 1])
    it.settle()
    it.engine.apply(Cancel("gone"), it.now)
    it.engine.check()
    it.held = set()
    it.settle()
    assert it.engine.pool.used_merged() == it.engine.memory.host.pool.used_merged() == 0
    assert it.answer("again", [*PROMPT, 1]).num_host_tokens == 28, "what was read is kept"


def test_nothing_goes_down_while_there_is_room():
    it = Instance(offload_start=0.75)
    it.answer("first", PROMPT)
    assert not it.copies
    for number in range(3):
        it.answer(f"more {number}", [100 + number] * 24)
    assert it.copies[CopyKind.CHECKPOINT] > 0 and not it.copies[CopyKind.WRITE]


def test_all_goes_to_disk_before_an_instance_ends():
    it = Instance(offload_start=1.0)
    it.answer("first", PROMPT)
    assert not it.copies
    assert not it.engine.apply(FlushTiers(), it.now)
    it.settle()
    assert it.engine.apply(FlushTiers(), it.now)
    assert len(it.executor.disk) == 7
    assert Instance(disk=it.executor.disk).answer("again", PROMPT).num_disk_tokens == 28


@pytest.mark.parametrize("offload", ["off", "host"])
def test_without_a_disk_there_is_nothing_to_wait_for_at_the_end(offload):
    it = Instance(offload=offload, offload_start=1.0)
    it.answer("first", PROMPT)
    assert it.engine.apply(FlushTiers(), it.now) and not it.copies


def test_off_or_without_host_memory_nothing_is_copied():
    for options in ({"offload": "off"}, {"host": 0}):
        it = Instance(**options)
        it.answer("first", PROMPT)
        it.lose_device()
        assert it.answer("again", PROMPT).num_cached_tokens == 0 and not it.copies


def test_what_is_computed_sooner_than_copied_is_neither_kept_nor_read():
    fast = costs(0.0001, 0.0000001, checkpoint_block_s=0.01, restore_block_s=0.01)
    it = Instance(cost=fast)
    it.answer("first", PROMPT)
    assert not it.copies
    slow = Instance()
    slow.answer("first", PROMPT)
    it = Instance(cost=fast, disk=slow.executor.disk)
    assert it.answer("again", PROMPT).num_cached_tokens == 0 and not it.copies


def test_clearing_the_prefix_cache_clears_all_tiers():
    it = Instance()
    it.answer("first", PROMPT)
    it.engine.apply(ClearPrefixCache(), it.now)
    assert it.answer("again", PROMPT).num_cached_tokens == 0


def test_the_scheduler_hears_of_what_lies_on_disk():
    it = Instance()
    it.answer("first", PROMPT)
    written = {block_hash[:KEY_BYTES] for _, block_hash in it.executor.disk}
    it.engine.memory.cache_news.take()
    it.lose_device()
    it.lose_host()
    changes = it.engine.memory.cache_news.take()
    held = {changes.cache_held[at : at + KEY_BYTES] for at in range(0, len(changes.cache_held), KEY_BYTES)}
    assert written <= held
    it.engine.memory.host.disk.clear()
    changes = it.engine.memory.cache_news.take()
    lost = {changes.cache_lost[at : at + KEY_BYTES] for at in range(0, len(changes.cache_lost), KEY_BYTES)}
    assert written <= lost and not changes.cache_held


def test_a_model_leaves_when_nothing_of_it_is_being_read():
    it = of_prompt_on_disk()
    it.held = {CopyKind.READ}
    it.submit("reads", PROMPT)
    it.settle()
    assert not it.engine.apply(RemoveModel("a"), it.now)
    it.held = set()
    it.settle()
    assert it.engine.apply(RemoveModel("a"), it.now)
    it.engine.apply(AddModel(msgspec.structs.replace(SHAPE, max_model_len=60)), it.now)
    assert it.answer("new", PROMPT).num_cached_tokens == 0


def test_a_prefix_that_lies_in_parts_in_several_tiers_need_not_be_fetched():
    it = Instance()
    it.answer("first", PROMPT)
    hashes = it.hashes_of(PROMPT)
    it.lose_device()
    it.answer("short", PROMPT[:13])
    it.lose_host()
    joined = b"".join(hashes)
    assert it.engine.outgoing.num_found("a", joined) == 7
    it.engine.memory.host.disk.lose("a", [hashes[5]])
    assert it.engine.outgoing.num_found("a", joined) == 5
    assert it.engine.outgoing.num_found("nobody", joined) == 0


def test_conversations_that_take_turns_do_not_drive_each_other_out_of_host_memory():
    """Five of seven blocks each, where host memory has room for two: the least recently used would always be wanted next."""
    it = Instance(host=8, offload="host")
    prompts = [[100 + number, *PROMPT] for number in range(5)]
    for turn in range(30):
        for number, prompt in enumerate(prompts):
            it.now += 2.0
            ended = it.answer(f"{number} {turn}", prompt)
            it.lose_device()
            if turn == 29:
                assert ended.num_host_tokens in (0, 4, 8, 28)
    before = it.engine.counters.cached_tokens["host"]
    for number, prompt in enumerate(prompts):
        it.now += 2.0
        it.answer(f"{number} at last", prompt)
        it.lose_device()
    assert it.engine.counters.cached_tokens["host"] - before >= 2 * 28


def test_on_their_way_to_disk_blocks_pass_those_that_host_memory_keeps():
    it = Instance(host=20)
    prompts = [[100 + number, *PROMPT] for number in range(8)]
    for turn in range(30):
        for number, prompt in enumerate(prompts):
            it.now += 2.0
            ended = it.answer(f"{number} {turn}", prompt)
            it.lose_device()
            if turn:
                assert ended.num_cached_tokens == 28, "host memory or the disk has them"
    counters = it.engine.counters
    assert counters.written_blocks["a"] <= 8 * 8 and counters.cached_tokens["host"] > 20 * 2 * 28
    assert not it.engine.memory.tiers._passing


def test_where_host_memory_has_no_room_for_the_first_blocks_of_a_chain_the_others_stay_out():
    it = Instance(host=8, offload="host")
    tiers = it.engine.memory.tiers
    tiers._reuse["a"]._judge = lambda kind: 1000.0
    it.answer("first", PROMPT)
    assert it.engine.memory.host.pool.num_idle("a", 0.0, 99) == 9
    it.answer("other", [5, *[7] * 60])
    chain = it.hashes_of([5, *[7] * 60])
    kept = [it.engine.memory.host.pool.find_one("a", block_hash) is not None for block_hash in chain]
    assert kept == [True] * 9 + [False] * 6
    it.lose_device()
    assert it.answer("again", [5, *[7] * 60]).num_host_tokens == 36


def test_a_model_for_which_host_memory_has_no_room_hides_no_other(monkeypatch: pytest.MonkeyPatch):
    it = Instance(offload="host")
    it.engine.apply(AddModel(msgspec.structs.replace(SHAPE, name="b")), 0.0)
    it.engine.apply(SetCostModel("b", SLOW), 0.0)
    it.executor = FakeExecutor([SHAPE, msgspec.structs.replace(SHAPE, name="b")])
    pool = it.engine.memory.host.pool
    known = pool.num_available
    monkeypatch.setattr(pool, "num_available", lambda model: 0 if model == "a" else known(model))
    monkeypatch.setattr(tiers_module, "MAX_LOOKED", 4)
    it.answer("first", PROMPT)
    it.answer("second", PROMPT, model="b")
    assert it.engine.counters.offloaded_blocks.keys() == {"b"}
