"""Run probes outside (plain Python) and inside (the sandbox), as the user of this process.

    python -m attacks.trial NAME...      with this folder's parent and the package on PYTHONPATH

One JSON object on the standard output: {probe's name: {"outside": ..., "inside": ...}}, or
{"refused": why} where the sandbox will not run. With --tier= only the controls run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from attack_probes import PROBES

from .arena import LIMITS, Arena
from .probe import ALIVE, NAMED, STARTED, Probe, Seen, living, whole

MOMENT, PATIENCE = 0.8, 30.0
"""Seconds that a control gets before it counts as running for ever; and at most."""

HUNG = 240.0
"""Seconds after which a probe, with all its tries, is given up, so that its name is known."""

FAILED = "failed"
"""How a run ended that the sandbox gave no outcome for."""

SPLIT = "\x1d next step \x1d\n"
INTERPRETER = f"""
import sys
space = {{"__name__": "__main__"}}
for text in sys.argv[1:]:
    exec(compile(text, "step", "exec"), space)
    print({SPLIT!r}, end="", flush=True)
"""


async def _plain(command: Sequence[str], probe: Probe, folder: str, stdin: str) -> Seen:
    """A process with everything its user may do, and a channel such as careless runners leave."""
    channel, spare = socket.socketpair()
    with open(stdin, "rb") as file, channel, spare:  # noqa: PTH123
        started = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            stdin=file,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(spare.fileno(),),
            start_new_session=True,
        )
        spare.close()
        reading = asyncio.ensure_future(started.communicate())
        patience = MOMENT if probe.alive else PATIENCE
        done, _ = await asyncio.wait({reading}, timeout=patience)
        ended = "exit" if done else ALIVE
        if not done:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
        try:
            out, err = await asyncio.wait_for(reading, PATIENCE)
        except TimeoutError:  # a process of another group holds its output open
            out, err = b"", b"its output stayed open after it was killed"
        return Seen(out.decode(errors="replace"), err.decode(errors="replace"), ended)


async def named(what: str, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The verdict that this work gives; one that never comes is a lost one, and says so."""
    print(f"{time.monotonic():.1f} {what}", file=sys.stderr, flush=True)
    try:
        return await asyncio.wait_for(work, HUNG)
    except TimeoutError:
        return {"won": True, "started": False, "error": f"no end after {HUNG} s", "seen": []}
    finally:
        print(f"{time.monotonic():.1f} {what}: ended", file=sys.stderr, flush=True)


async def outside(probe: Probe, values: Mapping[str, Any]) -> list[Seen]:
    texts = [whole(step, values) for step in probe.steps]
    folder = tempfile.mkdtemp(prefix="coa-outside-", dir=values["folder"])
    try:
        if probe.control == "processes":
            return [
                await _plain([sys.executable, "-c", text], probe, folder, values["stdin"])
                for text in texts
            ]
        command = [sys.executable, "-c", INTERPRETER, *texts]
        seen = await _plain(command, probe, folder, values["stdin"])
        parts = [*seen.stdout.split(SPLIT), *[""] * len(texts)][: len(texts)]
        return [Seen(part, seen.stderr, seen.ended) for part in parts]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def inside(probe: Probe, values: Mapping[str, Any], box: Any, hold: bool) -> list[Seen]:
    """The same steps in the sandbox; sessions are held open, or closed before the next step."""
    from coa.sandbox import SandboxError

    seen: list[Seen] = []
    sessions: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        for step in probe.steps:
            if not hold and step.session not in sessions:
                await stack.aclose()
                sessions.clear()
            if step.session and step.session not in sessions:
                sessions[step.session] = await stack.enter_async_context(box.session())
            await asyncio.sleep(step.pause)
            place = sessions[step.session] if step.session else box
            run = place.run(whole(step, values))
            try:
                outcome = await asyncio.wait_for(run, LIMITS["seconds"] + PATIENCE)
                seen.append(Seen(outcome.stdout, outcome.stderr, str(outcome.ended)))
            except TimeoutError:
                seen.append(Seen("", "", ALIVE))
            except SandboxError as error:
                seen.append(Seen("", str(error), FAILED))
    return seen


