import json
import os
import subprocess
import tempfile
from pathlib import Path

from checks import ASKED, MODEL, SCHEMA, absent, check
from forced import COMMAND, NOTES, Forced, only

CLAUDE = Path(os.environ.get("NODE_MODULES", "node_modules")) / ".bin" / "claude"
if not CLAUDE.exists():
    absent(f"no {CLAUDE} (npm install @anthropic-ai/claude-code)")


def turn(*options, **forced):
    """The result of a run of `claude -p`, and what it asked."""
    with Forced(schema_field="input_schema", **forced) as proxy, tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "notes.txt").write_text(NOTES)
        done = subprocess.run(
            [CLAUDE, "-p", ASKED, "--output-format", "json", "--allowedTools", f"Bash({COMMAND})", *options],
            cwd=folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": folder,
                "ANTHROPIC_BASE_URL": proxy.url,
                "ANTHROPIC_AUTH_TOKEN": "none",
                "ANTHROPIC_MODEL": MODEL,
                "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "200",  # a weak model's free text may be as long as its context
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (done.stdout[-400:], done.stderr[-400:])
        return json.loads(done.stdout), proxy.asked


def stream():
    result, asked = turn()
    assert result["result"].strip() and result["usage"]["output_tokens"] and asked[0]["stream"]


def tool():
    _, asked = turn(choice={"type": "tool", "name": "Bash"}, schemas={"Bash": only("command", COMMAND)})
    blocks = [block for message in asked[1]["messages"] for block in message["content"] if isinstance(block, dict)]
    results = [block for block in blocks if block["type"] == "tool_result"]
    assert len(results) == 1 and NOTES in json.dumps(results[0]["content"]), results


def structured():
    result, _ = turn("--json-schema", json.dumps(SCHEMA), choice={"type": "tool", "name": "StructuredOutput"})
    assert result["structured_output"]["city"] in ("Rome", "Oslo")


version = subprocess.run([CLAUDE, "--version"], capture_output=True, text=True, check=True).stdout.split()[0]
check("@anthropic-ai/claude-code", of_version=version, stream=stream, tool=tool, structured=structured)
