"""`python -m services.gateway`: the gateway as a process, configured by `GatewaySettings`."""

from __future__ import annotations

from services.gateway.service import GatewayService
from shared.runtime.replica import run
from shared.runtime.settings import GatewaySettings


def main() -> None:
    run("gateway", GatewaySettings, GatewayService)


if __name__ == "__main__":
    main()
