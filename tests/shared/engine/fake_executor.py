"""An executor without tensors: the token after a prefix is a hash of that prefix, read back through the block tables.

It keeps what a real KV slab would hold (one cell per token and block, with merged blocks shared by models), so a block that
is handed out too early, a wrong block table or a wrong count shows as a different token or as a failed assertion.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from struct import pack

from shared.engine.plan import NO_TOKEN, CopyKind, KvCopy, ModelShape, StepPlan, StepResult
from shared.messages.requests import (
    GenerationRequest,
    SamplingParams,
    TokenLogprob,
    pack_tokens,
    unpack_tokens,
)


def next_token(prefix: list[int]) -> int:
    return int.from_bytes(blake2b(pack_tokens(prefix), digest_size=4).digest(), "little") % 1000


def repeating_token(prefix: list[int]) -> int:
    """A token of a model that mostly goes on as it did three tokens ago, or round among few tokens."""
    drawn = next_token(prefix)
    return prefix[-3] if drawn % 8 and len(prefix) > 3 else drawn % 5


def mostly(token_after: Callable[[list[int]], int]) -> Callable[[list[int]], int]:
    """A draft model that is right three times of four."""
    return lambda prefix: token_after(prefix) if next_token(prefix) % 4 else 7


def expected_output(
    request: GenerationRequest, max_model_len: int, next_token: Callable[[list[int]], int] = next_token
) -> list[int]:
    """What an undisturbed run of the request makes (one request at a time, no paging, no cache)."""
    tokens = unpack_tokens(request.prompt)
    limit = min(len(tokens) + request.sampling.max_tokens, max_model_len)
    output: list[int] = []
    while len(tokens) < limit:
        token = next_token(tokens)
        tokens.append(token)
        output.append(token)
        if token in request.sampling.stop_token_ids and len(output) > request.sampling.min_tokens:
            break
    return output


def request(request_id: str, prompt: list[int], max_tokens: int, **fields) -> GenerationRequest:
    sampling = {
        key: fields.pop(key)
        for key in ("min_tokens", "stop_token_ids", "temperature", "logprobs", "prompt_logprobs")
        if key in fields
    }
    fields = {"gateway_id": "gateway", "model": "a", **fields}
    return GenerationRequest(
        request_id=request_id,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        **fields,
    )


def prompt_logprobs(prompt: list[int]) -> bytes:
    """What a request that asks for them, without alternatives, is to be told of its prompt."""
    return b"".join(_logprob(prompt[: position + 1], prompt[position + 1]) for position in range(len(prompt) - 1))


def _logprob(prefix: list[int], following: int) -> bytes:
    return pack("=fi", next_token(prefix), following)


class FakeExecutor:
    def __init__(
        self,
        shapes: list[ModelShape],
        next_token: Callable[[list[int]], int] = next_token,
        draft_token: Callable[[list[int]], int] | None = None,
    ) -> None:
        """`draft_token`: the draft models' token after a prefix; None: the models'."""
        self._next_token = next_token
        self._draft_token = draft_token or next_token
        self._draft_cells: dict[tuple[str, int], list[int | None]] = {}
        """By model and block: what its draft model has there, if it was the last to write to it."""
        self._drafted: dict[int, list[int]] = {}
        """By step that is suspended: what was drafted for it."""
        self._shapes = {shape.name: shape for shape in shapes}
        self._cells: dict[tuple[str, int], list[int | None]] = {}
        self._merged_owner: dict[int, str] = {}
        self._tokens: dict[int, list[int]] = {}
        self._blocks: dict[int, list[int]] = {}
        self._model: dict[int, str] = {}
        self._scored: dict[int, int] = {}
        """Rows that want log-probabilities of their prompt, with its length."""
        self._suspended: dict[int, StepPlan] = {}
        self._host: dict[tuple[str, int], list[int | None]] = {}
        self.disk: dict[tuple[str, bytes], list[int | None]] = {}
        """By model and hash."""
        self._launched: list[StepPlan] = []
        """Plans that may still be executed when they return."""
        self._results: dict[int, StepResult] = {}

    def launch(self, plan: StepPlan) -> None:
        """It is in flight, and executed before anything that is to take place after it."""
        self._launched.append(plan)

    def start(self, copies: list[KvCopy]) -> list[KvCopy]:
        """Moves take place at once, other copies at any time; all are still to be reported."""
        for copy in copies:
            if copy.kind == CopyKind.MOVE:
                self._execute_launched()
                self._move(copy)
        return copies

    def _execute_launched(self) -> None:
        for plan in self._launched:
            # One that may be suspended is alone, and no block of its sequences is moved.
            if not plan.is_interruptible and not plan.resumes:
                self._results[plan.step_id] = self._execute(plan)
        self._launched = [plan for plan in self._launched if plan.step_id not in self._results]

    def _move(self, copy: KvCopy) -> None:
        contents = [list(self._block(copy.model, block)) for block in copy.device_blocks]
        for target, cells in zip(copy.target_blocks, contents, strict=True):
            self._block(copy.model, target)[:] = cells
        for row, index, block in copy.tables:
            if index < len(self._blocks.get(row, ())):
                self._blocks[row][index] = block

    def suspend(self, plan: StepPlan, share: float = 0.5) -> StepResult:
        """The step stops half-way: its row changes count, some of its cells hold garbage."""
        self._launched = [other for other in self._launched if other is not plan]
        assert plan.is_interruptible and (plan.step_id in self._suspended) is plan.resumes
        if not plan.resumes:
            self._apply_rows(plan)
            self._drafted[plan.step_id] = self._draft(plan)
        plan = plan.expanded()
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            for position in range(start, start + count):
                cells, index = self._cell(plan.model, row, position)
                cells[index] = -1
        self._suspended[plan.step_id] = plan
        return StepResult(plan.step_id, [], suspended_share=share)

    def copy(self, copy: KvCopy) -> bool:
        """Returns whether it succeeded: what is to be read may not be on disk."""
        if copy.kind == CopyKind.MOVE:
            return True
        for block_hash, host in zip(copy.hashes, copy.host_blocks, strict=bool(copy.hashes)):
            key = (copy.model, block_hash)
            if copy.kind == CopyKind.WRITE:
                self.disk[key] = list(self._host[copy.model, host])
            elif key in self.disk:
                self._host[copy.model, host] = list(self.disk[key])
            else:
                return False
        for device, host in zip(copy.device_blocks, copy.host_blocks, strict=not copy.hashes):
            if copy.kind == CopyKind.CHECKPOINT:
                cells = self._block(copy.model, device)
                assert -1 not in cells and None not in cells, "a block was checkpointed before it was filled"
                self._host[copy.model, host] = list(cells)
            else:
                self._block(copy.model, device)[:] = self._host[copy.model, host]
        return True

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step_id in self._results:
            return self._results.pop(plan.step_id)
        self._launched = [other for other in self._launched if other is not plan]
        return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        for step_id in plan.discards:
            del self._suspended[step_id]
            self._drafted.pop(step_id)
        if plan.stop_share < 1.0:
            return self.suspend(plan, plan.stop_share)
        if plan.resumes:
            first = self._suspended.pop(plan.step_id)
            expanded = plan.expanded()
            assert (expanded.rows, expanded.starts, expanded.counts) == (first.rows, first.starts, first.counts)
            assert not plan.new_sequences and not plan.new_blocks
        return self._compute(plan)

    def _compute(self, plan: StepPlan) -> StepResult:
        self._apply_rows(plan)
        assert len(set(plan.rows)) == len(plan.rows), "a sequence twice in one step"
        drafted = self._drafted.pop(plan.step_id) if plan.resumes else self._draft(plan)
        made = iter(drafted)
        for index, planned in plan.drafts:
            tokens = [next(made) if token == NO_TOKEN else token for token in planned]
            self._tokens[plan.rows[index]][plan.starts[index] + plan.counts[index] :] = tokens
        plan = plan.expanded()
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            assert self._model[row] == plan.model
            for position in range(start, start + count):
                self._write(plan.model, row, position)
        prompts = [
            (index, self._score(plan.model, row, start, count))
            for index, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True))
            if start + 1 < self._scored.get(row, 0)
        ]
        tokens = self._sample(plan)
        logprobs = [TokenLogprob(0.0) for _ in tokens] if self._scored else None
        passes_s = [0.001] * (1 + max((one.num_drafts for one in plan.model_drafts), default=0))
        return StepResult(
            plan.step_id, tokens, logprobs, prompt_logprobs=prompts, drafted=drafted,
            draft_passes_s=passes_s if plan.model_drafts else [],
        )  # fmt: skip

    def _draft(self, plan: StepPlan) -> list[int]:
        """What the draft model makes, from what it has in its cache."""
        made = []
        for one in plan.model_drafts:
            row, tokens_per_block = plan.rows[one.column], self._shapes[plan.model].draft.tokens_per_block
            known = self._tokens[row][: plan.starts[one.column] + 1]
            assert one.start + one.count <= len(known)
            assert not one.num_drafts or one.start + one.count == len(known), "it lacks tokens before its first draft"
            cells = [self._draft_block(plan.model, block) for block in one.blocks]
            for position in range(one.start, one.start + one.count):
                cells[position // tokens_per_block][position % tokens_per_block] = known[position]
            for number in range(one.num_drafts):
                read = [cells[p // tokens_per_block][p % tokens_per_block] for p in range(len(known))]
                assert read == known, "the draft model's cache holds other tokens than the sequence"
                known.append(self._draft_token(known))
                if number < one.num_drafts - 1:
                    position = len(known) - 1
                    cells[position // tokens_per_block][position % tokens_per_block] = known[-1]
            made += known[one.start + one.count :] if one.num_drafts else []
        return made

    def _draft_block(self, model: str, block: int) -> list[int | None]:
        self._cells[model, block] = [None] * self._shapes[model].block_size
        self._own(model, block)
        draft = self._shapes[model].draft
        assert draft is not None
        return self._draft_cells.setdefault((model, block), [None] * draft.tokens_per_block)

    def _score(self, model: str, row: int, start: int, count: int) -> bytes:
        end = min(start + count, self._scored[row] - 1)
        prefix = [self._read(model, row, position) for position in range(end)]
        return b"".join(
            _logprob(prefix[: position + 1], self._tokens[row][position + 1]) for position in range(start, end)
        )

    def _apply_rows(self, plan: StepPlan) -> None:
        for new in plan.new_sequences:
            self._tokens[new.row] = unpack_tokens(new.tokens)
            self._blocks[new.row] = list(new.blocks)
            self._model[new.row] = plan.model
            self._scored.pop(new.row, None)
            if new.sampling.prompt_logprobs >= 0:
                self._scored[new.row] = new.prompt_tokens
        for row, blocks in plan.new_blocks:
            self._blocks[row].extend(blocks)

    def _sample(self, plan: StepPlan) -> list[int]:
        sampled = []
        for row, start, count, samples in zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True):
            if samples:
                end = start + count
                token = self._next_token([self._read(plan.model, row, position) for position in range(end)])
                sampled.append((row, end, token))
        for row, end, token in sampled:
            self._tokens[row][end : end + 1] = [token]
        return [token for _, _, token in sampled]

    def _cell(self, model: str, row: int, position: int) -> tuple[list[int | None], int]:
        shape = self._shapes[model]
        return self._block(model, self._blocks[row][position // shape.block_size]), position % shape.block_size

    def _block(self, model: str, block: int) -> list[int | None]:
        self._own(model, block)
        self._draft_cells.pop((model, block), None)
        return self._cells.setdefault((model, block), [None] * self._shapes[model].block_size)

    def _own(self, model: str, block: int) -> None:
        merged = block // self._shapes[model].blocks_per_merged
        if self._merged_owner.get(merged) != model:
            for cells in (self._cells, self._draft_cells):
                for key in [key for key in cells if self._merged_of(key) == merged]:
                    del cells[key]
            self._merged_owner[merged] = model

    def _merged_of(self, key: tuple[str, int]) -> int:
        return key[1] // self._shapes[key[0]].blocks_per_merged

    def _write(self, model: str, row: int, position: int) -> None:
        cells, index = self._cell(model, row, position)
        cells[index] = self._tokens[row][position]

    def _read(self, model: str, row: int, position: int) -> int:
        cells, index = self._cell(model, row, position)
        token = cells[index]
        assert token is not None, f"position {position} of row {row} was never computed"
        assert token == self._tokens[row][position], "the KV cell holds another token than the sequence has there"
        return token
