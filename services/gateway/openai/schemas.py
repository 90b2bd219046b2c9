"""The requests of the HTTP API as typed structs, with the range of each field.

msgspec checks types and ranges while it decodes, and the same annotations make the OpenAPI schema, so the description
is true by construction. Every optional field takes an explicit null. Unknown fields are ignored where OpenAI or vLLM
defines the endpoint, and refused in the operator's requests, which are this system's own. Rules that span fields are in
`parsing`.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from shared.models.spec import MAX_NAME_LENGTH, NAME_PATTERN

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 16384
MAX_GRAMMAR_CHARACTERS = 128 * 1024
MAX_STRUCTURED_CHOICES = 4096
MAX_TOOLS = 1024
MAX_NESTING = 100
"""Objects and lists in each other, where a request may bring any: others that read or write them stop not far above."""
INT64 = Meta(ge=-(2**63), le=2**63 - 1)

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TopP = Annotated[float, Meta(ge=0, le=1)]
"""0 takes the most likely token."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Milliseconds = Annotated[float, Meta(gt=0, le=3_600_000)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
ModelName = Annotated[str, Meta(min_length=1, max_length=512)]
ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]
"""scale, a contract with OpenAI, is default here."""
ServedName = Annotated[str, Meta(max_length=512)]
"""Name of a model; an empty one is left out, which it may be where the server has one model."""
END = r"$(?!\n)"
"""End of a pattern: `$` alone lets a line feed follow."""
Urgency = Annotated[int, INT64] | Annotated[str, Meta(pattern=r"^(high|normal|[+-]?[0-9]{1,18})" + END)]
"""A number may be a text, as anywhere."""
PublicName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH, pattern=f"^{NAME_PATTERN}{END}")]

# Fields that would change the answer in ways that this server cannot: they are accepted where they are without effect
# and refused otherwise (parsing.refuse_unsupported), because ignoring them would be a wrong answer.
OnlyNull = Annotated[Any, Meta(extra_json_schema={"enum": [None]})]
OnlyFalse = Annotated[Any, Meta(extra_json_schema={"enum": [None, False]})]
OnlyEmptyText = Annotated[Any, Meta(extra_json_schema={"enum": [None, ""]})]
OnlyEmptyList = Annotated[Any, Meta(extra_json_schema={"enum": [None, []]})]
OnlyNoTool = Annotated[Any, Meta(extra_json_schema={"enum": [None, "none", "auto"]})]
OnlyZero = Annotated[Any, Meta(extra_json_schema={"enum": [None, 0]})]
OnlyOne = Annotated[Any, Meta(extra_json_schema={"enum": [None, 1]})]
OnlyText = Annotated[Any, Meta(extra_json_schema={"enum": [None, ["text"]]})]

_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
Prompt = Annotated[
    str | list[str | TokenId | list[TokenId]],
    Meta(
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                _TOKEN_IDS,
                {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
            ]
        }
    ),
]
"""A text, a list of texts, token ids, or a list of lists of token ids."""


def is_nested_deep(value: Any) -> bool:
    """Whether JSON is nested deeper than `MAX_NESTING`."""
    containers = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_NESTING):
        containers = [
            child
            for container in containers
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, (dict, list))
        ]
        if not containers:
            return False
    return True


def check_nesting(**fields: Any) -> None:
    """Checks the nesting of a struct that is being decoded: what is raised becomes a `ValidationError` with the field's
    place."""
    for name, value in fields.items():
        if is_nested_deep(value):
            raise ValueError(f"Nested deeper than {MAX_NESTING} objects and lists - at `$.{name}`")


_SCHEMA_FORMS = [{"type": "object"}, {"type": "boolean"}]
Schema = Annotated[Any, Meta(extra_json_schema={"anyOf": _SCHEMA_FORMS})]
"""`check_schema` says what it may be: a type that may be a flag takes 1 for one, and that schema allows anything."""
SchemaOrText = Annotated[Any, Meta(extra_json_schema={"anyOf": [*_SCHEMA_FORMS, {"type": "string"}, {"type": "null"}]})]


