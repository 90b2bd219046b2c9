"""Roles in the scheduler's core: who computes a prompt, who is named to decode it, and what is counted for that."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import shared.scheduling.dispatching as dispatching
from shared.messages.cluster import MigrationOutcome, Role
from shared.messages.requests import HeldRequest
from shared.policies.roles import BEGIN_S
from shared.runtime.settings import SchedulerSettings
from shared.scheduling.actions import Action, AskHeld, Dispatch, NotifyLost, TellRole
from shared.scheduling.calls import OnDispatched, OnHeld, OnRegistry, OnReport, Submit
from shared.scheduling.candidates import CandidatesFor
from shared.scheduling.core import SchedulerCore
from tests.shared.scheduling.samples import make_info, make_report, make_request

TOKEN_S, STEP_S = 1e-3, 0.01
ROLES = {"p": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


def make_core(mode: str = "fixed", roles: dict[str, Role] = ROLES, **fields: object) -> SchedulerCore:
    core = SchedulerCore(SchedulerSettings(roles=mode), term=1)  # type: ignore[arg-type]
    for number, (name, role) in enumerate(roles.items()):
        info = msgspec.structs.replace(
            make_info(name, num_merged=100), role=role, is_role_fixed=mode == "fixed", **fields
        )
        core.apply(OnRegistry(name, info), 0.0)
        report(core, name, 1, freeness=50.0 - number)
    return core


def report(core: SchedulerCore, name: str, sequence: int, now: float = 0.0, **fields: object) -> None:
    fields = {"num_running": 1, "running": {"m": 1}, "token_s": TOKEN_S, "decode_s": STEP_S, **fields}
    made = make_report(name, sequence, **fields)  # type: ignore[arg-type]
    core.apply(OnReport(msgspec.structs.replace(made, ttft_s=10.0, tpot_s=0.1)), now)


def dispatch_all(
    core: SchedulerCore, request_id: str, num_prompt: int, now: float = 0.0, max_tokens: int = 50
) -> list[Action]:
    made = make_request(request_id, num_prompt=num_prompt, max_tokens=max_tokens)
    # No prompt is found in a cache.
    core.apply(Submit(msgspec.structs.replace(made, prefix_salt=request_id)), now)
    actions = core.actions(now)
    for action in actions:
        if isinstance(action, Dispatch):
            core.apply(OnDispatched.to(action, None), now)
    return actions


def dispatch(core: SchedulerCore, *arguments: Any, **fields: Any) -> Dispatch:
    (found,) = [action for action in dispatch_all(core, *arguments, **fields) if isinstance(action, Dispatch)]
    return found


def test_a_long_prompt_goes_to_a_prefill_instance_and_names_its_decoder_while_a_short_one_stays() -> None:
    core = make_core()
    long, short = dispatch(core, "long", 500), dispatch(core, "short", 10)
    assert (long.instance_id, long.request.decoder) == ("p", "d0") and "d0" in long.why
    assert short.instance_id in ("d0", "d1") and not short.request.decoder
    brief = dispatch(core, "brief", 500, max_tokens=3)
    assert (brief.instance_id, brief.request.decoder) == ("p", "")


@pytest.mark.parametrize("mode", ["off", "adaptive"])
def test_roles_that_nobody_fixed_or_that_are_off_change_nothing(mode: str) -> None:
    core = make_core(mode, dict.fromkeys(ROLES, Role.BOTH))
    assert not dispatch(core, "long", 500).request.decoder


def test_an_instance_without_a_transport_hands_nothing_over() -> None:
    core = make_core(kv_address="")
    assert not dispatch(core, "long", 500).request.decoder


@pytest.mark.parametrize("fields", [{"kv_address": ""}, {"engine": "vllm"}])
def test_a_request_is_handed_over_to_the_freest_that_can_take_it(fields: dict[str, str]) -> None:
    core = make_core()
    state = core.cluster.get("d0")
    assert state is not None
    core.apply(OnRegistry("d0", msgspec.structs.replace(state.info, **fields)), 0.0)
    assert dispatch(core, "long", 500).request.decoder == "d1"


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_an_instance_whose_engine_hands_nothing_over_does_both(mode: str) -> None:
    core = make_core(mode, engine="vllm")
    told: list[Action] = []
    for number in range(40):
        actions = dispatch_all(core, f"r{number}", 900, 0.5 * number)
        told += [one for one in actions if isinstance(one, TellRole)]
        assert not any(one.request.decoder for one in actions if isinstance(one, Dispatch))
        for name in ROLES:
            report(core, name, number + 2, 0.5 * number, admitted=[f"r{number}"], ended=[f"r{number}"], freeness=90.0)
    assert not told and not core.roles.is_split


def test_what_is_promised_to_a_decoder_counts_there_until_it_has_come_or_will_not() -> None:
    core = make_core()
    decoders = [dispatch(core, f"r{number}", 900).request.decoder for number in range(4)]
    assert sorted(decoders) == ["d0", "d0", "d1", "d1"], "each takes what the one before leaves less free"
    ledger = core.dispatcher.ledger
    assert ledger.num_online("d0") == 2 and ledger.demand_merged("d0") > 20
    moved = HeldRequest(request_id="r0", gateway_id="g0", epoch=1, model="m", num_tokens=901, running=True)
    core.apply(OnReport(msgspec.structs.replace(make_report(decoders[0], 2), migrated_in=[moved])), 1.0)
    failed = MigrationOutcome("r1", decoders[1], 0, False, "refused")
    core.apply(OnReport(make_report("p", 2, migrations=[failed])), 1.0)
    core.apply(OnReport(make_report("p", 3, ended=["r2", "r3"])), 1.0)
    assert ledger.num_online("d0") == ledger.num_online("d1") == 0 == ledger.demand_merged("d0")


def test_what_is_promised_to_a_decoder_ends_where_the_request_is_found_elsewhere_or_the_decoder_goes() -> None:
    core = make_core()
    decoders = [dispatch(core, f"r{number}", 900).request.decoder for number in range(2)]
    held = HeldRequest(request_id="r0", gateway_id="g0", epoch=1, model="m", num_tokens=901, running=True)
    core.apply(OnHeld(AskHeld(decoders[0], "1", 0.0), [held]), 1.0)
    assert core.dispatcher.ledger.num_online(decoders[0]) == 0
    core.apply(OnRegistry(decoders[1], None), 1.0)
    core.apply(OnReport(make_report("p", 2, ended=["r1"])), 1.0)
    assert core.dispatcher.ledger.num_online(decoders[1]) == 0


def test_a_decoder_whose_memory_came_together_counts_as_that_whatever_is_promised_to_it() -> None:
    core = make_core()
    report(core, "d0", 2, freeness=-1.0, waiting={"m": 1})
    assert core.dispatcher._defragmenting == {"d0"}
    core.dispatcher.ledger.promise("r", "d0", 5.0)
    report(core, "d0", 3)
    assert not core.dispatcher._defragmenting


def test_roles_follow_the_load_and_a_new_leader_goes_on_from_them() -> None:
    core = make_core("adaptive", dict.fromkeys(ROLES, Role.BOTH))
    told: list[Action] = []
    for number in range(40):
        now = 0.5 * number
        told += [action for action in dispatch_all(core, f"r{number}", 900, now) if isinstance(action, TellRole)]
        for name in ROLES:
            report(core, name, number + 2, now, admitted=[f"r{number}"], ended=[f"r{number}"], freeness=90.0)
        assert not told or now >= BEGIN_S, "what came lately has not filled the decoders yet"
    assert told and told[0].role is Role.PREFILL
    assert core.roles.is_split and sum(core.roles.is_prefill(name) for name in ROLES) >= 1
    (prefill,) = [name for name in ROLES if core.roles.is_prefill(name)][:1]
    state = core.cluster.get(prefill)
    assert state is not None
    for change in ({"is_role_fixed": True, "role": Role.DECODE}, {"is_role_fixed": False, "role": Role.BOTH}):
        core.apply(OnRegistry(prefill, msgspec.structs.replace(state.info, **change)), 20.0)
        assert not core.roles.is_prefill(prefill), "an operator's choice ends that of the scheduler"
    heir = make_core("adaptive", {**ROLES, "p": Role.PREFILL})
    assert heir.roles.is_prefill("p")
    again = make_info("p", incarnation="2", num_merged=100)
    heir.apply(OnRegistry("p", again), 1.0)
    assert not heir.roles.is_prefill("p"), "a new process begins with both"


def test_few_prefill_instances_are_found_without_a_look_at_all_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"i{number:02}": Role.PREFILL if number % 20 == 19 else Role.DECODE for number in range(60)}

    def sent() -> list[tuple[str, str]]:
        core, found = make_core(roles=names), []
        for number in range(30):
            made = dispatch(core, f"r{number}", 500 if number % 2 else 10)
            found.append((made.instance_id, made.request.decoder))
            report(core, f"i{number:02}", 2, freeness=10.0 * (number % 7))
        return found

    found = sent()
    assert {name for name, decoder in found if decoder} <= {"i19", "i39", "i59"} and any(dict(found).values())
    seen: list[str] = []
    fitting = CandidatesFor._fitting
    monkeypatch.setattr(CandidatesFor, "_fitting", lambda self, name: seen.append(name) or fitting(self, name))
    assert sent() == found
    num_seen = len(seen)
    monkeypatch.setattr(dispatching, "MAX_RANKED", 0)
    assert sent() == found and len(seen) - num_seen > 4 * num_seen


def test_the_gateway_hears_of_a_request_that_neither_end_of_a_handoff_told_of() -> None:
    core = make_core()
    asked = next(action for action in core.actions(0.0) if isinstance(action, AskHeld) and action.instance_id == "p")
    core.apply(OnHeld(asked, []), 0.0)
    assert dispatch(core, "long", 500, 0.1).request.decoder
    report(core, "p", 2, 0.2, admitted=["long"])
    # Its decoder took it over and died with it; the source's word of that was lost.
    report(core, "p", 4, 1.0)
    actions = core.actions(1.0)
    (asked,) = [action for action in actions if isinstance(action, AskHeld)]
    core.apply(OnHeld(asked, []), 1.1)
    lost = [action for action in core.actions(1.1) if isinstance(action, NotifyLost)]
    assert [one.request_id for told in lost for one in told.lost.requests] == ["long"]
