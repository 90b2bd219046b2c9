"""docs/structure.md shows the files that a chat request passes in the gateway, in order: it does pass them so."""

from __future__ import annotations

import re
import sys
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from services.gateway import app
from tests.gateway.conftest import Stack

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 46


def documented() -> list[str]:
    text = (ROOT / "docs" / "structure.md").read_text()
    _, _, section = text.partition("\n### In the gateway, file by file\n")
    return re.findall(r"^\d+\. `([a-z_/]+\.py)`", section.partition("\n## ")[0], re.MULTILINE)


async def test_a_chat_passes_the_files_that_are_documented_in_their_order(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_request, begin = ContextVar("is_request", default=False), app._RequestIds.__call__
    files: list[str] = []

    async def marked(*arguments: Any) -> None:
        is_request.set(True)
        await begin(*arguments)

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and is_request.get() and file.startswith(str(ROOT)) and ".venv" not in file:
            files.append(file.removeprefix(f"{ROOT}/"))

    monkeypatch.setattr(app._RequestIds, "__call__", marked)
    stack.say("Hello world")
    chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    await stack.post("/v1/chat/completions", **chat)  # loads the tokenizer
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        answer = await stack.post("/v1/chat/completions", **chat)
    finally:
        sys.setprofile(before)
    assert answer.text.endswith("data: [DONE]\n\n")
    passed = list(dict.fromkeys(files))
    assert len([file for file in passed if not file.startswith("tests/")]) <= MOST_FILES
    shown = documented()
    line = dict.fromkeys(files[files.index(shown[0]) :])
    assert [file for file in line if file in shown] == shown