def check_schema(name: str, value: Any) -> None:
    """Checks a field of a struct that holds a JSON schema, as `check_nesting` does."""
    if not isinstance(value, dict | bool):
        raise ValueError(f"Expected a JSON schema: an object, true or false - at `$.{name}`")
    check_nesting(**{name: value})


def check_schema_or_text(name: str, value: Any) -> None:
    """Checks one that may be a schema's text, or be left out."""
    if value is not None and not isinstance(value, str):
        check_schema(name, value)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    schema: dict[str, Any] | None = None
    """Schema of the object, as llama.cpp has it."""

    def __post_init__(self) -> None:
        check_nesting(schema=self.schema)


class JsonSchema(msgspec.Struct, frozen=True):
    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """true: a schema that cannot be enforced is refused; else what cannot be is left out, which a header of the answer
    names."""

    def __post_init__(self) -> None:
        check_schema("schema", self.schema)


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
Source = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_STRUCTURED_CHOICES)]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Field `structured_outputs` of vLLM. One of `json`, `regex`, `choice`, `grammar` and `json_object`."""

    json: SchemaOrText = None
    """A schema."""
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    """Lark, or EBNF as llama.cpp writes it."""
    json_object: bool | None = None
    whitespace_pattern: Source | None = None
    """Pattern of white space in JSON, where any is allowed."""
    disable_fallback: bool | None = None
    """Without effect, as are the next two: nothing falls back, and JSON is on one line."""
    disable_any_whitespace: bool | None = None
    disable_additional_properties: OnlyFalse = None
    structural_tag: OnlyNull = None

    def __post_init__(self) -> None:
        check_schema_or_text("json", self.json)
        forms = (self.json, self.regex, self.choice, self.grammar, self.json_object)
        if all(form is None for form in forms):
            raise ValueError("One of json, regex, choice, grammar and json_object is needed")
        if self.structural_tag is not None or self.disable_additional_properties:
            name = "structural_tag" if self.structural_tag is not None else "disable_additional_properties"
            raise ValueError(f"It is not supported by this server - at `$.{name}`")


class GenerationFields(msgspec.Struct, kw_only=True):
    """What both generation endpoints take."""

    model: ServedName = ""
    """May be left out where the server has one model."""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    seed: Annotated[int, INT64] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """-1 and 0 are off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    """Name of `repetition_penalty` in llama.cpp and Ollama."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    """Token id (as a string) to what is added to its logit."""
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Urgency | None = None
    """A lower number is more urgent; below 0 is "high"."""
    service_tier: ServiceTier | None = None
    """flex: served as offline work; priority: served as high priority."""
    ttft_ms: Milliseconds | None = None
    """Objective for the time to first token; the model's where it is not given."""
    tpot_ms: Milliseconds | None = None
    """Objective for the time per output token after the first; likewise."""
    request_timeout_s: Annotated[float, Meta(gt=0)] | None = msgspec.field(default=None, name="x-request-timeout")
    """Seconds; the header of that name does the same. Never more than the server's own limit."""
    prompt_lookup: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Tokens guessed at most in a step; never more than the instance guesses."""
    cache_salt: CacheSalt | None = None
    """Among the tenant's requests, only those with the same text here use each other's cached prefixes."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """The log-probability of each token of the prompt, with so many of the most likely. Not in a stream."""
    user: str | None = None
    include_reasoning: bool | None = None
    """false: reasoning is not told of."""
    separate_reasoning: bool | None = None
    """false: it is part of the answer's text."""
    reasoning_format: Literal["auto", "none", "deepseek"] | None = None
    """none: the same."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = None
    """Older spelling of `structured_outputs.json`, as are those below."""
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    guided_whitespace_pattern: Source | None = None
    regex: Source | None = None
    """SGLang's spelling of `structured_outputs.regex`; `ebnf` is its grammar, `json_schema` its schema."""
    ebnf: Source | None = None
    json_schema: SchemaOrText = None
    """Spelling of `structured_outputs.json` in SGLang and llama.cpp."""
    grammar: Source | None = None
    """llama.cpp's spelling of `structured_outputs.grammar`."""
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens by their ids, `token_id:7`."""
    best_of: int | None = None
    """Only `n`."""
    suffix: OnlyEmptyText = None
    tools: OnlyEmptyList = None
    tool_choice: OnlyNoTool = None
    functions: OnlyEmptyList = None
    function_call: OnlyNoTool = None
    modalities: OnlyText = None
    audio: OnlyNull = None
    use_beam_search: OnlyFalse = None
    truncate_prompt_tokens: OnlyNull = None
    chat_template: OnlyNull = None
    documents: OnlyEmptyList = None
    allowed_token_ids: OnlyEmptyList = None
    bad_words: OnlyEmptyList = None
    return_token_ids: OnlyFalse = None
    logprob_token_ids: OnlyEmptyList = None
    logits_processors: OnlyEmptyList = None
    structural_tag: OnlyNull = None
    format: OnlyEmptyText = None
    web_search_options: OnlyNull = None
    prompt_embeds: OnlyNull = None
    thinking_token_budget: OnlyNull = None
    repetition_detection: OnlyNull = None
    no_repeat_ngram_size: OnlyZero = None
    length_penalty: OnlyOne = None
    early_stopping: OnlyFalse = None
    typical_p: OnlyOne = None
    mirostat: OnlyZero = None
    dry_multiplier: OnlyZero = None
    xtc_probability: OnlyZero = None
    tfs_z: OnlyOne = None
    top_a: OnlyZero = None
    dynatemp_range: OnlyZero = None
    smoothing_factor: OnlyZero = None
    penalty_alpha: OnlyZero = None
    guidance_scale: OnlyOne = None
    num_beams: OnlyOne = None
    n_probs: OnlyZero = None
    custom_logit_processor: OnlyNull = None
    lora_path: OnlyNull = None
    lora: OnlyEmptyList = None
    kv_transfer_params: OnlyNull = None
    return_hidden_states: OnlyFalse = None

    def __post_init__(self) -> None:
        check_schema_or_text("guided_json", self.guided_json)
        check_schema_or_text("json_schema", self.json_schema)


@functools.cache
def allowed_values(request: type[GenerationFields]) -> dict[str, list[Any]]:
    """Values of the fields that take only these."""
    allowed = {}
    for name, hint in get_type_hints(request, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, Meta) and meta.extra_json_schema and "enum" in meta.extra_json_schema:
                allowed[name] = meta.extra_json_schema["enum"]
    return allowed


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: Prompt
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Default 16. 0 is allowed with `echo` or `prompt_logprobs`."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Number of alternatives; with `echo`, of the prompt's tokens too."""
    echo: bool | None = None
    add_special_tokens: bool | None = None


