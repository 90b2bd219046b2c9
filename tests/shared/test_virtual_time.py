"""The event loop whose clock jumps."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.virtual_time import DeadlockError, VirtualTimeLoop, run_virtual


def test_an_hour_of_timers_takes_no_time() -> None:
    async def main() -> tuple[float, list[str]]:
        order: list[str] = []

        async def tick(name: str, interval_s: float, count: int) -> None:
            for _ in range(count):
                await asyncio.sleep(interval_s)
                order.append(name)

        await asyncio.gather(tick("slow", 1200, 3), tick("fast", 500, 7))
        return asyncio.get_running_loop().time(), order

    started_s = time.perf_counter()
    now_s, order = run_virtual(main())
    assert now_s == pytest.approx(3600)
    assert order == ["fast", "fast", "slow", "fast", "fast", "slow", "fast", "fast", "fast", "slow"]
    assert time.perf_counter() - started_s < 5


def test_timers_fire_at_their_times_and_in_order() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        fired: list[float] = []
        for delay_s in (0.3, 0.1, 0.2, 1e-9, 1e6):
            loop.call_later(delay_s, lambda: fired.append(loop.time()))
        await asyncio.sleep(2e6)
        return fired

    assert run_virtual(main()) == pytest.approx([1e-9, 0.1, 0.2, 0.3, 1e6])


def test_ready_tasks_run_before_time_passes() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert loop.time() == 0.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        assert loop.time() == pytest.approx(30)

    run_virtual(main())


def test_a_deadlock_is_an_error_that_names_the_tasks() -> None:
    async def wait_for_godot() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="wait_for_godot"):
        run_virtual(wait_for_godot())


def test_the_limit_ends_what_never_ends() -> None:
    async def forever() -> None:
        while True:
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError, match="100"):
        run_virtual(forever(), limit_s=100)


def test_executor_jobs_run_inline() -> None:
    async def main() -> tuple[int, float]:
        thread = await asyncio.to_thread(threading.get_ident)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        return thread, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (threading.get_ident(), 0.0)


def test_results_and_exceptions_come_out() -> None:
    async def fail() -> None:
        await asyncio.sleep(1)
        raise KeyError("x")

    with pytest.raises(KeyError):
        run_virtual(fail())
    loop = VirtualTimeLoop()
    assert loop.run_until_complete(asyncio.sleep(5, "done")) == "done"
    loop.close()
