"""Test suites of others against a Tideway that runs: what passes, and why the rest does not.

    python -m bench.foreign --folder PATH [--url http://127.0.0.1:8000] [--model NAME]
        [--embedding-model NAME] [--tokenizer FOLDER] [--python VENV/bin/python]

PATH holds checkouts that the user has, under their usual names: `openai-python` (openai/openai-python),
`anthropic-sdk-python` (anthropics/anthropic-sdk-python), `llama.cpp` (ggml-org/llama.cpp), `vllm` (vllm-project/vllm, or its
sdist from PyPI). A suite that is not there is skipped with a word. Nothing of theirs is changed: they run with pytest in
`--python`, which must have what they import, and what they ask of is a server at the URL; vLLM's run without vLLM, and those
that look into it are skipped. Names of models that they ask for become routes to NAME while they run (with `--admin-key`
where the server has keys). The server should have one model only, since llama.cpp's tests name none.

Each failure is put to one of the reasons in `REASONS` by what it said; one that fits none may be a fault of ours, and the
command ends with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree

import httpx

TIMEOUT_S = 3600.0
STOP_S = 60
"""How long an interrupted pytest has for its report."""
_DROPPED = ("-p", "no:cacheprovider", "-o", "addopts=", "-q", "--tb=short", "--disable-warnings")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A test suite of others: its name, its tests, and where they look for the server."""

    name: str
    """Name of its checkout's folder."""
    tests: tuple[str, ...]
    """Files and folders below `root`."""
    root: str = "."
    select: str = ""
    """pytest's -k."""
    models: tuple[str, ...] = ()
    """Names that it asks for."""
    embedding_models: tuple[str, ...] = ()
    """Names that the suite uses for models that embed."""
    marked: str = ""
    """pytest's -m."""
    source: str = ""
    """Folder of the SDK that the tests are of, which is used in the place of an installed one."""
    url_variable: str = ""
    """Variable of the environment that has the URL with `url_path`."""
    url_path: str = "/v1"
    port_variable: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    plugin: str = ""
    """A module that pytest loads, with FOREIGN_URL, FOREIGN_MODEL, FOREIGN_ADMIN_KEY and FOREIGN_TOKENIZER."""
    options: tuple[str, ...] = ()
    """More of pytest's."""


SUITES = (
    Suite(
        name="openai-python",
        tests=(
            "tests/api_resources/chat/test_completions.py",
            "tests/api_resources/test_completions.py",
            "tests/api_resources/test_embeddings.py",
            "tests/api_resources/test_models.py",
            "tests/api_resources/test_batches.py",
            "tests/api_resources/test_files.py",
            "tests/api_resources/test_responses.py",
            "tests/api_resources/responses",
        ),
        select="not Async and strict",
        models=("gpt-5.4", "gpt-5.1", "gpt-5.6-sol", "gpt-4o-mini", "gpt-3.5-turbo-instruct", "model"),
        embedding_models=("text-embedding-3-small",),
        source="src",
        url_variable="TEST_API_BASE_URL",
    ),
    Suite(
        name="anthropic-sdk-python",
        tests=("tests/api_resources/test_messages.py", "tests/api_resources/test_models.py"),
        select="not Async and strict",
        models=("claude-opus-4-6", "model_id"),
        source="src",
        url_variable="TEST_API_BASE_URL",
        url_path="",
    ),
    Suite(
        name="llama.cpp",
        root="tools/server/tests",
        tests=tuple(
            f"unit/test_{name}.py"
            for name in ("chat_completion", "tool_call", "compat_oai_responses", "compat_anthropic")
        ),
        marked="not slow",
        models=("gpt-3.5-turbo-instruct", "gpt-4.1", "test", "codellama70b"),
        port_variable="PORT",
        variables=(("DEBUG_EXTERNAL", "1"),),
    ),
    Suite(
        name="vllm",
        tests=(
            *(
                f"tests/entrypoints/openai/chat_completion/test_{name}.py"
                for name in (
                    "chat",
                    "chat_echo",
                    "chat_logit_bias_validation",
                    "enable_force_include_usage",
                    "root_path",
                )
            ),
            "tests/entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
            "tests/entrypoints/openai/chat_completion/test_include_reasoning.py",
            "tests/entrypoints/openai/completion/test_completion.py",
            "tests/entrypoints/openai/completion/test_prompt_validation.py",
            *(
                f"tests/entrypoints/openai/responses/test_{name}.py"
                for name in (
                    "simple",
                    "basic",
                    "stateful",
                    "structured_output",
                    "function_call",
                    "namespace_tool_separator",
                )
            ),
            "tests/entrypoints/openai/models/test_models.py",
            *(f"tests/entrypoints/openai/test_{name}.py" for name in ("return_token_ids", "return_tokens_as_ids")),
            "tests/entrypoints/anthropic/test_messages.py",
            "tests/entrypoints/serve/tokenize/test_tokenization.py",
            "tests/entrypoints/serve/instrumentator/test_basic.py",
        ),
        select="not load_prompt_embeds",
        plugin="bench.foreign_vllm",
        options=("--confcutdir=tests/entrypoints", "-o", "asyncio_mode=auto", "--timeout=120"),
    ),
)


