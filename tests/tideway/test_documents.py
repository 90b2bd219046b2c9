"""README and docs say what is so: commands, paths, options, fields and defaults are held against the code."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest
import typer.main

from services.gateway.app import ROUTES
from services.gateway.http.errors import _MEANINGS
from services.gateway.openai.schemas import AddModelRequest, ChatRequest, CompletionRequest
from shared.costs import live as live_costs
from shared.costs.model import CostSource
from shared.policies.rebalancing import LATE_SHARE, MAX_CHECKED, MAX_LOOKS, MAX_SLICE
from shared.runtime.settings import (
    GatewaySettings,
    InstanceSettings,
    PlacementSettings,
    SchedulerSettings,
    WorkerSettings,
)
from shared.scheduling.rescheduling import SOON_S
from tests.tideway.nats_rows import bucket_rows, subject_rows
from tests.tideway.readme import REPOSITORY, curl_lines, python_examples, shell_lines
from tideway.command import app
from tideway.preflight import DEMONSTRATION_MODELS

DOCUMENTS = [
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "bench").rglob("README.md")),
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "CHANGELOG.md",
]
BODIES = {
    ("POST", "/v1/chat/completions"): ChatRequest,
    ("POST", "/v1/completions"): CompletionRequest,
    ("POST", "/admin/models"): AddModelRequest,
}


def options_of(command: str) -> set[str]:
    params = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {name for parameter in params for name in parameter.opts} | {"--help"}


def options_of_up() -> set[str]:
    return options_of("up")


def make_targets() -> set[str]:
    rules = re.findall(r"^([a-z -]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    return {target for rule in rules for target in rule.split()}


@pytest.mark.parametrize("line", curl_lines())
def test_curl_lines_ask_for_something_that_is_there(line: str) -> None:
    words = shlex.split(line)
    url = next(word for word in words if word.startswith("http"))
    body = words[words.index("-d") + 1] if "-d" in words else None
    method = words[words.index("-X") + 1] if "-X" in words else ("POST" if body else "GET")
    path = re.sub(r"^http://[^/]+", "", url)
    patterns = {(route.method, re.sub(r"\{\w+:path\}", ".+", route.path)) for route in ROUTES}
    assert any(method == known and re.fullmatch(pattern, path) for known, pattern in patterns), line
    if body is not None:
        assert "Content-Type: application/json" in words
        kind = BODIES[method, path]
        msgspec.convert(json.loads(body), kind)
        assert set(json.loads(body)) <= {field.encode_name for field in msgspec.structs.fields(kind)}
        if "model" in json.loads(body):
            assert json.loads(body)["model"] in DEMONSTRATION_MODELS


def test_the_curls_of_the_api_name_models_that_the_demonstration_has() -> None:
    text = (REPOSITORY / "docs" / "api.md").read_text()
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r'"model": "([^"]+)"', "".join(blocks)))
    for members in re.findall(r'"(?:arms|mirrors)": (\{.*?\})', "".join(blocks)):
        named |= set(json.loads(members))
    assert "another" in named and named - {"another", "NAME"} <= set(DEMONSTRATION_MODELS), named
    addresses = re.findall(r"(?:localhost|127.0.0.1):8000[^ ]*", "".join(blocks))
    assert len(addresses) > 15 and not [one for one in addresses if "..." in one or re.search("/[A-Z_]{4}", one)]


def test_the_readme_shows_what_was_promised() -> None:
    assert len(curl_lines()) >= 3
    assert any('"stream": true' in line for line in curl_lines())
    assert shell_lines()[0] == "make up"
    for example in python_examples():
        compile(example, "README.md", "exec")
    assert python_examples()


@pytest.mark.parametrize("line", [line for line in shell_lines() if not line.startswith("curl ")])
def test_other_lines_are_ones_that_a_shell_and_the_makefile_take(line: str) -> None:
    subprocess.run(["/bin/sh", "-n", "-c", line], check=True)
    words = shlex.split(line)
    while "=" in words[0]:
        variable = words.pop(0).partition("=")[0].removeprefix("TIDEWAY_").lower()
        assert variable in GatewaySettings.__struct_fields__
    assert words[0] in ("make", "docker", ".venv/bin/tideway")
    if words[0] == ".venv/bin/tideway":
        for command in map(shlex.split, line.splitlines()):
            assert {word for word in command if word.startswith("--")} <= options_of(command[1])
    if words[0] == "make":
        assert words[1] in make_targets()
        for word in words[2:]:
            given = {option for option in shlex.split(word.removeprefix("ARGS=")) if option.startswith("--")}
            assert given <= options_of_up()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_options_in_documents_exist(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(r"`((?:shared|services|tideway|models|bench|tests|deploy|docs)/[\w./-]*)`", text)
    for link in links:
        assert (document.parent / link).exists(), link
    for path in paths:
        assert (REPOSITORY / path).exists(), path
    for target in re.findall(r"`make ([\w-]+)", text):
        assert target in make_targets()


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, by GitHub's rule, without the numbers of repeated ones."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#{1,6} (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_headings(document: Path) -> None:
    links = re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", document.read_text())
    for name, anchor in links:
        page = document.parent / name if name else document
        assert page.suffix != ".md" or anchor in anchors_of(page), f"{name}#{anchor}"


def test_the_table_of_options_is_whole_and_true() -> None:
    table = (REPOSITORY / "docs" / "operating.md").read_text().split("## Settings")[0]
    documented = set(re.findall(r"^\| `?(--[\w-]+)", table, re.MULTILINE)) | set(re.findall(r", `(--[\w-]+)", table))
    assert documented <= options_of_up()
    # What is left is told in a sentence or is for tests alone.
    assert options_of_up() - documented <= {"--help", "--nats-port"}


def test_the_defaults_of_settings_are_as_documented() -> None:
    settings = {}
    for kind in (InstanceSettings, WorkerSettings, SchedulerSettings, PlacementSettings, GatewaySettings):
        settings.update({f"TIDEWAY_{name.upper()}": value for name, value in msgspec.to_builtins(kind()).items()})
    table = (REPOSITORY / "docs" / "operating.md").read_text().split("## Settings")[1].split("## Containers")[0]
    num_checked = 0
    for variables, default in re.findall(r"^\| (`TIDEWAY_[^|]*) \| ([^|]*) \|", table, re.MULTILINE):
        names = re.findall(r"`(\w+)`", variables)
        values = default.split(", ") if ", " in default else [default] * len(names)
        for name, value in zip(names, values, strict=True):
            assert str(settings[name]) == ("" if value == "none" else value), name
            num_checked += 1
    assert num_checked >= 12


def test_documented_endpoints_and_fields_exist() -> None:
    text = (REPOSITORY / "docs" / "api.md").read_text()
    routes = {re.sub(r":path", "", route.path) for route in ROUTES}
    for path in re.findall(r"(/(?:v1|admin|tokenize|detokenize|health|ready|version|metrics)[\w/{}]*)`", text):
        assert path in routes or path == "/v1" or path == "/admin", path
    fields = {field.encode_name for field in msgspec.structs.fields(ChatRequest)}
    beyond = text.split("**Beyond OpenAI's fields**")[1].split("**Not supported")[0]
    named = set(re.findall(r"`([a-z_-]+)`", beyond))
    assert len(named) > 8 and named <= fields, named - fields


def test_documented_metrics_exist() -> None:
    sources = "".join(path.read_text() for path in (REPOSITORY / "services").rglob("*.py"))
    sources += "".join(
        (REPOSITORY / name).read_text() for name in ("shared/bus/metrics.py", "shared/runtime/telemetry.py")
    )
    names = ("gateway", "scheduler", "placement", "instance", "bus", "nats_stream")
    prefixes = (*(f"tideway_{name}_" for name in names), "")
    pages = "".join(
        (REPOSITORY / "docs" / f"{page}.md").read_text() for page in ("operating", "kubernetes", "runbooks")
    )
    for name in re.findall(r"`((?:tideway_|vllm:)\w+)`", pages):
        plain = name.removesuffix("_total")
        assert any(f'"{plain.removeprefix(prefix)}"' in sources for prefix in prefixes), name


def test_how_step_times_are_learnt_is_as_documented() -> None:
    text = " ".join((REPOSITORY / "docs" / "design" / "policies.md").read_text().split())
    assert f"of each the last {live_costs._STEPS_KEPT}, of which the median counts" in text
    assert f"The first step of a model has {live_costs.FIRST_STEP_TOKENS} tokens at most" in text
    assert live_costs.GROWTH == 2 and "each later one twice as many as the longest seen" in text
    sources = set(re.findall(r"^\| `(\w+)` \|", (REPOSITORY / "docs" / "operating.md").read_text(), re.MULTILINE))
    assert set(CostSource) <= sources


def test_how_often_rebalancing_looks_and_at_how_many_pairs_is_as_documented() -> None:
    text = " ".join((REPOSITORY / "docs" / "design" / "policies.md").read_text().split())
    assert f"and {1000 * SOON_S:.0f} ms after a report that crosses a threshold" in text
    assert f"a look asks {MAX_CHECKED} in turn" in text
    assert f"in slices of {MAX_SLICE} instances" in text
    assert f"a step looks at {MAX_LOOKS:,} for all sources and late prompts together, a quarter" in text
    assert LATE_SHARE == 1 / 4


def test_every_subject_and_bucket_is_listed() -> None:
    rows = [line for line in (REPOSITORY / "docs/nats.md").read_text().splitlines() if line.startswith("| `")]
    assert rows == [*subject_rows(), *bucket_rows()], "python -m tests.tideway.nats_rows"


def test_every_error_code_has_a_row() -> None:
    """Those written as constants where an error is made."""
    sources = [path.read_text() for path in (REPOSITORY / "services/gateway").rglob("*.py")]
    made = {code for source in sources for code in _codes_in(source)}
    rows = [line for line in (REPOSITORY / "docs/errors.md").read_text().splitlines() if line.startswith("| `")]
    told = {code for row in rows for code in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert len(made) > 40 and made == told, (made - told, told - made)


def _codes_in(source: str) -> set[str]:
    codes = set[str]()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
        if name == "invalid":
            given += node.args[2:3]
        elif name == "_too_many":
            given += node.args[1:2]
        codes |= {value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)}
    return codes | {code for _, _, code in _MEANINGS.values()}
