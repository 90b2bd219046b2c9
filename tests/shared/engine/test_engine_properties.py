"""The engine under random arrivals, cancels, failures and deadlines, with invariants checked after every call."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from shared.engine.calls import (
    AddModel,
    Cancel,
    ClearPrefixCache,
    FoundOnDisk,
    GiveUpReads,
    LostOnDisk,
    OnCopy,
    OnStep,
    OnTime,
    SetCostModel,
    Submit,
)
from shared.engine.engine import Engine
from shared.engine.plan import CopyKind, DraftShape, ModelShape, StepResult
from shared.engine.requests import Ended, Output
from shared.messages.requests import (
    ErrorCode,
    FinishReason,
    Priority,
    RequestClass,
    pack_tokens,
    unpack_tokens,
)
from shared.policies.catalogue import ORDERING_POLICIES, ordering_policy
from shared.policies.checkpointing import AdaptiveCheckpoint
from shared.policies.prompt_lookup import LookupSettings
from shared.policies.slo_budget import SloTokenBudget
from shared.policies.speculation import GateState, SpeculationGate
from shared.policies.token_budget import FixedTokenBudget
from tests.seeds import examples
from tests.shared.costs import SMALL
from tests.shared.engine.fake_executor import (
    FakeExecutor,
    expected_output,
    mostly,
    next_token,
    prompt_logprobs,
    repeating_token,
    request,
)

SHAPES = [ModelShape("a", 4, 3, 60), ModelShape("b", 2, 2, 24)]
DRAFTS = {"a": DraftShape(9, 50), "b": DraftShape(2, 100)}


class AlwaysTries(SpeculationGate):
    def __init__(self):
        super().__init__()
        self.state = GateState.TRIES

    def take_turn(self):
        return GateState.TRIES


class EngineMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        num_merged=st.integers(2, 8),
        rows=st.integers(1, 4),
        budget=st.integers(1, 12),
        depth=st.integers(1, 2),
        ordering=st.sampled_from(sorted(ORDERING_POLICIES)),
        slo=st.booleans(),
        host=st.integers(0, 6),
        start_share=st.sampled_from([0.0, 0.5]),
        interruption=st.sampled_from(["suspend", "discard", "off"]),
        mix_phases=st.booleans(),
        prefetch=st.booleans(),
        has_cost_model=st.booleans(),
        least_share=st.sampled_from([0.0, 0.25, 0.7]),
        lookup=st.sampled_from([LookupSettings(), LookupSettings(1, 1, 1), LookupSettings(6, 1, 3)]),
        drafting=st.sampled_from(["none", "measured", "always"]),
        offload=st.sampled_from(["off", "host", "disk"]),
        offload_start=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def start(
        self,
        num_merged,
        rows,
        budget,
        depth,
        ordering,
        slo,
        host,
        start_share,
        interruption,
        mix_phases,
        prefetch,
        has_cost_model,
        least_share,
        lookup,
        drafting,
        offload,
        offload_start,
    ):
        self.next_token = repeating_token if lookup.num_tokens else next_token
        self.engine = Engine(
            num_merged,
            rows,
            ordering_policy(ordering, mix_phases=mix_phases),
            SloTokenBudget(budget) if slo else FixedTokenBudget(budget),
            steps_in_flight=depth,
            max_waiting=50,
            interruption=interruption,
            mix_phases=mix_phases,
            num_host_merged=host,
            checkpoint=AdaptiveCheckpoint(start_share),
            prefetch=prefetch,
            ttft_s=1.0,
            tpot_s=0.05,
            least_share=least_share,
            lookup=lookup,
            offload=offload,
            offload_start=offload_start,
        )
        shapes = SHAPES
        if drafting != "none":
            shapes = [msgspec.structs.replace(shape, draft=DRAFTS[shape.name]) for shape in SHAPES]
        self.limits = {shape.name: self.engine.apply(AddModel(shape), 0.0).max_model_len for shape in shapes}
        self.executor = FakeExecutor(shapes, self.next_token, mostly(self.next_token))
        if drafting == "always":
            for speculator in self.engine.drafting.speculators.values():
                speculator.gate = lambda num_sequences: AlwaysTries()
        self.now = 0.0
        self.sent = {}
        self.output = {}
        self.ended = {}
        self.cancelled = set()
        self.in_flight = []
        self.copies = []
        if has_cost_model:
            for shape in SHAPES:
                self.engine.apply(SetCostModel(shape.name, SMALL), 0.0)

    @rule(
        target=requests,
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        stops=st.lists(st.integers(0, 999), max_size=400, unique=True),
        model=st.sampled_from(["a", "b"]),
        offline=st.booleans(),
        high=st.booleans(),
        timeout_s=st.sampled_from([5.0, 1000.0]),
        scored=st.booleans(),
    )
    def submit(self, prompt, max_tokens, min_tokens, stops, model, offline, high, timeout_s, scored):
        name = f"r{len(self.sent)}"
        sent = request(
            name,
            prompt,
            max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=tuple(stops),
            model=model,
            request_class=RequestClass.OFFLINE if offline else RequestClass.ONLINE,
            priority=Priority.HIGH if high else Priority.NORMAL,
            timeout_s=timeout_s,
            logprobs=0 if scored else -1,
            prompt_logprobs=0 if scored else -1,
        )
        refused = self.engine.apply(Submit(sent), self.now)
        if refused is None:
            self.sent[name] = sent
            self.output[name] = []
        else:
            assert refused.code in (ErrorCode.TOO_LONG, ErrorCode.OVERLOADED)
            if refused.code == ErrorCode.TOO_LONG:
                assert len(prompt) >= self.limits[model]
        return name

    @rule(name=requests)
    def cancel(self, name):
        self.engine.apply(Cancel(name), self.now)
        self.collect()

    @rule(name=requests)
    def submit_again(self, name):
        """The same id and epoch has no effect while the request is held."""
        if name in self.sent and name not in self.ended:
            assert self.engine.apply(Submit(self.sent[name]), self.now) is None

    @rule(name=requests, cut=st.integers(0, 12))
    def place_again(self, name, cut):
        """A higher epoch, with part of the output as prior, continues exactly after it."""
        if name in self.sent and name not in self.ended:
            prior = self.output[name][:cut]
            again = msgspec.structs.replace(self.sent[name], epoch=self.sent[name].epoch + 1, prior=pack_tokens(prior))
            if self.engine.apply(Submit(again), self.now) is None:
                self.sent[name] = again
                self.output[name] = prior
            else:
                del self.sent[name]
            self.collect()

    @rule()
    def plan(self):
        plan = self.engine.plan(self.now)
        self.take_copies()
        if plan is not None:
            self.launch(plan)

    def launch(self, plan):
        self.in_flight.append(plan)
        self.executor.launch(plan)

    def take_copies(self):
        self.copies.extend(self.executor.start(self.engine.next_copies()))

    @rule(fails=st.sampled_from([False] * 9 + [True]), share=st.floats(0, 0.99))
    def step_returns(self, fails, share):
        if self.in_flight:
            plan = self.in_flight.pop(0)
            if self.engine.take_interrupt(self.now) == plan.step_id:
                assert self.engine.take_interrupt(self.now) is None
                self.engine.apply(OnStep(self.executor.suspend(plan, share)), self.now)
                return
            result = self.executor.execute(plan)
            self.engine.apply(
                OnStep(StepResult(plan.step_id, [], error="out of memory") if fails else result), self.now
            )
            self.engine.apply(OnStep(result), self.now)
            self.collect()

    @rule(ok=st.sampled_from([True] * 5 + [False]))
    def copy_ends(self, ok):
        if self.copies:
            copy = self.copies.pop(0)
            ok = copy.kind == CopyKind.MOVE or (ok and self.executor.copy(copy))
            self.engine.apply(OnCopy(copy.copy_id, ok), self.now)
            self.engine.apply(OnCopy(copy.copy_id, True), self.now)

    @rule(seconds=st.sampled_from([0.1, 3.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.engine.apply(OnTime(), self.now)
        wakeup = self.engine.next_wakeup()
        assert wakeup is None or wakeup > self.now
        self.collect()

    @rule(in_all_tiers=st.booleans())
    def forget_cache(self, in_all_tiers):
        if in_all_tiers:
            self.engine.apply(ClearPrefixCache(), self.now)
        else:
            self.engine.pool.clear_cache()

    @rule()
    def disk_hangs(self):
        self.engine.apply(GiveUpReads(), self.now)
        assert not any(
            self.engine.memory.host.disk and self.engine.memory.host.disk.num_known(name) for name in ("a", "b")
        )

    @rule(is_known=st.booleans(), data=st.data())
    def files_vanish(self, is_known, data):
        """Another instance, or damage, takes files from the disk."""
        if self.executor.disk:
            model, block_hash = data.draw(st.sampled_from(list(self.executor.disk)))
            del self.executor.disk[model, block_hash]
            if is_known:
                self.engine.apply(LostOnDisk(model, [block_hash]), self.now)

    @rule()
    def look_for_files(self):
        for model, block_hash in self.executor.disk:
            self.engine.apply(FoundOnDisk(model, [block_hash]), self.now)

    @invariant()
    def holds(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def collect(self):
        for effect in self.engine.effects():
            if isinstance(effect, Ended):
                assert effect.request.request_id not in self.ended, "a request ended twice"
                self.ended[effect.request.request_id] = effect
                continue
            assert isinstance(effect, Output) and effect.gateway_id == "gateway"
            for entry in effect.entries:
                output = self.output[entry.request_id]
                assert entry.offset == len(output), "a repeated or missing token"
                sent = self.sent[entry.request_id]
                if entry.tokens and sent.sampling.prompt_logprobs >= 0:
                    told = b"" if output else prompt_logprobs(unpack_tokens(sent.prompt))
                    assert [logprob.prompt for logprob in entry.logprobs] == [told] + [b""] * (
                        len(entry.tokens) // 4 - 1
                    )
                output.extend(unpack_tokens(entry.tokens))

    def teardown(self):
        """With no more arrivals everything drains in bounded steps, and every output is the undisturbed one."""
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            self.now += 0.01
            while len(self.in_flight) < self.engine.steps.max_in_flight and (plan := self.engine.plan(self.now)):
                self.take_copies()
                self.launch(plan)
            self.take_copies()
            if not self.in_flight and not self.copies:
                break
            if self.in_flight:
                self.engine.apply(OnStep(self.executor.execute(self.in_flight.pop(0))), self.now)
            while self.copies:
                self.copy_ends(True)
            self.engine.check()
        self.collect()
        assert set(self.ended) == set(self.sent)
        assert self.engine.pool.used_merged() == 0
        assert self.engine.memory.host.pool is None or self.engine.memory.host.pool.used_merged() == 0
        assert self.engine.memory.suspended is None
        for name, ended in self.ended.items():
            expected = expected_output(self.sent[name], self.limits[self.sent[name].model], self.next_token)
            if ended.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert self.output[name] == expected, name
                stops = self.sent[name].sampling.stop_token_ids
                assert ended.reason == (FinishReason.STOP if expected[-1] in stops else FinishReason.LENGTH) or (
                    ended.reason == FinishReason.LENGTH
                )
            else:
                assert self.output[name] == expected[: len(self.output[name])]


EngineMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
TestEngine = EngineMachine.TestCase
