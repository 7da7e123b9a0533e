"""Places of coa serve: who runs, who waits, and that whoever leaves gives back what it held."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coa.serving.errors import Refused
from coa.serving.session import Places


async def test_tickets_are_served_in_turn_and_giving_back_twice_is_harmless() -> None:
    places = Places(1, 2)
    first, second, third = places.take(), places.take(), places.take()
    with pytest.raises(Refused, match="try later"):
        places.take()
    await first.wait(1)
    order: list[str] = []

    async def go(name: str, ticket: Any) -> None:
        with ticket:
            await ticket.wait(5)
            order.append(name)

    going = [asyncio.create_task(go("second", second)), asyncio.create_task(go("third", third))]
    await asyncio.sleep(0)
    assert (places.running, places.waiting) == (1, 2)
    first.give_back()
    first.give_back()
    await asyncio.gather(*going)
    assert order == ["second", "third"] and (places.running, places.waiting) == (0, 0)


async def test_a_ticket_that_is_cancelled_at_any_point_leaves_nothing_behind() -> None:
    for patience in range(6):
        places = Places(1, 4)

        async def hold(ticket: Any) -> None:
            with ticket:
                await ticket.wait(5)
                await asyncio.sleep(0)

        holding = [asyncio.create_task(hold(places.take())) for _ in range(4)]
        for _ in range(patience):
            await asyncio.sleep(0)
        holding[1].cancel()
        holding[2].cancel()
        await asyncio.wait(holding, timeout=5)
        # One that never began has not entered its ticket; the request gives it back then.
        assert all(each.done() for each in holding)
        if patience:
            assert (places.running, places.waiting) == (0, 0), patience


async def test_whoever_waits_too_long_is_told_so() -> None:
    places = Places(1, 1)
    first = places.take()
    await first.wait(1)
    with (
        pytest.raises(Refused, match=r"no place became free within 0\.01 s") as told,
        places.take() as late,
    ):
        await late.wait(0.01)
    assert told.value.status == 503 and told.value.headers()["Retry-After"]
    first.give_back()
    assert (places.running, places.waiting) == (0, 0)
