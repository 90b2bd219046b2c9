"""Tokenizers and chat templates of checkpoints as they come: special tokens, bytes, templates, defects."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from services.gateway.http.errors import ApiError
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.conversations import plain_messages
from services.gateway.openai.schemas import ChatMessage, ContentPart
from services.gateway.text.bounds import may_inflate
from services.gateway.text.chat_templates import (
    DEFAULT_TEMPLATE,
    ChatTemplate,
    load_template,
)
from services.gateway.text.pool import TextPool
from services.gateway.text.tokenization import Tokenizers, load_tokenizer
from shared.messages.cluster import ModelSpec
from shared.models.checkpoint import CheckpointError, read_tokenizer_config
from shared.runtime.settings import BusSettings, GatewaySettings
from tests.gateway.checkpoints import byte_level_tokenizer, sentencepiece_tokenizer, write_checkpoint
from tests.gateway.conftest import MODEL, running_stack

REPOSITORY = Path(__file__).parents[2]
HI = [{"role": "user", "content": "Hi"}]


def configure(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(("add_bos", "own_bos", "expected"), [
    (None, True, True), (None, False, False), (True, False, True), (True, True, True), (False, True, False),
])  # fmt: skip
def test_the_begin_token_is_added_once_as_configured(
    tmp_path: Path, add_bos: bool | None, own_bos: bool, expected: bool
) -> None:
    tokenizer = byte_level_tokenizer()
    bos = tokenizer.token_to_id("<s>")
    plain = tokenizer.encode("the tide", add_special_tokens=False).ids
    folder = write_checkpoint(tmp_path / "model", tokenizer)
    if not own_bos:
        file = folder / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    if add_bos is not None:
        configure(folder, add_bos_token=add_bos)
    loaded = load_tokenizer(ModelSpec("m", str(folder)))
    assert loaded.encode("the tide", True) == ([bos, *plain] if expected else plain)
    assert loaded.encode("the tide", False) == plain


def test_token_bytes_are_exact(checkpoint: Path, plain_checkpoint: Path, tokenizer: Tokenizer) -> None:
    byte_level = load_tokenizer(ModelSpec("m", str(checkpoint)))
    text = "the tide 😀 naïve\n<think>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(byte_level.token_bytes(i) for i in ids) == text.encode()
    assert byte_level.token_text(tokenizer.token_to_id("</s>")) == "</s>"
    assert byte_level.token_bytes(10**6) == b""
    sentencepiece = load_tokenizer(ModelSpec("m", str(plain_checkpoint)))
    ids = sentencepiece.encode("the 😀 w", False)
    assert b"".join(sentencepiece.token_bytes(i) for i in ids) == " the 😀 w".encode()


def test_the_operators_length_limit_holds(checkpoint: Path) -> None:
    assert load_tokenizer(ModelSpec("m", str(checkpoint))).max_model_len == 256
    assert load_tokenizer(ModelSpec("m", str(checkpoint), max_model_len=100)).max_model_len == 100
    assert load_tokenizer(ModelSpec("m", str(checkpoint), max_model_len=1000)).max_model_len == 256


@pytest.mark.slow
def test_a_checkpoint_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    folder = write_checkpoint(tmp_path / "model", tokenizer)
    data = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(data["model"]["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in data["model"]["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges)
    configure(folder, tokenizer_class="GPT2Tokenizer", unk_token="<s>", eos_token="</s>")
    (folder / "tokenizer.json").unlink()
    loaded = load_tokenizer(ModelSpec("m", str(folder)))
    ids = loaded.encode("the tide 😀", False)
    assert loaded.decode(ids) == "the tide 😀"


async def test_a_tokenizer_that_failed_is_tried_again(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.text.tokenization.RETRY_AFTER_FAILURE_S", 0.0)
    folder = tmp_path / "later"
    spec = ModelSpec("m", str(folder))
    tokenizers = Tokenizers(TextPool(GatewaySettings(), GatewayMetrics(CollectorRegistry())))
    with pytest.raises(ApiError, match="cannot be loaded"):
        await tokenizers.get(spec)
    folder.symlink_to(checkpoint)
    loaded = None
    async with asyncio.timeout(10):
        while loaded is None:
            await asyncio.sleep(0)
            with contextlib.suppress(ApiError):
                loaded = await tokenizers.get(spec)
    assert await tokenizers.get(spec) is loaded
    await tokenizers.close()


def test_defects_are_told(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", byte_level_tokenizer())
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(ModelSpec("m", str(folder)))
    with pytest.raises(CheckpointError):
        load_tokenizer(ModelSpec("m", "/nowhere/" + "x" * 5000))
    folder = write_checkpoint(tmp_path / "template", byte_level_tokenizer(), chat_template="{% for %}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(ModelSpec("m", str(folder)))


@pytest.mark.parametrize("where", ["chat_template.jinja", "chat_template.json", "named"])
def test_templates_are_found_where_checkpoints_keep_them(tmp_path: Path, where: str) -> None:
    template, config = "{{ bos_token }}{{ messages[0]['content'] }}", {"bos_token": {"content": "<s>"}}
    if where == "named":
        config["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    else:
        (tmp_path / where).write_text(template if where.endswith("jinja") else json.dumps({"chat_template": template}))
    assert load_template(tmp_path, config).render(HI) == "<s>Hi"


def test_a_template_of_chats_with_tools_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", byte_level_tokenizer(), "PLAIN")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("<tool_call> {{ tools | length }}")
    template = load_template(folder, read_tokenizer_config(folder))
    assert template.render(HI, tools=[{"type": "function"}]) == "<tool_call> 1" and template.render(HI) == "PLAIN"
    loaded = load_tokenizer(ModelSpec("m", str(folder)))
    assert loaded.takes_tools and loaded.tool_format.name == "hermes"


def test_special_tokens_that_only_the_older_file_names(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", byte_level_tokenizer(), "{{ bos_token }}{{ eos_token }}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": config["chat_template"]}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    assert load_template(folder, read_tokenizer_config(folder)).render(HI) == "<s></s>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|end|>"}))
    assert load_template(folder, read_tokenizer_config(folder)).render(HI) == "<|end|></s>"


def test_the_default_template(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi "}]
    assert load_template(tmp_path, {}).render(messages) == "System: Be kind.\nUser: Hi\nAssistant:"
    assert ChatTemplate(DEFAULT_TEMPLATE, {}).render(HI, add_generation_prompt=False) == "User: Hi\n"


def test_templates_have_what_transformers_gives_them() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ {'ü': [1, 2]} | tojson }}{{ strftime_now('%Y') | length }}{{ tools is none }}{{ flavour }}"
    )
    messages = [{"role": "assistant", "content": "x"}, *HI]
    text = ChatTemplate(source, {}).render(messages, variables={"flavour": "!"})
    assert text == 'Hi{"ü": [1, 2]}4True!'


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('roles') }}", "{{ messages[5].content.x }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}"],
)
def test_a_template_that_fails_is_the_requests_error(source: str) -> None:
    with pytest.raises(ApiError) as raised:
        ChatTemplate(source + "{{ ''.__class__.__mro__[1] }}", {}).render(HI)
    assert (raised.value.status, raised.value.param) == (400, "messages")


def test_messages_reach_the_template_plain(checkpoint: Path) -> None:
    template = load_template(checkpoint, read_tokenizer_config(checkpoint))
    parts = [ContentPart("text", "a"), ContentPart("text", "b")]
    messages = [ChatMessage("user", parts), ChatMessage("assistant", None, tool_calls=[{"id": "1"}])]
    assert template.render(plain_messages(messages)) == "<|user|>a\nb<|end|><|assistant|><|end|><|assistant|>"


@pytest.mark.parametrize("name", ["tideway-demo-llama", "tideway-demo-opt"])
def test_the_demonstration_models(name: str) -> None:
    folder = REPOSITORY / "models" / name
    loaded = load_tokenizer(ModelSpec(name, str(folder)))
    text = "What is a KV cache? naïve 😀"
    ids = loaded.encode(text, False)
    detokenizer = loaded.detokenizer()
    assert "".join([*(detokenizer.push(i) for i in ids), detokenizer.flush()]) == text
    assert b"".join(loaded.token_bytes(i) for i in ids).decode().strip() == text
    template = load_template(folder, read_tokenizer_config(folder))
    prompt = loaded.encode(template.render(plain_messages([ChatMessage("user", "Hi")])), False)
    assert prompt[0] == loaded.encode("", True)[0] if loaded.encode("", True) else prompt
    assert max(prompt) < loaded.vocab_size
    assert loaded.eos_token_ids


@pytest.mark.parametrize("value", [5, {"content": 5}, float("nan"), [], {}])
def test_a_beginning_that_is_no_text_is_none(tmp_path: Path, value: object) -> None:
    folder = write_checkpoint(tmp_path / "odd", byte_level_tokenizer())
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "bos_token": value, "add_bos_token": True}))
    loaded = load_tokenizer(ModelSpec("odd", str(folder)))
    assert loaded.decode(loaded.encode("Hello", False)) == "Hello"


@pytest.mark.parametrize("template", [[5], [{"name": "default"}], [None]])
def test_templates_without_names_are_told_of(tmp_path: Path, template: object) -> None:
    folder = write_checkpoint(tmp_path / "odd", byte_level_tokenizer(), chat_template=None)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    with pytest.raises(CheckpointError, match="chat_template is neither"):
        load_tokenizer(ModelSpec("odd", str(folder)))


def test_normalizers_that_make_much_of_little() -> None:
    harmless, one, two = byte_level_tokenizer(), byte_level_tokenizer(), byte_level_tokenizer()
    harmless.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    one.normalizer = normalizers.Replace(Regex("."), "a" * 1000)
    two.normalizer = normalizers.Sequence([normalizers.Replace("a", "aaaa"), normalizers.Replace("a", "aaaa")])
    tokenizers = (byte_level_tokenizer(), harmless, sentencepiece_tokenizer(), one, two)
    assert [may_inflate(json.loads(tokenizer.to_str())["normalizer"]) for tokenizer in tokenizers] == [
        False, False, False, True, True,
    ]  # fmt: skip


def test_a_tokenizer_that_would_take_all_memory_is_not_loaded(tmp_path: Path) -> None:
    """Also to load it: it normalises the tokens that were added to it."""
    folder = write_checkpoint(tmp_path / "bomb", byte_level_tokenizer())
    file = folder / "tokenizer.json"
    bomb = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 1000}
    normalizer = {"type": "Sequence", "normalizers": [bomb] * 3}
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": normalizer}))
    with pytest.raises(CheckpointError, match="makes more than 8 characters of one"):
        load_tokenizer(ModelSpec("bomb", str(folder)))


async def test_a_tokenizer_that_fails_on_a_text_is_told_of(
    nats_settings: BusSettings, checkpoint: Path, tmp_path: Path
) -> None:
    """A regular expression that goes back over and over."""
    slow = byte_level_tokenizer()
    cut = pre_tokenizers.Split(Regex(r"^(a?){40}a{40}(?<b>x)\k<b>$|((a|a)*b)+c"), "isolated")
    slow.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    specs = [ModelSpec(MODEL, str(checkpoint)), ModelSpec("slow", str(write_checkpoint(tmp_path / "slow", slow)))]
    async with running_stack(nats_settings, specs) as stack:
        for length in (40, 1500, 5000):
            answer = await stack.client.post("/v1/completions", json={"model": "slow", "prompt": "a" * length})
            assert answer.status_code == 400 or answer.status_code == 200, answer.text
            assert answer.headers["content-type"].startswith("application/json")
