"""The parts of a running gateway that its HTTP routes need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.gateway.access.admission import Admission
    from services.gateway.admin.audit import Audit
    from services.gateway.admin.cluster_loads import ClusterLoads
    from services.gateway.batch.files import Files
    from services.gateway.batch.records import Batches
    from services.gateway.console.history import History
    from services.gateway.console.state import Console
    from services.gateway.http.bodies import BodyRoom
    from services.gateway.http.limits import Connections
    from services.gateway.metrics import GatewayMetrics
    from services.gateway.models.catalog import Catalog
    from services.gateway.models.routes import Routes
    from services.gateway.requests.kept_calls import KeptCalls
    from services.gateway.requests.mirrors import Mirrors
    from services.gateway.responses.background import Background
    from services.gateway.responses.store import Responses
    from services.gateway.streams.stream_table import StreamTable
    from services.gateway.streams.timelines import Timelines
    from services.gateway.text.tokenization import Tokenizers
    from shared.bus.interface import Bus
    from shared.runtime.settings import GatewaySettings
    from shared.runtime.telemetry import Telemetry


@dataclass(frozen=True, kw_only=True)
class GatewayContext:
    gateway_id: str
    settings: GatewaySettings
    bus: Bus
    telemetry: Telemetry
    metrics: GatewayMetrics
    admission: Admission
    connections: Connections
    bodies: BodyRoom
    tokenizers: Tokenizers
    catalog: Catalog
    routes: Routes
    responses: Responses
    background: Background
    mirrors: Mirrors
    loads: ClusterLoads
    table: StreamTable
    kept: KeptCalls
    timelines: Timelines
    files: Files
    batches: Batches
    audit: Audit
    console: Console
    history: History
