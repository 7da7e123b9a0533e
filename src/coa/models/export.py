"""Models that leave: an adapter packed to be shipped, or a merged model for other programs.

`pack` makes a folder of an adapter: half the bytes, its history, its results and a model card that
is written from the files beside it and from nothing else. Factors are rounded to float16: their
values are small, and of two types of 16 bits it is the one with more digits.

`export_model` writes one folder for transformers, or one GGUF file for llama.cpp. The adapter is
merged in float32 on exactly the base it was trained on, and rounded once, to the type that is
written. The folder says how to ask the model: what it was trained on is its prompt.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from coa.engines.llama import MergedTensors
from coa.errors import GrammarError, ModelError, UsageError, did_you_mean
from coa.grammar import Block, Grammar, PromptKind, load_grammar, system_prompt
from coa.io.download import writing_to
from coa.io.files import open_to_others, portable, refuse_to_overwrite, whole_folder
from coa.io.runs import Json
from coa.io.tables import markdown_table
from coa.models.bases import BASE, BASES
from coa.models.codec import Codec
from coa.models.gguf_file import QUANTS, check_gguf, write_gguf
from coa.models.references import (
    OURS,
    ModelSource,
    listed,
    model_folder,
    resolve,
    trained_on,
)
from coa.models.weights import (
    CONFIG,
    MANIFEST,
    WEIGHTS,
    adapter_hash,
    base_hash,
    check_range,
    is_whole,
    load_tensors,
    read_adapter,
    read_config,
    read_json,
    weight_files,
    write_json,
)
from coa.train.policy import write_model

CARD, RESULTS, ABOUT, RECIPE = "README.md", "results.json", "about.md", "recipe.toml"
TYPES = {
    "hf": {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0},
    "gguf": {"float16": 2.0, "bfloat16": 2.0, "float32": 4.0, "q8_0": 34 / 32},
}
"""Format to the types it can hold, the default first, with their bytes for one weight."""
_ELSEWHERE = "give another folder with --out"
_TRAINED_HERE = "an adapter that coa sft or coa rl wrote"
Note = Callable[[str], None]


# ------------------------------------------------------------------------------------------------
# Packing an adapter.
# ------------------------------------------------------------------------------------------------


_WRITTEN = {CONFIG, MANIFEST, WEIGHTS, CARD, RESULTS, ABOUT, RECIPE}
_PACKED = ("schema", "base", "base_sha256", "rank", "alpha", "trainable", "grammar", "prompt")
_KEPT = ("stage", "recipe", "inputs", "seed", "packages", "python", "commit")
_RUN_ABOVE = 3
"""A run is at most so far above an adapter: RUN/checkpoints/update-N/adapter."""
_FIGURES = (
    *("n", "k", "accuracy", "ci95", "f1", "pass_at", "tokens_per_task", "tokens_per_solved"),
    *("tool_calls_per_task", "malformed_per_task", "truncated"),
)
_HELD_OUT = re.compile(r"by_(\w+)_heldout")
"""A group of a summary by whether something was held out of training."""


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
    manifest = read_json(adapter / MANIFEST, _TRAINED_HERE)
    settings = read_json(adapter / CONFIG, "a peft adapter's settings")
    if out.resolve() == adapter.resolve():
        raise UsageError(f"{out}: is the adapter to be packed. Give another folder with --out.")
    _check_packed(out)
    stages = stages_of(adapter)
    halves = {}
    for title, tensor in sorted(load_tensors(adapter / WEIGHTS).items()):
        check_range(adapter, title, tensor, "float16")
        halves[title] = tensor.to(torch.float16).contiguous()
    for given in (recipe, about):
        if given is not None and not given.is_file():
            raise UsageError(f"{given}: no such file.")
    room = "an adapter needs about 20 MB"
    with writing_to(out, room, _ELSEWHERE), whole_folder(out, replaces=True) as folder:
        _check_packed(out)  # again: one that was killed may have left a folder to put back
        save_file(halves, folder / WEIGHTS, metadata={"format": "pt"})
        open_to_others(folder / WEIGHTS)
        packed = adapter_hash(folder)
        record: Json = {"name": name or out.resolve().name}
        record |= {key: manifest[key] for key in _PACKED if key in manifest}
        record |= {"dtype": "float16", "adapter_sha256": packed, "stages": stages}
        write_json(folder / MANIFEST, portable(record))
        write_json(folder / CONFIG, portable(settings))
        if evaluations:
            hashes = {adapter_hash(adapter): "these, before rounding", packed: "these"}
            rows = read_results(evaluations, hashes, str(manifest["base_sha256"]))
            write_json(folder / RESULTS, {"schema": 1, "rows": rows})
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
    if names and "stages" not in read_json(out / MANIFEST, "a packed folder's manifest"):
        raise UsageError(f"{out}: was not packed, {expected}. Give another one with --out.")


def stages_of(adapter: Path) -> list[Json]:
    """The stages that made an adapter, the first one first."""
    manifest = read_json(adapter / MANIFEST, _TRAINED_HERE)
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
            found = read_json(folder / MANIFEST, "the manifest of a run")
            if found.get("stage") == stage:
                return found
    raise ModelError(
        f"{adapter}: no run directory around it, so nothing says how it was trained. "
        "Pack it where coa sft or coa rl wrote it: RUN/adapter."
    )


def _before(adapter: Path, manifest: Json, run: Json) -> list[Json]:
    """The stages of the adapter that this one was started from."""
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
        summary = read_json(folder / "summary.json", "a finished run of coa eval")
        manifest = read_json(folder / MANIFEST, "a run of coa eval")
        inputs = manifest.get("inputs") or {}
        found = inputs.get("adapter")
        alone = found is None and inputs.get("base") == base
        row: Json = {
            "name": name,
            "weights": hashes.get(str(found), "base alone" if alone else "other weights"),
            "model": summary.get("model"),
            "tasks": summary.get("tasks"),
            "tasks_fingerprint": inputs.get("tasks"),
        }
        row |= {k: v for k, v in summary.items() if k in _FIGURES or _HELD_OUT.fullmatch(k)}
        rows.append(portable(row | {"settings": manifest.get("recipe") or {}}))
    return rows


# ------------------------------------------------------------------------------------------------
# The model card: README.md of a packed adapter, in the form that the Hugging Face hub reads.
# ------------------------------------------------------------------------------------------------


_NEUTRAL: Json = {"k": 1, "temperature": 0.0, "seed": 0, "observations": "real", "malformed": 2}
_NEUTRAL["prompt"] = "compact"
_OPTIONS = (
    *("prompt", "reward", "k", "temperature", "observations", "turns", "turn_tokens", "malformed"),
    *("context", "constrain", "deterministic", "weights", "seed"),
)
"""Settings of `coa eval` that change its result, as they are in a run's manifest. The grammars are
those of the tasks and of the adapter."""
_MEASURED = (
    *("measured", "weights", "tasks", "n", "accuracy", "95% interval", "tokens a task", "calls"),
)


def _rendered(_template: str, **values: Any) -> str:
    """The text that a template beside this module makes of values."""
    from jinja2 import Environment

    templates = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    templates.filters["quoted"] = "`{}`".format
    template = Path(__file__).with_name(f"{_template}.md.jinja").read_text(encoding="utf-8")
    return templates.from_string(template).render(**values)


def model_card(folder: Path) -> str:
    """The card of a packed folder as one Markdown text."""
    manifest = read_json(folder / MANIFEST, "a folder that coa model pack wrote")
    results, about = folder / RESULTS, folder / ABOUT
    rows = read_json(results, "results of coa model pack")["rows"] if results.is_file() else []
    return _rendered(
        "packed",
        **{key: manifest[key] for key in ("name", "rank", "base", "trainable", "dtype")},
        base_sha256=manifest["base_sha256"],
        grammars=listed(manifest.get("grammar")),
        known=BASES.get(manifest["base"]),
        ours=OURS,
        results=_results(rows),
        commands=dict.fromkeys(_command(manifest, row) for row in rows),
        training=_training(manifest["stages"]),
        has_recipe=(folder / RECIPE).is_file(),
        about=about.read_text(encoding="utf-8").strip() if about.is_file() else "",
    )


def _results(rows: list[Json]) -> list[str]:
    shown = []
    for row in rows:
        shown.append(_figures(row["name"], row, row))
        for key, groups in row.items():
            if (found := _HELD_OUT.fullmatch(key)) and (heldout := (groups or {}).get("True")):
                shown.append(_figures(f"{row['name']}: {found[1]}s never trained on", row, heldout))
    return markdown_table(_MEASURED, shown, "lllrrlrr") if shown else []


def _figures(name: str, row: Json, figures: Json) -> tuple[object, ...]:
    low, high = figures.get("ci95") or (None, None)
    reward = (row.get("settings") or {}).get("reward", "exact")
    return (
        name if reward == "exact" else f"{name} (mean of `{reward}`)",
        row["weights"],
        row.get("tasks"),
        figures.get("n", 0),
        _percent(figures.get("accuracy")),
        f"{_percent(low)} to {_percent(high)}",
        figures.get("tokens_per_task", ""),
        figures.get("tool_calls_per_task", ""),
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _command(manifest: Json, row: Json) -> str:
    """The call of `coa eval` that a row comes from, as far as its manifest tells."""
    own = str(row["weights"]).startswith("these") and manifest["name"] == OURS
    parts = ["coa eval", f"--model {OURS if own else row.get('model')}"]
    parts += [f"--tasks {row.get('tasks')}", "--out DIR"]
    for key in _OPTIONS:
        value = (row.get("settings") or {}).get(key)
        if value in (None, False) or value == _NEUTRAL.get(key):
            continue
        flag = f"--{key.replace('_', '-')}"
        parts.append(flag if value is True else f"{flag} {value}")
    return " ".join(parts)


def _training(stages: list[Json]) -> list[str]:
    head = ("stage", "started from", "updates", "learning rate", "seed", "data", "commit")
    rows = []
    for place, stage in enumerate(stages):
        recipe = stage.get("recipe") or {}
        name = str(stage.get("stage"))
        inner = recipe.get("sft" if name == "improve" else name)  # which trains by that table
        settings = inner if isinstance(inner, dict) else recipe
        inputs = stage.get("inputs") or {}
        prints = (f"{key} `{str(value)[:12]}`" for key, value in inputs.items() if key != "adapter")
        started = "the stage above" if place else f"`{settings.get('model')}`"
        commit = str(stage.get("commit") or "not known")[:12]
        numbers = (stage.get("updates", ""), settings.get("lr", ""), stage.get("seed"))
        rows.append((stage.get("stage"), started, *map(str, numbers), ", ".join(prints), commit))
    return markdown_table(head, rows, "llrrrll")


# ------------------------------------------------------------------------------------------------
# Exporting a merged model.
# ------------------------------------------------------------------------------------------------


def export_model(ref: str, out: Path, to: str = "hf", dtype: str = "", note: Note = print) -> Json:
    """Write the merged model of `ref` into the new folder `out`; says what is in it."""
    if to not in TYPES:
        raise UsageError(f"--to {to!r}: unknown format.{did_you_mean(to, TYPES)}")
    dtype = dtype or next(iter(TYPES[to]))
    if dtype not in TYPES[to]:
        raise UsageError(f"--dtype {dtype!r}: expected one of {', '.join(TYPES[to])} for {to}.")
    source = resolve(ref)
    if source.kind != "local":
        raise ModelError(
            f"{ref!r} has no weights here. Export a local model: {OURS}, {BASE}[+ADAPTER_DIR] or "
            "hf:ID_OR_PATH[+ADAPTER_DIR]."
        )
    refuse_to_overwrite(out)
    folder = model_folder(source)
    _refuse_quantised(folder)
    if to == "gguf":
        check_gguf(folder)
    merged = Merged(source, folder)
    weights = sum(map(math.prod, merged.shapes.values()))
    size = f"about {weights * TYPES[to][dtype] / 1e6:,.1f} MB"
    note(f"writing {ref} as {dtype} to {out}, {size}")
    title, gguf = ref if ref in (OURS, *BASES) else "model", ""
    room = f"the model needs {size}"
    with writing_to(out, room, _ELSEWHERE), whole_folder(out) as target:
        if to == "hf":
            _write_hf(target, folder, merged, dtype)
        else:
            gguf = f"{title}-{QUANTS[dtype].lower()}.gguf"
            write_gguf(target / gguf, folder, merged.shapes, merged.take, dtype, title)
        merged.take.check_all_used()
        known, base = trained_on(ref), BASES.get(source.base)
        record: Json = {"schema": 1, "base": source.base, "base_sha256": base_hash(folder)}
        record |= {"full": True} if to == "hf" else {}
        record |= {"adapter_sha256": adapter_hash(source.adapter)} if source.adapter else {}
        write_json(target / MANIFEST, record | {"dtype": dtype} | known)
        terms = f"Apache-2.0; made from {base.hub} (Apache-2.0), a 4-bit copy." if base else ""
        text = how_to_prompt(title, folder, known, gguf, terms)
        (target / CARD).write_text(text, encoding="utf-8")
        files = sorted(path.name for path in target.iterdir())
    return {"model": ref, "to": to, "dtype": dtype, "out": str(out), "files": files}


def _refuse_quantised(folder: Path) -> None:
    """Numbers that mean something with their scales alone can be neither merged nor rounded."""
    quantised = read_config(folder).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ModelError(
            f"{folder}: found quantised weights (quantization_config in config.json"
            f"{f', {method!r}' if method else ''}), expected plain ones. "
            "Export the model that it was made from."
        )


class Merged:
    """The tensors of a model, merged in float32, read one at a time."""

    def __init__(self, source: ModelSource, folder: Path) -> None:
        adapter = read_adapter(source.adapter, base_hash(folder)) if source.adapter else None
        self.take = MergedTensors(folder, adapter, torch.float32)
        self.shapes: dict[str, list[int]] = {}
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                self.shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        if read_config(folder).get("tie_word_embeddings"):
            self.shapes.pop("lm_head.weight", None)  # the embedding itself


def _write_hf(target: Path, folder: Path, merged: Merged, dtype: str) -> None:
    """A folder that plain transformers loads, with settings that end a turn where we end it."""
    tensors = {}
    for name in merged.shapes:
        tensor = tensors[name] = merged.take(name)
        if tensor.is_floating_point():
            check_range(folder, name, tensor, dtype)
            tensors[name] = tensor.to(getattr(torch, dtype))
    write_model(target, folder, tensors)
    config, beside = read_config(folder), folder / "generation_config.json"
    settings = read_json(beside) if beside.is_file() else {}
    settings.pop("_from_model_config", None)  # else transformers would make it anew
    ends = set(Codec.from_folder(folder).end_ids())
    for said in (settings.get("eos_token_id"), config.get("eos_token_id")):
        ends.update(said if isinstance(said, list) else [] if said is None else [said])
    for key in ("bos_token_id", "pad_token_id"):
        if config.get(key) is not None:
            settings.setdefault(key, config[key])
    write_json(target / "generation_config.json", settings | {"eos_token_id": sorted(ends)})


# ------------------------------------------------------------------------------------------------
# How to ask an exported model without coa: the README of an export.
#
# A model that was trained on a grammar answers one prompt well: that one. Here it stands word for
# word, with the strings at which its turn ends and what to append then.
# ------------------------------------------------------------------------------------------------


_QUESTION = "What is the capital of the country where Osaka is located?"


def how_to_prompt(title: str, folder: Path, known: Json, gguf: str = "", terms: str = "") -> str:
    """The README; `known` is what `trained_on` says, `gguf` the name of a file, if it is one, and
    `terms` under which licence the weights are, where that is known."""
    grammars = {name: _preset(name) for name in listed(known.get("grammar"))}
    prompts = listed(known.get("prompt")) or ["compact"]
    kinds: list[PromptKind] = ["full" if each == "full" else "compact" for each in prompts]
    first, example = next(filter(None, grammars.values()), None), ""
    if first is not None:
        codec = Codec.from_folder(folder)
        ids = codec.encode_prompt(system_prompt(first, kinds[0]), _QUESTION)
        example = codec.tokenizer.decode(ids, skip_special_tokens=False).removesuffix("\n")
    return _rendered(
        "exported",
        title=title,
        gguf=gguf,
        terms=terms,
        question=_QUESTION,
        options=_options(grammars, kinds[0]),
        grammars=grammars,
        kinds=kinds,
        system_prompt=system_prompt,
        observed=lambda grammar: grammar.render([Block(grammar.observation, "TEXT")]),
        example=example,
    )


def _preset(name: str) -> Grammar | None:
    """None for a grammar that was read from a file, which is not known here."""
    try:
        return load_grammar(name)
    except GrammarError:
        return None


def _options(grammars: Mapping[str, Grammar | None], kind: PromptKind) -> str:
    """How to ask for what the model was trained on, which a server does not tell; else nothing."""
    if not grammars:
        return ""
    usual = next(iter(import_module("coa.environments").BY_GRAMMAR))
    name = usual if usual in grammars else next(iter(grammars))
    return f" --grammar {name if grammars[name] else 'FILE.toml'} --prompt {kind}"
