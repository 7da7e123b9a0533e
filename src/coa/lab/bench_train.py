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
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from coa.distillation.dataset import Distilling, DistillSettings, run_distillation
from coa.environment import bound_for
from coa.environments import make_tasks
from coa.errors import ConfigError, EngineError, MissingExtra, did_you_mean
from coa.grammar import system_prompt
from coa.io.machine import cores, native_bfloat16
from coa.io.runs import Json
from coa.io.settings import load_recipe
from coa.lab import peer_trl as trl_train
from coa.lab.bench import Note, Peers, beside, missing_lines, over, peer_python, run_script
from coa.models.bases import BASE
from coa.models.codec import Codec
from coa.models.references import model_folder, resolve
from coa.recording.record import Recording, run_recording
from coa.train.rows import Row, batches, build_row

GRAMMAR = "mhqa"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The modules that get an adapter; those of `coa.train.forward`, which needs torch."""
UNTRAINED = -100
"""The label of a token that is not trained."""
_SPARE = 1.5
"""Tasks recorded for every row wanted: filters leave some out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all trainers have in common. LoRA on every projection, AdamW, a constant rate."""

    model: str = BASE
    dtype: str = "auto"
    """Of the frozen weights; the adapter is trained in float32."""
    threads: int = field(default_factory=cores)
    rank: int = 16
    lr: float = 1e-4
    grad_clip: float = 1.0
    runs: int = 3
    """How often each trainer does the work, in a process of its own."""
    peers: tuple[str, ...] = ("trl",)

    def __post_init__(self) -> None:
        for name in ("threads", "rank", "runs"):
            at_least(name, getattr(self, name), 1)
        if self.dtype not in ("auto", "bfloat16", "float32"):
            raise ConfigError(f"dtype: found {self.dtype!r}, expected auto, bfloat16 or float32.")
        for name in self.peers:
            if name not in PEERS:
                raise ConfigError(f"peers: {name!r} is none.{did_you_mean(name, PEERS)}")

    def to_json(self) -> Json:
        native = "bfloat16" if native_bfloat16() else "float32"
        found = asdict(self) | {"alpha": 2.0 * self.rank, "targets": list(TARGETS)}
        return found | {"dtype": native if self.dtype == "auto" else self.dtype}


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSetup(Setup):
    """The settings of `coa bench sft`."""

    rows: int = 32
    batch_size: int = 8

    def __post_init__(self) -> None:
        Setup.__post_init__(self)
        at_least("batch_size", self.batch_size, 1)
        if self.rows < 2 * self.batch_size or self.rows % self.batch_size:
            raise ConfigError(
                f"rows: found {self.rows}, expected a multiple of batch_size {self.batch_size}, at "
                "least twice: the first update only warms up."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSetup(Setup):
    """The settings of `coa bench rl`."""

    tasks: int = 4
    group_size: int = 8
    tokens: int = 128
    """Sampled for every rollout, no more and no fewer."""
    updates: int = 2
    """Of one run; the first only warms up."""

    def __post_init__(self) -> None:
        Setup.__post_init__(self)
        for name, least in {"tasks": 1, "group_size": 2, "tokens": 1, "updates": 2}.items():
            at_least(name, getattr(self, name), least)

    @property
    def sampled(self) -> int:
        """Tokens sampled in an update."""
        return self.tasks * self.group_size * self.tokens


def at_least(name: str, found: int, least: int) -> None:
    if found < least:
        raise ConfigError(f"{name}: found {found}, expected at least {least}.")


@dataclass(frozen=True, slots=True)
class TrainWork:
    """What a trainer is asked to do, and what it must say that it did."""

    asked: Json
    """To be sent to a trainer's process."""
    tokens: list[int]
    """Of the sequences trained on, by update."""


def sft_work(setup: SftSetup) -> TrainWork:
    """Rows, and the order in which our `batches` takes them, so that all have the same batches."""
    folder = model_folder(resolve(setup.model))
    rows = distilled_rows(Codec.from_folder(folder), setup.rows)
    place = {id(row): at for at, row in enumerate(rows)}
    made = batches(rows, setup.batch_size, 0, 0)
    asked = setup.to_json() | {
        "kind": "sft",
        "folder": str(folder),
        "rows": [{"input_ids": row.ids, "labels": _labels(row)} for row in rows],
        "order": [place[id(row)] for batch in made for row in batch],
    }
    return TrainWork(asked, [sum(len(row.ids) for row in batch) for batch in made])


def _labels(row: Row) -> list[int]:
    pairs = zip(row.ids, row.weights, strict=True)
    return [token if weight > 0 else UNTRAINED for token, weight in pairs]


