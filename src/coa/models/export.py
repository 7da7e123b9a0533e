"""A model for other programs: one folder for transformers, or one GGUF file for llama.cpp.

The adapter is merged in float32 on exactly the base it was trained on, and rounded once, to the
type that is written. The folder says how to ask the model: what it was trained on is its prompt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from coa.engines.llama import MergedTensors
from coa.errors import GrammarError, MissingExtra, ModelError, UsageError, did_you_mean
from coa.grammar import Block, Grammar, PromptKind, load_grammar, system_prompt
from coa.io.runs import Json
from coa.models.adapters import MANIFEST, adapter_hash, read_adapter
from coa.models.card import HUB_BASE, refuse_to_overwrite, whole_folder
from coa.models.codec import Codec
from coa.models.references import (
    BASE,
    OURS,
    ModelSource,
    base_hash,
    listed,
    model_folder,
    resolve,
    trained_on,
)
from coa.models.shape import read_config
from coa.models.weights import weight_files
from coa.train.policy import write_json, write_model

_HALVED = {"float16": 1, "q8_0": 127}
"""Types that keep a value in float16, and what it is divided by: a block of q8_0 keeps a step."""


EXPORT_ADVICE = " Export with --dtype bfloat16 or float32."


def refuse_quantised(folder: Path) -> None:
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
        adapter = None
        if source.adapter is not None:
            adapter = read_adapter(source.adapter, base_hash(folder))
        self.take = MergedTensors(folder, adapter, torch.float32)
        self.shapes: dict[str, list[int]] = {}
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                self.shapes |= {name: file.get_slice(name).get_shape() for name in names}
        if read_config(folder).get("tie_word_embeddings"):
            self.shapes.pop("lm_head.weight", None)  # the embedding itself

    def count(self) -> int:
        """Weights in all tensors."""
        return sum(map(math.prod, self.shapes.values()))


def check_range(
    folder: Path, name: str, tensor: Tensor, dtype: str, advice: str = EXPORT_ADVICE
) -> None:
    """A value that is too large for the type it is written in is an error, not an infinity."""
    if dtype not in _HALVED:
        return
    largest = tensor.abs().max()
    if not bool(torch.isfinite((largest / _HALVED[dtype]).to(torch.float16))):
        raise ModelError(
            f"{folder}: {name!r} has the value {float(largest):g}, which {dtype} cannot hold."
            f"{advice}"
        )


def write_hf(target: Path, folder: Path, merged: Merged, dtype: str) -> None:
    """A folder that plain transformers loads, with settings that end a turn where we end it."""
    tensors = {}
    for name in merged.shapes:
        tensor = tensors[name] = merged.take(name)
        if tensor.is_floating_point():
            check_range(folder, name, tensor, dtype)
            tensors[name] = tensor.to(getattr(torch, dtype))
    write_model(target, folder, tensors)
    config = read_config(folder)
    beside = folder / "generation_config.json"
    settings = json.loads(beside.read_text("utf-8")) if beside.is_file() else {}
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


def how_to_prompt(
    title: str, folder: Path, known: dict[str, Any], gguf: str = "", terms: str = ""
) -> str:
    """The README; `known` is what `trained_on` says, `gguf` the name of a file, if it is one, and
    `terms` under which licence the weights are, where that is known."""
    lines = [f"# {title}", "", *_use(gguf, known), "", *_protocol(folder, known), ""]
    return "\n".join([*lines, *(["## Licence", "", terms, ""] if terms else [])])


def _use(gguf: str, known: dict[str, Any]) -> Iterator[str]:
    asked = f'    coa ask "{_QUESTION}"{_options(known)}'
    yield "Exported with `coa model export`. `manifest.json` has the hashes of what it was made of."
    yield ""
    if gguf:
        yield "With llama.cpp:"
        yield ""
        yield f"    llama-server -m {gguf} --port 8080"
        yield f"{asked} \\"
        yield f"        --model openai:{gguf.removesuffix('.gguf')}@http://localhost:8080/v1"
        yield ""
        yield "The name in front of the @ is the one that the server lists under `/v1/models`."
        return
    yield "With coa, where `DIR` is this folder:"
    yield ""
    yield f"{asked} --model hf:DIR"
    yield ""
    yield "With transformers alone (`system` and `stops` are below):"
    yield ""
    for line in _SNIPPET.splitlines():
        yield f"    {line}".rstrip()


def _options(known: dict[str, Any]) -> str:
    """How to ask for what the model was trained on, which a server does not tell; else nothing."""
    names, kinds = _trained(known)
    if not names:
        return ""
    usual = next(iter(import_module("coa.environments").BY_GRAMMAR))
    name = usual if usual in names else names[0]
    given = "FILE.toml" if _preset(name) is None else name
    return f" --grammar {given} --prompt {kinds[0]}"


def _trained(known: dict[str, Any]) -> tuple[list[str], list[PromptKind]]:
    """The grammars and the prompts that a model was trained on."""
    kinds = listed(known.get("prompt")) or ["compact"]
    return listed(known.get("grammar")), ["full" if each == "full" else "compact" for each in kinds]


def _preset(name: str) -> Grammar | None:
    """None for a grammar that was read from a file, which is not known here."""
    try:
        return load_grammar(name)
    except GrammarError:
        return None


_SNIPPET = f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = AutoModelForCausalLM.from_pretrained("DIR")
chat = [
    {{"role": "system", "content": system}},
    {{"role": "user", "content": "{_QUESTION}"}},
]
text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
done = model.generate(**ids, max_new_tokens=256, stop_strings=stops, tokenizer=tokenizer)
print(tokenizer.decode(done[0][ids["input_ids"].shape[1]:]))"""


def _protocol(folder: Path, known: dict[str, Any]) -> Iterator[str]:
    names, kinds = _trained(known)
    yield "## How to prompt it"
    yield ""
    if not names:
        yield "Nothing says which prompt it was trained on: it is a chat model as its base is."
        return
    yield from _LOOP.splitlines()
    first = ""
    for name in names:
        grammar = _preset(name)
        if grammar is None:
            yield from ("", f"### `{name}`", "")
            yield "A grammar of one's own: `coa grammar show FILE.toml --prompt compact`."
            continue
        for kind in kinds:
            yield from _grammar_lines(grammar, kind)
            first = first or system_prompt(grammar, kind)
    if first:
        yield from ("", "As one text, with the question above:", "")
        codec = Codec.from_folder(folder)
        prompt = codec.encode_prompt(first, _QUESTION)
        text = codec.tokenizer.decode(prompt, skip_special_tokens=False)
        yield from ["~~~~", *text.splitlines(), "~~~~"]


_LOOP = """\
It writes blocks. Generate until one of the stop strings, keep the stop string, run the tool that
the last block calls, append what it returned as an observation to the same assistant turn, and
generate on. An answer block ends the work. In the text of a tool write `<` of a block's tag as
`&lt;`, or a page can speak for the model."""


def _grammar_lines(grammar: Grammar, kind: PromptKind) -> Iterator[str]:
    yield ""
    yield f"### `{grammar.name}` ({kind} prompt)"
    yield ""
    yield "System prompt:"
    yield ""
    yield from ["~~~~", *system_prompt(grammar, kind).splitlines(), "~~~~"]
    yield ""
    yield f"Stop strings: {', '.join(f'`{stop}`' for stop in grammar.stop_strings)}"
    yield ""
    shown = grammar.render([Block(grammar.observation, "TEXT")])
    yield f"Observation, where `\\n` is a newline: `\\n{shown}\\n`"


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
    from coa.train.policy import write_json

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
