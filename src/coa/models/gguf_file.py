"""GGUF, the format of llama.cpp: a Llama or Qwen2 is read from one file, a Llama written as one.

Reading makes a model folder. It goes without transformers: that needs no torch, takes seconds
instead of half a minute, holds a few rows of a tensor at a time instead of the whole model, and
keeps the tokenizer's way of splitting text. In float32 the folder has exactly the values that the
blocks of the file stand for; a larger model is rounded to bfloat16, as its checkpoint was.

Writing names the way in which llama.cpp has to split text before it merges. llama.cpp knows a fixed
list of such ways, and a wrong name gives other tokens without an error, so a tokenizer whose way we
cannot name is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coa.errors import MissingExtra, ModelError
from coa.io.runs import Json
from coa.models.weights import (
    Shape,
    check_range,
    read_config,
    read_json,
    template_text,
    token_text,
    unsupported,
    write_json,
)

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
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""What is read: its name in a GGUF to its class."""
_WIDTHS = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}
"""Our name of a type to that of safetensors, and its bytes."""
_AT_ONCE = 1 << 22
"""Numbers of a tensor that are held at a time."""
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""A module in a GGUF to the same in a model folder; those of a layer stand behind its number."""
_NUMBERS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
    "head_dim": "rope.dimension_count",
}
"""A number of config.json to its name in a GGUF."""
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""A special token in tokenizer_config.json to its name in a GGUF."""

Shapes = Mapping[str, Sequence[int]]
"""Names of tensors, as in a model folder, to their sizes."""
TakeTensor = Callable[[str], Any]
"""Gives a tensor of the merged model, in float32, by its name."""


def _swap_halves(values: Any, heads: int, outer: int, inner: int) -> Any:
    """The rows of each head, `outer` groups of `inner`, in the other order. llama.cpp interleaves
    the two rotary halves of a head, which stand one after the other in a model folder."""
    rows, columns = values.shape
    return values.reshape(heads, outer, inner, columns).swapaxes(1, 2).reshape(rows, columns)


# -- reading ---------------------------------------------------------------------------------


def convert_gguf(
    source: Path, folder: Path, dtype: str = "float32", *, retie: bool = False
) -> None:
    """Write the GGUF `source` as a model folder.

    `retie` is for a file that has the one table of a tied model twice, rounded in two ways: the
    finer one, which llama.cpp computes logits with, is taken for both.
    """
    try:
        import gguf
    except ImportError as exc:
        raise MissingExtra("Converting a GGUF", "train") from exc
    reader = gguf.GGUFReader(source)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    if (kind := fields.get("general.architecture")) not in _ARCHITECTURES:
        raise ModelError(
            f"{source}: found a GGUF of architecture {kind!r}, expected one of "
            f"{', '.join(_ARCHITECTURES)}."
        )
    held = {tensor.name: tensor for tensor in reader.tensors}
    if retie and (head := held.pop("output.weight", None)) is not None:
        held["token_embd.weight"] = head
    config = _config(fields, held, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder / "model.safetensors", held, config, dtype)
    write_json(folder / "config.json", config)
    _tokenizer_from(fields, folder)


