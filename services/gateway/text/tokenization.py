"""Tokenizers of the served models: text to token ids and back, chat messages to prompts.

Works on the `tokenizers` library directly. Short texts are tokenised inline, where a hand-over would cost more than the
work, longer ones on a thread (the library drops the interpreter's lock in `encode_batch` only), and very long ones, as chat
templates, in processes that may be killed (`pool`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer, decoders

from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.conversations import plain_messages
from services.gateway.openai.schemas import ChatMessage
from services.gateway.openai.structured import Grammar
from services.gateway.text.bounds import MAX_INFLATION, longest_token_characters, may_inflate
from services.gateway.text.chat_templates import load_template
from services.gateway.text.detokenization import Decoding, Detokenizer
from services.gateway.text.pool import SHORT_CHARACTERS, TextPool
from services.gateway.text.work import Encode, Render
from services.gateway.tools.formats import PLAIN, ToolFormat, format_of
from services.gateway.tools.reasoning import Opening, ReasoningFormat, reasoning_format_of
from shared.messages.cluster import ModelSpec
from shared.models.checkpoint import (
    CheckpointError,
    SamplingDefaults,
    describe,
    read_tokenizer_config,
    resolve,
    sampling_defaults,
    tokenizer_json,
)
from shared.models.pooling import Pooling

logger = logging.getLogger(__name__)

T = TypeVar("T")

INLINE_CHARACTERS = 2048
"""Longer texts go to a thread: tokenising takes about a millisecond for 4,000 characters."""
NUM_THREADS = 2
RETRY_AFTER_FAILURE_S = 5.0
MAX_REASON_CHARACTERS = 300
"""Most characters of a reason that the tokenizers library gives."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2's `bytes_to_unicode`, inverted): printable bytes stand for themselves, the
    others for characters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    alphabet = {chr(byte): byte for byte in printable}
    for n, byte in enumerate(byte for byte in range(256) if byte not in printable):
        alphabet[chr(256 + n)] = byte
    return alphabet


