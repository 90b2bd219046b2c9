"""A pytest plugin by which vLLM's API tests ask a server that runs, without vLLM: `bench.foreign` loads it.

Their `RemoteOpenAIServer` becomes the server at FOREIGN_URL, and names of models and adapters that they ask for become
routes to FOREIGN_MODEL, made with FOREIGN_ADMIN_KEY; their tokenizer is the one in the folder FOREIGN_TOKENIZER. vLLM's
other modules are stood in for; a test that uses one looks into vLLM itself and is skipped. It runs in the suite's
environment, so of this repository it imports `bench.foreign` alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import json
import os
import sys
from types import ModuleType
from typing import Any

import pytest

from bench.foreign import Routes

URL = os.environ["FOREIGN_URL"]
MODEL = os.environ["FOREIGN_MODEL"]
ADMIN_KEY = os.environ["FOREIGN_ADMIN_KEY"]
TOKENIZER = os.environ["FOREIGN_TOKENIZER"]


class _OfVllm(type):
    """What stands in for a name of vLLM's; to use it skips the test."""

    def __getattr__(cls, name: str) -> Any:
        return _Part

    def __call__(cls, *arguments: Any, **more: Any) -> Any:
        pytest.skip("it looks into vLLM itself")

    __add__ = __radd__ = __call__


class _Part(metaclass=_OfVllm):
    pass


def _tokenizer(*arguments: Any, **more: Any) -> Any:
    if not TOKENIZER:
        pytest.skip("it needs the model's tokenizer (--tokenizer)")
    return __import__("transformers").AutoTokenizer.from_pretrained(TOKENIZER)


class _Hub:
    """A hub that fetches nothing: adapters are routes, too, and nobody reads their files."""

    def snapshot_download(self, repo_id: str) -> str:
        return repo_id


_SERVED = {"VLLMValidationError": ValueError, "get_tokenizer": _tokenizer, "hf_api": _Hub}
"""What tests take of vLLM and ask the server with."""


class _Module(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _SERVED.get(name, _Part)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "vllm" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class RemoteOpenAIServer:
    """The server that runs, as vLLM's tests know theirs."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, args: list[str] | None = None, *more: Any, **options: Any) -> None:
        given = list(args or ())
        names = [model]
        for flag in ("--served-model-name", "--lora-modules"):
            if flag in given:
                values = itertools.takewhile(lambda value: not value.startswith("--"), given[given.index(flag) + 1 :])
                names += [json.loads(one)["name"] if one.startswith("{") else one.partition("=")[0] for one in values]
        self._routes = Routes(URL, dict.fromkeys(names, MODEL), ADMIN_KEY)
        self.url_root = URL

    def __enter__(self) -> RemoteOpenAIServer:
        self._routes.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._routes.__exit__(*error)

    def url_for(self, *parts: str) -> str:
        return "/".join((URL, *parts))

    def _client(self, kind: str, **options: Any) -> Any:
        sdk = __import__("anthropic" if "Anthropic" in kind else "openai")
        base = URL if "Anthropic" in kind else f"{URL}/v1"
        return getattr(sdk, kind)(**{"base_url": base, "api_key": "none", "max_retries": 0, "timeout": 120, **options})

    def get_client(self, **options: Any) -> Any:
        return self._client("OpenAI", **options)

    def get_async_client(self, **options: Any) -> Any:
        return self._client("AsyncOpenAI", **options)

    def get_client_anthropic(self, **options: Any) -> Any:
        return self._client("Anthropic", **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        return self._client("AsyncAnthropic", **options)


sys.meta_path.insert(0, _Finder())
_utils = _Module("tests.utils")
_utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
_utils.ROCM_EXTRA_ARGS, _utils.ROCM_ENV_OVERRIDES = [], {}  # type: ignore[attr-defined]
sys.modules["tests.utils"] = _utils
