"""A Llama-family model as one GGUF file, the format of llama.cpp and what is built on it.

The inverse of `engines.weights.convert_gguf`. The tokenizer goes along as tokens, types and merges,
with the name of the way llama.cpp has to split text before it merges. llama.cpp knows a fixed list
of such ways, and a wrong name gives other tokens without an error, so a tokenizer whose way we
cannot name is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coa.errors import MissingExtra, ModelError
from coa.models.codec import template_text
from coa.models.export import check_range
from coa.models.shape import Shape, read_config, unsupported

QUANTS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
"""Our name of a type to that of GGUF."""
_NORMAL, _CONTROL, _OWN, _UNUSED = 1, 3, 4, 5
"""Types of a token in a GGUF file; llama.cpp keeps one of type `_OWN` whole wherever it occurs."""
_BYTE_LEVEL = ("ByteLevel", {"add_prefix_space": False, "use_regex": True})
_SPLITS = {
    "gpt-2": [_BYTE_LEVEL],
    "smollm": [("Digits", {"individual_digits": True}), _BYTE_LEVEL],
}
"""llama.cpp's name of a way to split text before merging, to the same in a tokenizer.json."""

Shapes = Mapping[str, Sequence[int]]
"""Names of tensors, as in a Hugging Face folder, to their sizes."""
TakeTensor = Callable[[str], Any]
"""A tensor of the merged model, in float32."""


def check_gguf(folder: Path) -> None:
    """Refuse a model that cannot be written, before anything is computed."""
    config = read_config(folder)
    reason = unsupported(config)
    if reason is None and config["model_type"] != "llama":
        reason = f"architecture {config['model_type']!r}"
    if reason is None and (config.get("attention_bias") or config.get("mlp_bias")):
        reason = "a llama with biases"
    if reason is not None:
        raise ModelError(
            f"{folder}: found {reason}; a GGUF is written for plain llama models only. "
            "Export with --to hf and convert that with llama.cpp's own script."
        )
    _read_tokenizer(folder, int(config["vocab_size"]))


def write_gguf(
    path: Path, folder: Path, shapes: Shapes, take: TakeTensor, dtype: str, title: str
) -> None:
    """Write the tensors of `shapes`, with the tokenizer and the numbers of the model `folder`."""
    try:
        import gguf
    except ImportError as exc:
        raise MissingExtra("Writing a GGUF", "train") from exc
    config = read_config(folder)
    shape = Shape.read(config)
    writer = gguf.GGUFWriter(path, "llama")
    try:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(title)
        _write_numbers(writer, shape, config)
        writer.add_file_type(_file_type(dtype))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _write_tokenizer(writer, folder, shape.vocab)
        _write_tensors(writer, folder, shapes, take, shape, dtype)
    finally:
        writer.close()


def _file_type(dtype: str) -> int:
    from gguf import LlamaFileType

    name = "ALL_F32" if dtype == "float32" else f"MOSTLY_{QUANTS[dtype]}"
    return int(LlamaFileType[name])


def _write_numbers(writer: Any, shape: Shape, config: dict[str, Any]) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(shape.vocab)
    writer.add_rope_dimension_count(shape.head_dim)
    if shape.head_dim * shape.heads != shape.hidden:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)


# -- tensors ---------------------------------------------------------------------------------


def _write_tensors(
    writer: Any, folder: Path, shapes: Shapes, take: TakeTensor, shape: Shape, dtype: str
) -> None:
    """One at a time: the header needs sizes only, so no two tensors are held at once."""
    import gguf
    import numpy

    listed = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.layers)
    types = {name: _type_of(size, dtype) for name, size in shapes.items()}
    for name, size in shapes.items():
        title = listed.get_name(name, try_suffixes=(".weight",))
        if title is None:
            raise ModelError(f"The model's tensor {name!r} has no place in a GGUF of a llama.")
        kind = gguf.GGMLQuantizationType[QUANTS[types[name]]]
        held = gguf.quant_shape_to_byte_shape(size, kind)
        writer.add_tensor_info(title, held, numpy.uint8, math.prod(held), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}
    for name, own in types.items():
        tensor = take(name)
        check_range(folder, name, tensor, own)
        values = tensor.numpy()
        if (module := name.split(".")[-2]) in heads:
            values = _permute(values, heads[module])
        kind = gguf.GGMLQuantizationType[QUANTS[own]]
        writer.write_tensor_data(gguf.quants.quantize(values, kind))


def _type_of(size: Sequence[int], dtype: str) -> str:
    """llama.cpp wants vectors in float32, and a row that blocks do not divide is not quantised."""
    if len(size) == 1:
        return "float32"
    return "float16" if dtype == "q8_0" and size[-1] % 32 else dtype


def _permute(values: Any, heads: int) -> Any:
    """Interleave the two rotary halves of each head, as llama.cpp computes them."""
    rows, columns = values.shape
    return (
        values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


# -- tokenizer -------------------------------------------------------------------------------


def _write_tokenizer(writer: Any, folder: Path, vocabulary: int) -> None:
    tokens, types, merges, split = _read_tokenizer(folder, vocabulary)
    config = _read_json(folder / "tokenizer_config.json")
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(False)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    for key, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        token = config.get(key)
        text = token["content"] if isinstance(token, dict) else token
        if text in tokens:
            add(tokens.index(text))
    if template := template_text(folder, config):
        writer.add_chat_template(template)


def _read_tokenizer(folder: Path, size: int) -> tuple[list[str], list[int], list[str], str]:
    """Tokens by id, their types, the merges in order, and llama.cpp's name of the split."""
    spec = _read_json(folder / "tokenizer.json")
    model = spec.get("model") or {}
    split = _split_of(spec.get("pre_tokenizer"))
    after = (spec.get("post_processor") or {}).get("type", "ByteLevel")
    if (
        model.get("type") != "BPE"
        or split is None
        or spec.get("normalizer")
        or after != "ByteLevel"
    ):
        raise ModelError(
            f"{folder}: llama.cpp's way of splitting text for this tokenizer is not known here. "
            "Export with --to hf and convert that with llama.cpp's own script."
        )
    places = [*model["vocab"].values(), *(each["id"] for each in spec.get("added_tokens", []))]
    if max(places) >= size:
        raise ModelError(
            f"{folder}: the tokenizer has a token {max(places)}, and the model has {size} only. "
            "Expected a tokenizer that fits the model."
        )
    tokens = [f"[PAD{place}]" for place in range(size)]
    types = [_UNUSED] * size
    for text, place in model["vocab"].items():
        tokens[place], types[place] = text, _NORMAL
    for added in spec.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added["special"] else _OWN
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    return tokens, types, merges, split


def _split_of(spec: dict[str, Any] | None) -> str | None:
    steps = spec.get("pretokenizers", [spec]) if spec else []
    for name, wanted in _SPLITS.items():
        if [step["type"] for step in steps] == [kind for kind, _ in wanted] and all(
            step.get(key) == value
            for step, (_, settings) in zip(steps, wanted, strict=True)
            for key, value in settings.items()
        ):
            return name
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path}: cannot read it ({exc}). Expected a model folder.") from exc
    return found
