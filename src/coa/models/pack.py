"""A trained adapter as a folder to ship: half the bytes, its history, its results and its card.

Factors are rounded to float16: their values are small, and of two types of 16 bits it is the one
with more digits. The engine computes with what they stand for in float32, as before.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coa.engines.lora import CONFIG, MANIFEST, WEIGHTS, adapter_hash, is_whole, load_tensors
from coa.errors import ModelError, UsageError
from coa.models.beside import refuse_to_overwrite, whole_folder
from coa.models.card import ABOUT, CARD, RECIPE, RESULTS, model_card, write_results
from coa.models.history import read_object, read_results, stages_of
from coa.paths import portable
from coa.runs import Json
from coa.whole_files import open_to_others

_WRITTEN = {CONFIG, MANIFEST, WEIGHTS, CARD, RESULTS, ABOUT, RECIPE}
_KEPT = ("schema", "base", "base_sha256", "rank", "alpha", "trainable", "grammar", "prompt")


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
        record |= {key: manifest[key] for key in _KEPT if key in manifest}
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

    from coa.models.merged import check_range

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
    from coa.train.folders import write_json

    write_json(path, record)