def distilled_rows(codec: Codec, count: int) -> list[Row]:
    """Training rows of so many chains, distilled from episodes of the expert team."""
    tasks = make_tasks("atlas-mhqa", "train", int(_SPARE * count) + 8, 0)
    with tempfile.TemporaryDirectory() as folder:
        given, path = Path(folder) / "tasks.jsonl", Path(folder) / "episodes.jsonl"
        tasks.save(given)
        run_recording(Recording(tasks=given, options={"error_rate": 0.1}, workers=1), path)
        how = DistillSettings(grammar=GRAMMAR)
        kept = run_distillation(Distilling(path, given, how, workers=1), Path(folder) / "out").kept
    assert len(kept) >= count, (len(kept), count)
    return [build_row(trajectory, codec) for trajectory in kept[:count]]


def rl_work(setup: RlSetup) -> TrainWork:
    """Every update takes all tasks, so that their order does not matter."""
    folder = model_folder(resolve(setup.model))
    codec = Codec.from_folder(folder)
    tasks = make_tasks("atlas-mhqa", "train", setup.tasks, 0)
    system = system_prompt(bound_for("atlas-mhqa", tasks[0], GRAMMAR), "compact")
    prompts = [len(codec.encode_prompt(system, task.question)) for task in tasks]
    asked = setup.to_json() | {
        "kind": "rl",
        "folder": str(folder),
        "system": system,
        "tasks": [task.to_json() for task in tasks],
        "context": max(prompts) + setup.tokens,
    }
    return TrainWork(asked, [setup.group_size * sum(prompts) + setup.sampled] * setup.updates)


# ------------------------------------------------------------------------------------------------
# Who does the work of `coa bench sft` and `coa bench rl`: we and TRL, each in a new process.
#
# A process of its own gives each the whole machine and a clean peak of memory, which the system
# counts. TRL comes from an environment of its own (`dev/peers.sh` makes it).
# ------------------------------------------------------------------------------------------------


PEERS_PYTHON = ".cache/peers/bin/python"


@dataclass(frozen=True, slots=True)
class TrainedBench:
    """A work, done once. Lists have a number for each update."""

    seconds: list[float]
    tokens: list[int]
    """Of the sequences that were trained on."""
    version: str
    memory_gb: float
    """The most that the process held."""
    loss: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    rollout_s: list[float] = field(default_factory=list)


Trainer = Callable[[TrainWork], TrainedBench]


def train_ours(work: TrainWork) -> TrainedBench:
    return _train([sys.executable, "-m", "coa.lab.bench_coa"], work.asked)


def train_trl(work: TrainWork, changes: Json | None = None) -> TrainedBench:
    """TRL as it is fastest here, or with changes to what it is asked (COA_PEERS is its Python)."""
    how = "make it with `sh dev/peers.sh .cache/peers`, or "
    python = peer_python("COA_PEERS", PEERS_PYTHON, "TRL", how)
    asked = {"settings": {}, **work.asked, **(changes or {})}
    return _train([python, "-I", trl_train.__file__], asked)


PEERS: Mapping[str, Trainer] = {
    "trl": train_trl,
    "trl-float32": partial(train_trl, changes={"dtype": "float32"}),
    "trl-no-autocast": partial(train_trl, changes={"settings": {"bf16": False}}),
    "trl-padding-free": partial(train_trl, changes={"settings": {"padding_free": True}}),
    "trl-compiled": partial(train_trl, changes={"settings": {"torch_compile": True}}),
    "trl-checkpointing": partial(train_trl, changes={"settings": {"gradient_checkpointing": True}}),
}
"""TRL, and other ways to run it, to see which is the fastest and which holds least."""


def _train(command: Sequence[str], asked: Json) -> TrainedBench:
    done, memory_gb = run_script(command, asked, {"OMP_NUM_THREADS": str(asked["threads"])})
    return TrainedBench(**done, memory_gb=memory_gb)


LOSS_TOLERANCE = 0.02
"""By which share first losses may differ: bfloat16 is rounded in other places."""


def bench_training(name: str, overrides: Sequence[str], note: Note) -> Json:
    """`sft` or `rl` with these settings."""
    if name == "sft":
        return bench_sft(load_recipe(None, overrides, SftSetup), note)
    return bench_rl(load_recipe(None, overrides, RlSetup), note)


def bench_sft(
    setup: SftSetup,
    note: Note = lambda line: None,
    *,
    trainers: Mapping[str, Trainer] | None = None,
) -> Json:
    """Tokens per second of supervised fine-tuning."""

    def speed(done: TrainedBench) -> float:
        return sum(done.tokens[1:]) / sum(done.seconds[1:])

    measured = _TrainMeasured(sft_work(setup), "tokens/s", speed, note)
    return measured.take_turns(setup, trainers)


