"""One instance: the bus side of an engine, the life of its models and adapters, its telemetry.

Started by the node agent. Decides nothing about steps (`shared.engine` does) and computes no tensor
(`services.worker.executor` does).
"""