class ModelTokenizer:
    """One model's tokenizer, and what its checkpoint says about lengths and ends."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        spec: ModelSpec,
        config: dict[str, Any],
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        vocab_size: int,
        tool_format: ToolFormat = PLAIN,
        takes_tools: bool = False,
        template_variables: frozenset[str] = frozenset(),
        reasoning_format: ReasoningFormat | None = None,
        defaults: SamplingDefaults | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        """`vocab_size`: of the model's embedding, which may be more than the tokenizer names. `config`:
        tokenizer_config.json. `spec`: with the checkpoint's folder as its source. `tool_format`: of the calls that the model
        writes. `takes_tools`: its chat template tells it of tools; `template_variables`: all that this looks at.
        `reasoning_format`: of its reasoning, where it has some."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.spec = spec
        self._longest_token_characters = longest_token_characters(tokenizer)
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.tool_format = tool_format
        self.takes_tools = takes_tools
        self.template_variables = template_variables
        self.reasoning_format = reasoning_format
        self.defaults = defaults or SamplingDefaults()
        """Sampling defaults of the checkpoint's maker."""
        self.pooling = pooling
        """Pooling of a model that embeds or scores; None: it generates text."""
        added = tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        marks = () if reasoning_format is None else (reasoning_format.begin, reasoning_format.end)
        shown = map(tokenizer.token_to_id, (*marks, *(tool_format.marks if tool_format.has_reasoning else ())))
        self._hidden_beside_reasoning = self._special_ids.difference(shown)
        of_calls = map(tokenizer.token_to_id, tool_format.marks)
        self._hidden_beside_calls = self._hidden_beside_reasoning.difference(of_calls)
        self._is_byte_level = b'"ByteLevel"' in (tokenizer.decoder.__getstate__() if tokenizer.decoder else b"")
        decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
        self._decoding = Decoding(decode, joins_bytes=isinstance(tokenizer.decoder, decoders.ByteLevel))
        bos = config.get("bos_token")
        bos = bos.get("content") if isinstance(bos, dict) else bos
        self._bos_id = tokenizer.token_to_id(bos) if isinstance(bos, str) and bos else None
        self._add_bos: bool | None = config.get("add_bos_token")

    def opening(self, prompt: str, continued: ChatMessage | None) -> Opening:
        """How the output of a chat begins after its prompt. `continued`: the assistant's message that the prompt ends in."""
        if self.reasoning_format is None:
            return Opening.FREE
        text = None if continued is None else plain_messages([continued])[0]["content"]
        return self.reasoning_format.opening(prompt, text)

    def special_token_id(self, piece: str) -> int | None:
        """Id of a special token that grammars name by it; None: there is none. To llguidance an added token in angle
        brackets is special, whether or not the tokenizer says so."""
        token_id: int | None = self._tokenizer.token_to_id(piece)
        is_bracketed = token_id in self._added_ids and piece.startswith("<") and piece.endswith(">")
        return token_id if is_bracketed or token_id in self._special_ids else None

    # ------------------------------------------------------------------------------------------- text to ids

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises `ApiError` where the checkpoint's tokenizer fails on the text."""
        try:
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise _failed(error, "cannot read this text") from None
        return self._begun(ids) if add_special_tokens else ids

    def encode_cut(self, first: str, second: str | None, num_tokens: int | None) -> tuple[list[int], int]:
        """A text, or a pair as the tokenizer joins them, with special tokens; the ids, and where the second text begins
        (0: there is none). Of more than `num_tokens` the last text is cut at its end, before what ends it. Raises
        `ApiError`."""
        tokenizer, is_pair = self._tokenizer, second is not None
        try:
            parts = [
                tokenizer.encode(text, add_special_tokens=False)
                for text in ((first,) if second is None else (first, second))
            ]
            if num_tokens is not None:
                room = num_tokens - tokenizer.num_special_tokens_to_add(is_pair)
                for part in parts[:-1]:
                    part.truncate(min(len(part), max(0, room)))
                    room -= len(part)
                parts[-1].truncate(min(len(parts[-1]), max(0, room)))
            whole = tokenizer.post_process(parts[0], parts[1] if is_pair else None)
        except BaseException as error:
            raise _failed(error, "cannot read this text") from None
        ids: list[int] = whole.ids
        num_first = whole.type_ids.index(1) if is_pair and 1 in whole.type_ids else 0
        begun = self._begun(ids)
        begun = begun if num_tokens is None else begun[:num_tokens]
        return begun, num_first + len(begun) - len(ids) if num_first else 0

    def _begun(self, ids: list[int]) -> list[int]:
        if self._bos_id is not None and self._add_bos is not None:
            # The setting goes before what the tokenizer file does by itself, as in transformers.
            begins = ids[:1] == [self._bos_id]
            if self._add_bos and not begins:
                return [self._bos_id, *ids]
            if not self._add_bos and begins:
                return ids[1:]
        return ids

    def max_characters(self, num_tokens: int) -> int | None:
        """No text with more characters makes so few tokens; None: there is no such bound."""
        longest = self._longest_token_characters
        return None if longest is None else longest * (num_tokens + 1)  # a beginning that `encode` takes away

    # ------------------------------------------------------------------------------------------- ids to text

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        try:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _failed(error, "cannot write these tokens") from None
        return text

    def detokenizer(
        self, skip_special_tokens: bool = True, *, has_calls: bool = False, has_reasoning: bool = False
    ) -> Detokenizer:
        """`has_calls`, `has_reasoning`: calls of tools, and reasoning, are looked for, so the marks of these have text,
        special tokens or not."""
        hidden_ids = self._hidden_beside_reasoning if has_reasoning else self._special_ids
        hidden_ids = self._hidden_beside_calls if has_calls else hidden_ids
        return Detokenizer(self._decoding, hidden_ids if skip_special_tokens else frozenset())

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for; half a character is possible. Empty for an id without a token."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            alphabet = _byte_of_character()
            if all(c in alphabet for c in piece):
                return bytes(alphabet[c] for c in piece)
        elif match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        else:
            piece = piece.replace("▁", " ")
        return str(piece).encode()

    def token_text(self, token_id: int) -> str:
        """The token alone as text; bytes that are no character become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_piece(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        return self._tokenizer.id_to_token(token_id) or ""


def _failed(error: BaseException, what: str) -> BaseException:
    """What is raised in the place of an error of the tokenizers library: its panics are no `Exception`."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        reason = (str(error).splitlines() or [""])[0][:MAX_REASON_CHARACTERS]
        return ApiError(400, f"The model's tokenizer {what}: {reason}", param="model", code="tokenizer_failed")
    return error


