"""The demonstration models before any training, and the draft model of one of them: shapes, special tokens, chat templates.

Owns: everything in which the models differ. Knows nothing of text or of training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

MAX_POSITIONS = 2048
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")  # each opens a message


@dataclass(frozen=True)
class Recipe:
    """One demonstration model: its shape, its special tokens and how its chats look."""

    name: str
    vocab_size: int
    peak_learning_rate: float
    relative_steps: float  # a cheaper step allows more of them in the same time
    pad: str
    bos: str
    eos: str  # ends a text
    end_of_turn: str  # ends a message of a chat; may be the same as eos
    max_shard_size: str
    tokenizer_of: str = ""  # the model whose tokenizer a draft model shares

    def special_tokens(self) -> list[str]:
        return list(dict.fromkeys([self.pad, self.bos, self.eos, self.end_of_turn, *ROLE_TOKENS]))

    def chat_template(self) -> str:
        return (
            "{{ bos_token }}{% for message in messages %}"
            "{% set role = 'system' if message['role'] == 'developer' else message['role'] %}"
            "{% if role not in ['system', 'user', 'assistant'] %}"
            "{{ raise_exception('unknown role: ' + role) }}{% endif %}"
            "{{ '<|' + role + '|>' + message['content'] | trim + '" + self.end_of_turn + "' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
        )

    def new_model(self, pad: int, bos: int, eos: int) -> nn.Module:
        common = {
            "vocab_size": self.vocab_size,
            "max_position_embeddings": MAX_POSITIONS,
            "tie_word_embeddings": True,
            "pad_token_id": pad,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "use_cache": False,
        }
        if self.name == DRAFT.name:  # an eighth of its model's weights and of its KV
            return LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=128,
                    intermediate_size=352,
                    num_hidden_layers=1,
                    num_attention_heads=4,
                    num_key_value_heads=1,
                    **common,
                )
            )
        if self.name == LLAMA.name:  # grouped-query attention: 8 query heads share 2 KV heads of 32
            return LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=256,
                    intermediate_size=704,
                    num_hidden_layers=4,
                    num_attention_heads=8,
                    num_key_value_heads=2,
                    **common,
                )
            )
        return OPTForCausalLM(  # multi-head attention: 4 KV heads of 64; learned positions
            OPTConfig(
                hidden_size=256,
                word_embed_proj_dim=256,
                ffn_dim=1024,
                num_hidden_layers=3,
                num_attention_heads=4,
                dropout=0.0,
                attention_dropout=0.0,
                layerdrop=0.0,
                **common,
            )
        )


LLAMA = Recipe(
    name="tideway-demo-llama",
    vocab_size=4096,
    peak_learning_rate=2.5e-3,
    relative_steps=1.0,
    pad="<|pad|>",
    bos="<|begin_of_text|>",
    eos="<|end_of_text|>",
    end_of_turn="<|end_of_turn|>",
    max_shard_size="100MB",
)
OPT = Recipe(
    name="tideway-demo-opt",
    vocab_size=3072,
    peak_learning_rate=2.5e-3,
    relative_steps=1.5,
    pad="<pad>",
    bos="<s>",
    eos="</s>",
    end_of_turn="</s>",
    max_shard_size="5MB",  # two files and an index, so that the sharded way of loading is used too
)
DRAFT = replace(LLAMA, name="tideway-demo-draft", relative_steps=1.0, tokenizer_of=LLAMA.name)
RECIPES = {recipe.name: recipe for recipe in (LLAMA, OPT, DRAFT)}
