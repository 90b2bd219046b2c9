"""Instances that make other bits of a model, in deterministic mode, are told of."""

from __future__ import annotations

import logging

import pytest

from services.scheduler.observer import Observer
from shared.messages.cluster import InstanceInfo, LoadedModel
from shared.runtime.settings import BusSettings
from shared.runtime.telemetry import start_telemetry


def instance(instance_id: str, **fingerprints: str) -> InstanceInfo:
    models = [LoadedModel(name=name, state="ready", fingerprint=value) for name, value in fingerprints.items()]
    return InstanceInfo(instance_id=instance_id, incarnation="i", node_id="n", state="ready", models=models)


def test_a_model_with_other_bits_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = start_telemetry("scheduler", "s", BusSettings())
    try:
        observer = Observer(telemetry)
        with caplog.at_level(logging.WARNING):
            observer.on_registry("a", instance("a", llama="1", opt="2"))
            observer.on_registry("b", instance("b", llama="1", opt=""))
            assert caplog.messages == []
            for _ in range(2):
                observer.on_registry("c", instance("c", llama="3", opt="2"))
            (message,) = caplog.messages
            assert "llama has the fingerprint 3 on c, and 1 elsewhere" in message
            for instance_id in "ab":
                observer.on_registry(instance_id, None)
            observer.on_registry("d", instance("d", llama="3"))
        assert len(caplog.messages) == 1
    finally:
        telemetry.close()
