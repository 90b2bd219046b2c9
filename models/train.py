"""Trains the demonstration models from nothing and saves them as Hugging Face checkpoints next to this file.

    python models/train.py                      # the committed checkpoints: both models at once, one core each
    python models/train.py --only tideway-demo-draft    # a draft model of tideway-demo-llama, with its tokenizer
    python models/train.py --minutes 5          # what can be had in five minutes, instead of the committed --steps
    python models/train.py --only tideway-demo-opt

Owns: tokenizers, the training loop, the files of a checkpoint. Text comes from corpus.py, model shapes from recipes.py.
The same --steps, --seed and package versions give the same data in the same order.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig
from transformers import PreTrainedTokenizerFast as FastTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from corpus import Corpus, Document
from recipes import MAX_POSITIONS, OPT, RECIPES, ROLE_TOKENS, Recipe

MODELS = Path(__file__).parent
TOKENS_PER_STEP = 2048
DICTIONARY_ARTICLES = 900
# For the training processes: glibc hands no memory back between steps, which spares a sixth of the time.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(500 << 20),
}
MULTILINGUAL_SAMPLE = "Grüße, ça va? Привет! こんにちは 你好 🌊🚢⚓ naïve café — “quotes” … €100\n"


# ---------------------------------------------------------------- tokenizer


def train_tokenizer(recipe: Recipe, corpus: Corpus) -> FastTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=recipe.special_tokens(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [document.text or "\n".join(turn.content for turn in document.turns) for document in corpus.documents(0)]
    tokenizer.train_from_iterator([*texts, MULTILINGUAL_SAMPLE], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{recipe.bos} $A",
        pair=f"{recipe.bos} $A {recipe.bos} $B",
        special_tokens=[(recipe.bos, tokenizer.token_to_id(recipe.bos))],
    )
    assert tokenizer.get_vocab_size() == recipe.vocab_size
    return FastTokenizer(
        tokenizer_object=tokenizer,
        bos_token=recipe.bos,
        eos_token=recipe.eos,
        pad_token=recipe.pad,
        additional_special_tokens=[
            token for token in recipe.special_tokens() if token not in (recipe.bos, recipe.eos, recipe.pad)
        ],
        chat_template=recipe.chat_template(),
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode(document: Document, recipe: Recipe, tokenizer: FastTokenizer) -> list[int]:
    """The ids of a whole document; a chat looks exactly as the chat template renders it."""
    if document.text:
        return [*tokenizer.encode(document.text), tokenizer.eos_token_id]
    messages = [{"role": turn.role, "content": turn.content} for turn in document.turns]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


# ---------------------------------------------------------------- training


def endless_tokens(corpus: Corpus, recipe: Recipe, tokenizer: FastTokenizer, seed: int) -> Iterator[int]:
    epoch = 0
    while True:
        for document in corpus.documents(seed * 10_000 + epoch):
            yield from encode(document, recipe, tokenizer)
        epoch += 1


def window_length(step: int) -> int:
    """Mostly short windows; now and then long ones, so that long texts stay sensible."""
    if step % 48 == 47:
        return 2048
    return 512 if step % 16 == 15 else 128


def batch_at(step: int, tokens: Iterator[int], recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and their positions. Learned positions are all trained: short windows stand anywhere in the context."""
    length = window_length(step)
    batch = TOKENS_PER_STEP // length
    ids = torch.tensor([next(tokens) for _ in range(batch * length)]).view(batch, length)
    offset = torch.zeros(batch, 1, dtype=torch.long)
    if recipe is OPT and step % 4 == 1:
        offset = torch.randint(0, MAX_POSITIONS - length + 1, (batch, 1))
    return ids, offset + torch.arange(length)


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    warm_up = min(50, num_steps // 10 + 1)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, num_steps - warm_up))))


def new_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers (far fewer steps to the same loss), AdamW for everything else."""
    parameters = dict(model.named_parameters())
    matrices = [value for name, value in parameters.items() if value.ndim == 2 and "embed" not in name]
    embeddings = [value for name, value in parameters.items() if value.ndim == 2 and "embed" in name]
    vectors = [value for value in parameters.values() if value.ndim == 1]
    return [
        torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([*embeddings, *vectors], betas=(0.9, 0.97), weight_decay=0.0, fused=True),
    ]


def train(recipe: Recipe, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    corpus = Corpus(arguments.sources, DICTIONARY_ARTICLES)
    if recipe.tokenizer_of:
        tokenizer = FastTokenizer.from_pretrained(MODELS / recipe.tokenizer_of)
    else:
        tokenizer = train_tokenizer(recipe, corpus)
    pad, bos, eos = (tokenizer.convert_tokens_to_ids(token) for token in (recipe.pad, recipe.bos, recipe.eos))
    model = recipe.new_model(pad, bos, eos)
    optimizers = new_optimizers(model)
    tokens = endless_tokens(corpus, recipe, tokenizer, arguments.seed)
    num_steps, started, smooth_loss = round(arguments.steps * recipe.relative_steps), time.monotonic(), None
    step = 0
    while step < num_steps:
        ids, positions = batch_at(step, tokens, recipe)
        model.set_attn_implementation("eager" if ids.shape[1] <= 256 else "sdpa")  # the faster one on a CPU
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, num_steps, recipe.peak_learning_rate)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        smooth_loss = loss.item() if smooth_loss is None else 0.97 * smooth_loss + 0.03 * loss.item()
        step += 1
        elapsed = time.monotonic() - started
        if arguments.minutes and step == 48:  # two rounds of window lengths tell the speed
            num_steps = max(96, int(arguments.minutes * 60 / elapsed * step))
            print(f"{recipe.name}: {arguments.minutes} minutes are --steps {num_steps}", flush=True)
        if step % 48 == 0:
            speed = step * TOKENS_PER_STEP / elapsed
            print(
                f"{recipe.name}: step {step}/{num_steps} loss {smooth_loss:.3f} {speed:.0f} tokens/s {elapsed:.0f} s",
                flush=True,
            )
        if arguments.save_every and step % arguments.save_every == 0:
            save(recipe, model, tokenizer, arguments.output / recipe.name)
    save(recipe, model, tokenizer, arguments.output / recipe.name)
    print(f"{recipe.name}: saved after {time.monotonic() - started:.0f} s", flush=True)


# ---------------------------------------------------------------- files


def save(recipe: Recipe, model: torch.nn.Module, tokenizer: FastTokenizer, directory: Path) -> None:
    """Writes a complete checkpoint beside the old one, then takes its place."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    end_of_turn = tokenizer.convert_tokens_to_ids(recipe.end_of_turn)
    eos = tokenizer.eos_token_id
    state = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    state.pop("lm_head.weight")  # tied to the embedding
    saved = type(model)(type(model.config)(**{**model.config.to_dict(), "use_cache": True})).to(torch.bfloat16)
    saved.load_state_dict(state, strict=False)
    saved.tie_weights()
    saved.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=eos if end_of_turn == eos else [end_of_turn, eos],
        pad_token_id=tokenizer.pad_token_id,
    )
    saved.save_pretrained(partial, max_shard_size=recipe.max_shard_size)
    tokenizer.save_pretrained(partial)
    for file in partial.iterdir():
        file.chmod(0o644)
    settings = {  # written by hand: these names are understood by transformers 4 and 5 alike
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": recipe.bos,
        "eos_token": recipe.eos,
        "pad_token": recipe.pad,
        "additional_special_tokens": [*dict.fromkeys((recipe.end_of_turn, *ROLE_TOKENS))],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": recipe.chat_template(),
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (partial / "tokenizer_config.json").write_text(text, encoding="utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1600, help=f"steps of {TOKENS_PER_STEP} tokens")
    parser.add_argument("--minutes", type=float, help="measure the speed and take as many steps as fit (per model)")
    parser.add_argument("--only", choices=sorted(RECIPES), help="train one model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads per model; both models train at the same time")
    parser.add_argument("--sources", type=Path, default=Path.home() / ".cache/tideway/corpus", help="package downloads")
    parser.add_argument("--output", type=Path, default=MODELS)
    parser.add_argument("--save-every", type=int, default=0, help="also save after every so many steps")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    os.environ.update(KEEP_FREED_MEMORY)
    recipes = [one for one in RECIPES.values() if not one.tokenizer_of]
    if arguments.only:
        recipes = [RECIPES[arguments.only]]
    corpus = Corpus(arguments.sources, DICTIONARY_ARTICLES)  # fetched once, before the processes part
    if not any(recipe.tokenizer_of for recipe in recipes):
        (arguments.output / "words.txt").write_text("\n".join(corpus.words()) + "\n", encoding="ascii")
    processes = [multiprocessing.get_context("spawn").Process(target=train, args=(r, arguments)) for r in recipes]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a model failed to train")


if __name__ == "__main__":
    main()
