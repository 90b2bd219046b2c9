"""Every metric that a dashboard, an alert or a scaler may name."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry

from services.gateway.metrics import GatewayMetrics
from services.placement.metrics import NatsMetrics, PlacementMetrics
from services.scheduler.observer import Observer
from services.worker.instance.telemetry import InstanceTelemetry
from services.worker.kv_transport.telemetry import TransferMetrics
from services.worker.migration.telemetry import MigrationTelemetry
from services.worker.node.agent import _Metrics as NodeMetrics
from shared.bus.metrics import bus_metrics
from shared.runtime.settings import BusSettings
from shared.runtime.telemetry import start_telemetry


def every_metric() -> CollectorRegistry:
    telemetry = start_telemetry("scheduler", "test", BusSettings(otlp_endpoint="http://127.0.0.1:9"))
    Observer(telemetry)
    GatewayMetrics(telemetry.registry)
    InstanceTelemetry("test", telemetry, time.monotonic)
    MigrationTelemetry(telemetry)
    TransferMetrics(telemetry.registry)
    PlacementMetrics(telemetry.registry)
    NatsMetrics(telemetry.registry)
    NodeMetrics(telemetry.registry)
    bus_metrics(telemetry.registry)
    return telemetry.registry