def load_tokenizer(spec: ModelSpec) -> ModelTokenizer:
    """Blocking; may download. Raises `CheckpointError`."""
    try:
        folder = resolve(spec.source)
        shape = describe(folder)
        config = read_tokenizer_config(folder)
        text = tokenizer_json(folder)
        if text is None:
            tokenizer = _convert(folder)
        else:
            # Before it is loaded, which normalises its own added tokens.
            if may_inflate(msgspec.json.decode(text).get("normalizer")):
                raise CheckpointError(
                    f"the normalizer of the tokenizer in {folder} makes more than {MAX_INFLATION} characters of one."
                )
            tokenizer = Tokenizer.from_str(text)
        template = load_template(folder, config)  # one that cannot be used is told of now; `work` runs it
        return ModelTokenizer(
            tokenizer,
            spec=msgspec.structs.replace(spec, source=str(folder)),
            config=config,
            eos_token_ids=shape.eos_token_ids,
            max_model_len=min(shape.max_model_len, spec.max_model_len or shape.max_model_len),
            vocab_size=shape.vocab_size,
            tool_format=format_of(template.tool_source, spec.tool_format),
            takes_tools=template.takes_tools,
            template_variables=template.variables,
            reasoning_format=reasoning_format_of(template.sources),
            defaults=sampling_defaults(folder),
            pooling=shape.pooling,
        )
    except CheckpointError:
        raise
    except BaseException as error:  # the tokenizers library raises plain Exception, and panics
        reason = _failed(error, f"of {spec.source} cannot be read")
        if not isinstance(reason, ApiError):
            raise
        raise CheckpointError(f"The tokenizer of {spec.source} cannot be read: {error}") from error


def _convert(folder: Path) -> Tokenizer:
    """An older checkpoint (vocab.json and merges.txt): transformers converts it. Its import takes seconds and loads torch,
    so it happens only here."""
    logger.info("%s has no tokenizer.json; transformers converts its tokenizer", folder)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(folder))
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        raise CheckpointError(f"{folder} has no tokenizer.json and its tokenizer cannot be converted into one.")
    return tokenizer


