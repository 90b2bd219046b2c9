"""The alerts: each fires when it should and not before (by promtool), names metrics that are there, and has a page that says
what to do. promtool is a part of Debian's `prometheus`, which `make promtool` fetches where apt is there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from services.scheduler.observer import LOSSES
from tests.deploy.chart import CHART, REPOSITORY
from tests.deploy.metrics import every_metric

ALERTS = CHART / "files/alerts.yaml"
RULES = {rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}
CASES = yaml.safe_load((Path(__file__).parent / "alert_cases.yaml").read_text())
RUNBOOK = "docs/runbooks.md"


def promtool() -> str:
    fetched = REPOSITORY / ".tideway/tools/bin/promtool"
    found = str(fetched) if fetched.exists() else shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    return found


def test_promtool_finds_no_fault() -> None:
    subprocess.run([promtool(), "check", "rules", "--lint=all", "--lint-fatal", str(ALERTS)], check=True)


def case_of_promtool(case: Mapping[str, Any]) -> dict[str, Any]:
    """A group of its own, so that no other alert's series are seen."""
    rule = RULES[case["alert"]]
    expected = {
        "exp_labels": {"severity": rule["labels"]["severity"], **case["labels"]},
        "exp_annotations": {"summary": case["summary"], "runbook_url": rule["annotations"]["runbook_url"]},
    }
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case["series"].items()],
        "alert_rule_test": [
            {"eval_time": case["quiet"], "alertname": case["alert"], "exp_alerts": []},
            {"eval_time": case["fires"], "alertname": case["alert"], "exp_alerts": [expected]},
        ],
    }


def test_each_alert_fires_and_not_before(tmp_path: Path) -> None:
    file = tmp_path / "tests.json"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": [case_of_promtool(case) for case in CASES]}))
    result = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_tried() -> None:
    assert sorted(RULES) == sorted(case["alert"] for case in CASES)


@pytest.fixture(scope="module")
def registry() -> CollectorRegistry:
    return every_metric()


def test_alerts_name_metrics_of_the_code(registry: CollectorRegistry) -> None:
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    known = {family.name + suffix for family in registry.collect() for suffix in suffixes.get(family.type, ())}
    named = {name for rule in RULES.values() for name in re.findall(r"(?<!\w)(?:tideway_|vllm:)\w+", rule["expr"])}
    assert len(named) > 15 and named <= known


def test_what_alerts_count_begins_at_zero(registry: CollectorRegistry) -> None:
    """Else a first increase, say three instances between two scrapes, is none to Prometheus."""
    source = (REPOSITORY / "shared/scheduling/membership.py").read_text()
    reasons = {reason for call in re.findall(r"_lose\((.+)\)", source) for reason in re.findall(r'"(\w+)"', call)}
    reasons |= set(re.findall(r'how = "(\w+)" .* else "(\w+)"', source)[0])
    assert reasons == set(LOSSES)
    for reason in LOSSES:
        assert registry.get_sample_value("tideway_scheduler_lost_instances_total", {"reason": reason}) == 0
    assert registry.get_sample_value("tideway_kv_transfer_refused_connections_total", {"reason": "ticket"}) == 0
    assert registry.get_sample_value("tideway_gateway_admin_refusals_total") == 0
    assert registry.get_sample_value("tideway_bus_refused_total") == 0


def test_each_alert_has_its_page() -> None:
    sections = re.findall(r"^## (\w+)$", (REPOSITORY / RUNBOOK).read_text(), re.MULTILINE)
    assert sections == list(RULES)
    for name, rule in RULES.items():
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOK}#{name.lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_runbooks_name_commands_and_settings_that_are_there() -> None:
    text = (REPOSITORY / RUNBOOK).read_text()
    commands = set(re.findall(r"`tideway ([a-z-]+)", text))
    shown = subprocess.run([sys.executable, "-m", "tideway", "--help"], capture_output=True, text=True, check=True)
    assert commands and all(re.search(rf"\b{command}\b", shown.stdout) for command in commands)
