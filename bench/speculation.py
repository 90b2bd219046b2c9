"""A draft model against none: the engine and the executor without the services, on models that really agree as much as a
model and a smaller one that was trained for its text.

    python -m bench.speculation [--train-s 60] [--drafts 5] [--streams 1 4 16] [--tokens 192] [--rounds 2]
        [--draft trained random] [--temperatures 0 1] [--keep FOLDER]

The model is the demonstration model tideway-demo-llama, widened to the layers of SmolLM-135M (30 layers of 576) without
changing what it computes: new channels and heads are zero where they would be added, and further layers add nothing. So each
step takes the time of that shape (109M parameters with a vocabulary of 4,096), and the text is the trained model's own. The
draft model has three of its four layers of 256, is distilled from it on its own text for `--train-s` seconds of processor
time, and widened to 12 layers of 384 (20M; the shape of 30M with a larger vocabulary). `--draft random`: one of that shape
with random weights, which is never right: what drafts cost where they are of no use.

All times are the process's processor time, on one thread, so that others on the machine count little. Runs without and with
the draft model alternate (A B B A); ratios are medians over the rounds. A first run of each, in which step times and
acceptance are learnt, does not count, but is told (`first`). It also says what rejection sampling would keep of the same
drafts: 1 - d at each position, d the total variation distance of the two distributions.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

from bench.reporting import machine, table, write
from services.worker.executor import draft_model
from services.worker.executor.executor import Executor
from services.worker.executor.preparing import PreparedModel
from shared.engine.calls import AddModel, Cancel, OnStep, Submit
from shared.engine.memory.slab import choose_merged_bytes
from shared.engine.recording import Configuration
from shared.engine.requests import Output
from shared.messages.cluster import ModelSpec
from shared.messages.requests import GenerationRequest, SamplingParams, pack_tokens

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "models/tideway-demo-llama"
SHAPE_135M = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 18,
              "num_key_value_heads": 6}  # fmt: skip
SHAPE_30M = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 4}  # fmt: skip
REQUESTS_A_STREAM = 3
MATRICES_RATE, OTHERS_RATE = 1.5e-3, 1e-3
"""Peak learning rates of the distillation."""
QUESTIONS = (
    "What is a compiler?", "Tell me about operating systems.", "In short, what is a bit?", "What is a database?",
    "Tell me about Unix.", "What is a network?", "What is a stack?", "Tell me about programming languages.",
    "What is a hash?", "What is a protocol?", "Tell me about computers.", "What is memory?", "What is an algorithm?",
    "Tell me about the Internet.", "What is a file?", "What is a virus?",
)  # fmt: skip


def widened(small: LlamaForCausalLM, shape: dict[str, int]) -> LlamaForCausalLM:
    """A model of the shape that computes what the small one computes."""
    config = copy.deepcopy(small.config)
    ratio = small.config.hidden_size / shape["hidden_size"]
    # The mean of the squares is over more channels, of which the new ones are zero.
    config.update({**shape, "rms_norm_eps": small.config.rms_norm_eps * ratio})
    torch.manual_seed(0)
    wide = LlamaForCausalLM(config)
    heads = _head_map(small.config, config)
    with torch.no_grad():
        for index, layer in enumerate(wide.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            if index < small.config.num_hidden_layers:
                _widen_layer(small.model.layers[index], layer, small.config, heads, ratio)
        _place(wide.model.embed_tokens.weight, small.model.embed_tokens.weight)
        _place(wide.model.norm.weight, small.model.norm.weight * math.sqrt(ratio))
        wide.lm_head.weight = wide.model.embed_tokens.weight
    return wide


def _head_map(small: LlamaConfig, wide: LlamaConfig) -> list[tuple[int, int, int]]:
    """(small query head, wide query head, wide KV head) of each small query head."""
    group, wide_group = (c.num_attention_heads // c.num_key_value_heads for c in (small, wide))
    found, next_kv = [], 0
    for kv in range(small.num_key_value_heads):
        for place in range(group):
            if place and place % wide_group == 0:
                next_kv += 1
            found.append((kv * group + place, next_kv * wide_group + place % wide_group, next_kv))
        next_kv += 1
    assert next_kv <= wide.num_key_value_heads
    return found


def _widen_layer(small: Any, wide: Any, config: LlamaConfig, heads: list[tuple[int, int, int]], ratio: float) -> None:
    size, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(wide.self_attn, name).weight.zero_()
    for old, new, kv in heads:
        rows, wide_rows = slice(old * size, old * size + size), slice(new * size, new * size + size)
        _place(wide.self_attn.q_proj.weight[wide_rows], small.self_attn.q_proj.weight[rows])
        _place(wide.self_attn.o_proj.weight[:, wide_rows], small.self_attn.o_proj.weight[:, rows])
        for name in ("k_proj", "v_proj"):
            source = slice(old // group * size, old // group * size + size)
            target = slice(kv * size, kv * size + size)
            _place(getattr(wide.self_attn, name).weight[target], getattr(small.self_attn, name).weight[source])
    for name in ("gate_proj", "up_proj", "down_proj"):
        _place(getattr(wide.mlp, name).weight, getattr(small.mlp, name).weight)
    for name in ("input_layernorm", "post_attention_layernorm"):
        _place(getattr(wide, name).weight, getattr(small, name).weight * math.sqrt(ratio))


def _place(wide: torch.Tensor, small: torch.Tensor) -> None:
    """In a corner of zeros."""
    wide.zero_()
    wide[tuple(slice(0, size) for size in small.shape)] = small


def prompts_of(tokenizer: FastTokenizer) -> list[list[int]]:
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in QUESTIONS
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


@torch.no_grad()
def own_texts(model: LlamaForCausalLM, prompts: list[list[int]], num: int, length: int) -> torch.Tensor:
    """[num, length]: what the model says, at temperature 1 after a question or nothing."""
    torch.manual_seed(1)
    rows = [prompts[i % len(prompts)][: length // 2] if i % 2 else [1] for i in range(num)]
    width = max(map(len, rows))
    texts = torch.zeros(num, length, dtype=torch.long)
    done = 0
    for start in range(0, num, 256):
        for lengths in {len(row) for row in rows[start : start + 256]}:
            mine = [row for row in rows[start : start + 256] if len(row) == lengths]
            tokens = torch.tensor(mine)
            out = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_length=length, min_length=length, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            texts[done : done + len(mine)] = out
            done += len(mine)
    assert width < length
    return texts


def distilled(teacher: LlamaForCausalLM, texts: torch.Tensor, seconds: float) -> LlamaForCausalLM:
    """A model of three of the teacher's four layers, trained for so long to predict what the teacher predicts."""
    torch.manual_seed(2)
    config = copy.deepcopy(teacher.config)
    config.update({"num_hidden_layers": 3})
    student = LlamaForCausalLM(config)
    student.load_state_dict(teacher.state_dict(), strict=False)
    student.model.layers[2].load_state_dict(teacher.model.layers[-1].state_dict())
    matrices = [one for layer in student.model.layers for one in layer.parameters() if one.ndim == 2]
    others = [one for one in student.parameters() if all(one is not other for other in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=MATRICES_RATE, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHERS_RATE, betas=(0.9, 0.97), weight_decay=0.0),
    ]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    begun_s, step = time.process_time(), 0
    while (elapsed := time.process_time() - begun_s) < seconds:
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 10) * (1 - 0.95 * elapsed / seconds)
        batch = texts[torch.randint(len(texts), (8,))]
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(batch, use_cache=False).logits.float().log_softmax(-1).flatten(0, 1)
            found = student(batch, use_cache=False).logits.float().log_softmax(-1).flatten(0, 1)
        loss = F.kl_div(found, wanted, log_target=True, reduction="batchmean")
        if not step:
            print(f"before it is distilled: KL {loss.item():.3f}", flush=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
    print(f"distilled: {step} steps of {8 * texts.shape[1]} tokens, KL {loss.item():.3f}", flush=True)
    return student.eval()


@torch.no_grad()
def agreement(teacher: LlamaForCausalLM, student: LlamaForCausalLM, texts: torch.Tensor) -> tuple[float, float, float]:
    """Share of drafts kept, one at a time: greedy; at temperature 1 by rejection sampling; with the same noise."""
    p, q = (
        model(texts, use_cache=False).logits.float()[:, 8:].flatten(0, 1).log_softmax(-1)
        for model in (teacher, student)
    )
    greedy = (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    rejection = torch.minimum(p.exp(), q.exp()).sum(-1).mean().item()
    noise = -torch.empty_like(p).exponential_().log()
    return greedy, rejection, ((p + noise).argmax(-1) == (q + noise).argmax(-1)).float().mean().item()


class Run(NamedTuple):
    seconds: float
    num_tokens: int
    num_steps: int
    kept_share: float
    state: str


class Bench:
    def __init__(self, prepared: PreparedModel, streams: int, tokens: int, drafts: int) -> None:
        block_bytes = prepared.model.kv_shape(prepared.block_size).block_bytes
        merged_bytes = choose_merged_bytes([block_bytes])
        num_merged = -(-2 * streams * ((tokens + 64) // prepared.block_size + 2) * block_bytes // merged_bytes) + 1
        self._executor = Executor("cpu", num_merged, merged_bytes, streams)
        self._engine = Configuration(
            num_merged=num_merged, num_rows=streams, ordering="doubling_budget", token_budget=512, steps_in_flight=1,
            max_drafts=drafts,
        ).build()  # fmt: skip
        self._engine.apply(AddModel(self._executor.add_model(prepared)), 0.0)
        self._began_s = time.process_time()
        self._num_requests, self._streams, self._tokens = 0, streams, tokens

    def run(self, prompts: list[list[int]], temperature: float) -> Run:
        """Keeps as many streams all the time: when one has ended the next one begins. What is measured ends with the last
        one's beginning, after each has begun `REQUESTS_A_STREAM` times."""
        engine, counters = self._engine, self._engine.counters
        before = counters.drafted_tokens.total(), counters.accepted_tokens.total()
        waiting = deque(
            GenerationRequest(
                request_id=f"{self._num_requests}-{index}", gateway_id="g", model="m",
                prompt=pack_tokens(prompts[index % len(prompts)]),
                sampling=SamplingParams(max_tokens=self._tokens, temperature=temperature, seed=index),
            )
            for index in range(REQUESTS_A_STREAM * self._streams)
        )  # fmt: skip
        self._num_requests += 1
        for _ in range(self._streams):
            assert engine.apply(Submit(waiting.popleft()), self._now()) is None
        num_steps = num_tokens = 0
        began_s = time.process_time()
        while waiting:
            plan = engine.plan(self._now())
            assert plan is not None
            self._executor.launch(plan)
            result = self._executor.collect()
            assert not result.error, result.error
            engine.apply(OnStep(result), self._now())
            num_steps += 1
            for effect in engine.effects():
                if isinstance(effect, Output):
                    num_tokens += sum(len(entry.tokens) // 4 for entry in effect.entries)
                elif waiting:
                    assert engine.apply(Submit(waiting.popleft()), self._now()) is None
        seconds = time.process_time() - began_s
        for held in engine.all_held():
            engine.apply(Cancel(held.request.request_id), self._now())
        engine.effects()
        drafted = counters.drafted_tokens.total() - before[0]
        kept = counters.accepted_tokens.total() - before[1]
        gates = engine.speculation().get("m", {})
        state = next((state.value for most, (state, _) in gates.items() if most >= self._streams), "")
        return Run(seconds, num_tokens, num_steps, kept / max(1, drafted), state)

    def _now(self) -> float:
        return time.process_time() - self._began_s

    def close(self) -> None:
        self._executor.close()


def checkpoints(folder: Path, train_s: float) -> tuple[Path, dict[str, Path], tuple[float, float, float]]:
    """The model, its draft models, and how far the trained one agrees with it."""
    paths = folder / "model", {kind: folder / kind for kind in ("trained", "random")}
    tokenizer = FastTokenizer.from_pretrained(SOURCE)
    teacher = LlamaForCausalLM.from_pretrained(SOURCE, dtype=torch.float32).eval()
    prompts = prompts_of(tokenizer)
    texts = own_texts(teacher, prompts, 1024, 128)
    student = distilled(teacher, texts[:-64], train_s)
    wide = widened(teacher, SHAPE_135M)
    with torch.no_grad():
        same = (wide(texts[:2], use_cache=False).logits - teacher(texts[:2], use_cache=False).logits).abs().max()
    assert same < 1e-2, f"widening changed logits by {same}"
    models = {paths[0]: wide, paths[1]["trained"]: widened(student, SHAPE_30M)}
    config = copy.deepcopy(teacher.config)
    config.update(SHAPE_30M)
    models[paths[1]["random"]] = LlamaForCausalLM(config)
    for path, model in models.items():
        model.to(torch.bfloat16).save_pretrained(path)
        tokenizer.save_pretrained(path)
        print(path.name, f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters", flush=True)
    return *paths, agreement(teacher, student, texts[-64:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-s", type=float, default=60.0)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--draft", nargs="+", choices=("trained", "random"), default=["trained", "random"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--keep", type=Path, help="checkpoints are there, or are to be put there")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draft_model.clock = time.process_time
    rows = []
    with tempfile.TemporaryDirectory(prefix="tideway-speculation-") as temporary:
        folder = options.keep or Path(temporary)
        if (folder / "random").exists():
            path, drafts = folder / "model", {kind: folder / kind for kind in ("trained", "random")}
        else:
            path, drafts, shares = checkpoints(folder, options.train_s)
            greedy, rejection, same_noise = shares
            told = f"greedy {greedy:.3f}, rejection sampling {rejection:.3f}, same noise {same_noise:.3f}"
            print(f"kept of single drafts: {told}", flush=True)
        prompts = prompts_of(FastTokenizer.from_pretrained(SOURCE))
        for streams in options.streams:
            for kind in options.draft:
                spec = ModelSpec("m", str(path), dtype="bfloat16", draft=str(drafts[kind]))
                # Both have the same weights at the same place in memory.
                prepared = Executor("cpu", 1, 1 << 30, 1).prepare_model(spec)
                both = (dataclasses.replace(prepared, draft=None), prepared)
                benches = [Bench(one, streams, options.tokens, options.drafts) for one in both]
                for temperature in options.temperatures:
                    first = [bench.run(prompts, temperature) for bench in benches]
                    runs: list[list[Run]] = [[], []]
                    for which in options.rounds * (0, 1, 1, 0):
                        runs[which].append(benches[which].run(prompts, temperature))
                    rates = [[run.num_tokens / run.seconds for run in of] for of in runs]
                    last = runs[1][-1]
                    row = (
                        streams, kind, temperature, statistics.median(rates[0]), statistics.median(rates[1]),
                        statistics.median(b / a for a, b in zip(*rates, strict=True)),
                        first[1].num_tokens / first[1].seconds * first[0].seconds / first[0].num_tokens,
                        statistics.mean(run.num_tokens / run.num_steps / streams for run in runs[1]),
                        last.kept_share, last.state,
                    )  # fmt: skip
                    rows.append(row)
                    print(*row, flush=True)
                for bench in benches:
                    bench.close()
    header = (
        "streams", "draft model", "temperature", "tokens/s without", "tokens/s with", "ratio", "first", "tokens a step",
        "drafts kept", "drafts",
    )  # fmt: skip
    text = "\n".join(table(header, rows))
    print(text)
    if options.output is not None:
        document = {"machine": machine(), "rows": [dict(zip(header, row, strict=True)) for row in rows]}
        write(options.output, "speculation", document, text)


if __name__ == "__main__":
    main()
