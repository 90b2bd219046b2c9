"""What SDKs and agent frameworks make of a Tideway that runs: a stream, a tool call, a structured output.

    python -m bench.clients [--url http://127.0.0.1:8000] [--model NAME] [--python VENV/bin/python]
        [--node node --node-modules FOLDER/node_modules] [--client NAME]

Each client has a program in `python/` or `node/`, written as its users write it, which runs with what is installed in
`--python` or `--node-modules`; a client that is not there is skipped with a word. Calls are forced where the client can do
so, so any model will do; for Codex and Claude Code, which are programs, a proxy in between forces the first call to a
command that only reads a file. The tool really runs, and its result goes back where the client does that. The table is
Markdown; status 1: a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CHECKS = ("stream", "tool", "structured")
SHARED = ("checks", "forced")
"""What programs import; none is a client."""
TIMEOUT_S = 300


def run(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What a program tells in its last line: the version of its client, and of each check "ok", or what went wrong."""
    program = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, complained = program.communicate(timeout=TIMEOUT_S)
        return dict(json.loads(told.strip().split("\n")[-1]))
    except subprocess.TimeoutExpired:
        return dict.fromkeys(CHECKS, f"no end within {TIMEOUT_S} s")
    except ValueError:
        return dict.fromkeys(CHECKS, complained.strip()[-300:] or f"ended with {program.returncode}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)  # Agents have processes of their own.
        program.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tideway-demo-llama")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--node", default="node")
    parser.add_argument("--node-modules", type=Path)
    parser.add_argument("--client", action="append", help="some; all by default")
    arguments = parser.parse_args()
    environment = {"TIDEWAY_URL": arguments.url, "TIDEWAY_MODEL": arguments.model}
    programs = [(arguments.python, file) for file in sorted((HERE / "python").glob("*.py"))]
    if arguments.node_modules is not None:
        programs += [(arguments.node, file) for file in sorted((HERE / "node").glob("*.mjs"))]
        environment["NODE_MODULES"] = str(arguments.node_modules.resolve())
    print(f"| client | version | {' | '.join(CHECKS)} |\n|---|---|---|---|---|")
    failures = []
    for interpreter, file in programs:
        name = file.stem.replace("_", "-")
        if file.stem in SHARED or (arguments.client and name not in arguments.client):
            continue
        told = run([interpreter, str(file)], environment)
        if "absent" in told:
            print(f"| {name} | skipped: {told['absent']} | | | |", flush=True)
            continue
        results = ["passes" if told.get(check) == "ok" else "FAILS" for check in CHECKS]
        print(f"| {name} | {told.get('version', '')} | {' | '.join(results)} |", flush=True)
        failures += [f"{name}, {check}: {told.get(check)}" for check in CHECKS if told.get(check) != "ok"]
    print("\n" + "\n".join(failures) if failures else "")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
