"""Stop strings, found in decoded text because they rarely end where a token ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def completes_stop(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], stops: Sequence[str]
) -> bool:
    """Whether the last id completes a stop string, wherever inside that id's text it ends."""
    if not stops:
        return False
    last = decode(ids[-1:])
    if not any(stop[-1] in last for stop in stops) and "\ufffd" not in last:
        return False
    reach = max(len(stop.encode()) for stop in stops) + 1
    tail = decode(ids[-reach:])
    return any(stop in tail for stop in stops)
