"""Places of coa serve: who runs, who waits, and that whoever leaves gives back what it held."""

from __future__ import annotations

import asyncio

import pytest

from coa.serving.request import Refused
from coa.serving.session import Admission


async def test_places_are_given_in_turn() -> None:
    admission, order, last = Admission(1), list[str](), asyncio.Event()

    async def go(name: str) -> None:
        async with admission.place(5):
            order.append(name)
            await last.wait()

    going = [asyncio.create_task(go(name)) for name in ("first", "second", "third")]
    await asyncio.sleep(0)
    assert (admission.running, admission.waiting) == (1, 2)
    assert admission.retry_after_s() == 6, "two wait, and a rollout is taken to last 2 s"
    last.set()
    await asyncio.gather(*going)
    assert order == ["first", "second", "third"]
    assert (admission.running, admission.waiting) == (0, 0)


async def test_one_that_is_cancelled_at_any_point_leaves_nothing_behind() -> None:
    for patience in range(6):
        admission = Admission(1)

        async def hold(admission: Admission = admission) -> None:
            async with admission.place(5):
                await asyncio.sleep(0)

        holding = [asyncio.create_task(hold()) for _ in range(4)]
        for _ in range(patience):
            await asyncio.sleep(0)
        holding[1].cancel()
        holding[2].cancel()
        await asyncio.wait(holding, timeout=5)
        assert all(each.done() for each in holding)
        assert (admission.running, admission.waiting) == (0, 0), patience


async def test_whoever_waits_too_long_is_told_so() -> None:
    admission = Admission(1)
    async with admission.place(1):
        with pytest.raises(Refused, match=r"no place became free within 0\.01 s") as told:
            async with admission.place(0.01):
                raise AssertionError
        assert told.value.status == 503 and told.value.headers["Retry-After"]
    assert (admission.running, admission.waiting) == (0, 0)