def bench_rl(
    setup: RlSetup,
    note: Note = lambda line: None,
    *,
    trainers: Mapping[str, Trainer] | None = None,
) -> Json:
    """Updates per hour of RL, sampling included."""

    def speed(done: TrainedBench) -> float:
        return 3600 * len(done.seconds[1:]) / sum(done.seconds[1:])

    measured = _TrainMeasured(rl_work(setup), "updates/hour", speed, note)
    result = measured.take_turns(setup, trainers)
    phases = {name: _phases(runs) for name, runs in measured.found.items()}
    return result | {"phases": phases, "sampled": setup.sampled}


def _phases(runs: list[TrainedBench]) -> dict[str, float]:
    """Seconds of an update spent on sampling, and on the rest; medians."""
    pairs = [pair for run in runs for pair in zip(run.seconds[1:], run.rollout_s[1:], strict=True)]
    return {
        "rollout_s": round(statistics.median(rollout for _, rollout in pairs), 2),
        "train_s": round(statistics.median(whole - rollout for whole, rollout in pairs), 2),
    }


class _TrainMeasured(Peers):
    """What came out so far, by trainer."""

    def __init__(
        self, work: TrainWork, unit: str, speed: Callable[[TrainedBench], float], note: Note
    ) -> None:
        super().__init__(note)
        self._work, self._unit, self._speed = work, unit, speed
        self.found: dict[str, list[TrainedBench]] = {}

    def take_turns(self, setup: Setup, trainers: Mapping[str, Trainer] | None) -> Json:
        """`setup.runs` runs of each trainer, one after the other, so that all see the same
        machine."""
        if find_spec("torch") is None:
            raise MissingExtra("Measuring training", "train")
        trainers = trainers or {"ours": train_ours, **{name: PEERS[name] for name in setup.peers}}
        for run in range(1, setup.runs + 1):
            for name, trainer in trainers.items():
                if done := self.attempt(name, partial(self._run, name, trainer)):
                    self.found.setdefault(name, []).append(done)
                    held = f"{done.memory_gb:.2f} GB"
                    self.note(f"{name}, run {run}: {self._speed(done):.1f} {self._unit}, {held}")
                else:
                    self.found.pop(name, None)
        speeds, memory = self._median(self._speed), self._median(lambda run: run.memory_gb)
        return {
            **{name: round(speed, 1) for name, speed in speeds.items()},
            "unit": self._unit,
            "ratio": over(speeds),
            "memory_gb": {name: round(held, 2) for name, held in memory.items()},
            "memory_ratio": over(memory),
            "runs": {name: list(map(self._record, runs)) for name, runs in self.found.items()},
            "missing": self.missing,
            "versions": {name: runs[0].version for name, runs in self.found.items()},
            "tokens": self._work.tokens,
            "setup": setup.to_json(),
        }

    def _run(self, name: str, trainer: Trainer) -> TrainedBench:
        """One run; raises unless the work that was done is the work that was asked for."""
        done = trainer(self._work)
        if done.tokens != self._work.tokens:
            raise EngineError(f"trained on {done.tokens} tokens, expected {self._work.tokens}.")
        ours = self.found["ours"][0].loss if name != "ours" else []
        if done.loss and ours and abs(done.loss[0] - ours[0]) > LOSS_TOLERANCE * abs(ours[0]):
            raise EngineError(
                f"its first loss is {done.loss[0]:.4f} and ours {ours[0]:.4f}: not the same rows, "
                "labels or weights."
            )
        return done

    def _median(self, of: Callable[[TrainedBench], float]) -> dict[str, float]:
        return {name: statistics.median(map(of, runs)) for name, runs in self.found.items()}

    def _record(self, run: TrainedBench) -> Json:
        """One run; lists have a number for each update, the first of which does not count."""
        record: Json = {"speed": round(self._speed(run), 1), "memory_gb": round(run.memory_gb, 2)}
        for name in ("seconds", "rollout_s", "loss", "reward"):
            if found := getattr(run, name):
                record[name] = [round(value, 4) for value in found]
        return record


def train_lines(result: Json) -> Iterator[str]:
    """The result as a small table."""
    for name, runs in result["runs"].items():
        ratio = beside(result["ratio"].get(name))
        all_runs = ", ".join(f"{run['speed']:.1f}" for run in runs)
        yield f"{name:<12} {result[name]:>10.1f} {result['unit']}{ratio}   runs {all_runs}"
    for name, held in result["memory_gb"].items():
        yield f"{name:<12} {held:>10.2f} GB at most{beside(result['memory_ratio'].get(name))}"
    for name, phases in result.get("phases", {}).items():
        yield f"{name}: {phases['rollout_s']} s of an update sample, {phases['train_s']} s train"
    yield from missing_lines(result)
    setup, tokens = result["setup"], result["tokens"]
    sampled = f", of which {result['sampled']} sampled" if "sampled" in result else ""
    yield (
        f"{setup['model']}, {setup['dtype']}, {setup['threads']} threads, LoRA of rank "
        f"{setup['rank']}; tokens of an update: {', '.join(map(str, tokens))}{sampled}"
    )
    yield "; ".join(result["versions"].values())
