"""The node agent: what this machine has, which instances the plan wants here, and their processes.

Started by `python -m services.worker`; it starts `services.worker.instance.main` once per instance. Imports neither
torch nor the engine.
"""
