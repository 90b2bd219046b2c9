"""The parts of a running gateway that its HTTP routes need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.gateway.admission import Admission
from services.gateway.audit import Audit
from services.gateway.batches import Batches
from services.gateway.bodies import BodyRoom
from services.gateway.catalog import Catalog
from services.gateway.cluster_loads import ClusterLoads
from services.gateway.console.state import Console
from services.gateway.files import Files
from services.gateway.http_limits import Connections
from services.gateway.kept_calls import KeptCalls
from services.gateway.metrics import GatewayMetrics
from services.gateway.responses.store import Responses
from services.gateway.routes import Routes
from services.gateway.stream_table import StreamTable
from services.gateway.timelines import Timelines
from services.gateway.tokenization import Tokenizers
from shared.bus.interface import Bus
from shared.settings import GatewaySettings
from shared.telemetry import Telemetry

if TYPE_CHECKING:
    from services.gateway.mirrors import Mirrors


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
    mirrors: Mirrors
    loads: ClusterLoads
    table: StreamTable
    kept: KeptCalls
    timelines: Timelines
    files: Files
    batches: Batches
    audit: Audit
    console: Console
