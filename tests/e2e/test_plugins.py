"""A system whose policies, model family, attention back end and tool format come from another package."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from tests import outside
from tests.e2e.checkpoints import make_llama
from tests.e2e.stack import Stack

TEMPLATE = "{% if tools %}<|call|>{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def test_parts_of_another_package_serve(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    outside.install(site)
    models = {}
    for name in ("plain", "example"):
        models[name] = str(make_llama(tmp_path / name))
    config_file, template_file = (tmp_path / "example" / name for name in ("config.json", "tokenizer_config.json"))
    config_file.write_text(config_file.read_text().replace("LlamaForCausalLM", "ExampleForCausalLM"))
    template_file.write_text(json.dumps({**json.loads(template_file.read_text()), "chat_template": TEMPLATE}))
    environment = {
        "PYTHONPATH": os.pathsep.join((str(outside.PLUGIN.parents[1]), str(site))),
        "TIDEWAY_ORDER_POLICY": "shortest_prompt",
        "TIDEWAY_DISPATCH_POLICY": "tideway_example.policies:FullestThatFits",
        "TIDEWAY_CO_SERVING": "half_step",
        "TIDEWAY_REBALANCE_POLICY": "drain_only",
    }
    with Stack(models, num_instances=1, environment=environment) as stack:
        stack.wait_ready()
        body = {"prompt": [5, 60, 7], "max_tokens": 12, "temperature": 0, "logprobs": 2}
        answers = {
            name: httpx.post(f"{stack.url}/v1/completions", json={**body, "model": name}, timeout=60).json()["choices"][
                0
            ]
            for name in models
        }
        assert answers["example"]["text"] == answers["plain"]["text"]
        # At half the temperature the likeliest two lie twice as far apart.
        gaps = {
            name: [top[0] - top[1] for one in answer["logprobs"]["top_logprobs"] if (top := sorted(one.values())[::-1])]
            for name, answer in answers.items()
        }
        assert gaps["example"] == pytest.approx([2 * gap for gap in gaps["plain"]], rel=1e-3, abs=1e-4)
        called = httpx.post(
            f"{stack.url}/v1/chat/completions",
            json={
                "model": "example",
                "messages": [{"role": "user", "content": "Look."}],
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "look"}},
            },
            timeout=60,
        ).json()
        assert called["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
        nodes = httpx.get(f"{stack.url}/admin/nodes", timeout=60).text
        assert '"example"' in nodes, "the attention back end that the node was asked about"
