"""Environment with which the node agent starts an instance. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.worker.node.machine import Machine
from shared.messages.cluster import ONE_DEVICE, DeviceGroup, DeviceGroupError, InstancePlan, first_device
from shared.runtime.settings import BusSettings, WorkerSettings

HUGE_PAGES = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
"""glibc asks for them: weights are read whole at each step, and every 4 KiB of them would need an entry of the processor's.
It does not ask for what it adds to the heaps of further threads (2.36), where models are loaded; hence one heap."""


def instance_environment(
    settings: WorkerSettings, machine: Machine, node_id: str, plan: InstancePlan, base: Mapping[str, str]
) -> dict[str, str]:
    """The environment of an instance's process: the agent's own, its bus settings, and what makes the instance.

    Where the agent's metrics port is fixed, the instance on the devices from k on serves metrics on that port + 1 + k, so
    that a scraper can be told; else on any free port (see the registry). Rank 0 sees its own device alone, and gives the
    other ranks theirs (ranks/). Raises `DeviceGroupError` for devices that the machine does not offer.
    """
    k = first_device(plan.instance_id)
    size, num_stages = machine.group_size, machine.groups[0].num_stages
    group = plan.group if plan.group != ONE_DEVICE else DeviceGroup(machine.devices[k : k + size], num_stages)
    if not group.devices or not set(group.devices) <= set(machine.devices):
        raise DeviceGroupError(f"not all of {', '.join(group.devices)} are devices here")
    values = {name: getattr(settings, name) for name in BusSettings.__struct_fields__}
    values |= {
        "metrics_port": settings.metrics_port + 1 + k if settings.metrics_port else 0,
        "node_id": node_id,
        "instance_id": plan.instance_id,
        "plan": msgspec.json.encode(msgspec.structs.replace(plan, group=group)).decode(),
        "device": machine.device,
        "num_threads": machine.num_threads,
        "role": settings.role_of(k // (size * num_stages)),
    }
    environment = {**base, "PYTHONUNBUFFERED": "1"}
    environment |= {"TIDEWAY_" + name.upper(): str(value) for name, value in values.items()}
    if machine.device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = group.devices[0]
    else:
        environment.setdefault("GLIBC_TUNABLES", HUGE_PAGES)
    return environment
