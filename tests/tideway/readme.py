"""The README's code blocks, for tests that hold it to its word."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    text = (REPOSITORY / "README.md").read_text()
    return [block.strip() for block in re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def shell_lines(address: str = ADDRESS) -> list[str]:
    """Every command that the README asks one to type, as a shell takes it; the gateway's address replaced by `address`."""
    return [block.replace(ADDRESS, address) for block in blocks("sh")]


def curl_lines(address: str = ADDRESS) -> list[str]:
    return [line for line in shell_lines(address) if line.startswith("curl ")]


def python_examples(address: str = ADDRESS) -> list[str]:
    return [block.replace(ADDRESS, address) for block in blocks("python")]
