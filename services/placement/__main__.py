"""`python -m services.placement`: one placement replica, configured by environment (see `PlacementSettings`)."""

from __future__ import annotations

from services.placement.service import PlacementService
from shared.runtime.replica import run
from shared.runtime.settings import PlacementSettings


def main() -> None:
    run("placement", PlacementSettings, PlacementService)


if __name__ == "__main__":
    main()
