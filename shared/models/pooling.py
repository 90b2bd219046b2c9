"""What a checkpoint makes of the hidden states of a text: a vector to compare texts by, or the score of a pair of texts.

Read as sentence-transformers stores it: modules.json names the steps, each with a folder and a config.json of its own
(https://sbert.net/docs/sentence_transformer/usage/custom_models.html). Knows neither torch nor the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

Task = Literal["embed", "score"]
Mode = Literal["cls", "mean", "lasttoken"]

MODULES_FILE = "modules.json"
BARE = "Model"
CLASSIFIER = "ForSequenceClassification"
"""Ends of the names of architectures without the head of a language model, and with one score in its place."""
_GENERATES = ("LMHeadModel", "ChatModel")
_FROM_TOKENS = "classifier_from_token"
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODES = ("cls", "mean", "lasttoken")
_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid", "Tanh": "tanh"}
"""Last names of torch's modules, as sentence-transformers stores them."""


class PoolingError(Exception):
    """A checkpoint asks for a step that is not supported; the message names the file."""


class Dense(msgspec.Struct, frozen=True):
    """A linear layer behind the pooling, with an activation."""

    folder: str
    activation: str
    """identity, sigmoid or tanh."""


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """How hidden states become what a client gets."""

    task: Task
    mode: Mode
    """Which hidden states count: the first one, the mean of all, or the last one."""
    num_dimensions: int
    """Dimensions of the vector; 1 for a score."""
    dense: tuple[Dense, ...] = ()
    is_normalized: bool = False
    """Whether vectors are scaled to length 1 at the end."""
    is_matryoshka: bool = False
    """Its first dimensions alone are a good vector too (Kusupati et al. 2022)."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """The only numbers of them; empty: any."""
    token_ids: tuple[int, ...] = ()
    """Tokens by which a language model scores pairs: the logit of the first token, less that of the second where there is
    one."""
    activation: str = "identity"
    """Activation of a score: identity or sigmoid."""
    is_whole: bool = False
    """Every token must be computed for it: KV of a cached prefix is not enough."""

    @property
    def noun(self) -> str:
        return "an embedding model" if self.task == "embed" else "a reranking model"


def pooling_of(path: Path, config: Mapping[str, Any], read: Callable[[Path], dict[str, Any]]) -> Pooling | None:
    """Pooling of the checkpoint in `path` with this config.json; None: it generates text. `read`: a JSON object from a
    file. Raises `PoolingError`, and whatever `read` raises."""
    names = [str(name) for name in config.get("architectures") or []]
    modules = _modules(path / MODULES_FILE)
    width = config.get("hidden_size") or config.get("n_embd") or config.get("dim")
    hidden_size = int(width) if isinstance(width, int | float) else 0
    if modules is not None:
        found = _of_modules(path, config, modules, hidden_size, read)
    elif config.get(_FROM_TOKENS) or any(name.endswith(CLASSIFIER) for name in names):
        found = _scores(path, config, read)
    elif names and all(name.endswith(BARE) and not name.endswith(_GENERATES) for name in names):
        found = Pooling(task="embed", mode="mean", num_dimensions=hidden_size, is_normalized=True)
    else:
        return None
    sizes = config.get("matryoshka_dimensions")
    return msgspec.structs.replace(
        found,
        is_matryoshka=bool(config.get("is_matryoshka") or sizes),
        matryoshka_dimensions=tuple(int(size) for size in sizes) if isinstance(sizes, list) else (),
    )


def _modules(file: Path) -> list[tuple[str, str]] | None:
    """(last name of its type, folder) of each; None: there is no such file."""
    if not file.is_file():
        return None
    try:
        stored = json.loads(file.read_text(encoding="utf-8-sig"))
        return [(str(one["type"]).rsplit(".", 1)[-1], str(one.get("path") or "")) for one in stored]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PoolingError(f"{file} is no list of modules: {error!r}.") from None


def _of_modules(
    path: Path,
    config: Mapping[str, Any],
    modules: list[tuple[str, str]],
    hidden_size: int,
    read: Callable[[Path], dict[str, Any]],
) -> Pooling:
    kinds = [kind for kind, _ in modules]
    file = path / MODULES_FILE
    if kinds[:1] != ["Transformer"] or modules[0][1]:
        raise PoolingError(f"{file}: the first module must be a Transformer in the checkpoint's own folder.")
    if kinds[1:] == ["LogitScore"]:
        of_tokens = read(path / modules[1][1] / "config.json")
        ids = [of_tokens.get("true_token_id"), of_tokens.get("false_token_id")]
        if not isinstance(ids[0], int):
            raise PoolingError(f"{path / modules[1][1] / 'config.json'}: true_token_id must be a token id.")
        return _score("lasttoken", config, tuple(one for one in ids if isinstance(one, int)))
    if kinds[1:] == []:
        return _scores(path, config, read)
    if kinds[1] != "Pooling" or any(kind != "Dense" for kind in kinds[2:] if kind != "Normalize"):
        raise PoolingError(
            f"{file}: modules {', '.join(kinds)} are not supported; supported are Transformer with Pooling, Dense and "
            "Normalize, or with LogitScore."
        )
    if "Normalize" in kinds[:-1]:
        raise PoolingError(f"{file}: Normalize is supported as the last module only.")
    size, dense = hidden_size, []
    for kind, folder in modules[2:]:
        if kind == "Dense":
            layer = read(path / folder / "config.json")
            if layer.get("use_residual"):
                raise PoolingError(f"{path / folder / 'config.json'}: use_residual is not supported.")
            dense.append(Dense(folder, _activation(layer.get("activation_function"), path / folder / "config.json")))
            size = int(layer.get("out_features") or 0)
    return Pooling(
        task="embed",
        mode=_mode(path / modules[1][1] / "config.json", read),
        num_dimensions=size,
        dense=tuple(dense),
        is_normalized=kinds[-1] == "Normalize",
    )


def _mode(file: Path, read: Callable[[Path], dict[str, Any]]) -> Mode:
    stored = read(file)
    mode = stored.get("pooling_mode") or [name for key, name in _LEGACY_MODES.items() if stored.get(key)] or "mean"
    modes = mode if isinstance(mode, list) else [mode]
    for one in _MODES:
        if modes == [one]:
            return one  # type: ignore[return-value]
    raise PoolingError(f"{file}: pooling {', '.join(map(str, modes))} is not supported; one of {', '.join(_MODES)} is.")


def _scores(path: Path, config: Mapping[str, Any], read: Callable[[Path], dict[str, Any]]) -> Pooling:
    """Pooling of a classifier, or of a language model whose tokens stand for classes (vLLM's `classifier_from_token`)."""
    if tokens := config.get(_FROM_TOKENS):
        vocabulary = _vocabulary(path, read)
        ids = tuple(vocabulary.get(str(token), -1) for token in reversed(tokens))
        if len(ids) != 2 or min(ids) < 0:
            raise PoolingError(f"{path / 'config.json'}: {_FROM_TOKENS} must name two tokens of the tokenizer.")
        return _score("lasttoken", config, ids)
    labels = config.get("num_labels") or len(config.get("id2label") or {"0": "", "1": ""})
    if labels != 1:
        raise PoolingError(
            f"{path / 'config.json'}: a classifier of {labels} classes is not supported; one that gives one score is."
        )
    return _score("cls", config, ())


def _score(mode: Mode, config: Mapping[str, Any], token_ids: tuple[int, ...]) -> Pooling:
    """sentence-transformers' CrossEncoder takes the sigmoid unless config.json says otherwise."""
    stored = config.get("sentence_transformers")
    named = stored.get("activation_fn") if isinstance(stored, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    activation = _activation(named, Path("config.json"))
    return Pooling(task="score", mode=mode, num_dimensions=1, token_ids=token_ids, activation=activation)


def _activation(named: Any, file: Path) -> str:
    last = str(named or "Identity").rsplit(".", 1)[-1]
    if last not in _ACTIVATIONS:
        raise PoolingError(f"{file}: activation {named!r} is not supported; {', '.join(_ACTIVATIONS)} are.")
    return _ACTIVATIONS[last]


def _vocabulary(path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, int]:
    stored = read(path / "tokenizer.json")
    model = stored.get("model") or {}
    found = dict(model.get("vocab") or {}) if isinstance(model.get("vocab"), dict) else {}
    return found | {str(one["content"]): int(one["id"]) for one in stored.get("added_tokens") or ()}
