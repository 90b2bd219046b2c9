"""langchain-openai."""

from __future__ import annotations

import pytest

from tests.clients.conftest import LLAMA

langchain_openai = pytest.importorskip("langchain_openai")


def test_invoke_and_stream(base_url: str) -> None:
    chat = langchain_openai.ChatOpenAI(model=LLAMA, base_url=base_url, api_key="none", max_tokens=12, temperature=0)
    whole = chat.invoke("What is a compiler?")
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream("What is a compiler?")) == whole.content
