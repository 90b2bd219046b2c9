"""The JSON bodies of the HTTP API's answers, as OpenAI and (for tokenize, detokenize and models) vLLM shape them."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages.batches import BatchWait
from shared.messages.cluster import AdminAction

FinishedBy = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PooledUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Text: base64 of little-endian float32."""


class Embeddings(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PooledUsage


class RankedText(msgspec.Struct):
    text: str
    """Text of the document."""


class RankedDocument(msgspec.Struct):
    index: int
    """Index of the document in the request."""
    relevance_score: float
    """Relevance: the higher, the more relevant."""
    document: RankedText | msgspec.UnsetType = msgspec.UNSET
    """Document, unless `return_documents` is false."""


class Ranking(msgspec.Struct):
    """The most relevant comes first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[RankedDocument]
    """Documents, the most relevant first."""


class Score(msgspec.Struct):
    index: int
    object: Literal["score"]
    score: float
    """Score of the pair."""


class Scores(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    """Bytes of the token, which may be a part of a character."""


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    """Bytes of the token, which may be a part of a character."""
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    """Tokens of the content."""
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    """Place of each token in the text, in characters."""
    token_logprobs: list[float | None]
    """None: of the first token of a prompt (with `echo`)."""
    tokens: list[str]
    """Text of each token."""
    top_logprobs: list[dict[str, float] | None]
    """Most likely tokens at each place, with their log-probabilities."""


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    """1 is the most likely."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Log-probabilities of each token of a prompt, by token id; None for the first."""


class CalledFunction(msgspec.Struct):
    name: str
    """Name of the function."""
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(msgspec.Struct, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class CalledCustomTool(msgspec.Struct):
    name: str
    """Name of the tool."""
    input: str
    """Text that the tool is given."""


class CustomToolCall(msgspec.Struct, tag_field="type", tag="custom"):
    id: str
    custom: CalledCustomTool


class FunctionChunk(msgspec.Struct):
    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallChunk(msgspec.Struct):
    """What is new of a call in a stream; id, type and name come with its first."""

    index: int
    function: FunctionChunk
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class CustomCallChunk(msgspec.Struct):
    """A call of a custom tool in a stream; all of it comes at once."""

    index: int
    id: str
    type: Literal["custom"]
    custom: CalledCustomTool


class AssistantMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    """None: it has tool calls alone."""
    refusal: None = None
    tool_calls: list[ToolCall | CustomToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """The same by another name."""


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    """Message of the assistant."""
    logprobs: ChatLogprobs | None
    finish_reason: FinishedBy


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    """The tier that was used, where the request named one."""
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    """Text of the answer, with the prompt before it where `echo` is true."""
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedBy
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: str | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    """Time at which the server learned of it, in Unix seconds."""
    owned_by: str
    """Always tideway."""
    root: str
    """Checkpoint of the model."""
    parent: str | None
    """The base model of a LoRA adapter."""
    max_model_len: int | None
    """None: no instance has loaded the model yet and its operator set no limit."""
    state: Literal["ready", "loading", "host", "disk", "failed"] = "ready"
    """host, disk: a model on demand that is put away, and where its weights are: it is loaded for the next request."""


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    """Ids of the tokens."""
    token_strs: list[str] | None
    """Tokens as the vocabulary spells them; null: they were not asked for."""


class DetokenizeReply(msgspec.Struct):
    prompt: str
    """Text of the tokens."""


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    """Kind of the error."""
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    error: ErrorBody
    """Error."""


class ReadyReply(msgspec.Struct):
    ready: bool
    """Says whether a model can be served."""
    models: list[str]
    """Models that can be served now."""
    problems: list[str]
    """What does not work meanwhile, as sentences: NATS is away or hangs, a stream of it has no leader, its disk is full."""


class VersionReply(msgspec.Struct):
    version: str


class AuditLog(msgspec.Struct):
    actions: list[AdminAction]


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"]
    bytes: int
    """Size in bytes."""
    created_at: int
    expires_at: int | None
    """Time at which it is deleted, in Unix seconds; null: never."""
    filename: str
    """Name that it was uploaded with."""
    purpose: str
    """Purpose: batch, or batch_output for the results of one."""
    status: Literal["processed"]
    """Deprecated upstream, and required by its clients."""


class FileList(msgspec.Struct):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchError(msgspec.Struct):
    code: str
    message: str
    line: int | None
    """Line of the input file, counted from 1; null: none is at fault."""
    param: str | None


class BatchErrors(msgspec.Struct):
    object: Literal["list"]
    data: list[BatchError]


class BatchRequestCounts(msgspec.Struct):
    total: int
    """Number of lines; 0 while they are not counted."""
    completed: int
    """Number of lines that were answered."""
    failed: int
    """Number of lines in the error file: refused, failed, expired."""


class BatchInputDetails(msgspec.Struct):
    cached_tokens: int


class BatchOutputDetails(msgspec.Struct):
    reasoning_tokens: int
    """Always 0: they are not counted apart."""


class BatchUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: BatchOutputDetails
    total_tokens: int


class BatchObject(msgspec.Struct, kw_only=True):
    """Times are Unix seconds."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    """Model of the first line; null: the lines are not checked yet."""
    errors: BatchErrors | None
    """Problems of the input file, of a batch that failed."""
    input_file_id: str
    completion_window: str
    """Window of the request."""
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    """Id of the file of answers; null: there is none yet, or no line was answered."""
    error_file_id: str | None
    """Id of the file of lines that failed; null: there is none."""
    created_at: int
    in_progress_at: int | None
    """Time at which its first line could run."""
    expires_at: int
    """End of its window."""
    finalizing_at: int | None
    """Time at which its lines were done."""
    completed_at: int | None
    """Time at which its files were complete."""
    failed_at: int | None
    """Time at which it failed."""
    expired_at: int | None
    """Time at which its window was over."""
    cancelling_at: int | None
    """Time at which it was cancelled."""
    cancelled_at: int | None
    """Time at which its cancellation was done."""
    request_counts: BatchRequestCounts
    """Numbers of its lines."""
    usage: BatchUsage
    metadata: dict[str, str] | None
    waiting_for: BatchWait | None
    """Not OpenAI's: that it or some of its lines wait for tokens per minute, for room for results or for a scheduler; null:
    for none of these, though they may wait for something else."""
    predicted_finish_at: int | None
    """Not OpenAI's: when the batch will probably be done, at the present throughput."""


class DeletedBatch(msgspec.Struct):
    id: str
    object: Literal["batch"] = "batch"
    deleted: bool = True


class BatchList(msgspec.Struct):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
