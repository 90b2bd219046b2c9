"""vLLM itself, hosted by a real Tideway: `make test-engines`. Needs `tideway engine install vllm`; several minutes.

Streams go on through the death of any process of the instance that computes them, and through its drain, with the tokens of
an undisturbed run (float32).
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from services.worker.engines.environments import EngineEnvironmentError, python_of
from tests.worker.engines.hosted_stack import VICTIMS, hosted_stack, num_moved_in, streams, struck

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        python_of("vllm")
    except EngineEnvironmentError as error:
        pytest.skip(str(error))
    with hosted_stack(tmp_path_factory.mktemp("hosted")) as address:
        yield address


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 7}, {"presence_penalty": 0.8}], ids=str)
async def test_streams_go_on_through_the_death_of_any_process(url: str, fields: dict[str, object]) -> None:
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=50)) as http:
        expected = await streams(http, url, **fields)
        assert all(reason == "length" for _, reason in expected)
        for victim in VICTIMS:
            assert await struck(http, url, victim, **fields) == expected, victim


async def test_streams_move_out_of_an_instance_that_drains(url: str) -> None:
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=50)) as http:
        expected = await streams(http, url)
        assert await struck(http, url, "drain") == expected
        assert await num_moved_in(http, url) > 0, "they were made again"


async def test_a_schema_is_followed_and_what_is_lacking_is_refused_by_name(url: str) -> None:
    properties = {"yes": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["yes"], "additionalProperties": False}
    async with httpx.AsyncClient(timeout=120) as http:
        body = {"model": "demo", "prompt": "Is C a language?", "max_tokens": 40, "temperature": 0}
        structured = {**body, "structured_outputs": {"json": schema}}
        answer = (await http.post(f"{url}/v1/completions", json=structured)).json()
        assert answer["choices"][0]["text"] in ('{"yes": true}', '{"yes": false}', '{"yes":true}', '{"yes":false}')
        refused = await http.post(f"{url}/v1/completions", json={**body, "prompt_logprobs": 1})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_logprobs"
        assert "lacks prompt_logprobs" in refused.json()["error"]["message"]
