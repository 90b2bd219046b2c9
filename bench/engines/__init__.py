"""vLLM as it is, vLLM hosted by Tideway and the native engine: one machine, one checkpoint, one client, in turns.

`servers` starts them, `load` sends requests, `results` judges what came of it.
"""
