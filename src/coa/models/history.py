"""How an adapter came to be: every stage that trained it, from its base on, and what was measured.

Stages are found by following what each was started from, and the hashes along the way have to
agree, so that the history is of these weights and of no others. Directories of a machine are left
out: they mean nothing elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from coa.engines.lora import MANIFEST, adapter_hash
from coa.engines.store import resolve
from coa.errors import ModelError, UsageError
from coa.paths import portable
from coa.runs import Json

_KEPT = ("stage", "recipe", "inputs", "seed", "packages", "python", "commit")
_RUN_ABOVE = 3
"""A run is at most so far above an adapter: RUN/checkpoints/update-N/adapter."""
_FIGURES = (
    *("n", "k", "accuracy", "ci95", "f1", "pass_at", "tokens_per_task", "tokens_per_solved"),
    *("tool_calls_per_task", "malformed_per_task", "truncated", "by_phrasing_heldout"),
)


def read_object(path: Path, what: str) -> Json:
    """A JSON object from a file, or one line that says what was expected."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or "not JSON"
        raise UsageError(f"{path}: cannot read it ({reason}). Expected {what}.") from exc
    if not isinstance(found, dict):
        raise UsageError(f"{path}: found a {type(found).__name__}. Expected {what}.")
    return found


def stages_of(adapter: Path) -> list[Json]:
    """The stages that made an adapter, the first one first."""
    manifest = read_object(adapter / MANIFEST, "an adapter that coa sft or coa rl wrote")
    if "stages" in manifest:  # it was packed, with its history
        return list(manifest["stages"])
    run = _run_of(adapter, manifest.get("stage"))
    stage = {key: run[key] for key in _KEPT if key in run}
    stage |= {key: manifest[key] for key in ("updates", "loss") if key in manifest}
    return [*_before(adapter, manifest, run), portable(stage)]


def _run_of(adapter: Path, stage: str | None) -> Json:
    """The manifest of the run directory that an adapter lies in."""
    for folder in adapter.resolve().parents[:_RUN_ABOVE]:
        if (folder / MANIFEST).is_file():
            found = read_object(folder / MANIFEST, "the manifest of a run")
            if found.get("stage") == stage:
                return found
    raise ModelError(
        f"{adapter}: no run directory around it, so nothing says how it was trained. "
        "Pack it where coa sft or coa rl wrote it: RUN/adapter."
    )


def _before(adapter: Path, manifest: Json, run: Json) -> list[Json]:
    started = str((manifest.get("settings") or {}).get("model", ""))
    try:
        source = resolve(started)
    except ModelError as exc:
        raise ModelError(
            f"{adapter}: it was started from {started!r}, which is not here, so its history is "
            "not known. Pack it in the directory in which it was trained."
        ) from exc
    if source.adapter is None:
        return []
    wanted = (run.get("inputs") or {}).get("adapter")
    if wanted is not None and wanted != adapter_hash(source.adapter):
        raise ModelError(
            f"{adapter}: it was started from an adapter with hash {str(wanted)[:12]!r}, and "
            f"{source.adapter} has changed since. Its history is not known."
        )
    return stages_of(source.adapter)


def read_results(
    evaluations: Mapping[str, Path], hashes: Mapping[str, str], base: str
) -> list[Json]:
    """One row for each run of `coa eval`; `hashes` says what to call the adapter it measured, and
    `base` is the hash of the base under it."""
    rows = []
    for name, folder in evaluations.items():
        summary = read_object(folder / "summary.json", "a finished run of coa eval")
        manifest = read_object(folder / MANIFEST, "a run of coa eval")
        inputs = manifest.get("inputs") or {}
        found = inputs.get("adapter")
        alone = found is None and inputs.get("base") == base
        weights = "base alone" if alone else "other weights"
        row: Json = {"name": name, "weights": hashes.get(str(found), weights)}
        row |= {"model": summary.get("model"), "tasks": summary.get("tasks")}
        row |= {"tasks_fingerprint": inputs.get("tasks")}
        row |= {key: summary[key] for key in _FIGURES if key in summary}
        rows.append(portable(row | {"settings": manifest.get("recipe") or {}}))
    return rows
