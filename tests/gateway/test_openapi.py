"""schemathesis reads /openapi.json and sends what it allows and what it does not: never a 5xx, always as described."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import MODEL, Stack

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
TIME_LIMIT_S = 200


@pytest.mark.parametrize(
    ("phases", "num_examples"), [("fuzzing", 1), pytest.param("examples,coverage,fuzzing", 6, marks=pytest.mark.long)]
)
async def test_no_input_makes_a_server_error(stack: Stack, tmp_path: Path, phases: str, num_examples: int) -> None:
    description = (await stack.client.get("/openapi.json")).json()
    for schema in description["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):  # a made-up model is a 404, and nothing behind that is tried
            schema["properties"]["model"] = {"enum": [MODEL]}
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(description))
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", str(file), "--url", stack.url, "--checks", CHECKS),
        *("--max-examples", str(num_examples), "--phases", phases, "--generation-deterministic"),
        *("--request-timeout", "10", "--no-color"),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path
    )
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    assert f"Tested: {sum(map(len, description['paths'].values()))}" in output.decode()
    answered = (await stack.client.get("/metrics")).text
    assert 'tideway_gateway_requests_total{class="online",model="tide",outcome="ok"}' in answered, "some are valid"


def bare_fields(pending: list[Any], schemas: dict[str, Any]) -> tuple[int, list[str]]:
    """Number of components that the schemas name, directly or not, and those of their fields that have no description."""
    seen, bare = set(), []
    while pending:
        schema = pending.pop()
        if isinstance(schema, list):
            pending += schema
        elif isinstance(schema, dict):
            name = schema.get("$ref", "").rpartition("/")[2]
            if name and name not in seen:
                seen.add(name)
                fields = schemas[name].get("properties", {})
                bare += [f"{name}.{field}" for field, one in fields.items() if not one.get("description")]
                pending.append(schemas[name])
            pending += schema.values()
    return len(seen), bare


async def test_each_field_is_described_and_each_operation_has_its_place(stack: Stack) -> None:
    description = (await stack.client.get("/openapi.json")).json()
    schemas = description["components"]["schemas"]
    asked: list[Any] = []
    answered: list[Any] = []
    for operations in description["paths"].values():
        for operation in operations.values():
            assert operation["summary"] and len(operation["tags"]) == 1
            contents = [*operation.get("requestBody", {}).get("content", {}).values()]
            asked += [content["schema"] for content in contents]
            contents = [
                each for answer in operation["responses"].values() for each in answer.get("content", {}).values()
            ]
            answered += [content["schema"] for content in contents if "schema" in content]
    for fields, least in ((asked, 30), (answered, 100)):
        number, bare = bare_fields(fields, schemas)
        assert number > least and bare == []
    choice = schemas["ChatTokenLogprob"]["properties"]
    assert choice["top_logprobs"]["description"] == "Most likely tokens at this place.", "and not as in a request"
    assert schemas["ChatRequest"]["properties"]["top_logprobs"]["description"].startswith("Number of")


async def test_the_examples_work(stack: Stack) -> None:
    description = (await stack.client.get("/openapi.json")).json()
    tried = 0
    for path, operations in description["paths"].items():
        for operation in operations.values():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body is None or path.startswith(("/admin", "/v1/batches")) or path.endswith("_lora_adapter"):
                continue
            answer = await stack.client.post(path, json={**body["example"], "model": MODEL})
            # A model that generates text neither embeds nor ranks, and says so once the body is understood.
            is_pooled = path.endswith(("embeddings", "rerank", "score"))
            expected = (400, "unsupported_model") if is_pooled else (200, None)
            code = answer.json().get("error", {}).get("code") if is_pooled else None
            assert (answer.status_code, code) == expected, (path, answer.text)
            tried += 1
    assert tried == 17


async def test_the_root_leads_to_the_console(stack: Stack) -> None:
    answer = await stack.client.get("/")
    assert (answer.status_code, answer.headers["location"]) == (302, "/console")
    assert (await stack.client.get("/", follow_redirects=True)).status_code == 200
