"""litellm as a client of an OpenAI-compatible server."""

from __future__ import annotations

import pytest

from tests.clients.conftest import LLAMA

litellm = pytest.importorskip("litellm")
HI = [{"role": "user", "content": "What is a compiler?"}]


def test_whole_and_streamed(base_url: str) -> None:
    asked = {"model": f"openai/{LLAMA}", "api_base": base_url, "api_key": "none", "messages": HI, "max_tokens": 12}
    whole = litellm.completion(**asked, temperature=0).choices[0].message.content
    chunks = litellm.completion(**asked, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole != ""