def judged(probe: Probe, seen: Sequence[Seen], values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        verdict: dict[str, Any] = {"won": probe.judge(seen, values)}
    except AssertionError as error:
        verdict = {"won": True, "error": f"cannot be judged: {error}"}
    finally:
        named = any(NAMED in s.stdout for s in seen)
        for pid in living(values["token"]) if named else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    steps = [
        {"ended": s.ended, "stdout": s.stdout[:3000], "stderr": s.stderr[-3000:]} for s in seen
    ]
    # Outside, a later step may be the victim of the first.
    ran = [STARTED in s.stdout for s in (seen[:1] if values["side"] == "outside" else seen)]
    return {**verdict, "started": all(ran), "seen": steps}


def merged(verdicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst of several tries."""
    return next((v for v in verdicts if v["won"] or not v["started"]), verdicts[0])


async def controls(arena: Arena, probes: Iterable[Probe]) -> dict[str, dict[str, Any]]:
    crowd = asyncio.Semaphore(4)

    async def control(probe: Probe) -> dict[str, Any]:
        values = arena.values_for("outside")
        seen = await outside(probe, values)
        return await asyncio.to_thread(judged, probe, seen, values)

    async def one(probe: Probe) -> tuple[str, dict[str, Any]]:
        async with crowd:
            return probe.name, await named(f"outside {probe.name}", control(probe))

    safe = [probe for probe in probes if probe.control != "none"]
    return dict(await asyncio.gather(*map(one, safe)))


async def attack(probe: Probe, arena: Arena, box: Any, hold: bool) -> dict[str, Any]:
    """One try, or a few where it ran out of time: a slow machine is not what is to stop it."""
    for _ in range(3):
        values = arena.values_for("inside")
        seen = await inside(probe, values, box, hold)
        verdict = await asyncio.to_thread(judged, probe, seen, values)
        if probe.category in ("bombs", "harm") or all(s.ended != "timeout" for s in seen):
            break
    return verdict


async def attacks(arena: Arena, probes: Sequence[Probe], tier: str) -> dict[str, dict[str, Any]]:
    """Two lanes, each with a sandbox of one slot, so that every run follows the last attack there.
    Sessions are tried one after the other, and side by side."""
    from coa.sandbox import Limits, Sandbox, Tier

    reached = Tier[tier]
    settings: dict[str, Any] = {"limits": Limits(**LIMITS), "require": reached, "at_most": reached}
    results: dict[str, dict[str, Any]] = {}
    waiting = list(reversed(probes))

    async def lane() -> None:
        async with Sandbox(**settings, slots=1) as box:
            while waiting:
                probe = waiting.pop()
                verdicts = []
                for hold in (False, True) if any(s.session for s in probe.steps) else (False,):
                    tries = attack(probe, arena, box, hold)
                    verdicts.append(await named(f"inside {probe.name}", tries))
                results[probe.name] = merged(verdicts)

    await asyncio.gather(lane(), lane())
    return results


async def trial(names: Sequence[str], tier: str) -> dict[str, Any]:
    probes = [probe for probe in PROBES if not names or probe.name in names]
    with Arena() as arena:
        without = await controls(arena, probes)
        if not tier:
            return {name: {"outside": verdict} for name, verdict in without.items()}
        from coa.errors import CoaError

        try:
            within = await attacks(arena, probes, tier)
        except CoaError as error:
            return {"refused": str(error)}
    return {name: {"outside": without.get(name), "inside": within[name]} for name in within}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tier", default="FULL")
    chosen = parser.parse_args()
    faulthandler.enable()  # an impatient caller aborts us, to see where we are
    json.dump(asyncio.run(trial(chosen.names, chosen.tier)), sys.stdout)


if __name__ == "__main__":
    main()
