"""Plans as files: `[[groups]]`, as in a file of `tideway simulate`, so that a plan that was simulated can be carried out
where the nodes have those names.

    [[groups]]
    node = "node-1"
    devices = [0, 1]
    models = ["chat", "summaries"]
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.messages.admin import ModelState
from shared.messages.cluster import PlacementPlan
from shared.placement.plan import Group, group_of, plan_of
from tideway.data_folder import OperatorError


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node: str
    devices: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    models: Annotated[list[str], Meta(min_length=1)]


class _File(msgspec.Struct):
    groups: list[GroupSpec] = []


def read_groups(path: Path) -> list[GroupSpec]:
    """Other keys of the file are not looked at. Raises `OperatorError`."""
    try:
        groups = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).groups
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OperatorError(f"{path} cannot be read: {error}.") from None
    except msgspec.ValidationError as error:
        raise OperatorError(f"{path}: {str(error).replace('`$.', '`')}.") from None
    if not groups:
        raise OperatorError(f"{path} has no [[groups]] with node, devices and models.")
    return groups


def write_plan(plan: PlacementPlan, path: Path) -> None:
    """The plan that runs. Raises `OperatorError`."""
    if plan.change is not None and not plan.change.is_over:
        raise OperatorError("A replacement is under way: what runs is between two plans. Wait for its end.")
    if not plan.instances:
        raise OperatorError("No instance has a model: there is no plan to write.")
    try:
        path.write_text(written(plan_of(map(group_of, plan.instances)).groups), encoding="utf-8")
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error}.") from None


def why_not_set(plan: PlacementPlan, models: Iterable[ModelState]) -> list[str]:
    """Why `--set` would refuse the plan that runs, for each model of which there are more or fewer groups than asked for."""
    counts = Counter(spec.name for place in plan.instances for spec in place.models)
    return [
        f"{one.name} is on {num} instances and is to be on {one.replicas}: --set takes this file after "
        f"`tideway scale {one.name} {num}`, or once the plan has as many"
        for one in models
        if (num := counts[one.name]) and one.replicas not in (None, num)
    ]


def written(groups: Iterable[Group]) -> str:
    """The file of a plan."""
    parts = []
    for group in groups:
        keys = {"node": group.node_id, "devices": list(group.devices), "models": list(group.models)}
        # what JSON has here is TOML too
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()]
        parts.append("\n".join(["[[groups]]", *lines, ""]))
    return "\n".join(parts)
