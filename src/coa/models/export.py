"""A model for other programs: one folder for transformers, or one GGUF file for llama.cpp.

The adapter is merged in float32 on exactly the base it was trained on, and rounded once, to the
type that is written. The folder says how to ask the model: what it was trained on is its prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coa.engines.lora import MANIFEST, adapter_hash
from coa.engines.store import BASE, OURS, ModelSource, base_hash, model_folder, resolve, trained_on
from coa.errors import MissingExtra, ModelError, UsageError, did_you_mean
from coa.models.beside import refuse_to_overwrite, whole_folder
from coa.models.card import HUB_BASE
from coa.models.prompting import how_to_prompt
from coa.runs import Json

TYPES = {
    "hf": {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0},
    "gguf": {"float16": 2.0, "bfloat16": 2.0, "float32": 4.0, "q8_0": 34 / 32},
}
"""Format to the types it can hold, the default first, with their bytes for one weight."""
_SHORT = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
Note = Callable[[str], None]


def export_model(ref: str, out: Path, to: str = "hf", dtype: str = "", note: Note = print) -> Json:
    """Write the merged model of `ref` into the new folder `out`; says what is in it."""
    dtype = _check(to, dtype)
    source = resolve(ref)
    if source.kind != "local":
        raise ModelError(
            f"{ref!r} has no weights here. Export a local model: {OURS}, {BASE}[+ADAPTER_DIR] or "
            "hf:ID_OR_PATH[+ADAPTER_DIR]."
        )
    refuse_to_overwrite(out)
    try:
        from coa.models.gguf_file import QUANTS, check_gguf, write_gguf
        from coa.models.merged import Merged, refuse_quantised, write_hf
    except ImportError as exc:
        raise MissingExtra("Exporting a model", "train") from exc
    folder = model_folder(source)
    refuse_quantised(folder)
    if to == "gguf":
        check_gguf(folder)
    merged = Merged(source, folder)
    size = f"about {merged.count() * TYPES[to][dtype] / 1e6:,.1f} MB"
    note(f"writing {ref} as {dtype} to {out}, {size}")
    with whole_folder(out, f"the model needs {size}") as target:
        if to == "hf":
            write_hf(target, folder, merged, dtype)
        else:
            path = target / f"{_title(ref)}-{QUANTS[dtype].lower()}.gguf"
            write_gguf(path, folder, merged.shapes, merged.take, dtype, _title(ref))
        merged.take.check_all_used()
        _describe(target, source, folder, to, dtype)
        files = sorted(path.name for path in target.iterdir())
    return {"model": ref, "to": to, "dtype": dtype, "out": str(out), "files": files}


def _check(to: str, dtype: str) -> str:
    """The type to write, after a format and a type that exist."""
    if to not in TYPES:
        raise UsageError(f"--to {to!r}: unknown format.{did_you_mean(to, TYPES)}")
    if not dtype:
        return next(iter(TYPES[to]))
    chosen = _SHORT.get(dtype, dtype)
    if chosen not in TYPES[to]:
        raise UsageError(f"--dtype {dtype!r}: expected one of {', '.join(TYPES[to])} for {to}.")
    return chosen


def _title(ref: str) -> str:
    return ref if ref in (OURS, BASE) else "model"


def _describe(target: Path, source: ModelSource, folder: Path, to: str, dtype: str) -> None:
    """What it is and how to ask it: a manifest for coa, a README for people."""
    from coa.train.folders import write_json

    known = trained_on(source.ref)
    record: Json = {"schema": 1, "base": source.base, "base_sha256": base_hash(folder)}
    record |= {"full": True} if to == "hf" else {}
    if source.adapter is not None:
        record["adapter_sha256"] = adapter_hash(source.adapter)
    write_json(target / MANIFEST, record | {"dtype": dtype} | known)
    gguf = next((path.name for path in target.glob("*.gguf")), "")
    terms = f"Apache-2.0; made from {HUB_BASE} (Apache-2.0)." if source.base == BASE else ""
    text = how_to_prompt(_title(source.ref), folder, known, gguf, terms)
    (target / "README.md").write_text(text, encoding="utf-8")
