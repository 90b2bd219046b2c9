"""The process of a destination over UCX: `python -m tests.worker.migration.ucx_peer NATS_URL [FAULT_POINTS]`.

Prints a line of JSON with its transport's address when it serves, and one with what it holds when its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys

from services.worker.kv_transport import UcxNetwork
from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import GATEWAY_FRAMES
from shared.messages.requests import TokenEntry, TokenFrame
from shared.runtime.settings import BusSettings
from tests.worker.migration.parties import make_party


class RemoteGateway:
    """Frames go to the test's process."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self.news = asyncio.Event()

    def on_entry(self, sender: str, entry: TokenEntry) -> None:
        self._bus.publish(GATEWAY_FRAMES.at(gateway_id="gateway"), TokenFrame(sender, [entry]))


async def main(nats_url: str, fault_points: str) -> None:
    bus = await NatsBus.connect(BusSettings(nats_url=nats_url), service="instance", service_id="b")
    party = await make_party(
        "b",
        nats_url,
        RemoteGateway(bus),
        {},
        UcxNetwork("127.0.0.1"),
        bus=bus,
        step_s=0.005,
        fault_points=fault_points,
    )
    print(json.dumps({"address": party.transport.address}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    with party.loop.locked() as engine:
        engine.check()
        held = {"used": engine.pool.used_merged(), "held": len(engine.all_held()), "adopted": len(party.adopted)}
    print(json.dumps(held), flush=True)
    await party.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
