import json
import os
import subprocess
import tempfile
from pathlib import Path

from checks import ASKED, MODEL, SCHEMA, absent, check
from forced import COMMAND, NOTES, Forced, only

CODEX = Path(os.environ.get("NODE_MODULES", "node_modules")) / ".bin" / "codex"
if not CODEX.exists():
    absent(f"no {CODEX} (npm install @openai/codex)")


def turn(*options, **forced):
    """What a run of `codex exec` says last, and what it asked."""
    with Forced(**forced) as proxy, tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "notes.txt").write_text(NOTES)
        (work / "schema.json").write_text(json.dumps(SCHEMA))
        (work / "config.toml").write_text(
            f'model = "{MODEL}"\nmodel_provider = "tideway"\n'
            f'[model_providers.tideway]\nname = "Tideway"\nwire_api = "responses"\nbase_url = "{proxy.url}/v1"\n'
        )
        done = subprocess.run(
            [CODEX, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *options, ASKED],
            cwd=work,
            env={**os.environ, "CODEX_HOME": folder},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-600:]
        return done.stdout, proxy.asked


def stream():
    said, asked = turn()
    assert said.strip() and asked[0]["stream"] and len(asked[0]["tools"]) > 3


def tool():
    name = "exec_command"
    _, asked = turn(choice={"type": "function", "name": name}, schemas={name: only("cmd", COMMAND)})
    results = [item for item in asked[1]["input"] if item.get("type") == "function_call_output"]
    assert len(results) == 1 and NOTES in json.dumps(results[0]["output"]), results


def structured():
    said, asked = turn("--output-schema", "schema.json", choice="none")
    assert json.loads(said)["city"] in ("Rome", "Oslo") and asked[0]["text"]["format"]["type"] == "json_schema"


version = subprocess.run([CODEX, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
check("@openai/codex", of_version=version, stream=stream, tool=tool, structured=structured)
