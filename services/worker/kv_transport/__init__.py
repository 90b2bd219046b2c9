"""Moves KV blocks from instance to instance (see transport.py)."""

from services.worker.kv_transport.errors import TransferError, TransferReason
from services.worker.kv_transport.links import Network
from services.worker.kv_transport.receiving import Incoming, Receipt
from services.worker.kv_transport.sending import Outgoing
from services.worker.kv_transport.transport import KvTransport, TransportLimits
from services.worker.kv_transport.ucx import UcxNetwork

__all__ = [
    "Incoming",
    "KvTransport",
    "Network",
    "Outgoing",
    "Receipt",
    "TransferError",
    "TransferReason",
    "TransportLimits",
    "UcxNetwork",
]
