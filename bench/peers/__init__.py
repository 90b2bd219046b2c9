"""Tideway beside other servers: one machine, one checkpoint, one client, in turns.

`servers` says how each is set up (in an environment of its own, outside of this tree), started and stopped; `checkpoints`
and `gguf_file` make the model; `client` is vLLM's `vllm bench serve`, which all are measured with; `results` has the ratios.
"""
