"""The work of `coa bench sft` and `coa bench rl`: the same training for every trainer, as JSON.

SFT: rows of chains that the expert team's episodes over the Atlas distil to, as token ids with a
label each, in batches of similar length. RL: questions of the Atlas, each answered several times by
text of a fixed length; the reward is a checksum of the text, so that no group is flat and all of it
is trained on. Only the lengths matter to a clock.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from coa.distill.stage import DistillSettings, run_distillation
from coa.engines.codec import Codec
from coa.engines.store import BASE, model_folder, resolve
from coa.environment import bound_for
from coa.errors import ConfigError
from coa.machine import cores, native_bfloat16
from coa.protocol import system_prompt
from coa.runs import Json
from coa.tasks import make_tasks
from coa.teachers.stage import Recording, run_recording
from coa.train.rows import Row, batches, row_maker

GRAMMAR = "mhqa"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The modules that get an adapter; those of `coa.train.plain`, which needs torch."""
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
class Work:
    """What a trainer is asked to do, and what it must say that it did."""

    asked: Json
    """To be sent to a trainer's process."""
    tokens: list[int]
    """Of the sequences trained on, by update."""


def sft_work(setup: SftSetup) -> Work:
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
    return Work(asked, [sum(len(row.ids) for row in batch) for batch in made])


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
        kept = run_distillation(path, Path(folder) / "out", given, how, workers=1).kept
    assert len(kept) >= count, (len(kept), count)
    return [row_maker(codec)(trajectory) for trajectory in kept[:count]]


def rl_work(setup: RlSetup) -> Work:
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
    return Work(asked, [setup.group_size * sum(prompts) + setup.sampled] * setup.updates)
