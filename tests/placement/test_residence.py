"""What the host of decisions about models on demand adds to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from prometheus_client import CollectorRegistry

from services.placement.inputs import Inputs
from services.placement.metrics import PlacementMetrics
from services.placement.residence import Residence
from shared.bus.interface import Bus
from shared.messages.cluster import (
    DemandReport,
    InstanceInfo,
    InstancePlan,
    LoadedModel,
    ModelDemand,
    ModelSpec,
    PlacementPlan,
)

MODELS = {name: ModelSpec(name, f"/{name}", on_demand=True, idle_s=60.0) for name in "ab"}


class Peers:
    """The bus of a residence: time, and what is watched and heard."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.tell_instance: Any = None
        self.tell_demand: Any = None

    def now(self) -> float:
        return self.at_s

    async def key_value(self, _bucket: object) -> Peers:
        return self

    async def watch(self, on_change: object) -> None:
        self.tell_instance = on_change

    async def subscribe(self, _topic: object, on_message: object) -> None:
        self.tell_demand = on_message


@dataclass
class Room:
    """Room for one model; `meanwhile` happens while it is asked for."""

    meanwhile: Any = lambda: None

    def fit(self, names: frozenset[str]) -> bool:
        self.meanwhile()
        return len(names) <= 1


async def test_a_request_that_comes_while_it_is_decided_keeps_its_model() -> None:
    peers, registry = Peers(), CollectorRegistry()
    residence = Residence(cast(Bus, peers), PlacementMetrics(registry), lambda: None)
    plan = PlacementPlan(1, [InstancePlan("n-0", "n", [MODELS["a"]], 1, 1)])
    await residence.open(MODELS, plan)
    ready = LoadedModel(name="a", state="ready")
    peers.tell_instance(
        "n-0", InstanceInfo(instance_id="n-0", incarnation="1", node_id="n", state="ready", models=[ready])
    )
    peers.at_s = 50.0
    wanted, in_use = ModelDemand(model="b", num_online=1, waited_s=9.0), ModelDemand(model="a", num_held_online=1)
    peers.tell_demand(DemandReport("s", [wanted]))
    assert residence.is_urgent

    def ask() -> None:
        peers.tell_demand(DemandReport("s", [wanted, in_use]))

    await residence.decide(cast(Inputs, Room(ask)))
    assert [residence.why_asleep(spec) for spec in MODELS.values()] == ["", "idle"]
    await residence.decide(cast(Inputs, Room()))
    assert [residence.why_asleep(spec) for spec in MODELS.values()] == ["", "room_in_use"]
    peers.tell_demand(DemandReport("s", [wanted]))
    await residence.decide(cast(Inputs, Room()))
    assert [residence.why_asleep(spec) for spec in MODELS.values()] == ["idle", ""]
    assert registry.get_sample_value("tideway_model_put_aways_total", {"model": "a", "cause": "room"}) == 1


async def test_nothing_is_decided_while_the_scheduler_is_silent() -> None:
    peers = Peers()
    residence = Residence(cast(Bus, peers), PlacementMetrics(CollectorRegistry()), lambda: None)
    await residence.open(MODELS, PlacementPlan(1, [InstancePlan("n-0", "n", [MODELS["a"]], 1, 1)]))
    ready = LoadedModel(name="a", state="ready")
    peers.tell_instance(
        "n-0", InstanceInfo(instance_id="n-0", incarnation="1", node_id="n", state="ready", models=[ready])
    )
    peers.at_s = 1000.0
    await residence.decide(cast(Inputs, Room()))
    assert residence.why_asleep(MODELS["a"]) == ""
    peers.tell_demand(DemandReport("s", []))
    await residence.decide(cast(Inputs, Room()))
    assert residence.why_asleep(MODELS["a"]) == "idle"
