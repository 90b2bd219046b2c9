"""Chat templates of checkpoints: a list of messages to the text that the model was trained to continue.

Templates are Jinja written against transformers' `apply_chat_template`; this module gives them the same environment
(sandboxed, immutable) without importing transformers, which would load torch into the gateway. They are programs of whoever
made the checkpoint, and even to compile one runs parts of it: the gateway only parses them, `work` does the rest.
"""

from __future__ import annotations

import functools
import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.conversations import as_parts, forms, lost
from shared.models.checkpoint import CheckpointError

logger = logging.getLogger(__name__)

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] | trim }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Template of a checkpoint that brings none: one line a message, "Role: text", and "Assistant:" to be continued."""

RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
_PLACE_OF_FINAL_MESSAGE = "\x00tideway-final-message\x00"


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here only its contents count."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    """Those that are not worked out before a template is rendered, where memory and time have limits: it is loaded in the
    gateway itself, where `'a' * 300000000` would be in everybody's way."""


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


class ChatTemplate:
    """A template with the special tokens that it may use."""

    def __init__(self, source: str, special_tokens: dict[str, str], tool_source: str | None = None) -> None:
        """`tool_source`: of a template of its own for chats with tools. Raises `jinja2.TemplateSyntaxError`."""
        environment = _environment()
        environment.parse(source)
        self._source = source
        self.tool_source = tool_source or source
        self.sources = source if tool_source is None else source + tool_source
        variables = meta.find_undeclared_variables(environment.parse(self.tool_source))
        self.takes_tools = "tools" in variables
        """It tells the model of them."""
        self.variables = frozenset(variables | meta.find_undeclared_variables(environment.parse(source)))
        """All that it looks at."""
        self._special_tokens = special_tokens

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self._source)

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """Whether it drops a text that is no list of parts, as templates of models that take images may."""
        is_shown = []
        for content in (_PLACE_OF_FINAL_MESSAGE, as_parts(_PLACE_OF_FINAL_MESSAGE)):
            try:
                text = _rendered(self._template, [{"role": "user", "content": content}], self._special_tokens)
            except ApiError:
                text = ""
            is_shown.append(_PLACE_OF_FINAL_MESSAGE in text)
        return is_shown == [False, True]

    @functools.cached_property
    def _tool_template(self) -> jinja2.Template:
        return _environment().from_string(self.tool_source)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Raises `ApiError` 400 where the template refuses the messages (for example roles that do not alternate) in every
        form that they may be given.

        `continue_final_message`: the text ends in the middle of the last message, which the model goes on writing.
        """
        for name in variables or ():
            if name in RESERVED_VARIABLES:
                raise invalid("chat_template_kwargs", f"chat_template_kwargs must not set '{name}'.")
        final_text = ""
        if continue_final_message:
            if isinstance(messages[-1]["content"], list):
                raise invalid("continue_final_message", "A message with images cannot be continued.")
            final_text = str(messages[-1]["content"] or "")
            messages = [*messages[:-1], {**messages[-1], "content": _PLACE_OF_FINAL_MESSAGE}]
        template = self._tool_template if tools else self._template
        given = {
            "tools": tools,
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = self._first_whole(template, messages, given)
        if continue_final_message:
            before, found, _ = text.partition(_PLACE_OF_FINAL_MESSAGE)
            if not found:
                raise invalid("continue_final_message", "The model's chat template drops the final message.")
            text = before + final_text
        return text

    def _first_whole(self, template: jinja2.Template, messages: list[dict[str, Any]], given: dict[str, Any]) -> str:
        """The text of the first form of the messages that the template takes and keeps; where it keeps none, of the
        first that it takes."""
        refusal: ApiError | None = None
        taken: str | None = None
        for form in forms(messages, knows_developer="developer" in self.sources):
            given_form = (
                [{**each, "content": as_parts(each["content"])} for each in form] if self._wants_parts else form
            )
            try:
                text = _rendered(template, given_form, given)
            except ApiError as error:
                refusal = refusal or error
                continue
            if lost(form, text) is None:
                return text
            taken = text if taken is None else taken
        if taken is None:
            assert refusal is not None
            raise refusal
        return taken


def _rendered(template: jinja2.Template, messages: list[dict[str, Any]], given: dict[str, Any]) -> str:
    try:
        return template.render({**given, "messages": messages})
    except jinja2.TemplateError as error:
        raise invalid("messages", f"The model's chat template refuses these messages: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: what it raises on odd messages is anything
        raise invalid("messages", f"The model's chat template fails on these messages: {error!r}") from None


_FILES = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)


def template_stamp(folder: Path) -> tuple[int, ...]:
    """Times in nanoseconds at which the files were written that `load_template` reads; 0: there is none."""
    times = []
    for name in _FILES:
        try:
            times.append((folder / name).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


def load_template(folder: Path, config: dict[str, Any]) -> ChatTemplate:
    """The template of the checkpoint in `folder`; `config` is its tokenizer_config.json. Raises `CheckpointError`."""
    source, tool_source = _source(folder, config), _tool_source(folder, config)
    if source is None:
        logger.warning("%s has no chat template; the default is used (one line a message, 'Role: text')", folder)
        source = DEFAULT_TEMPLATE
    special_tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special_tokens[name] = text
    try:
        return ChatTemplate(source, special_tokens, tool_source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"The chat template of {folder} cannot be read: line {error.lineno}: {error.message}."
        ) from None


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    file = folder / "chat_template.json"
    if found is None and file.is_file():
        found = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    return found if isinstance(found, str) else _named(found, "default")


def _tool_source(folder: Path, config: dict[str, Any]) -> str | None:
    """Source of the template for chats with tools, where there is another: one of a list, or in a file as newer
    transformers save it."""
    file = folder / "additional_chat_templates" / "tool_use.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else _named(config.get("chat_template"), "tool_use")


def _named(templates: Any, name: str) -> str | None:
    """The template of that name, of several."""
    if not isinstance(templates, list):
        return None
    if not all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in templates):
        raise CheckpointError("chat_template is neither a text nor a list of objects with 'name' and 'template'.")
    return next((str(one["template"]) for one in templates if one["name"] == name), None)
