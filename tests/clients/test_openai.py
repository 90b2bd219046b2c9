"""OpenAI's Python client."""

from __future__ import annotations

import json

import openai
import pytest

from tests.clients.conftest import LLAMA, OPT
from tests.e2e.stack import Stack


@pytest.fixture(scope="module")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {
        "model": LLAMA,
        "messages": [{"role": "user", "content": "What is a compiler?"}],
        "stop": ".",
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content and whole.usage is not None
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=OPT, prompt=["One", "Two"], max_tokens=5, temperature=0, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.token_logprobs) == 5


def test_a_batch_of_a_file(client: openai.OpenAI, stack: Stack) -> None:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": OPT, "prompt": f"Chapter {number}:", "max_tokens": 4, "ignore_eos": True},
        }
        for number in range(4)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("input.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    stack.wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch")
    output = client.files.content(client.batches.retrieve(batch.id).output_file_id).text
    answers = [json.loads(line) for line in output.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"line-{number}" for number in range(4)]
    assert all(answer["response"]["body"]["usage"]["completion_tokens"] == 4 for answer in answers)


def test_responses_whole_streamed_and_continued(client: openai.OpenAI) -> None:
    asked = {"model": LLAMA, "input": "What is a compiler?", "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == whole.output_text
    again = client.responses.create(**{**asked, "input": "And a linker?"}, previous_response_id=whole.id)
    assert again.output_text and again.usage.input_tokens > whole.usage.input_tokens
    assert client.responses.retrieve(again.id).output_text == again.output_text
    client.responses.delete(again.id)
