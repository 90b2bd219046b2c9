"""What a stream writes: one event a line, wherever clients end lines."""

from __future__ import annotations

import json

import pytest

from services.gateway.requests.answers import on_one_line

TEXTS = ["plain", "naïve", "a\x85b\u2028c\u2029d", "\\u2028 as written", "中\n文\r\x0b"]


@pytest.mark.parametrize("text", TEXTS)
def test_an_event_is_one_line_to_all_clients_and_the_same_text(text: str) -> None:
    encoded = on_one_line(json.dumps({"text": text}, ensure_ascii=False).encode())
    assert len(encoded.decode().splitlines()) == 1
    assert json.loads(encoded) == {"text": text}
