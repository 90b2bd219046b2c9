"""Every panel of the dashboard shows something of a system that serves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.stack import Stack

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy/grafana/dashboards/tideway.json"
GIVEN_BY_PROMETHEUS = {"le", "service", "instance"}

Series = dict[str, list[dict[str, str]]]
"""Labels of each sample, by its name."""


def scrape(stack: Stack) -> Series:
    ports = [*stack.metrics_ports.values(), *(instance["metrics_port"] for instance in stack.instances())]
    found: Series = {}
    for port in ports:
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10)
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
    return found


def shows(expression: str, series: Series) -> bool:
    """Whether each metric of a PromQL expression has a sample with the labels that it selects and sums by. (Regular
    expressions are those of the dashboard's variables, which take all; what is left out with != may be all there is.)"""
    grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
    for name, selector in re.findall(r"((?:tideway_|vllm:)\w+)(?:\{([^}]*)\})?", expression):
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', selector))
        if not any(
            wanted.items() <= labels.items() and grouped - GIVEN_BY_PROMETHEUS <= labels.keys()
            for labels in series.get(name, ())
        ):
            return False
    return True


def blank_panels(series: Series) -> set[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        panel["title"]
        for panel in panels
        if panel.get("targets") and not any(shows(target["expr"], series) for target in panel["targets"])
    }


def test_every_panel_has_its_metric(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=60)
    for model in stack.models:
        client.completions.create(model=model, prompt="once", max_tokens=5, extra_body={"ignore_eos": True})
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": "llama", "prompt": "x", "max_tokens": 2}}
    file = client.files.create(file=("input.jsonl", json.dumps({"custom_id": "a", **line}).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )  # fmt: skip
    stack.wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch's end")
    stack.wait_until(lambda: not blank_panels(scrape(stack)), "every panel's metric", 60)

    def traffic() -> tuple[dict, dict]:
        models = httpx.get(f"{stack.url}/admin/models").json()["models"]
        found = next(model["traffic"] for model in models if model["name"] == "llama")
        return found["online"], found["offline"]

    # The scheduler tells placement each second.
    stack.wait_until(lambda: all(part["num_finished"] for part in traffic()), "traffic of both classes", 20)
    online, offline = traffic()
    assert online["num_finished"] >= 1 and online["latency_s"]["p99"] > 0 and online["attainment"] is not None
    assert offline["num_finished"] >= 1 and offline["output_tokens"]["mean"] >= 1
