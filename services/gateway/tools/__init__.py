"""Tool calls: how model families are given tools, how they write calls, and how they are constrained to write them.

`formats` is the registry, with a format for each family; `parsers` find calls in text as it comes; `call_reader` reads one.
"""
