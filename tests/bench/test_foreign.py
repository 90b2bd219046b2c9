"""Suites of others run against a server that is there, and each failure has its reason or is told of."""

from __future__ import annotations

import json
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench import foreign
from bench.foreign import Case, Suite, reason_of, run, show

TESTS = """
import os
import pytest

def test_server():
    assert os.environ["PORT"] == "81" and os.environ["DEBUG_EXTERNAL"] == "1"

def test_mock():
    raise ValueError("There is no file 'file_id'.")

def test_fault():
    assert {"a": 1} == {}

@pytest.mark.skip
def test_other():
    pass
"""

VLLM_TESTS = """
import urllib.request
from tests.utils import RemoteOpenAIServer
from vllm.entrypoints import Thing
from vllm.tokenizers import get_tokenizer
from vllm.transformers_utils.repo_utils import hf_api

def test_server():
    adapters = ["--lora-modules", "one=" + hf_api().snapshot_download("org/one"), '{"name": "two"}', "--enforce-eager"]
    with RemoteOpenAIServer("org/model", ["--served-model-name", "served", *adapters]) as server:
        assert urllib.request.urlopen(server.url_for("v1", "x")).status == 200

def test_inside():
    Thing(1)

def test_tokens():
    get_tokenizer("org/model")
"""


def test_a_suite_runs_unchanged_and_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "test_it.py").write_text(TESTS)
    suite = Suite(
        name="theirs", root="inner", tests=("test_it.py", "gone.py"), port_variable="PORT",
        variables=(("DEBUG_EXTERNAL", "1"),),
    )  # fmt: skip
    cases = run(suite, tmp_path, "http://127.0.0.1:81", sys.executable)
    assert {case.name.rpartition("::")[2]: case.outcome for case in cases} == {
        "test_server": "passed", "test_mock": "failed", "test_fault": "failed", "test_other": "skipped",
    }  # fmt: skip
    assert not show("theirs", cases)
    told = capsys.readouterr().out
    assert "1 passed, 2 failed, 1 skipped" in told and "only the suite's mock server" in told
    assert "NOT EXPLAINED" in told and "test_it::test_fault" in told and "test_it::test_mock" not in told


def test_a_suite_over_its_limit_keeps_the_results_that_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_it.py").write_text(
        "import time\n\ndef test_first():\n    pass\n\ndef test_second():\n    time.sleep(600)\n"
    )
    suite = Suite(name="theirs", tests=("test_it.py",))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    try:
        cases = run(suite, tmp_path, "http://127.0.0.1:81", sys.executable, timeout_s=15)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [(case.name, case.outcome) for case in cases] == [("test_it::test_first", "passed")]
    assert "theirs: stopped after 15 s" in capsys.readouterr().out


def test_vllms_tests_ask_the_server_by_routes_that_are_made_with_the_admin_key(tmp_path: Path) -> None:
    asked: list[tuple[str, str, str | None, bytes]] = []

    class Gateway(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            asked.append((self.command, self.path, self.headers["authorization"], body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        do_POST = do_DELETE = do_GET = answer

        def log_message(self, *_: object) -> None:
            pass

    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "test_it.py").write_text(VLLM_TESTS)
    suite = Suite(name="vllm", tests=("tests/test_it.py",), plugin="bench.foreign_vllm")
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            cases = run(suite, tmp_path, url, sys.executable, model="tide", admin_key="root")
        finally:
            server.shutdown()
    assert {case.name.rpartition("::")[2]: case.outcome for case in cases} == {
        "test_server": "passed", "test_inside": "skipped", "test_tokens": "skipped",
    }  # fmt: skip
    names = ("org/model", "served", "one", "two")
    assert [(method, path) for method, path, *_ in asked] == [
        *[("POST", "/admin/routes")] * 4, ("GET", "/v1/x"), *[("DELETE", f"/admin/routes/{name}") for name in names],
    ]  # fmt: skip
    assert [json.loads(body) for *_, body in asked[:4]] == [{"name": name, "arms": {"tide": 1}} for name in names]
    assert {key for method, _, key, _ in asked if method != "GET"} == {"Bearer root"}


def test_a_fault_is_not_explained_away() -> None:
    assert reason_of(Case("t::x", "failed", "openai.InternalServerError: Error code: 500 - Internal error.")) == ""
    assert reason_of(Case("t::x", "failed", "There is no batch 'batch_17'.")) == ""
    weak = "test_include_reasoning::test_include_reasoning_true"
    assert "weak" in reason_of(Case(weak, "failed", "assert None"))
    for late in ("Failed: Timeout (>120.0s) from pytest-timeout.", "openai.APITimeoutError: Request timed out."):
        assert reason_of(Case(weak, "failed", late)) == ""


def test_a_reason_is_what_failed_and_not_a_word_of_the_answer() -> None:
    info = "test_tokenization::test_tokenizer_info_chat_template"
    gone = "requests.exceptions.HTTPError: 404 Client Error: Not Found for url: http://127.0.0.1:8000/tokenizer_info"
    assert reason_of(Case(info, "failed", gone)) == "it is an endpoint of vLLM's own"
    said = "AssertionError: assert 'An image of memory is a program.' == '2'"
    assert "image" not in reason_of(Case("test_chat::test_complex_message_content", "failed", said))
    assert "image" not in reason_of(Case("test_chat::test_other", "failed", said))
    asked = "400 - Invalid value for 'messages[0].content[0].type': 'image_url' is not supported by this server."
    assert "images" in reason_of(Case("test_x", "failed", asked))


def test_what_is_not_there_is_skipped_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["foreign", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="0"):
        foreign.main()
    assert capsys.readouterr().out.count("skipped") == len(foreign.SUITES)
