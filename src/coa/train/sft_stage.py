"""The fine-tuning stage: a recipe in, a run directory with an adapter out.

Before it costs anything one can look: `preview` shows the rows and their figures without loading
the model, `plan` tries two real parts and says what the whole run would take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coa.errors import ConfigError, GrammarError, MissingExtra, RecordError
from coa.grammar.load import GrammarBook
from coa.io.machine import memory_gb
from coa.io.progress import duration
from coa.io.runs import Json
from coa.io.settings import load_recipe
from coa.rollouts import known_grammars, remembered
from coa.train.settings import SftSettings
from coa.trajectory import Trajectory, load_trajectories

if TYPE_CHECKING:
    from rich.console import Console

    from coa.models.codec import Codec
    from coa.train.row_report import RowReport
    from coa.train.rows import Row


Note = Callable[[str], None]


@dataclass(frozen=True)
class SftRecipe:
    """What `coa sft` reads: trajectories in, where to write, and how to train."""

    trajectories: str = ""
    """Path of a trajectories.jsonl, or of the directory that `coa distill` wrote."""
    out: str = "runs/sft"
    sft: SftSettings = field(default_factory=SftSettings)


@dataclass(frozen=True)
class Chosen:
    """Trajectories and the rows made of them, in the same order."""

    trajectories: list[Trajectory]
    rows: list[Row]
    left_out: int = 0

    def notes(self, settings: SftSettings) -> Iterator[str]:
        """What a reader of the result should know of its rows."""
        limit = f"sft.max_length {settings.max_length}"
        if shortened := sum(row.cut for row in self.rows):
            lost = "1 row lost its end" if shortened == 1 else f"{shortened} rows lost their end"
            yield f"{lost}: longer than {limit}"
        if self.left_out:
            yield f"{self.left_out} left out: nothing to train within {limit}"


@dataclass(frozen=True)
class SftPlan:
    """What a run would take, by two of its parts."""

    report: RowReport
    parameters: int
    tokens: int
    """Of all epochs."""
    tokens_per_second: float
    seconds: float
    memory_gb: float
    """The most that this process has used so far, two parts and a step included."""
    disk_mb: float
    """Two checkpoints, one that is being written, and the result."""

    def to_json(self) -> Json:
        return {**vars(self), "report": self.report.to_json()}

    def lines(self) -> Iterator[str]:
        yield from self.report.lines()
        has = memory_gb()
        machine = f" of {has:.1f}" if has else ""
        yield (
            f"{self.parameters:,} parameters, {self.tokens:,} tokens in {self.report.updates} "
            f"updates, {self.tokens_per_second:.0f} tokens/s here"
        )
        yield (
            f"about {duration(self.seconds)} in one process, {self.memory_gb:.1f}{machine} GB of "
            f"memory, {self.disk_mb:.0f} MB on disk; nothing was written"
        )


def sft_from_recipe(path: Path | None, overrides: Sequence[str], note: Note) -> Path:
    """Train by recipe; returns the adapter's folder."""
    recipe, trajectories = _read(path, overrides)
    return train_on(trajectories, recipe.sft, Path(recipe.out), note)


def preview_from_recipe(path: Path, overrides: Sequence[str], out: Console | None) -> RowReport:
    """Figures of what would be trained on, printed with a few rows when `out` is given."""
    recipe, trajectories = _read(path, overrides)
    try:
        from coa.models.codec import codec_of
        from coa.train.row_report import print_preview, row_report
    except ImportError as exc:
        raise MissingExtra("Training", "train") from exc

    codec = codec_of(recipe.sft.model)
    chosen = choose(trajectories, recipe.sft, codec)
    report = row_report(chosen.trajectories, chosen.rows, recipe.sft, codec)
    if out is not None:
        print_preview(out, chosen.trajectories, chosen.rows, codec)
        for line in (*report.lines(), *chosen.notes(recipe.sft)):
            out.print(line)
    return report


def plan_from_recipe(path: Path, overrides: Sequence[str]) -> SftPlan:
    """What the run would take, by trying two of its parts; writes nothing."""
    recipe, trajectories = _read(path, overrides)
    try:
        from coa.train.row_report import row_report
        from coa.train.sft import make_policy, rehearse
    except ImportError as exc:
        raise MissingExtra("Training", "train") from exc

    settings = recipe.sft
    policy = make_policy(settings)
    chosen = choose(trajectories, settings, policy.codec)
    report = row_report(chosen.trajectories, chosen.rows, settings, policy.codec)
    tried = rehearse(settings, chosen.rows, policy)
    tokens = report.tokens * settings.epochs
    seconds = tokens * tried.seconds_per_token + report.updates * tried.seconds_per_step
    return SftPlan(
        report=report,
        parameters=policy.trainable,
        tokens=tokens,
        tokens_per_second=round(tokens / seconds, 1),
        seconds=round(seconds, 3),
        memory_gb=round(tried.peak_bytes / 1e9, 2),
        # float32: the parameters, and in a checkpoint two moments of each
        disk_mb=round((3 * 3 + 1) * 4 * policy.trainable / 1e6, 1),
    )


