"""`coa bench busy`: what our jobs keep of their speed when others use the same cores.

Goes in: nothing. Comes out: the speed of sampling (32 rollouts at once, and one), of fine-tuning
and of RL alone, beside a process that counts, and beside another job of the same kind. Two
processes of a job load and warm up once; then each works for some seconds whenever it is told to.
The three situations follow one another in every round, so that all see the same machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from coa.errors import EngineError
from coa.io.runs import Json
from coa.models.bases import BASE

JOBS = ("rollout", "ask", "sft", "rl")
ALONE, BUSY, OURS = BESIDE = ("alone", "beside a busy process", "beside another of ours")
SECONDS, ROUNDS = 8.0, 3
_STREAMS = {"rollout": 32, "ask": 1}
_TOKENS = 1000
_LONGEST = 512
"""Tokens of a row: what every model bears."""
_RL_TOKENS = 64
"""Sampled for a rollout of RL."""
_COUNT = "while True: pass"


def bench_busy(
    note: Callable[[str], None] = lambda line: None,
    jobs: Sequence[str] = JOBS,
    model: str = BASE,
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
) -> Json:
    """Tokens per second by job and by what runs beside it: medians, and shares of those alone."""
    result: Json = {"unit": "tokens/s", "seconds": seconds, "rounds": rounds, "jobs": {}}
    for job in jobs:
        with ExitStack() as stack:
            both = [stack.enter_context(BusyJob(job, model)) for _ in range(2)]
            found = [_round(both, seconds) for _ in range(rounds)]
        alone = statistics.median(speeds[ALONE] for speeds in found)
        result["jobs"][job] = {
            beside: _summary([speeds[beside] for speeds in found], alone) for beside in BESIDE
        }
        for line in _lines(job, result["jobs"][job]):
            note(line)
    return result


def _round(both: Sequence[BusyJob], seconds: float) -> dict[str, float]:
    found = {ALONE: both[0].work(seconds)}
    with subprocess.Popen([sys.executable, "-c", _COUNT]) as counting:
        try:
            found[BUSY] = both[0].work(seconds)
        finally:
            counting.kill()
    for job in both:
        job.begin(seconds)
    found[OURS] = statistics.fmean(job.speed() for job in both)
    return found


def _summary(runs: list[float], alone: float) -> Json:
    speed = statistics.median(runs)
    shown = [round(each, 1) for each in runs]
    return {"speed": round(speed, 1), "share": round(speed / alone, 2), "runs": shown}


def busy_lines(result: Json) -> Iterator[str]:
    """The result as a small table."""
    for job, found in result["jobs"].items():
        yield from _lines(job, found)


def _lines(job: str, found: Json) -> Iterator[str]:
    for beside, each in found.items():
        runs = ", ".join(f"{speed:.0f}" for speed in each["runs"])
        speed = f"{each['speed']:>7.1f} tokens/s   {each['share']:.2f} of alone"
        yield f"{job:<8} {beside:<24}{speed}   runs {runs}"


class BusyJob:
    """A process that works when it is told to, and says how fast it was."""

    def __init__(self, job: str, model: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "coa.lab.bench_busy", job, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            text=True,
        )

    def __enter__(self) -> BusyJob:
        self._line()  # it is ready
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None and self._process.stdout is not None
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with suppress(BrokenPipeError):
                stream.close()

    def work(self, seconds: float) -> float:
        self.begin(seconds)
        return self.speed()

    def begin(self, seconds: float) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # why it ended is said when its speed is asked for
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()

    def speed(self) -> float:
        return float(json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        self._log.seek(0)
        last = [line.strip() for line in self._log if line.strip()][-3:]
        raise EngineError(f"a job of the bench ended: {' | '.join(last)}")


# ------------------------------------------------------------------------------------------------
# In the process of a job.
# ------------------------------------------------------------------------------------------------


class Orders:
    """What a job is told on stdin, and what it says of it."""

    def __init__(self, out: Any) -> None:
        self._out = out

    def __iter__(self) -> Iterator[float]:
        """Seconds to work for, again and again, as soon as the job is ready."""
        self.say("ready")
        for line in sys.stdin:
            yield float(line)

    def say(self, value: float | str) -> None:
        print(json.dumps(value), file=self._out, flush=True)


def _sample(orders: Orders, streams: int, model: str) -> None:
    """Count the tokens that so many rollouts sample, once all of them decode."""
    from coa.engines.base import Sampling
    from coa.engines.local import LocalEngine
    from coa.lab.bench_rollout import Lengths, Texts

    # Without guesses: how many come true differs between windows. One stream has the weights that
    # `coa ask` takes.
    weights = "auto" if streams == 1 else "full"
    engine = LocalEngine(model, slots=streams, context=256 + _TOKENS, guess=False, weights=weights)
    engine._batch._eos = frozenset()
    prompts = Texts(engine.codec).work(streams, Lengths()).prompts

    sampled, take = 0, engine._batch._take

    def counted(*drawn: Any) -> None:
        nonlocal sampled
        sampled += 1
        take(*drawn)

    engine._batch._take = counted  # type: ignore[method-assign, assignment]

    async def stream(prompt: list[int]) -> None:
        while True:
            await engine.generate(prompt, Sampling(temperature=1.0, max_tokens=_TOKENS))

    async def work(seconds: float) -> float:
        running = [asyncio.create_task(stream(prompt)) for prompt in prompts]
        begun = sampled
        while sampled < begun + 4 * streams:
            await asyncio.sleep(0.01)
        before, started = sampled, time.perf_counter()
        await asyncio.sleep(seconds)
        speed = (sampled - before) / (time.perf_counter() - started)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return speed

    with asyncio.Runner() as runner:
        runner.run(work(0.1))
        for seconds in orders:
            orders.say(runner.run(work(seconds)))
        runner.run(engine.close())


class _Windows:
    """Whole updates of a trainer, counted from one order to the next."""

    def __init__(self, orders: Orders, tokens: float) -> None:
        self._orders, self._told = orders, iter(orders)
        self._tokens = tokens
        """Of one update."""
        self._updates, self._started, self._seconds = 0, 0.0, 0.0

    def update(self, number: int) -> None:
        """An update is done; the first ones only warm up."""
        self._updates += 1
        spent = time.perf_counter() - self._started
        if number < 3 or (self._seconds and spent < self._seconds):
            return
        if self._seconds:
            self._orders.say(self._updates * self._tokens / spent)
        self._seconds = next(self._told)  # ends the process when nobody tells it any more
        self._started, self._updates = time.perf_counter(), 0


def _fine_tune(orders: Orders, model: str) -> None:
    from coa.lab.bench_train import distilled_rows
    from coa.models.codec import Codec
    from coa.models.references import model_folder, resolve
    from coa.train.policy import make_policy
    from coa.train.settings import SftSettings
    from coa.train.sft import UpdateReport, run_sft

    codec = Codec.from_folder(model_folder(resolve(model)))
    rows = [row for row in distilled_rows(codec, 24) if len(row.ids) <= _LONGEST]
    settings = SftSettings(model=model, batch_size=1, epochs=1000, checkpoint_every=10**6)
    windows = _Windows(orders, sum(len(row.ids) for row in rows) / len(rows))

    def on_update(report: UpdateReport) -> None:
        windows.update(report.update)

    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(settings)
        run_sft(settings, rows, Path(folder) / "run", on_update=on_update, policy=policy)


def _reinforce(orders: Orders, model: str) -> None:
    """The updates of `coa bench rl`, smaller ones, without end."""
    from coa.lab.bench_coa import rl
    from coa.lab.bench_train import RlSetup, rl_work
    from coa.train.rl import RlLoop

    work = rl_work(RlSetup(model=model, tasks=2, tokens=_RL_TOKENS))
    windows = _Windows(orders, work.tokens[0])
    record = RlLoop._record

    def counted(loop: RlLoop, done: int, *known: Any) -> None:
        record(loop, done, *known)
        windows.update(done)

    RlLoop._record = counted  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as folder:
        rl(work.asked | {"updates": 10**6}, Path(folder))


def main(job: str, model: str) -> None:
    # Libraries may write to stdout as well; what is said gets a copy of it to itself.
    orders = Orders(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    if job in _STREAMS:
        _sample(orders, _STREAMS[job], model)
    else:
        {"sft": _fine_tune, "rl": _reinforce}[job](orders, model)


if __name__ == "__main__":
    main(*sys.argv[1:])