class PooledFields(msgspec.Struct, kw_only=True):
    """What the endpoints of models that embed or score take."""

    model: ServedName = ""
    """May be left out where the server has one model."""
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Number of first tokens that are taken of a longer text; of a pair the second text is cut; -1: as many as the
    model takes. Else it is refused."""
    priority: Urgency | None = None
    """Priority, as of completions; the fields below too."""
    service_tier: ServiceTier | None = None
    ttft_ms: Milliseconds | None = None
    cache_salt: CacheSalt | None = None
    """Among the tenant's requests, only those with the same text here use each other's cached prefixes."""
    request_timeout_s: Annotated[float, Meta(gt=0)] | None = msgspec.field(default=None, name="x-request-timeout")
    """Seconds that the request may take."""


class EmbeddingRequest(PooledFields, kw_only=True):
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of little-endian float32."""
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Dimensions of the vectors; fewer than the model's where it was trained for that (Matryoshka)."""
    add_special_tokens: bool | None = None


class RerankText(msgspec.Struct, frozen=True):
    text: str


class RerankRequest(PooledFields, kw_only=True):
    query: str
    """Text that the documents are compared with."""
    documents: Annotated[list[str | RerankText], Meta(min_length=1)]
    """Texts to be ranked."""
    top_n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Results at most; all where it is not given."""
    return_documents: bool | None = None
    """Whether results repeat the documents' texts; default true."""


