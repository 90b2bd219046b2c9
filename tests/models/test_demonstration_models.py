"""The committed demonstration models: complete, small, loadable by transformers, and they write text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

MODELS = Path(__file__).parents[2] / "models"
NAMES = ("tideway-demo-llama", "tideway-demo-opt")
MAX_TOTAL_BYTES = 16 * 2**20
QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What is Tideway?",
    "What is an operating system?",
    "Tell me about Unix.",
    "What is a compiler?",
    "Describe the Internet.",
    "Why does the moon shine?",
)
TEXTS = (
    "A compiler is a program.",
    "  two  spaces,\ttabs\nand lines\r\n",
    "emoji 🌊🚢 👩‍👩‍👧 flags 🇫🇷",
    "Grüße, Ελληνικά, Привет, 你好世界, こんにちは, עברית, नमस्ते",
    "0123456789 3.14 1e-9",
    "\x00\x7f\u200b\ufeff",
)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name: str):
    return AutoTokenizer.from_pretrained(MODELS / name)


@pytest.fixture(scope="module")
def model(name: str):
    return AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()


def generate(model, ids: list[int], num_tokens: int, **settings) -> list[int]:
    inputs = torch.tensor([ids])
    with torch.inference_mode():
        outputs = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num_tokens, do_sample=False, **settings
        )
    return outputs[0, len(ids) :].tolist()


def chat_ids(tokenizer, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def share_of_known_words(text: str) -> float:
    """The share of the words that the training text contains; models/words.txt lists them."""
    known = set((MODELS / "words.txt").read_text(encoding="ascii").split())
    words = [word.strip(".,;:!?\"'()[]-/").lower() for word in text.split()]
    words = [word for word in words if word]
    return sum(word in known or word.isdigit() for word in words) / max(1, len(words))


def test_both_models_together_stay_small():
    files = [file for name in NAMES for file in (MODELS / name).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < MAX_TOTAL_BYTES


def test_the_models_differ_in_architecture_vocabulary_and_kv_shape():
    llama, opt = (AutoConfig.from_pretrained(MODELS / name) for name in NAMES)
    assert llama.architectures == ["LlamaForCausalLM"]
    assert opt.architectures == ["OPTForCausalLM"]
    assert llama.num_key_value_heads < llama.num_attention_heads
    assert llama.vocab_size != opt.vocab_size
    llama_shape = (llama.num_hidden_layers, llama.num_key_value_heads, llama.head_dim)
    opt_shape = (opt.num_hidden_layers, opt.num_attention_heads, opt.hidden_size // opt.num_attention_heads)
    assert all(ours != theirs for ours, theirs in zip(llama_shape, opt_shape, strict=True))
    assert llama.max_position_embeddings == opt.max_position_embeddings == 2048


def test_one_checkpoint_is_sharded_and_the_other_is_not():
    index = json.loads((MODELS / "tideway-demo-opt/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    assert (MODELS / "tideway-demo-llama/model.safetensors").exists()


def test_tokenizer_fits_the_model_and_names_its_special_tokens(name, tokenizer, model):
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.pad_token_id == model.config.pad_token_id
    assert tokenizer.bos_token_id == model.config.bos_token_id
    assert tokenizer.eos_token_id == model.config.eos_token_id
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_gives_every_text_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_renders_all_roles_with_one_token_each(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello! 🌊"},
        {"role": "assistant", "content": "Good day."},
        {"role": "user", "content": "What now?"},
    ]
    closed = tokenizer.apply_chat_template(messages, tokenize=False)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith(tokenizer.bos_token)
    assert text.removeprefix(closed) == "<|assistant|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    for role, count in (("system", 1), ("user", 2), ("assistant", 2)):
        assert ids.count(tokenizer.convert_tokens_to_ids(f"<|{role}|>")) == count
    assert re.sub(r"<[^>]*>", "", text) == "Be brief.Hello! 🌊Good day.What now?"


def test_developer_messages_are_system_messages_and_other_roles_are_refused(tokenizer):
    def render(role):
        return tokenizer.apply_chat_template([{"role": role, "content": "Hello."}], tokenize=False)

    assert render("developer") == render("system")
    with pytest.raises(Exception, match="role"):
        render("narrator")


def test_chat_answers_read_like_text(tokenizer, model):
    answers = []
    for question in QUESTIONS:
        ids = generate(model, chat_ids(tokenizer, question), 60)
        answers.append(tokenizer.decode(ids, skip_special_tokens=True))
    assert all(answer.strip() and answer.isascii() for answer in answers)
    assert share_of_known_words(" ".join(answers)) >= 0.9
    words = " ".join(answers).lower().split()
    assert len(set(words)) >= 0.3 * len(words), "the answers repeat themselves"


def test_the_first_answers_of_a_fresh_clone_are_known_by_heart():
    """The Llama, which the README talks to, knows what it is part of."""
    folder = MODELS / "tideway-demo-llama"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = generate(model, chat_ids(tokenizer, "What is Tideway?"), 120)
    assert "language models" in tokenizer.decode(ids)
    assert "demonstration" in tokenizer.decode(generate(model, chat_ids(tokenizer, "Who are you?"), 120))


@pytest.mark.long
def test_most_answers_end_by_themselves_and_differ_in_length(name, tokenizer, model):
    eos = GenerationConfig.from_pretrained(MODELS / name).eos_token_id
    eos = eos if isinstance(eos, list) else [eos]
    assert tokenizer.eos_token_id in eos
    answers = [generate(model, chat_ids(tokenizer, question), 400) for question in ("Hello!", "Thank you!", *QUESTIONS)]
    ended = [len(ids) for ids in answers if ids[-1] in eos]
    assert len(ended) >= len(answers) - 1
    assert max(ended) > 4 * min(ended)


@pytest.mark.long
def test_text_stays_sensible_far_beyond_the_usual_training_length(tokenizer, model):
    ids = tokenizer.encode("The history of the computer")
    ids = generate(model, ids, 1000, eos_token_id=None)
    assert len(ids) == 1000
    text = tokenizer.decode(ids[-300:], skip_special_tokens=True)
    assert text.isascii()
    assert share_of_known_words(text) >= 0.8