def _write_weights(path: Path, held: Mapping[str, Any], config: Json, dtype: str) -> None:
    """A safetensors file, written a few rows at a time: its header needs sizes only."""
    name, width = _WIDTHS[dtype]
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for title, tensor in held.items():
        *layer, kind, leaf = title.split(".")
        place = f"model.layers.{layer[1]}." if layer else ""
        start, end = end, end + width * int(tensor.n_elements)
        header[f"{place}{_TENSORS[kind]}.{leaf}"] = {
            "dtype": name,
            "shape": [int(size) for size in reversed(tensor.shape)],
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for title, tensor in held.items():
            for values in _rows_of(tensor, title.split(".")[-2], config):
                file.write((values if width == 4 else _bfloat16(values)).tobytes())


def _rows_of(tensor: Any, kind: str, config: Json) -> Iterator[Any]:
    """The numbers of a tensor in float32, in order, a few rows at a time."""
    from gguf.quants import dequantize

    rows, columns = len(tensor.data), int(tensor.shape[0])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if config["model_type"] == "llama" and kind in heads:  # the order of rows in a Qwen2 is ours
        values = dequantize(tensor.data, tensor.tensor_type).astype("float32")
        yield _swap_halves(values, heads[kind], rows // heads[kind] // 2, 2)
        return
    step = max(1, _AT_ONCE // columns)
    for start in range(0, rows, step):
        part = dequantize(tensor.data[start : start + step], tensor.tensor_type)
        yield part.astype("float32")


def _bfloat16(values: Any) -> Any:
    """The upper halves of float32 numbers, rounded to the nearest, of two as near to the even."""
    import numpy

    bits = numpy.ascontiguousarray(values).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def _config(fields: Json, held: Mapping[str, Any], dtype: str) -> Json:
    kind = fields["general.architecture"]
    config: Json = {"architectures": [_ARCHITECTURES[kind]], "model_type": kind}
    known = {name: fields.get(f"{kind}.{key}") for name, key in _NUMBERS.items()}
    config |= {name: value for name, value in known.items() if value is not None}
    config["vocab_size"] = int(held["token_embd.weight"].shape[1])
    config["rms_norm_eps"] = round(config["rms_norm_eps"], 9)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    for name in ("bos", "eos", "pad"):
        config[f"{name}_token_id"] = fields.get(f"tokenizer.ggml.{_SPECIAL[name]}_token_id")
    config |= {"hidden_act": "silu", "tie_word_embeddings": "output.weight" not in held}
    config |= {"attention_bias": False, "mlp_bias": False} if kind == "llama" else {}
    return config | {"dtype": dtype}


def _tokenizer_from(fields: Json, folder: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as steps

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    used = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    tokenizer = Tokenizer(models.BPE(used, merges))
    split = fields["tokenizer.ggml.pre"]
    if split == "smollm":
        made = [getattr(steps, kind)(**how) for kind, how in _SPLITS[split]]
    elif split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        cut = steps.Split(Regex(_QWEN2), behavior="isolated")
        made = [cut, steps.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        raise ModelError(f"{folder}: found tokenizer pre-type {split!r}, expected smollm or qwen2.")
    tokenizer.pre_tokenizer = steps.Sequence(made)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _OWN):
            added = AddedToken(token, special=kind == _CONTROL, normalized=False)
            tokenizer.add_tokens([added])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    names = {f"{name}_token": tokens[at] for name, at in ids.items() if at is not None}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    names["model_max_length"] = fields[f"{fields['general.architecture']}.context_length"]
    names["chat_template"] = fields["tokenizer.chat_template"]
    write_json(folder / "tokenizer_config.json", names)


# -- writing ---------------------------------------------------------------------------------


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
        numbers = config | {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
        numbers |= {"rope_theta": float(shape.theta), "rms_norm_eps": float(shape.eps)}
        for name, key in _NUMBERS.items():
            is_float = isinstance(numbers[name], float)
            add = writer.add_float32 if is_float else writer.add_uint32
            add(f"llama.{key}", numbers[name])
        if shape.head_dim * shape.heads != shape.hidden:
            writer.add_key_length(shape.head_dim)
            writer.add_value_length(shape.head_dim)
        kind = "ALL_F32" if dtype == "float32" else f"MOSTLY_{QUANTS[dtype]}"
        writer.add_file_type(int(gguf.LlamaFileType[kind]))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _write_tokenizer(writer, folder, shape.vocab)
        _write_tensors(writer, folder, shapes, take, shape, dtype)
    finally:
        writer.close()


def _write_tensors(
    writer: Any, folder: Path, shapes: Shapes, take: TakeTensor, shape: Shape, dtype: str
) -> None:
    """One at a time: the header needs sizes only, so no two tensors are held at once."""
    import gguf
    import numpy

    types = {name: _type_of(size, dtype) for name, size in shapes.items()}
    for name, size in shapes.items():
        kind = gguf.GGMLQuantizationType[QUANTS[types[name]]]
        held = gguf.quant_shape_to_byte_shape(size, kind)
        writer.add_tensor_info(_title(name), held, numpy.uint8, math.prod(held), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}
    for name, own in types.items():
        tensor = take(name)
        check_range(folder, name, tensor, own)
        values = tensor.numpy()
        if count := heads.get(name.split(".")[-2]):
            values = _swap_halves(values, count, 2, len(values) // count // 2)
        kind = gguf.GGMLQuantizationType[QUANTS[own]]
        writer.write_tensor_data(gguf.quants.quantize(values, kind))


def _title(name: str) -> str:
    """The name in a GGUF of a tensor in a model folder."""
    module, _, leaf = name.rpartition(".")
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    place, own = (f"blk.{layer}.", rest) if module.startswith("model.layers.") else ("", module)
    for kind, title in _TENSORS.items():
        if title == own and leaf == "weight":
            return f"{place}{kind}.{leaf}"
    raise ModelError(f"The model's tensor {name!r} has no place in a GGUF of a llama.")


def _type_of(size: Sequence[int], dtype: str) -> str:
    """llama.cpp wants vectors in float32, and a row that blocks do not divide is not quantised."""
    if len(size) == 1:
        return "float32"
    return "float16" if dtype == "q8_0" and size[-1] % 32 else dtype


def _write_tokenizer(writer: Any, folder: Path, vocabulary: int) -> None:
    tokens, types, merges, split = _read_tokenizer(folder, vocabulary)
    config = read_json(folder / "tokenizer_config.json")
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(False)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    for name, key in _SPECIAL.items():
        if (token := token_text(config.get(f"{name}_token"))) in tokens:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", tokens.index(token))
    if template := template_text(folder, config):
        writer.add_chat_template(template)


def _read_tokenizer(folder: Path, size: int) -> tuple[list[str], list[int], list[str], str]:
    """Tokens by id, their types, the merges in order, and llama.cpp's name of the split."""
    spec = read_json(folder / "tokenizer.json")
    model = spec.get("model") or {}
    split = _split_of(spec.get("pre_tokenizer"))
    after = (spec.get("post_processor") or {}).get("type", "ByteLevel")
    known = model.get("type") == "BPE" and after == "ByteLevel" and not spec.get("normalizer")
    if split is None or not known:
        raise ModelError(
            f"{folder}: llama.cpp's way of splitting text for this tokenizer is not known here. "
            "Export with --to hf and convert that with llama.cpp's own script."
        )
    added = spec.get("added_tokens", [])
    most = max([*model["vocab"].values(), *(each["id"] for each in added)])
    if most >= size:
        raise ModelError(
            f"{folder}: the tokenizer has a token {most}, and the model has {size} only. "
            "Expected a tokenizer that fits the model."
        )
    tokens = [f"[PAD{place}]" for place in range(size)]
    types = [_UNUSED] * size
    for text, place in model["vocab"].items():
        tokens[place], types[place] = text, _NORMAL
    for each in added:
        tokens[each["id"]] = each["content"]
        types[each["id"]] = _CONTROL if each["special"] else _OWN
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    return tokens, types, merges, split


def _split_of(spec: Json | None) -> str | None:
    steps = spec.get("pretokenizers", [spec]) if spec else []
    for name, wanted in _SPLITS.items():
        if len(steps) == len(wanted) and all(
            step | settings | {"type": kind} == step
            for step, (kind, settings) in zip(steps, wanted, strict=True)
        ):
            return name
    return None
