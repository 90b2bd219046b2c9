"""How a service's process runs: logging, event loop, signals, and errors that are the operator's to mend.

def main() -> None:
    settings = load_or_exit(SchedulerSettings)
    run_service(serve, settings)
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from typing import Any, TypeVar

from shared.bus.interface import BusError
from shared.models.checkpoint import CheckpointError
from shared.runtime.settings import BusSettings, SettingsError, load
from shared.runtime.struct_types import prepare_struct_types
from shared.runtime.watchdog import Watchdog

T = TypeVar("T")

OPERATOR_ERRORS = (SettingsError, CheckpointError)
"""The operator must change something before a restart can help."""
OPERATOR_ERROR_EXIT_CODE = 2

logger = logging.getLogger(__name__)


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class TextFormatter(logging.Formatter):
    """A readable line a record: date and time with zone, service, level, message."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s {service} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        # What a client wrote begins no line of its own, and does nothing to a terminal.
        record.message = _CONTROL.sub(_escaped, record.message)
        return super().formatMessage(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class JsonFormatter(TextFormatter):
    """An object a record, on a line of its own: time, service, level, logger, message, and the exception if there is one."""

    def __init__(self, service: str) -> None:
        super().__init__(service)
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record),
            "service": self._service,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


FORMATTERS: dict[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


def set_up_logging(service: str, level: str, log_format: str) -> None:
    """Records go to stderr, in one of FORMATTERS."""
    if log_format not in FORMATTERS:
        raise SettingsError(f"TIDEWAY_LOG_FORMAT={log_format!r}: expected {' or '.join(FORMATTERS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[log_format](service))
    try:
        logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    except ValueError:
        raise SettingsError(f"TIDEWAY_LOG_LEVEL={level!r}: expected DEBUG, INFO, WARNING or ERROR") from None
    # Lines about single HTTP requests and connection attempts of libraries are noise at INFO.
    for name in ("httpx", "httpcore", "urllib3", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed; the standard one does the same, slower."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of `work`; None, with `work` cancelled, if `stop` is set first: a service that still waits for NATS must
    end when it is told to."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()


def _complain(error: Exception) -> None:
    print(f"tideway: {error}", file=sys.stderr, flush=True)


def load_or_exit(kind: type[T]) -> T:
    """The settings of a service; settings that cannot be used end the process with one sentence."""
    try:
        return load(kind)
    except SettingsError as error:
        _complain(error)
        sys.exit(OPERATOR_ERROR_EXIT_CODE)


def run_service(main: Callable[[asyncio.Event], Awaitable[None]], settings: BusSettings) -> None:
    """Runs `main(stop)` until it returns, then exits the process, which may have as many descriptors as the hard limit says.

    SIGINT and SIGTERM set `stop`; a second one ends the process at once. `OPERATOR_ERRORS` are printed as
    one sentence (exit code 2), so is what the bus refused (exit code 1), any other exception with its stack trace (exit code
    1). A loop that stands still for `watchdog_s` ends the process with all stacks (exit code 3).
    """
    service = type(settings).__name__.removesuffix("Settings").lower()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        set_up_logging(service, settings.log_level, settings.log_format)
        prepare_struct_types()
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_until_stopped(main, settings.watchdog_s))
    except OPERATOR_ERRORS as error:
        _complain(error)
        sys.exit(OPERATOR_ERROR_EXIT_CODE)
    except BusError as error:
        logger.error("%s cannot go on: %s", service, error.info.message)
        sys.exit(1)
    except Exception:
        logger.exception("%s failed", service)
        sys.exit(1)


async def _until_stopped(main: Callable[[asyncio.Event], Awaitable[None]], watchdog_s: float) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        logger.info("stopping (%s)", number.name)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    watchdog = Watchdog(watchdog_s)
    try:
        await main(stop)
    finally:
        watchdog.stop()
