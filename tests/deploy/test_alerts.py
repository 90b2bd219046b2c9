"""The alerts: each fires when it should and not before (by promtool), names metrics that are there, and has a page that says
what to do. promtool is a part of Debian's `prometheus`, which `make promtool` fetches where apt is there."""

from __future__ import annotations

import json
import os
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
from tests.deploy.chart import CHART, REPOSITORY, render
from tests.deploy.cluster import Cluster
from tests.deploy.metrics import every_metric

ALERTS = CHART / "files/alerts.yaml"
RULES = {rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}
CASES = yaml.safe_load((Path(__file__).parent / "alert_cases.yaml").read_text())
RUNBOOK = "docs/runbooks.md"


def promtool() -> str:
    fetched = REPOSITORY / ".tideway/tools/bin/promtool"
    found = str(fetched) if fetched.exists() else shutil.which("promtool")
    if found is None:
        missing = "promtool is not installed (apt install prometheus)"
        if os.environ.get("CI") == "true" and shutil.which("apt-get"):
            pytest.fail(f"{missing}, and `make promtool` fetches it where apt is")
        pytest.skip(missing)
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


def assert_promtool_agrees(rules: Path, cases: list[dict[str, Any]], folder: Path) -> None:
    file = folder / "tests.json"
    file.write_text(json.dumps({"rule_files": [str(rules)], "tests": cases}))
    result = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_alert_fires_and_not_before(tmp_path: Path) -> None:
    assert_promtool_agrees(ALERTS, [case_of_promtool(case) for case in CASES], tmp_path)


def labelled(series: str, **labels: str) -> str:
    """The series with these labels added to its own."""
    name, _, own = series.rstrip("}").partition("{")
    pairs = [*filter(None, [own]), *(f'{key}="{value}"' for key, value in labels.items())]
    return f"{name}{{{','.join(pairs)}}}"


def expects(alert: str, at: str, *labels: Mapping[str, str]) -> dict[str, Any]:
    rule = RULES[alert]
    whose = {"namespace": "llm", "release": "tideway", "severity": rule["labels"]["severity"]}
    return {"eval_time": at, "alertname": alert, "exp_alerts": [{"exp_labels": {**whose, **each}} for each in labels]}


@pytest.mark.parametrize("is_scraped_by_the_chart", [True, False])
def test_alerts_of_a_release_are_for_its_own_series(is_scraped_by_the_chart: bool, tmp_path: Path) -> None:
    """In a Prometheus of a whole cluster: other releases neither hide what fails here nor are told of here."""
    monitoring = {"rules": {"enabled": True}, "podMonitor": {"enabled": is_scraped_by_the_chart}}
    (rule_object,) = Cluster(render({"monitoring": monitoring})).of_kind("PrometheusRule")
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps(rule_object["spec"]))
    subprocess.run([promtool(), "check", "rules", "--lint=all", "--lint-fatal", str(rules)], check=True)
    here = {"namespace": "llm", "job": "llm/tideway" if is_scraped_by_the_chart else "tideway"}
    elsewhere = [{**here, "namespace": "other"}] + [{**here, "job": "llm/second"}] * is_scraped_by_the_chart
    cases = []
    for case in CASES:
        # Alerts of a series that is not aggregated have its labels.
        kept = {"job": here["job"]} if case["alert"] in ("TidewayServiceDown", "TidewayWorkerNotReady") else {}
        series = [{"series": labelled(name, **here), "values": values} for name, values in case["series"].items()]
        whole = case_of_promtool(case)["alert_rule_test"][1]["exp_alerts"][0]["exp_annotations"]
        fires = expects(case["alert"], case["fires"], {**case["labels"], **kept})
        fires["exp_alerts"][0]["exp_annotations"] = whole
        cases.append({"interval": "1m", "input_series": series, "alert_rule_test": [fires]})
        if case["alert"] not in ("TidewayNoGateway", "TidewayNoLeader"):
            # The job of kube-state-metrics is its own; a CronJob is known by its name.
            for other in elsewhere if "kube_" not in RULES[case["alert"]]["expr"] else elsewhere[:1]:
                series = [{"series": labelled(name, **other), "values": v} for name, v in case["series"].items()]
                quiet = expects(case["alert"], case["fires"])
                cases.append({"interval": "1m", "input_series": series, "alert_rule_test": [quiet]})
    for other in elsewhere:
        leads = ("tideway_scheduler_is_leader", "tideway_placement_is_leader", 'up{service="gateway"}')
        series = [{"series": labelled(name, **other), "values": "1x30"} for name in leads]
        series += [{"series": labelled(name, **here), "values": "0x30"} for name in leads]
        leaderless = expects("TidewayNoLeader", "20m", {"service": "scheduler"}, {"service": "placement"})
        tests = [leaderless, expects("TidewayNoGateway", "20m", {})]
        for test in tests:
            for alert in test["exp_alerts"]:
                annotations = RULES[test["alertname"]]["annotations"]
                summary = annotations["summary"].replace(
                    "{{ $labels.service }}", alert["exp_labels"].get("service", "")
                )
                alert["exp_annotations"] = {**annotations, "summary": summary}
        cases.append({"interval": "1m", "input_series": series, "alert_rule_test": tests})
    assert_promtool_agrees(rules, cases, tmp_path)


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