_WEAK = (
    r"test_include_reasoning::|test_function_tool_use|test_named_tool_use|test_namespace_tool_separator|test_anthropic_tool_call"
    r"|test_response_format_json|test_complex_message_content|test_(simple_input|instructions|chat)\n|test_structured_output"
    r"|test_previous_response_id|test_two_responses_with_same_prev_id|test_reasoning_item|reasoning_tokens_e2e"
    r"|test_function_calling_with_streaming|assert 'stop' == 'length'|unique completions"
)
"""Tests of vLLM's that want a model's knowledge, calls or reasoning, which a demonstration model has not."""

REASONS = {
    "it wants the words of vLLM's errors": r"Regex pattern did not match|test_long_seed|assert 'bad2' in",
    "it names an object that only the suite's mock server has": (
        r"There is no (batch|file|response|stream) "
        r"'(batch_id|file_id|input_file_id|response_id|previous_response_id|resp_\w+)'|there is no model 'after_id'"
    ),
    "stored chats (/v1/chat/completions/ID, GET) are not kept": (r"Chat completions are not stored"),
    "models are removed by /admin/models": r"DELETE is not allowed on /v1/models/",
    "it compacts nothing: neither 'input' nor 'previous_response_id'": (
        r"test_\w+_compact[\s\S]*Missing required parameter: 'input'"
    ),
    "the schema of its tool is none: a property is a text": r"schema must be an object or boolean",
    "it asks for a response to nothing": r"test_\w+_(create|count)[\s\S]*Missing required parameter: 'input'",
    "it leaves out 'model', which has no default where there are several": r"'model' is required where a server has several",
    "it asks for 0 tokens, or 0 of a list": r"'max_completion_tokens': Expected `int` >= 1|'limit' must be a whole number",
    "in strict mode the client checks vectors before it reads those that it has asked for as base64": (
        r"test_embeddings[\s\S]*APIResponseValidationError"
    ),
    "it asks for a model that is deprecated there": r"The model 'claude-(mythos-preview|1\.3)' does not exist",
    "'suffix' is not served": r"suffix\\?' is not supported by this server",
    "no embedding model was named (--embedding-model)": r"The model 'text-embedding-\S+' does not exist",
    "the embedding model has no vectors of one dimension": r"'dimensions' (is not supported by|must be)",
    "it is an endpoint of llama.cpp's own": (
        r"Not found: /(apply-template|completion|props|slots)|chat_completions_token_count|test_logit_bias\nassert 400"
    ),
    "it wants a first chunk without content": r"test_chat_completion_stream[\s\S]*\[\"content\"\] is None",
    "it wants llama.cpp's short context": r"test_context_size_exceeded",
    "a text stands for an image that a tool returned": r"test_anthropic_tool_result_with_image",
    "a conversation without messages is refused, as Anthropic does": r"test_anthropic_empty_messages",
    "it refuses two messages of the assistant in a row, which most templates take": (
        r"test_invalid_chat_completion_req\[messages7\]"
    ),
    "the model's template shows no reasoning of before": r"test_anthropic_thinking_history_in_count_tokens",
    "it wants llama.cpp's own fields or types of errors": (
        r"timings|exceed_context_size_error|verbose|return_progress|prompt_progress|llama_telemetry|system_fingerprint"
    ),
    "it wants the words of llama.cpp's test model": (
        r"match_regex|_tokens[\"']\] == n_|is None\b[\s\S]*ChoiceDelta\([^)]*content"
    ),
    "it is an endpoint of vLLM's own": r"/(invocations|tokenizer_info)\b|test_server_load",
    "a template of llama.cpp's own is asked for, or one that the model has not": r"chat_template(?!_kwargs)",
    "the model is too weak: it does not answer, call or reason as is wanted": _WEAK,
    "it is refused by name": (
        r"'(echo|truncate_prompt_tokens|allowed_token_ids|return_token_ids|use_beam_search)' is not supported"
        r"|_logprobs': Expected `int` >= 0"
    ),
    "it wants vLLM's own fields": (
        r"no attribute '(prompt_logprobs|input_messages|output_messages)'|'prompt_token_ids' in|cache_creation_input_tokens"
    ),
    "it wants a server that was started with a flag of vLLM's": (
        r"test_root_path::|force_include_usage|return_tokens_as_token_ids_completion\[True\]|test_show_version"
    ),
    "it wants the counts, the context, the template or the special tokens of its own model": (
        r"test_single_chat_session|== 8192|test_request_cancellation|test_tokenize_chat_with_tools"
        r"|test_single_completion\[[\s\S]*where \d+ = CompletionUsage"
        r"|test_echo_logprob_completion"
    ),
    "a model that is a route has its model's root": r"served_model\.root",
    "it wants the chosen token before more likely ones": r"return_tokens_as_token_ids_completion\[False\]",
    "it wants the last text in the chunk that says why the answer ends, which OpenAI sends apart": (
        r"test_chat_streaming\[[\s\S]*assert None|test_chat_completion_stream_options\[[\s\S]*ChoiceDelta\([^)]*content=None"
    ),
    "roles other than OpenAI's are refused": r"test_custom_role",
    "message_start counts the first token, as Anthropic's does": r"test_anthropic_streaming\n",
    "images and documents are not served": r"^[^\n]*(image|vision|video)|(image|video)_url|input_image|truck\.png",
}
"""Why a test fails where that is no fault of this server, by a pattern of what it failed with. The first counts."""


