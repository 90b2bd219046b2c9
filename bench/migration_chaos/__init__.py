"""Moves requests between real instance processes while everything around them fails, and looks for one wrong token.

| process | what of it is real |
|---|---|
| instances | all but the model: instance_main, engine, engine loop, migration, UCX (instance.py, executor.py) |
| schedulers, NATS | all |
| the driver | the gateway's streams, placing and recovery; it plays node agent and operator (cluster.py, streams.py) |

KV cells hold a hash of all tokens up to theirs, and each step reads all cells of its sequences, as attention does: a block
that is missing, stale or another sequence's makes other tokens, and is told of by itself (executor.py). Each migration has
one fault, drawn by the seed (faults.py) and carried in its migration id, so that both ends meet it exactly where it was
drawn.
"""