def train_on(
    trajectories: Sequence[Trajectory], settings: SftSettings, directory: Path, note: Note
) -> Path:
    """Train on trajectories in a run directory; continues what is there."""
    try:
        from coa.train.processes import Processes
        from coa.train.rows import total_tokens
        from coa.train.sft import UpdateReport, make_policy, run_sft
    except ImportError as exc:
        raise MissingExtra("Training", "train") from exc
    from coa.io.progress import Progress

    processes = Processes.open()
    if not processes.main:
        note = _silent
    policy = make_policy(settings, note)
    chosen = choose(trajectories, settings, policy.codec)
    tokens, trained = total_tokens(chosen.rows), sum(row.trained for row in chosen.rows)
    note(
        f"{len(chosen.rows)} rows, {tokens} tokens, {trained} trained; "
        f"{policy.trainable:,} parameters ({policy.kind})"
    )
    for line in chosen.notes(settings):
        note(line)
    bar: Progress | None = None

    def on_update(report: UpdateReport) -> None:
        nonlocal bar
        if bar is None:
            bar = Progress("sft update", report.updates, done=report.update - 1).__enter__()
        bar.advance(1, loss=report.loss, tokens_per_s=round(report.tokens_per_second))

    try:
        result = run_sft(
            settings,
            chosen.rows,
            directory,
            on_update=on_update,
            policy=policy,
            manifest=protocol_of(chosen.trajectories, settings.model),
            processes=processes,
        )
    finally:
        if bar is not None:
            bar.__exit__(None, None, None)
    if not result.trained:
        note(f"{result.adapter} is finished already")
    return result.adapter


def _silent(line: str) -> None:
    """For processes that are not the one that speaks."""


def choose(trajectories: Sequence[Trajectory], settings: SftSettings, codec: Codec) -> Chosen:
    """The rows to train on. A trajectory that cannot be one is an error, or left out if asked."""
    from coa.train.rows import TooLong, row_maker

    if not trajectories:
        raise RecordError("there is no trajectory to train on.")
    make = row_maker(
        codec,
        err_weight=settings.err_weight,
        observation_weight=settings.observation_weight,
        max_length=settings.max_length,
    )
    kept: list[Trajectory] = []
    rows: list[Row] = []
    refused: list[TooLong] = []
    for trajectory in trajectories:
        try:
            rows.append(make(trajectory))
            kept.append(trajectory)
        except TooLong as wrong:
            refused.append(wrong)
    if refused and not (settings.skip_too_long and rows):
        more = f" {len(refused) - 1} more are as long." if len(refused) > 1 else ""
        raise TooLong(f"{refused[0]}{more} sft.skip_too_long = true leaves such tasks out.")
    return Chosen(kept, rows, len(refused))


def protocol_of(trajectories: Sequence[Trajectory], start: str = "") -> Json:
    """Grammar and prompt that the adapter will know, one each or a list of several. A grammar that
    its start was trained on counts: it is not forgotten because the rows are of another."""
    grammars = {*(trajectory.grammar for trajectory in trajectories), *remembered("grammar", start)}
    found = {
        "grammar": sorted(grammars),
        "prompt": sorted({trajectory.prompt for trajectory in trajectories}),
    }
    made: Json = {name: held[0] if len(held) == 1 else held for name, held in found.items()}
    said = (each.meta.get("environment") or each.meta.get("set") for each in trajectories)
    homes = {str(name) for name in said if name}
    if homes := homes | {*remembered("environments", start)}:
        made["environments"] = sorted(homes)
    return made | {"grammars": known_grammars(start) | book_of(trajectories).to_json()}


def book_of(trajectories: Sequence[Trajectory], where: str = "the dataset") -> GrammarBook:
    """The grammars that trajectories were written in, of which no two have one name."""
    book = GrammarBook()
    seen = dict.fromkeys((t.grammar, t.grammar_id, t.book) for t in trajectories)
    for name, fingerprint, held in seen:
        try:
            book.add((held or GrammarBook()).find(name, fingerprint))
        except GrammarError:  # somebody else's file: what is trained does not depend on it
            continue
    book.check_names(where)
    return book


def _read(path: Path | None, overrides: Sequence[str]) -> tuple[SftRecipe, list[Trajectory]]:
    recipe = load_recipe(path, overrides, SftRecipe)
    if not recipe.trajectories:
        raise ConfigError(f"{path}: trajectories is not set; give the file to train on.")
    trajectories = load_trajectories(Path(recipe.trajectories))
    book_of(trajectories, recipe.trajectories)
    return recipe, trajectories
