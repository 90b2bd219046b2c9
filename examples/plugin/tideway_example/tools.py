"""A tool format: `<|call|>` before a JSON list of calls."""

from services.gateway.tools.formats import ToolFormat
from services.gateway.tools.parsers import BareParser

MARK = "<|call|>"
FORMAT = ToolFormat(
    name="example",
    suits=lambda template: MARK in template,
    parser=lambda names: BareParser(names, MARK),
    begin=f"{MARK}[",
    separator=", ",
    end="]",
    marks=(MARK,),
)