class ScoreRequest(PooledFields, kw_only=True):
    text_1: str | list[str] | None = None
    """One text, or as many as `text_2`."""
    text_2: str | list[str] | None = None
    """Texts that are scored against `text_1`."""
    queries: str | list[str] | None = None
    """Another name of `text_1`."""
    documents: str | list[str] | None = None
    """Another name of `text_2`."""


UnseenType = Literal[
    "image", "image_url", "input_image", "document", "file", "input_file", "audio", "audio_url", "input_audio",
    "video", "video_url", "input_video",
]  # fmt: skip
_UNSEEN_KINDS = {"image": "An image", "audio": "A recording", "video": "A video"}
UNSEEN = {
    name: next((what for kind, what in _UNSEEN_KINDS.items() if kind in name), "A file")
    for name in get_args(UnseenType)
}
"""What models here cannot read, by types of parts of messages."""


def unseen(part_type: str) -> str:
    """The text that stands for a part of a tool's result, so that an agent's conversation goes on; empty: it is text."""
    what = UNSEEN.get(part_type)
    return f"[{what} was left out here: only text of what tools return is read.]" if what else ""


IMAGE = "image_url"
"""Type of a part with an image, and its field with the URL."""


class ImageUrl(msgspec.Struct, frozen=True):
    url: str = ""
    detail: str | None = None
    """Meant for the server behind an endpoint; others ignore it."""


class ThinkingText(msgspec.Struct, frozen=True):
    text: str = ""


class ContentPart(msgspec.Struct, frozen=True):
    """A piece of text, as chats or responses name it, or a refusal or reasoning, as an assistant's message may have them.
    Results of tools may have images, for which a text stands."""

    type: Literal["text", "input_text", "output_text", "refusal", "thinking"] | UnseenType
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[ThinkingText] | None = None
    """An assistant's reasoning of before, as Anthropic's blocks or Mistral's have it."""
    image_url: ImageUrl | str | None = None
    """An image: a data: URL with base64, or, where the model's engine is a server, an http(s) URL. Only in messages of the
    user, and where the engine takes images."""

    @property
    def url(self) -> str:
        return self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url or ""

    @property
    def detail(self) -> str | None:
        return self.image_url.detail if isinstance(self.image_url, ImageUrl) else None

    @property
    def shown(self) -> str:
        return unseen(self.type) or self.text or self.refusal or ""

    @property
    def reasoning(self) -> str:
        return self.thinking if isinstance(self.thinking, str) else "".join(part.text for part in self.thinking or ())


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """An assistant's, of before: for templates that show it to the model again."""
    reasoning: str | None = None
    """The same by another name."""
    refusal: str | None = None
    function_call: dict[str, Any] | None = None
    """A call as it was written before there were `tool_calls`; its result has the role `function`."""

    def shows(self, part: ContentPart) -> bool:
        """Whether this part is an image to an engine: what assistants and tools are said to have shown is none."""
        return self.role == "user" and part.type == IMAGE

    @property
    def images(self) -> list[ContentPart]:
        return [part for part in self.content if self.shows(part)] if isinstance(self.content, list) else []

    def __post_init__(self) -> None:
        if self.tool_calls is not None:
            check_nesting(tool_calls=self.tool_calls)
        if self.function_call is not None:
            check_nesting(function_call=self.function_call)


FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:-]{1,128}" + END)]