class Tokenizers:
    """The loaded tokenizers, one a source, and who does the longer work."""

    def __init__(self, pool: TextPool) -> None:
        self._pool = pool
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenizer")
        # Loading takes seconds, which no prompt should wait.
        self._loaders = ThreadPoolExecutor(NUM_THREADS, "tokenizer-loading")
        self._loading: dict[ModelSpec, asyncio.Future[ModelTokenizer]] = {}

    def preload(self, spec: ModelSpec) -> asyncio.Future[ModelTokenizer]:
        """Starts loading unless it is loaded or being loaded. The future fails with `CheckpointError`."""
        if (future := self._loading.get(spec)) is not None:
            return future
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._loaders, load_tokenizer, spec)
        self._loading[spec] = future

        def on_loaded(done: asyncio.Future[ModelTokenizer]) -> None:
            if done.cancelled() or (error := done.exception()) is None:
                return
            logger.error("the tokenizer of %s cannot be loaded: %s", spec.name, error)
            loop.call_later(RETRY_AFTER_FAILURE_S, self._loading.pop, spec, None)

        future.add_done_callback(on_loaded)
        return future

    async def load_anew(self, spec: ModelSpec) -> ModelTokenizer:
        """Loads the tokenizer of the checkpoint as it is now, whatever was loaded of it before. Raises `CheckpointError`."""
        return await asyncio.get_running_loop().run_in_executor(self._loaders, load_tokenizer, spec)

    def loaded(self, spec: ModelSpec) -> ModelTokenizer | None:
        """None: it is not loaded, or being so."""
        future = self._loading.get(spec)
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result()

    def forget(self, keep: set[ModelSpec]) -> None:
        """Drops the tokenizers of models that are not served any more."""
        for spec in self._loading.keys() - keep:
            del self._loading[spec]

    async def get(self, spec: ModelSpec) -> ModelTokenizer:
        """Waits while it loads. Raises `ApiError` 503 where it cannot be had."""
        try:
            return await asyncio.shield(self.preload(spec))
        except CheckpointError as error:
            raise ApiError(
                503,
                f"The tokenizer of model '{spec.name}' cannot be loaded: {error}",
                type="service_unavailable",
                param="model",
                code="unavailable",
                retry_after_s=RETRY_AFTER_FAILURE_S,
            ) from None

    async def encode(
        self, tokenizer: ModelTokenizer, texts: list[str], add_special_tokens: bool, param: str
    ) -> list[list[int]]:
        """The tokens of each text. Raises `ApiError` where it cannot be done within the limits; `param`: the field at fault
        then."""
        num_characters = sum(map(len, texts))
        if num_characters <= INLINE_CHARACTERS:
            return [tokenizer.encode(text, add_special_tokens) for text in texts]
        with self._pool.room(num_characters):
            if num_characters > SHORT_CHARACTERS:
                return await self._pool.encode(Encode(tokenizer.spec, texts, add_special_tokens), num_characters, param)
            return await self._on_thread(lambda: [tokenizer.encode(text, add_special_tokens) for text in texts])

    async def encode_cut(
        self, tokenizer: ModelTokenizer, texts: Sequence[tuple[str, str | None]], num_tokens: int | None
    ) -> list[tuple[list[int], int]]:
        """Encodes each text as `ModelTokenizer.encode_cut` does. Raises `ApiError`."""
        limit = None if num_tokens is None else tokenizer.max_characters(num_tokens)
        cut = [(first[:limit], second if second is None else second[:limit]) for first, second in texts]
        num_characters = sum(len(first) + len(second or "") for first, second in cut)

        def work() -> list[tuple[list[int], int]]:
            return [tokenizer.encode_cut(first, second, num_tokens) for first, second in cut]

        if num_characters <= INLINE_CHARACTERS:
            return work()
        with self._pool.room(num_characters):
            return await self._on_thread(work)

    async def render(
        self,
        tokenizer: ModelTokenizer,
        messages: list[Any],
        max_characters: int | None,
        tools: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> tuple[str, int]:
        """The text that the chat template makes of the messages, and its length; of one longer than `max_characters` only
        the length. `options`: see `ChatTemplate.render`. Raises `ApiError`."""
        task = Render(
            tokenizer.spec.source,
            messages,
            max_characters=max_characters,
            tools=tools,
            takes_tools=tokenizer.takes_tools,
            takes_images=not tokenizer.spec.is_native,
            **options,
        )
        result = await self._pool.render(task)
        return result.text, result.num_characters

    async def try_grammar(self, tokenizer: ModelTokenizer, grammar: Grammar) -> Grammar:
        """Gives the grammar as instances take it. Raises `ApiError` 400 where the model's output cannot be made to follow
        it."""
        if not tokenizer.eos_token_ids:
            reason = "this model has no token that ends its output, which the end of a grammar needs"
            raise invalid(grammar.param, f"'{grammar.param}' cannot be had: {reason}.", "unsupported_value")
        return await self._pool.try_grammar(grammar)

    async def pieces(self, tokenizer: ModelTokenizer, ids: list[int]) -> list[str]:
        """`ModelTokenizer.token_piece` of each."""
        if 4 * len(ids) <= INLINE_CHARACTERS:
            return list(map(tokenizer.token_piece, ids))
        return await self._on_thread(lambda: list(map(tokenizer.token_piece, ids)))

    async def decode(self, tokenizer: ModelTokenizer, ids: list[int], skip_special_tokens: bool = False) -> str:
        if 4 * len(ids) <= INLINE_CHARACTERS:
            return tokenizer.decode(ids, skip_special_tokens)
        return await self._on_thread(lambda: tokenizer.decode(ids, skip_special_tokens))

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def close(self) -> None:
        for threads in (self._threads, self._loaders):
            threads.shutdown(wait=False, cancel_futures=True)
        await self._pool.close()
