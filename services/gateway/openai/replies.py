"""The JSON bodies of the HTTP API's answers, as OpenAI and (for tokenize, detokenize and models) vLLM shape them."""

from __future__ import annotations

from typing import Literal

import msgspec

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


class RankedDocument(msgspec.Struct):
    index: int
    """Index of the document in the request."""
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class Ranking(msgspec.Struct):
    """The most relevant comes first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[RankedDocument]


class Score(msgspec.Struct):
    index: int
    object: Literal["score"]
    score: float


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


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    """None: of the first token of a prompt (with `echo`)."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    """1 is the most likely."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Log-probabilities of each token of a prompt, by token id; None for the first."""


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(msgspec.Struct, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class CalledCustomTool(msgspec.Struct):
    name: str
    input: str


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
    owned_by: str
    root: str
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
    token_strs: list[str] | None


class DetokenizeReply(msgspec.Struct):
    prompt: str


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    error: ErrorBody


class ReadyReply(msgspec.Struct):
    ready: bool
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
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
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
    param: str | None


class BatchErrors(msgspec.Struct):
    object: Literal["list"]
    data: list[BatchError]


class BatchRequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int
    """Lines in the error file: refused, failed, expired, cancelled."""


class BatchInputDetails(msgspec.Struct):
    cached_tokens: int


class BatchOutputDetails(msgspec.Struct):
    reasoning_tokens: int


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
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
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