class Case(NamedTuple):
    name: str
    outcome: str
    """passed, failed or skipped."""
    told: str


def read_report(file: Path) -> list[Case]:
    """From pytest's JUnit XML."""
    found = []
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        failed = [one for kind in ("failure", "error") for one in case.iter(kind)]
        if failed:
            found.append(Case(name, "failed", f"{failed[0].get('message') or ''}\n{failed[0].text or ''}"))
        elif case.find("skipped") is not None:
            found.append(Case(name, "skipped", ""))
        else:
            found.append(Case(name, "passed", ""))
    return found


def reason_of(case: Case) -> str:
    """Empty: none of those known. A server's fault and an answer that did not come in time have none."""
    told = f"{case.name}\n{case.told}"
    if re.search(
        r"InternalServerError|Error code: 5\d\d|assert 5\d\d ==|Timeout (\(>|>)\d|APITimeoutError|ReadTimeout", told
    ):
        return ""
    return next((reason for reason, pattern in REASONS.items() if re.search(pattern, told)), "")


def run(
    suite: Suite,
    checkout: Path,
    url: str,
    python: str,
    *,
    timeout_s: float = TIMEOUT_S,
    model: str = "",
    admin_key: str = "",
    tokenizer: str = "",
) -> list[Case]:
    """Its tests, one after the other, up to `timeout_s`. `model`, `admin_key`, `tokenizer`: for its plug-in."""
    root = checkout / suite.root
    tests = [test for test in suite.tests if (root / test).exists()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        more = dict(suite.variables)
        if suite.url_variable:
            more[suite.url_variable] = url + suite.url_path
        if suite.source:
            more["PYTHONPATH"] = str((checkout / suite.source).resolve())
        if suite.plugin:
            more |= {"FOREIGN_URL": url, "FOREIGN_MODEL": model, "FOREIGN_ADMIN_KEY": admin_key}
            more["FOREIGN_TOKENIZER"] = tokenizer
            more["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
        if suite.port_variable:
            more[suite.port_variable] = str(urlsplit(url).port or 80)
        command = [
            python,
            "-m",
            "pytest",
            *_DROPPED,
            f"--junitxml={report}",
            *(("-k", suite.select) if suite.select else ()),
            *(("-m", suite.marked) if suite.marked else ()),
            *(("-p", suite.plugin) if suite.plugin else ()),
            *suite.options,
        ]
        log = Path(folder) / "log"
        is_stopped = False
        with log.open("w") as output:
            running = subprocess.Popen(
                [*command, *tests], cwd=root, env={**os.environ, **more}, stdout=output, stderr=subprocess.STDOUT,
                # What a shell starts in the background does not hear it otherwise.
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip
            try:
                running.wait(timeout_s)
            except subprocess.TimeoutExpired:
                is_stopped = True
                print(f"{suite.name}: stopped after {timeout_s:.0f} s; tests after the last one counted did not run")
                running.send_signal(signal.SIGINT)  # with that it still writes its report
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(STOP_S)
            finally:
                running.kill()
                status = running.wait()
        if not report.is_file() or not (is_stopped or status in (0, 1)):
            raise RuntimeError(f"{suite.name}: pytest ended with {status}\n{log.read_text()[-5000:]}")
        # An interrupted test stands there as one that passed.
        return read_report(report)[: -1 if is_stopped else None]


class Routes:
    """Names that suites ask for, as routes to models while they are used."""

    def __init__(self, url: str, model_of: dict[str, str], admin_key: str) -> None:
        headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=30)
        self._model_of = model_of

    def __enter__(self) -> None:
        for name, model in self._model_of.items():
            body = {"name": name, "arms": {model: 1}}
            self._client.post("/admin/routes", json=body).raise_for_status()

    def __exit__(self, *error: object) -> None:
        for name in self._model_of:
            self._client.delete(f"/admin/routes/{name}")
        self._client.close()


def show(name: str, cases: list[Case]) -> bool:
    """Prints the table; whether each failure has its reason."""
    counts = Counter(case.outcome for case in cases)
    print(f"{name}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    reasons = Counter(reason_of(case) for case in cases if case.outcome == "failed")
    for reason, count in reasons.most_common():
        print(f"  {count:4}  {reason or 'NOT EXPLAINED'}")
    for case in cases:
        if case.outcome == "failed" and not reason_of(case):
            print(f"        {case.name}: {' '.join(case.told.split())[:200]}")
    return not reasons[""]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tideway-demo-llama", help="that the suites' names stand for")
    parser.add_argument("--embedding-model", default="", help="likewise; empty: there is none")
    parser.add_argument(
        "--tokenizer", default="", help="folder of NAME's tokenizer, which some of vLLM's tests compare with"
    )
    parser.add_argument("--python", default=sys.executable, help="with what the suites import")
    parser.add_argument("--admin-key", default="")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for a suite, default %(default).0f")
    parser.add_argument(
        "--suite", action="append", choices=[suite.name for suite in SUITES], help="some; all by default"
    )
    arguments = parser.parse_args()
    are_explained = True
    for suite in SUITES:
        if arguments.suite and suite.name not in arguments.suite:
            continue
        checkout = arguments.folder / suite.name
        if not (checkout / suite.root).is_dir():
            print(f"{suite.name}: skipped, {checkout / suite.root} is not there")
            continue
        model_of = dict.fromkeys(suite.models, arguments.model)
        if arguments.embedding_model:
            model_of |= dict.fromkeys(suite.embedding_models, arguments.embedding_model)
        with Routes(arguments.url, model_of, arguments.admin_key):
            cases = run(
                suite,
                checkout,
                arguments.url,
                arguments.python,
                timeout_s=arguments.timeout,
                model=arguments.model,
                admin_key=arguments.admin_key,
                tokenizer=arguments.tokenizer,
            )
            are_explained &= show(suite.name, cases)
    sys.exit(0 if are_explained else 1)


if __name__ == "__main__":
    main()
