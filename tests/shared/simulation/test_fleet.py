"""A fleet in virtual time, small: what the live system does about failures and changes, with every token once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.costs.model import CostModel
from shared.engine.plan import ModelShape
from shared.engine.recording import Configuration
from shared.messages.cluster import InstancePlan, ModelSpec, PlacementPlan, Role
from shared.messages.requests import RequestClass
from shared.runtime.settings import SchedulerSettings
from shared.simulation.batches import Batches
from shared.simulation.fleet import Device, Fleet, Model
from shared.simulation.gateway import Job
from shared.simulation.migration import FleetMigrations
from shared.simulation.nodes import FleetNodes
from shared.simulation.scaling import Scaling
from shared.streams import MAX_SUSPICIONS
from tests.seeds import examples

COST = CostModel(
    fixed_s=0.01, prefill_token_s=1e-4, prefill_attention_s=1e-8, decode_s=1e-4, decode_context_s=1e-6,
    num_layers=20, layers_per_safepoint=2, checkpoint_block_s=1e-3, restore_block_s=1e-3,
)  # fmt: skip
DEVICE = Device(
    configuration=Configuration(
        num_merged=64, num_rows=16, ordering="doubling_budget", token_budget=512, steps_in_flight=1
    )
)


def model(name: str, load_s: float = 0.0) -> Model:
    shape = ModelShape(name=name, block_size=8, blocks_per_merged=4, max_model_len=2000)
    return Model(shape=shape, cost_model=COST, load_s=load_s)


def fleet_of(
    num_instances: int, models: str = "a", *, seed: int = 0, migrations: bool = False, roles: str = "off"
) -> Fleet:
    """`roles`: as of `SchedulerSettings`; where they are fixed, the first instance computes prompts for the others."""
    scheduling = SchedulerSettings(migration="auto" if migrations else "off", roles=roles)  # type: ignore[arg-type]
    fleet = Fleet(scheduling, seed=seed, migrations=FleetMigrations if migrations else None)
    for number in range(num_instances):
        instance = fleet.add_instance(f"i-{number}", DEVICE, [model(name) for name in models])
        if roles == "fixed" and not number:
            instance.role, instance.is_role_fixed = Role.PREFILL, True
            fleet.register(instance)
    return fleet


def plan_of(models: dict[str, str]) -> PlacementPlan:
    """By instance id: the letters of its models."""
    return PlacementPlan(
        1,
        [
            InstancePlan(instance_id, "i", [ModelSpec(name, name) for name in names], 64 << 20, 1 << 20)
            for instance_id, names in models.items()
        ],
    )


def jobs_of(num: int, *, gap_s: float = 0.05, models: str = "a", prompt: int = 60, output: int = 30) -> list[Job]:
    """Alternately of the models; with answers whose length nobody knows."""
    return [
        Job(number * gap_s, prompt, output, model=models[number % len(models)], max_tokens=output + 50)
        for number in range(num)
    ]


def check_empty(fleet: Fleet) -> None:
    """Nothing is held by those that are left, and nothing is lost of their pools."""
    fleet.events.run(lambda: False, fleet.events.now + 15.0)
    assert len(fleet.core.requests) == 0 and len(fleet.core.queue) == 0
    for instance in fleet.instances.values():
        instance.engine.check()
        assert instance.is_gone or not instance.engine.all_held()
        if not instance.is_gone and not instance.engine.memory.has_copies("a"):
            blocks = instance.device.configuration.num_merged * 4
            assert all(instance.engine.pool.num_available(name) == blocks for name in instance.model_states)


def test_models_share_instances_and_each_request_gets_its_tokens() -> None:
    fleet = fleet_of(2, "ab")
    records = fleet.run(jobs_of(40, models="ab")).records
    assert all(record.num_tokens == 30 and record.ended_s > 0 for record in records)
    assert all(instance.num_steps for instance in fleet.instances.values())
    check_empty(fleet)


def test_models_that_share_all_instances_gather_on_some() -> None:
    """So that each has larger batches, and fewer turns of others between two steps."""

    def mean_latency_s(dispatch_policy: str) -> float:
        fleet = Fleet(SchedulerSettings(migration="off", dispatch_policy=dispatch_policy))
        for number in range(3):
            fleet.add_instance(f"i-{number}", DEVICE, [model(name) for name in "abc"])
        records = fleet.run(jobs_of(300, gap_s=0.02, models="abc")).records
        assert all(record.num_tokens == 30 for record in records)
        return sum(record.latency_s for record in records) / len(records)

    assert mean_latency_s("first_token") < 0.6 * mean_latency_s("freeness")


def test_instances_that_end_otherwise_while_they_drain_are_not_removed_twice() -> None:
    fleet = fleet_of(3)
    Scaling(fleet, lambda name: fleet.add_instance(name, DEVICE, [model("a")]))
    fleet.drain("i-1")
    fleet.remove("i-1")
    fleet.events.at(0.3, fleet.drain, "i-2")
    fleet.events.at(0.3, fleet.fail, "i-2")
    fleet.run(jobs_of(20))
    check_empty(fleet)
    assert list(fleet.instances) == ["i-0"]
    num_done = fleet.events.num_done
    fleet.events.run(lambda: False, fleet.events.now + 1.0)
    assert fleet.events.num_done - num_done < 50  # nobody looks for ever whether a dead one is empty


def test_an_instance_whose_drain_is_undone_gives_no_more_requests_away() -> None:
    fleet = fleet_of(2, migrations=True)
    core, leases = fleet.instances["i-1"].migrations.core, []  # type: ignore[union-attr]
    fleet.events.at(1.0, fleet.drain, "i-1")
    for at_s in (1.06, 1.1):
        fleet.events.at(at_s, lambda: leases.append(core.lease))
    fleet.events.at(1.07, fleet.undrain, "i-1")
    fleet.run(jobs_of(60, output=300))
    before, after = leases
    assert before is not None and after is None
    check_empty(fleet)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_requests_of_an_instance_that_dies_go_on_elsewhere(is_noticed: bool) -> None:
    fleet = fleet_of(2)
    fleet.events.at(0.5, lambda: fleet.fail("i-0", is_noticed=is_noticed))
    records = fleet.run(jobs_of(40)).records
    again = [record for record in records if record.num_placements > 1]
    assert again and all(record.num_placements == 2 for record in again)
    assert (max(record.longest_gap_s for record in again) > 2.0) is not is_noticed
    assert set(fleet.instances) == ({"i-1"} if fleet.events.now > 3.5 else {"i-0", "i-1"})
    check_empty(fleet)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_request_over_which_all_instances_crash_is_given_up(is_noticed: bool) -> None:
    """It is not suspected of anything where nobody can say what they were computing."""
    fleet = fleet_of(MAX_SUSPICIONS + 3)
    fleet.gateway.is_strict = False

    def kill_its_instance() -> None:
        for instance_id, instance in list(fleet.instances.items()):
            if not instance.is_gone and instance.engine.unproven() and len(fleet.instances) > 1:
                fleet.fail(instance_id, is_noticed=is_noticed)
        if fleet.gateway.num_left:
            fleet.events.after(0.001, kill_its_instance)

    fleet.events.at(0.0, kill_its_instance)
    (record,) = fleet.run([Job(0.0, 300, 10, model="a")]).records
    if is_noticed:
        assert f"{MAX_SUSPICIONS + 1} instances in turn crashed" in record.error
        assert record.num_placements == MAX_SUSPICIONS + 1
    else:
        assert not record.error and record.num_placements == MAX_SUSPICIONS + 3
    check_empty(fleet)


def test_a_new_scheduler_finds_what_runs_and_takes_what_waited() -> None:
    fleet = fleet_of(2)
    fleet.events.at(0.3, fleet.replace_scheduler)
    records = fleet.run(jobs_of(60, gap_s=0.01)).records
    assert fleet.scheduler.term == 2
    assert all(record.num_placements == 1 for record in records), "nothing was lost"
    check_empty(fleet)


def test_a_model_is_loaded_in_its_time_and_unloaded_when_its_requests_are_over() -> None:
    fleet = fleet_of(1)
    first = fleet.instances["i-0"]
    fleet.events.at(0.5, lambda: first.begin_load(model("b", load_s=2.0)))
    fleet.events.at(4.0, lambda: first.begin_unload("a", 5.0))
    late = [Job(0.6, 40, 10, model="b"), Job(3.9, 40, 10, model="a")]
    records = fleet.run([*jobs_of(4), *late]).records
    assert 2.5 <= records[4].first_s < 2.6
    check_empty(fleet)
    assert first.model_states == {"b": "ready"}


def test_what_an_unloaded_model_leaves_is_placed_where_it_is_still_served() -> None:
    fleet = fleet_of(2)
    fleet.events.at(0.4, lambda: fleet.instances["i-0"].begin_unload("a", 0.1))
    records = fleet.run(jobs_of(40, gap_s=0.01, output=80)).records
    assert any(record.num_placements == 2 for record in records)
    check_empty(fleet)
    assert fleet.instances["i-0"].model_states == {}


def test_a_request_that_nobody_serves_ends_at_its_deadline() -> None:
    fleet = fleet_of(1)
    fleet.gateway.is_strict = False
    served, other = fleet.run([*jobs_of(1), Job(0.1, 40, 10, model="b", timeout_s=2.0)]).records
    assert not served.error and other.error.startswith("deadline") and other.ended_s == pytest.approx(2.1, abs=0.01)
    check_empty(fleet)


@pytest.mark.parametrize("migrations", [True, False])
def test_a_placement_is_carried_out_while_it_serves(migrations: bool) -> None:
    fleet = fleet_of(2, "ab", migrations=migrations)
    agents = FleetNodes(
        fleet, ["i"], lambda place: DEVICE, lambda place: {spec.name: model(spec.name) for spec in place.models},
        lambda place: 0.5,
    )  # fmt: skip
    agents.bring_about(plan_of({"i-0": "ab", "i-1": "ab"}))
    fleet.events.at(1.0, lambda: agents.bring_about(plan_of({"i-1": "a", "i-2": "bc"})))
    for tick in range(1, 20):
        fleet.events.at(0.99 + tick, agents.step)
    records = fleet.run([*jobs_of(60, models="ab"), Job(1.1, 40, 10, model="c")]).records
    assert records[-1].first_s > 1.5
    assert all(record.num_placements == 1 for record in records), "all had the time to end, or to move"
    assert any(record.num_migrations for record in records) is migrations
    check_empty(fleet)
    states = {name: instance.model_states for name, instance in fleet.instances.items()}
    assert states == {"i-1": {"a": "ready"}, "i-2": {"b": "ready", "c": "ready"}}


def test_a_node_agent_starts_an_instance_again_that_died() -> None:
    fleet = fleet_of(2)
    agents = FleetNodes(
        fleet, ["i"], lambda place: DEVICE, lambda place: {"a": model("a")}, lambda place: 0.5
    )  # fmt: skip
    agents.bring_about(plan_of({"i-0": "a", "i-1": "a"}))
    for tick in range(1, 20):
        fleet.events.at(float(tick), agents.step)
    fleet.events.at(0.3, fleet.fail, "i-1")
    records = fleet.run(jobs_of(200)).records
    assert all(record.num_tokens == 30 for record in records)
    assert fleet.instances["i-1"].num_steps, "it serves again"
    check_empty(fleet)


def test_a_conversation_finds_its_prompt_and_answers_in_the_cache() -> None:
    fleet = fleet_of(1)
    turns = [
        Job(float(turn), 64 + 96 * turn, 32, model="a", max_tokens=60, texts=((3, 64 + 96 * turn),))
        for turn in range(4)
    ]
    stranger = Job(5.0, 352, 10, model="a", texts=((4, 352),))
    records = fleet.run([*turns, stranger]).records
    assert [record.num_cached_tokens for record in records] == [0, 88, 184, 280, 0]


def test_two_steps_in_flight_and_stopped_offline_steps_are_those_of_the_live_instance() -> None:
    device = msgspec.structs.replace(
        DEVICE, configuration=msgspec.structs.replace(DEVICE.configuration, steps_in_flight=2, ttft_s=0.05)
    )
    fleet = Fleet(SchedulerSettings(migration="off"))
    instance = fleet.add_instance("i-0", device, [model("a")])
    stopped = list[bool]()
    instance.on_step = lambda step: stopped.append(step.is_suspended)
    offline = [Job(0.0, 400, 20, model="a", request_class=RequestClass.OFFLINE) for _ in range(4)]
    fleet.run([*offline, *[msgspec.structs.replace(job, at_s=job.at_s + 0.02) for job in jobs_of(8)]])
    assert any(stopped) and instance.engine.counters.steps_resumed > 0
    check_empty(fleet)


def test_batches_fill_what_online_load_leaves_and_survive_a_change_of_scheduler() -> None:
    fleet = fleet_of(2)
    batches = Batches(fleet, lines_in_flight=16)
    for name in ("first", "second"):
        batches.begin_at(0.1, name, [Job(0.0, 100, 20, model="a") for _ in range(60)])
    fleet.events.at(1.0, fleet.replace_scheduler)
    records = fleet.run(jobs_of(60)).records
    assert batches.ended_s.keys() == {"first", "second"} and len(records) == 180
    online = sorted(record.ttft_s for record in records[:60])
    assert online[30] < 0.1 and online[-1] < 1.6, "none waits for a batch; some for a scheduler and its first reports"
    counters = [instance.engine.counters for instance in fleet.instances.values()]
    assert sum(one.harvested_tokens for one in counters) >= 120 * 119  # the last token of an answer is not computed
    assert not batches.feed.accounts
    check_empty(fleet)


def test_the_scenario_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = Path("docs/simulation.md").read_text()
    exec(compile(text.partition("```python")[2].partition("```")[0], "docs/simulation.md", "exec"), {})
    num_again, gap_s = capsys.readouterr().out.split()
    assert int(num_again) > 0 and float(gap_s) > 2.0


def test_who_dies_while_a_new_scheduler_asks_keeps_no_stream() -> None:
    fleet = fleet_of(3, "ab")
    fleet.events.at(0.5, fleet.fail, "i-1")
    fleet.events.at(2.6, fleet.replace_scheduler, 0.2)
    fleet.run(jobs_of(40, models="ab", output=30))
    check_empty(fleet)


def test_a_fleet_with_roles_hands_long_prompts_over() -> None:
    fleet = fleet_of(3, migrations=True, roles="fixed")
    fleet.run(jobs_of(20, gap_s=0.1, prompt=400))
    assert isinstance(fleet.migrations, FleetMigrations) and fleet.migrations.outcomes["moved"] >= 5
    check_empty(fleet)


@settings(max_examples=examples(4), deadline=None)
@given(data=st.data())
def test_whatever_fails_every_request_ends_once_with_its_tokens(data: st.DataObject) -> None:
    """The gateway fails a run in which a token is repeated or left out, or a request ends twice or with an error."""
    seed, migrations = data.draw(st.integers(0, 1000)), data.draw(st.booleans())
    roles = data.draw(st.sampled_from(["off", "fixed", "adaptive"]) if migrations else st.just("off"))
    prompt = data.draw(st.sampled_from([60, 400]))
    times = st.floats(0.0, 4.0)
    faults = data.draw(
        st.lists(st.tuples(st.sampled_from(["silent", "exited", "scheduler", "drain", "add"]), times), max_size=5)
    )

    def run() -> list[tuple[float, float, int]]:
        fleet = fleet_of(3, "ab", seed=seed, migrations=migrations, roles=roles)

        def fault(kind: str, number: int) -> None:
            alive = [name for name, one in fleet.instances.items() if not one.is_gone and one.state == "ready"]
            match kind:
                case "scheduler":
                    fleet.replace_scheduler(0.2)
                case "add":
                    fleet.add_instance(f"n{number}", DEVICE, [model("a"), model("b")], start_s=0.5)
                case _ if len(alive) < 2:
                    pass
                case "drain":
                    fleet.drain(alive[seed % len(alive)])
                case _:
                    fleet.fail(alive[seed % len(alive)], is_noticed=kind == "exited")

        for number, (kind, at_s) in enumerate(faults):
            fleet.events.at(at_s, fault, kind, number)
        Batches(fleet, lines_in_flight=8).begin_at(0.3, "batch", jobs_of(20, models="ab", output=15))
        records = fleet.run(jobs_of(40, models="ab", prompt=prompt, output=30)).records
        assert len(records) == 60
        check_empty(fleet)
        return [(record.first_s, record.ended_s, record.num_placements) for record in records]

    assert run() == run()
