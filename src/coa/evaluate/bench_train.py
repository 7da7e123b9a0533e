"""`coa bench sft` and `coa bench rl`: training, ours beside TRL.

Goes in: how much work. Comes out: tokens per second (SFT) or updates per hour (RL) and the peak of
memory of each trainer, medians of a few runs. All get the same base weights, type of numbers,
threads, adapter, rows or prompts, and numbers of tokens; each generates in its own way. Trainers
take turns, each run is a process of its own, and its first update only warms up. That the work is
the same is checked: tokens of every update, and in SFT the loss of the first, which both compute
from the same weights. A peer that cannot run is reported with its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

from coa.errors import EngineError, MissingExtra
from coa.evaluate.train_players import Trained, Trainer, trainers_named
from coa.evaluate.train_work import RlSetup, Setup, SftSetup, Work, rl_work, sft_work
from coa.runs import Json

Note = Callable[[str], None]
LOSS_TOLERANCE = 0.02
"""By which share first losses may differ: bfloat16 is rounded in other places."""


def bench_sft(
    setup: SftSetup | None = None,
    note: Note = lambda line: None,
    *,
    trainers: Mapping[str, Trainer] | None = None,
) -> Json:
    """Tokens per second of supervised fine-tuning."""
    setup = setup or SftSetup()

    def speed(done: Trained) -> float:
        return sum(done.tokens[1:]) / sum(done.seconds[1:])

    return _Measured(sft_work(setup), "tokens/s", speed, note).take_turns(setup, trainers)


def bench_rl(
    setup: RlSetup | None = None,
    note: Note = lambda line: None,
    *,
    trainers: Mapping[str, Trainer] | None = None,
) -> Json:
    """Updates per hour of RL, sampling included."""
    setup = setup or RlSetup()

    def speed(done: Trained) -> float:
        return 3600 * len(done.seconds[1:]) / sum(done.seconds[1:])

    measured = _Measured(rl_work(setup), "updates/hour", speed, note)
    result = measured.take_turns(setup, trainers)
    phases = {name: _phases(runs) for name, runs in measured.found.items()}
    return result | {"phases": phases, "sampled": setup.sampled}


def _phases(runs: list[Trained]) -> dict[str, float]:
    """Seconds of an update spent on sampling, and on the rest; medians."""
    pairs = [pair for run in runs for pair in zip(run.seconds[1:], run.rollout_s[1:], strict=True)]
    return {
        "rollout_s": round(statistics.median(rollout for _, rollout in pairs), 2),
        "train_s": round(statistics.median(whole - rollout for whole, rollout in pairs), 2),
    }


class _Measured:
    """What came out so far, by trainer."""

    def __init__(
        self, work: Work, unit: str, speed: Callable[[Trained], float], note: Note
    ) -> None:
        self._work, self._unit, self._speed, self._note = work, unit, speed, note
        self.found: dict[str, list[Trained]] = {}
        self._missing: dict[str, str] = {}

    def take_turns(self, setup: Setup, trainers: Mapping[str, Trainer] | None) -> Json:
        """`setup.runs` runs of each trainer, one after the other, so that all see the same
        machine."""
        if find_spec("torch") is None:
            raise MissingExtra("Measuring training", "train")
        trainers = trainers_named(setup.peers) if trainers is None else trainers
        for run in range(1, setup.runs + 1):
            for name, trainer in trainers.items():
                if name not in self._missing:
                    self._run(name, trainer, run)
        return self._result(setup)

    def _run(self, name: str, trainer: Trainer, run: int) -> None:
        try:
            done = trainer(self._work)
            self._check(name, done)
        except Exception as exc:  # whatever stops a peer must not stop the measurement
            if name == "ours":
                raise
            self._missing[name] = str(exc) or type(exc).__name__
            self.found.pop(name, None)
            self._note(f"{name} is not measured: {self._missing[name]}")
            return
        self.found.setdefault(name, []).append(done)
        held = f"{done.memory_gb:.2f} GB"
        self._note(f"{name}, run {run}: {self._speed(done):.1f} {self._unit}, {held}")

    def _check(self, name: str, done: Trained) -> None:
        """Raise unless the work that was done is the work that was asked for."""
        if done.tokens != self._work.tokens:
            raise EngineError(f"trained on {done.tokens} tokens, expected {self._work.tokens}.")
        if name == "ours" or not done.loss or not (ours := self.found["ours"][0].loss):
            return
        if abs(done.loss[0] - ours[0]) > LOSS_TOLERANCE * abs(ours[0]):
            raise EngineError(
                f"its first loss is {done.loss[0]:.4f} and ours {ours[0]:.4f}: not the same rows, "
                "labels or weights."
            )

    def _result(self, setup: Setup) -> Json:
        speeds, memory = self._median(self._speed), self._median(lambda run: run.memory_gb)
        return {
            **{name: round(speed, 1) for name, speed in speeds.items()},
            "unit": self._unit,
            "ratio": _over(speeds),
            "memory_gb": {name: round(held, 2) for name, held in memory.items()},
            "memory_ratio": _over(memory),
            "runs": {
                name: [self._run_record(run) for run in runs] for name, runs in self.found.items()
            },
            "missing": self._missing,
            "versions": {name: runs[0].version for name, runs in self.found.items()},
            "tokens": self._work.tokens,
            "setup": setup.to_json(),
        }

    def _median(self, of: Callable[[Trained], float]) -> dict[str, float]:
        return {name: statistics.median(map(of, runs)) for name, runs in self.found.items()}

    def _run_record(self, run: Trained) -> Json:
        """One run; lists have a number for each update, the first of which does not count."""
        record: Json = {"speed": round(self._speed(run), 1), "memory_gb": round(run.memory_gb, 2)}
        for name in ("seconds", "rollout_s", "loss", "reward"):
            if found := getattr(run, name):
                record[name] = [round(value, 4) for value in found]
        return record


def _over(values: Mapping[str, float]) -> dict[str, float]:
    """Ours over each peer's."""
    return {n: round(values["ours"] / value, 2) for n, value in values.items() if n != "ours"}


def train_lines(result: Json) -> Iterator[str]:
    """The result as a small table."""
    for name, runs in result["runs"].items():
        ratio = result["ratio"].get(name)
        beside = "" if ratio is None else f"   ours / peer {ratio:.2f}"
        all_runs = ", ".join(f"{run['speed']:.1f}" for run in runs)
        yield f"{name:<12} {result[name]:>10.1f} {result['unit']}{beside}   runs {all_runs}"
    for name, held in result["memory_gb"].items():
        ratio = result["memory_ratio"].get(name)
        beside = "" if ratio is None else f"   ours / peer {ratio:.2f}"
        yield f"{name:<12} {held:>10.2f} GB at most{beside}"
    for name, phases in result.get("phases", {}).items():
        yield f"{name}: {phases['rollout_s']} s of an update sample, {phases['train_s']} s train"
    for name, reason in result["missing"].items():
        yield f"{name} is not measured: {reason}"
    setup, tokens = result["setup"], result["tokens"]
    sampled = f", of which {result['sampled']} sampled" if "sampled" in result else ""
    yield (
        f"{setup['model']}, {setup['dtype']}, {setup['threads']} threads, LoRA of rank "
        f"{setup['rank']}; tokens of an update: {', '.join(map(str, tokens))}{sampled}"
    )
    yield "; ".join(result["versions"].values())
