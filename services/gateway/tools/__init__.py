"""Tool calls: how families of models are told of functions, write calls of them, and are made to.

`formats` is the registry, with a format for each family; `parsers` find calls in text as it comes; `call_reader` reads one.
"""
