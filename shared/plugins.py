"""Parts that other packages bring: a setting names one by import path, or by the name of an entry point.

    mypackage.policies:BestFit     attribute `BestFit` of the module `mypackage.policies`
    best_fit                       the entry point `best_fit` of the registry's group, in an installed package

A part that is named is imported when it is first wanted, in the process that uses it. What it must offer is said where its
registry is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Part = TypeVar("Part")


class PluginError(ValueError):
    """A part cannot be had; the message says which and why, for the operator."""


def import_path(path: str, what: str) -> Any:
    """The object at `module:attribute`. Raises `PluginError`."""
    module, _, attribute = path.partition(":")
    try:
        return reduce(getattr, attribute.split("."), import_module(module))
    except Exception as error:  # whatever a module of somebody else raises when it is imported
        raise PluginError(f"{what} {path!r} cannot be imported: {type(error).__name__}: {error}") from error


def installed(group: str) -> Mapping[str, EntryPoint]:
    """Entry points of `group` by name; the first of a name counts."""
    from importlib.metadata import entry_points  # slow to import, and most processes ask for none

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, point)
    return found


class Registry(dict[str, Part]):
    """The parts of one kind that are built in, by name, and those that other packages bring."""

    def __init__(self, what: str, group: str, built_in: Mapping[str, Part]) -> None:
        """`what`: the kind, as messages call it. `group`: of the entry points."""
        super().__init__(built_in)
        self.what = what
        self.group = group

    def find(self, name: str, accepts: Callable[[Any], bool] = callable) -> Part:
        """The part of that name or import path. Raises `PluginError`, also for an object that `accepts` turns down."""
        if name in self:
            return self[name]
        part: Part
        if ":" in name:
            part = import_path(name, self.what)
        elif (point := installed(self.group).get(name)) is not None:
            part = import_path(point.value, f"{self.what} {name!r},")
        else:
            raise PluginError(f"unknown {self.what} {name!r}; known: {', '.join(self.names())}")
        if not accepts(part):
            raise PluginError(f"{self.what} {name!r} is {part!r}, which is no {self.what}")
        return part

    def names(self) -> list[str]:
        """What `find` takes, import paths aside."""
        return list(dict.fromkeys([*self, *installed(self.group)]))
