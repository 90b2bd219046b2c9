"""OpenAI's API as types: requests as structs, the rules that span their fields, answers' bodies, schemas of outputs. Pure.

Called wherever a request is read or an answer written. Knows no tokenizer, no NATS subject and no instance.
"""
