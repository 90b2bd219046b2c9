"""`python -m services.scheduler`: one scheduler replica, configured by environment (see `SchedulerSettings`)."""

from __future__ import annotations

from services.scheduler.garbage import collect_rarely
from services.scheduler.service import SchedulerService
from shared.runtime.replica import run
from shared.runtime.settings import SchedulerSettings


def main() -> None:
    collect_rarely()
    run("scheduler", SchedulerSettings, SchedulerService)


if __name__ == "__main__":
    main()
