"""The package of examples/plugin as pip would install it, without pip."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

PLUGIN = Path(__file__).parents[1] / "examples/plugin"


def install(folder: Path) -> Path:
    """`folder` then belongs on the import path. Returns it."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    package = "tideway_example"
    shutil.copytree(PLUGIN / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    info = folder / f"{package}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {path}\n" for name, path in points.items()) for group, points in groups
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder
