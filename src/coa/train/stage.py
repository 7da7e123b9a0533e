"""The fine-tuning stage: a recipe in, a run directory with an adapter out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coa.config import load_recipe, to_json
from coa.errors import ConfigError, MissingExtra, RecordError
from coa.runs import Run
from coa.train.settings import SftSettings
from coa.trajectory import Author, Trajectory, load_trajectories

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
    if source.is_dir():
        source = source / "trajectories.jsonl"
    return train_on(load_trajectories(source), recipe.sft, Path(recipe.out), note)


def train_on(
    trajectories: Sequence[Trajectory], settings: SftSettings, directory: Path, note: Note
) -> Path:
    """Train on trajectories in a run directory; continues what is there."""
    try:
        from coa.train.policy import Policy
        from coa.train.rows import build_row, fingerprint, total_tokens
        from coa.train.sft import Progress as State
        from coa.train.sft import make_policy, run_sft
    except ImportError as exc:
        raise MissingExtra("Training", "train") from exc
    from coa.progress import Progress

    if not trajectories:
        raise RecordError("there is no trajectory to train on.")
    policy: Policy = make_policy(settings)
    rows = []
    for trajectory in trajectories:
        prompt = trajectory.segments[0]
        assert prompt.author is Author.PROMPT, trajectory.task_id
        rows.append(
            build_row(
                trajectory,
                policy.codec.encode_prompt(prompt.text, trajectory.question),
                policy.codec.encode_with_offsets,
                err_weight=settings.err_weight,
                max_length=settings.max_length,
                decode=policy.codec.decode,
            )
        )
    tokens, trained = total_tokens(rows), sum(row.trained for row in rows)
    note(
        f"{len(rows)} rows, {tokens} tokens, {trained} trained; "
        f"{policy.trainable:,} parameters at rank {policy.rank}"
    )
    recipe, inputs = to_json(settings), {"rows": fingerprint(rows)}
    with Run.open(directory, "sft", recipe, inputs, settings.seed, base=policy.base_sha256) as run:
        adapter = directory / "adapter"
        if (adapter / "manifest.json").is_file():
            note(f"{adapter} is finished already")
            return adapter
        bar: Progress | None = None

        def on_update(state: State) -> None:
            nonlocal bar
            if bar is None:
                bar = Progress("sft update", state.updates, done=state.update - 1).__enter__()
            bar.advance(1, loss=state.loss, tokens_per_s=round(state.tokens_per_second))

        try:
            result = run_sft(settings, rows, directory, progress=on_update, policy=policy)
        finally:
            if bar is not None:
                bar.__exit__(None, None, None)
        run.timing({"event": "finished"})
    return result.adapter
