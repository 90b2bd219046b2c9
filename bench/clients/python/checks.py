"""What all programs here share. They run in environments without Tideway, so this imports nothing of it."""

import json
import os
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Literal

URL = os.environ["TIDEWAY_URL"]
V1 = URL + "/v1"
MODEL = os.environ["TIDEWAY_MODEL"]
ASKED = "What is a compiler?"
City = Literal["Rome", "Oslo"]
CITIES = ("Rome", "Oslo")
CALLED: list[str] = []


def weather(city: City) -> str:
    """Tells the weather.

    Args:
        city: the city
    """
    CALLED.append(city)
    return "Rain"


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}}


def check(package: str, *, of_version: str = "", **checks: Callable[[], object]) -> None:
    """Runs the checks, each of which raises where it fails, and tells what came of them. `of_version`: of what is no Python
    package."""
    told = {"version": of_version or version(package)}
    for name, run in checks.items():
        CALLED.clear()
        try:
            run()
            told[name] = "ok"
        except BaseException:
            told[name] = traceback.format_exc()[-700:]
    print("\n" + json.dumps(told), flush=True)
    os._exit(0)  # Some clients leave threads behind.


def absent(error: ImportError | str) -> None:
    print(json.dumps({"absent": str(error)}))
    raise SystemExit(0)


def was_called() -> None:
    assert CALLED and set(CALLED) <= set(CITIES), CALLED
