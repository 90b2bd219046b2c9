"""Finds reasoning in a model's output, which stands between marks before the answer, wherever the text is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from services.gateway.tools.parsers import parted


class Opening(Enum):
    """Part with which the output of a chat begins."""

    FREE = auto()
    """Reasoning with its mark, or the answer."""
    WITHIN = auto()
    """The prompt ended within reasoning."""
    BEHIND = auto()
    """The prompt ended behind reasoning, so that the model answers at once."""


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a family marks its reasoning."""

    name: str
    begin: str
    end: str

    def suits(self, template: str) -> bool:
        """Whether a chat template, given its source, knows the marks: it writes or strips them."""
        return self.begin in template or self.end in template

    def opening(self, prompt: str, continued: str | None = None) -> Opening:
        """How an output begins after the prompt. `continued`: the end of the prompt, where that is an assistant's message
        which the model goes on with."""
        if continued is not None:
            begun, ended = continued.rfind(self.begin), continued.rfind(self.end)
            return Opening.FREE if begun == ended else Opening.WITHIN if begun > ended else Opening.BEHIND
        prompt = prompt.rstrip()
        return (
            Opening.WITHIN
            if prompt.endswith(self.begin)
            else Opening.BEHIND
            if prompt.endswith(self.end)
            else Opening.FREE
        )

    def rules(self, opening: Opening, literal: Callable[[str], str], is_token: Callable[[str], bool]) -> str:
        """Rules of a grammar in Lark: the rule `reasoning` is all that may come before an answer. `literal` spells a
        text, `is_token` tells whether a mark is a special token."""
        if is_token(self.end):
            rest, text = f"reasoned {literal(self.end)}", "reasoned: /(?s:.*)/"
        else:
            rest, text = "reasoned", f"reasoned[suffix={literal(self.end)}]: /(?s:.*)/"
        begun = {
            Opening.WITHIN: f"{rest} behind",
            Opening.FREE: f"({literal(self.begin)} {rest} behind)?",
            Opening.BEHIND: "behind",
        }[opening]
        return f"reasoning: {begun}\n{text}\nbehind: /[ \\n]{{0,4}}/"


REASONING_FORMATS = {
    one.name: one
    for one in (
        ReasoningFormat(name="think", begin="<think>", end="</think>"),
        ReasoningFormat(name="magistral", begin="[THINK]", end="[/THINK]"),
        ReasoningFormat(name="seed", begin="<seed:think>", end="</seed:think>"),
        ReasoningFormat(name="command", begin="<|START_THINKING|>", end="<|END_THINKING|>"),
        ReasoningFormat(name="kimi-vl", begin="\u25c1think\u25b7", end="\u25c1/think\u25b7"),
    )
}
"""DeepSeek R1 and V3.1, Qwen3, GLM-4.5, Kimi K2 Thinking, MiniMax, and most others; Magistral; Seed-OSS; Command A;
Kimi-VL. That of gpt-oss is read with its calls (`harmony`)."""


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """The one that a chat template knows, given its source; None: it knows none."""
    return next((one for one in REASONING_FORMATS.values() if one.suits(template)), None)


class ReasoningSplitter:
    """Parts one output in its reasoning and the answer. What begins otherwise is the answer from its first character."""

    def __init__(self, marks: ReasoningFormat, *, is_open: bool) -> None:
        """`is_open`: the prompt ended within reasoning."""
        self._marks = marks
        self._is_open = is_open
        self._rest = ""
        self._has_begun = self._has_ended = self._has_answer = False
        self._space = ""
        """White space that is reasoning where more of it follows."""

    @property
    def is_reasoning(self) -> bool:
        """The text so far ends within reasoning."""
        return not self._has_ended and (self._has_begun or self._is_open)

    def feed(self, text: str) -> tuple[str, str]:
        """What is new of the reasoning, and of the answer."""
        if self._has_answer:
            return "", text
        self._rest += text
        if not self._has_begun and not self._begin():
            return "", ""
        reasoning = "" if self._has_ended else self._read()
        if not self._has_ended:
            return reasoning, ""
        answer = self._rest if self._has_answer else self._rest.lstrip()
        self._rest = ""
        self._has_answer = self._has_answer or bool(answer)
        return reasoning, answer

    def _begin(self) -> bool:
        """Whether it is known with what the output begins."""
        rest = self._rest.lstrip()
        if rest.startswith(self._marks.begin):
            self._rest = rest[len(self._marks.begin) :]
        elif self._marks.begin.startswith(rest):
            return False
        elif not self._is_open:
            self._has_ended = self._has_answer = True
        self._has_begun = True
        return True

    def _read(self) -> str:
        text, found, self._rest = parted(self._rest, (self._marks.end,))
        self._has_ended = bool(found)
        return self._without_space(text)

    def _without_space(self, text: str) -> str:
        """Without white space at its beginning and end."""
        kept = text.rstrip()
        told = self._space + kept if kept else ""
        self._space = text[len(kept) :] if kept else self._space + text
        if told and not self._was_told:
            told = told.lstrip()
        self._was_told = self._was_told or bool(told)
        return told

    _was_told = False

    def flush(self) -> tuple[str, str]:
        """Ends the output; returns what was still held back."""
        rest, self._rest = self._rest, ""
        if self._has_ended:
            return "", ""
        if self._has_begun or self._is_open:
            return self._without_space(rest), ""
        return "", rest