class FunctionDefinition(msgspec.Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A schema; none takes no arguments."""
    strict: bool | None = None
    """true: a schema that cannot be enforced is refused, where calls are; else what cannot be is ignored."""

    def __post_init__(self) -> None:
        check_nesting(parameters=self.parameters)


class CustomGrammar(msgspec.Struct, frozen=True):
    definition: Source
    syntax: Literal["lark", "regex"]


class CustomFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None

    def __post_init__(self) -> None:
        if self.type == "grammar" and self.grammar is None:
            raise ValueError("Object missing required field `grammar`")
        if self.grammar is not None and self.grammar.syntax == "lark":
            raise ValueError("Not supported by this server, where calls are JSON; a regex is - at `$.grammar.syntax`")


class CustomDefinition(msgspec.Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None
    """Format of its input; none is any text. A regex holds where calls are forced (`tool_choice` required, or this
    tool's name)."""


CUSTOM_ARGUMENT = "input"
"""Name of an argument: to a model a custom tool is a function with this text as its only argument."""


def custom_parameters(pattern: str | None = None) -> dict[str, Any]:
    """The schema of that function's arguments. `pattern`: a regular expression of the text."""
    return {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: {"type": "string", **({} if pattern is None else {"pattern": pattern})}},
        "required": [CUSTOM_ARGUMENT],
        "additionalProperties": False,
    }


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function", "custom"]
    function: FunctionDefinition = None  # type: ignore[assignment]
    """The function that a custom tool is to the model."""
    custom: CustomDefinition | None = None
    """A tool with a text in place of arguments."""

    def __post_init__(self) -> None:
        if getattr(self, self.type) is None:
            raise ValueError(f"Object missing required field `{self.type}`")
        if self.type == "custom" and self.custom is not None:
            wanted = self.custom.format
            pattern = None if wanted is None or wanted.grammar is None else f"^(?:{wanted.grammar.definition})$"
            function = FunctionDefinition(self.custom.name, self.custom.description, custom_parameters(pattern), True)
            msgspec.structs.force_setattr(self, "function", function)


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    function: NamedFunction


class NamedCustomTool(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    custom: NamedFunction

    @property
    def function(self) -> NamedFunction:
        return self.custom


class AllowedTools(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | NamedCustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """A subset of `tools` that may be called; the model is given all of them."""

    allowed_tools: AllowedTools


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


Switch = Annotated[Any, Meta(extra_json_schema={"type": ["object", "null"]})]
"""What is not understood of it has no effect, and a header of the answer names it."""
ReasoningEffort = Annotated[str, Meta(pattern="^[a-z]{1,16}" + END)]
"""none, minimal, low, medium, high, or what else a template knows."""


class ChatRequest(GenerationFields, kw_only=True):
    messages: Messages
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Default: what the model's context leaves."""
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Goes before `max_tokens`."""
    fit_max_tokens: bool | None = None
    """A limit beyond what the context leaves becomes that, and is not refused."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    """Variable for the chat template; with none reasoning is turned off too."""
    enable_thinking: bool | None = None
    """Turns reasoning on or off, where the chat template has a switch for it (`enable_thinking` or `thinking`)."""
    thinking: Switch = None
    """Same as `enable_thinking`: {"type": "enabled"} or {"type": "disabled"}."""
    reasoning: Switch = None
    """OpenRouter's options: `enabled` and `effort`, as the fields above; `exclude`: true leaves reasoning out of the
    answer."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    """false: one call at most."""
    echo: OnlyFalse = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nesting(chat_template_kwargs=self.chat_template_kwargs, thinking=self.thinking, reasoning=self.reasoning)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: ServedName | None = None
    """May be left out where the server has one model."""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    thinking: Switch = None
    reasoning: Switch = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    """Tools that the chat template shows the model."""

    def __post_init__(self) -> None:
        check_nesting(chat_template_kwargs=self.chat_template_kwargs, thinking=self.thinking, reasoning=self.reasoning)


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: ServedName | None = None
    tokens: list[TokenId]


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """vLLM's request to serve a LoRA adapter as a model of its own."""

    lora_name: PublicName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """A folder in PEFT's format, or a hub id."""
    base_model_name: ModelName | None = None
    """May be left out where the server has one model."""
    load_inplace: bool | None = None
    """Whether an adapter that is there under this name is replaced."""


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    lora_name: ModelName
    lora_int_id: int | None = None
    """Not used."""


class AddModelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A model to serve. `source`: a folder in Hugging Face format, or a hub id. With `base` a LoRA adapter of that model, in
    PEFT's format."""

    name: PublicName
    source: Annotated[str, Meta(min_length=1, max_length=4096)]
    dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = None
    max_model_len: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    replicas: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    ttft_ms: Milliseconds | None = None
    """Objective of online requests that name none: time to first token."""
    tpot_ms: Milliseconds | None = None
    """Objective of online requests that name none: time per output token after the first."""
    slo_scale: Annotated[float, Meta(ge=1, le=1000)] | None = None
    """Times its model's mean execution time that a request may take from arrival to end; default 5."""
    quantization: Literal["int8", "int4", "fp8"] | None = None
    """Quantisation of the weights, where the checkpoint is not quantised."""
    base: ModelName | None = None
    """Base of a LoRA adapter: the model whose weights it is computed with."""
    tool_format: str | None = None
    """How it writes calls of tools, where its chat template does not tell."""
    on_demand: bool | None = None
    """Loaded when requests for it come, and put away when it is idle; else it is always loaded."""
    idle_s: Annotated[float, Meta(ge=0, le=2_592_000)] | None = None
    """Idle time of a model on demand: seconds after its last request until it is put away; default 300."""
    engine: Literal["native", "vllm", "endpoint"] | None = None
    """Engine that computes it; default native."""
    engine_args: Annotated[str, Meta(max_length=4096)] | None = None
    """Flags of that engine."""
    engine_url: Annotated[str, Meta(max_length=1024)] | None = None
    """URL of a server that already runs."""
    draft: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    """Folder or hub id of a draft model: a small model with the same tokenizer that drafts tokens."""


class ScaleModelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    replicas: Annotated[int, Meta(ge=1, le=10_000)] | None
    """On how many instances the model is to be; null: on all where it fits."""


class ScaleRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    instances: Annotated[int, Meta(ge=1, le=10_000)]
    """How many there are to be, over all nodes."""


class SetRoleRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["prefill", "decode", "both", "auto"]
    """What the instance is sent: long prompts, whose requests others decode; all but those; everything. `auto`: what the
    scheduler chooses (`TIDEWAY_ROLES`). It holds until the instance ends."""


class SetRouteRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A public name for models. It may be that of a model, which is then reached by routes alone."""

    name: PublicName
    arms: Annotated[dict[ModelName, Annotated[float, Meta(ge=0, le=1_000_000)]], Meta(min_length=1, max_length=64)]
    """Weights by model: each answers its weight over the sum of all."""
    sticky: Literal["none", "key", "user"] | None = None
    """What stays with one model: nothing, all requests of an API key, or all with the same `user` of a key."""
    mirrors: Annotated[dict[ModelName, Annotated[float, Meta(ge=0, le=1)]], Meta(max_length=8)] | None = None
    """Shares by model: so many of the requests are sent there too, uncharged and unseen, in the offline class."""
    fallbacks: Annotated[list[ModelName], Meta(max_length=16)] | None = None
    """Models that answer while no instance serves any of `arms`; the first that can."""


class PlanGroup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An instance of a plan, as `GET /admin/plan` has them in `replacement.proposal.plan.groups`."""

    node_id: Annotated[str, Meta(min_length=1, max_length=256)]
    devices: Annotated[list[Annotated[int, Meta(ge=0, le=4095)]], Meta(min_length=1, max_length=64)]
    """Their numbers on the node, counted from 0: a power of two of neighbours."""
    models: Annotated[list[ModelName], Meta(min_length=1, max_length=256)]


class ChangePlanRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    action: Literal["search", "apply", "set", "roll_back"]
    """Search for a plan; carry out the one that was found; carry out the one of `groups`; go back to the one of before."""
    groups: Annotated[list[PlanGroup], Meta(min_length=1, max_length=4096)] | None = None
    """All of the plan, with `set`. Each model is on one of them at least."""


class OutputExpiry(msgspec.Struct, frozen=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class CreateBatchRequest(msgspec.Struct, kw_only=True):
    input_file_id: Annotated[str, Meta(min_length=1, max_length=128)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]
    completion_window: Annotated[str, Meta(max_length=32)]
    """Such as 24h, 10m or 1h30m; at most 30 days."""
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    output_expires_after: OutputExpiry | None = None
