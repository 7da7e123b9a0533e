"""The fine-tuning stage: a recipe in, a run directory with an adapter out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coa.config import load_recipe
from coa.errors import ConfigError, MissingExtra, RecordError
from coa.train.settings import SftSettings
from coa.trajectory import Trajectory, load_trajectories

if TYPE_CHECKING:
    from coa.train.policy import Policy
    from coa.train.rows import Row

Note = Callable[[str], None]


@dataclass(frozen=True)
class SftRecipe:
    """What `coa sft` reads: trajectories in, where to write, and how to train."""

    trajectories: str = ""
    """Path of a trajectories.jsonl, or of the directory that `coa distill` wrote."""
    out: str = "runs/sft"
    sft: SftSettings = field(default_factory=SftSettings)


def sft_from_recipe(path: Path, overrides: Sequence[str], note: Note) -> Path:
    """Train by recipe; returns the adapter's folder."""
    recipe = load_recipe(path, overrides, SftRecipe)
    if not recipe.trajectories:
        raise ConfigError(f"{path}: trajectories is not set; give the file to train on.")
    source = Path(recipe.trajectories)
    return train_on(load_trajectories(source), recipe.sft, Path(recipe.out), note)


def train_on(
    trajectories: Sequence[Trajectory], settings: SftSettings, directory: Path, note: Note
) -> Path:
    """Train on trajectories in a run directory; continues what is there."""
    try:
        from coa.train.rows import total_tokens
        from coa.train.sft import UpdateReport, make_policy, run_sft
    except ImportError as exc:
        raise MissingExtra("Training", "train") from exc
    from coa.progress import Progress

    if not trajectories:
        raise RecordError("there is no trajectory to train on.")
    policy = make_policy(settings)
    rows = _rows(trajectories, settings, policy)
    tokens, trained = total_tokens(rows), sum(row.trained for row in rows)
    note(
        f"{len(rows)} rows, {tokens} tokens, {trained} trained; "
        f"{policy.trainable:,} parameters at rank {policy.rank}"
    )
    if shortened := sum(row.cut for row in rows):
        lost = "1 row lost its end" if shortened == 1 else f"{shortened} rows lost their end"
        note(f"{lost}: longer than sft.max_length {settings.max_length}")
    bar: Progress | None = None

    def on_update(report: UpdateReport) -> None:
        nonlocal bar
        if bar is None:
            bar = Progress("sft update", report.updates, done=report.update - 1).__enter__()
        bar.advance(1, loss=report.loss, tokens_per_s=round(report.tokens_per_second))

    try:
        result = run_sft(
            settings,
            rows,
            directory,
            on_update=on_update,
            policy=policy,
            manifest=protocol_of(trajectories),
        )
    finally:
        if bar is not None:
            bar.__exit__(None, None, None)
    if not result.trained:
        note(f"{result.adapter} is finished already")
    return result.adapter


def _rows(trajectories: Sequence[Trajectory], settings: SftSettings, policy: Policy) -> list[Row]:
    from coa.train.rows import row_maker

    make = row_maker(policy.codec, err_weight=settings.err_weight, max_length=settings.max_length)
    return [make(trajectory) for trajectory in trajectories]


def protocol_of(trajectories: Sequence[Trajectory]) -> dict[str, str | list[str]]:
    """Grammar and prompt that the adapter will know: one each, or a list of several."""
    found = {
        "grammar": sorted({trajectory.grammar for trajectory in trajectories}),
        "prompt": sorted({trajectory.prompt for trajectory in trajectories}),
    }
    return {name: held[0] if len(held) == 1 else held for name, held in found.items()}
