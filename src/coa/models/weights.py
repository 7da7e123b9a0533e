"""Model folders: their hash, and the one-time conversion of the embedded model's GGUF.

The conversion reads the GGUF directly rather than through transformers, for three reasons: it needs
neither torch nor transformers, takes seconds instead of half a minute, and states the tokenizer's
pre-type (digits are split one by one) instead of the generic GPT-2 one. The weights are equal.

The folder holds float32: those are exactly the values that the Q4_1 blocks stand for, so float32
and bfloat16 runs both derive from the same bytes with at most one rounding.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coa.errors import MissingExtra, ModelError
from coa.io.files import open_to_others
from coa.io.runs import write_atomic

BASE_FILE = "coa-base.json"
_CHUNK = 1 << 24
_SPECIAL_TOKEN = 3
_LAYER_TENSORS = {
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


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in name order."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: found no *.safetensors, expected a model folder.")
    return files


def base_hash(folder: Path) -> str:
    """sha256 over names, types, shapes and bytes of all tensors, however they are split in files.

    The answer is remembered in `coa-base.json` beside the weights when the folder is writable, and
    taken from there as long as sizes and times of the files are unchanged.
    """
    files = weight_files(folder)
    stamp = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    memory = folder / BASE_FILE
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
        if known["stamp"] == stamp:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = _hash_tensors(files)
    with contextlib.suppress(OSError):  # a read-only model folder is hashed each time
        write_atomic(memory, json.dumps({"sha256": digest, "stamp": stamp}) + "\n")
    return digest


def _tensors(path: Path) -> Iterator[tuple[str, str, list[int], int, int]]:
    """Yield (name, dtype, shape, first byte, last byte) from a safetensors header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size < path.stat().st_size:
            raise ModelError(f"{path}: not a safetensors file, or cut short. Fetch it again.")
        header = json.loads(file.read(size))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, entry["dtype"], entry["shape"], 8 + size + start, 8 + size + end


def _hash_tensors(files: list[Path]) -> str:
    tensors = sorted((*entry, path) for path in files for entry in _tensors(path))
    digest = hashlib.sha256()
    for name, dtype, shape, start, end, path in tensors:
        digest.update(json.dumps([name, dtype, shape]).encode())
        with path.open("rb") as file:
            file.seek(start)
            left = end - start
            while left > 0:
                block = file.read(min(_CHUNK, left))
                if not block:
                    raise ModelError(f"{path}: cut short inside {name!r}. Fetch it again.")
                digest.update(block)
                left -= len(block)
    return digest.hexdigest()


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the llama-architecture GGUF `source` as a model folder (float32 safetensors)."""
    try:
        import gguf
        from safetensors.numpy import save_file
    except ImportError as exc:
        raise MissingExtra("Converting the embedded model", "train") from exc
    reader = gguf.GGUFReader(source)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ModelError(f"{source}: found a GGUF of another architecture, expected llama.")
    heads = fields["llama.attention.head_count"]
    groups = {"attn_q": heads, "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        values = values.reshape([int(n) for n in reversed(tensor.shape)])
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if kind in groups:
            values = _unpermute(values, groups[kind])
        tensors[_tensor_name(tensor.name)] = values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    open_to_others(folder / "model.safetensors")
    config = _config(fields, tied="output.weight" not in {t.name for t in reader.tensors})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_tokenizer(fields, folder)


def _tensor_name(name: str) -> str:
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in fixed:
        return fixed[name]
    _, layer, kind, leaf = name.split(".")
    return f"model.layers.{layer}.{_LAYER_TENSORS[kind]}.{leaf}"


def _unpermute(values: Any, heads: int) -> Any:
    """Undo llama.cpp's interleaving of the two rotary halves of each head."""
    rows, columns = values.shape
    return (
        values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "float32",
    }


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if fields["tokenizer.ggml.pre"] != "smollm":
        raise ModelError(
            f"{folder}: found tokenizer pre-type {fields['tokenizer.ggml.pre']!r}, "
            "expected 'smollm'."
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(names, indent=2) + "\n", encoding="utf-8"
    )


def sync_folder(folder: Path) -> None:
    """fsync every file of a folder and the folder itself, so that a rename publishes it whole."""
    for path in [*(p for p in folder.rglob("*") if p.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ------------------------------------------------------------------------------------------------
# What a model's configuration says: its numbers, its rotary angles, and whether we can run it.
# ------------------------------------------------------------------------------------------------
