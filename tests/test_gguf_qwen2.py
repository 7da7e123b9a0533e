"""A Qwen2 from a GGUF file: its tensors to the bit, its tokenizer, its logits; small and random."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from export_chains import QWEN_SPLITS
from tiny_model import CORPUS, TEMPLATE, make_tiny_model

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

import numpy  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tokenizers import (  # noqa: E402
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from coa.engines import Sampling, load_engine  # noqa: E402
from coa.errors import ModelError  # noqa: E402
from coa.models import gguf_file  # noqa: E402
from coa.models.gguf_file import convert_gguf  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
KINDS = {
    "token_embd": "Q5_0",
    "output": "Q8_0",
    "attn_q": "Q5_0",
    "attn_k": "Q8_0",
    "attn_v": "Q6_K",
    "attn_output": "Q4_K",
    "ffn_gate": "Q4_K",
    "ffn_up": "Q5_0",
    "ffn_down": "Q6_K",
}
"""How the matrices of the file are rounded, as in a file of type Q4_K_M."""


def make_qwen_tokenizer() -> Any:
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(QWEN_SPLITS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def block_bytes(values: Any, kind: str) -> Any:
    """Rounded by gguf, or, for a kind that it can only read, any bytes with a small scale."""
    own = gguf.GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        return gguf.quants.quantize(values, own)
    block, size = gguf.GGML_QUANT_SIZES[own]
    held = numpy.random.default_rng(0).integers(0, 256, (values.size // block, size), numpy.uint8)
    scale = numpy.frombuffer(numpy.float16(2e-4).tobytes(), numpy.uint8)
    for at in [0, 2] if kind == "Q4_K" else [size - 2]:
        held[:, at : at + 2] = scale
    return held.reshape(len(values), -1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any], Any]:
    """A file, the model folder of which it is a copy, its numbers by name, and the tokenizer."""
    place = tmp_path_factory.mktemp("qwen2")
    tokenizer = make_qwen_tokenizer()
    size = tokenizer.get_vocab_size() + 5  # as Qwen's, whose table is longer than its vocabulary
    folder = make_tiny_model(place / "plain", kind="qwen2", **SHAPE, vocab_size=size)
    held = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(place / "made.gguf", "qwen2")
    config = json.loads((folder / "config.json").read_text())
    writer.add_block_count(2)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens = [f"[PAD{at}]" for at in range(size)]
    types = [gguf_file._UNUSED] * size
    for text, at in tokenizer.get_vocab().items():
        tokens[at], types[at] = text, gguf_file._NORMAL
        types[at] = gguf_file._CONTROL if text in SPECIAL else types[at]
        types[at] = gguf_file._OWN if text == "<tool_call>" else types[at]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(each) for each in merges])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    expected = {}
    titles = {own: kind for kind, own in gguf_file._TENSORS.items()}
    named = [*held.items(), ("lm_head.weight", held["model.embed_tokens.weight"])]
    for name, tensor in named:
        module, _, leaf = name.rpartition(".")
        _, _, rest = module.removeprefix("model.layers.").partition(".")
        within = module.startswith("model.layers.")
        kind = titles[rest if within else module]
        title = f"blk.{module.split('.')[2]}.{kind}" if within else kind
        values = tensor.numpy()
        if leaf == "weight" and kind in KINDS:
            own = gguf.GGMLQuantizationType[KINDS[kind]]
            bits = block_bytes(values, KINDS[kind])
            writer.add_tensor(f"{title}.{leaf}", bits, raw_dtype=own)
            expected[name] = torch.from_numpy(gguf.quants.dequantize(bits, own).astype("float32"))
        else:
            writer.add_tensor(f"{title}.{leaf}", values)
            expected[name] = tensor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return place / "made.gguf", folder, expected, tokenizer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_has_the_numbers_that_the_blocks_stand_for(
    made: tuple[Path, Path, dict[str, Any], Any],
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gguf_file, "_AT_ONCE", 1000)  # three rows at a time
    convert_gguf(made[0], tmp_path, dtype, retie=True)
    expected = dict(made[2])
    expected["model.embed_tokens.weight"] = expected.pop("lm_head.weight")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype))), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and config["dtype"] == dtype


def test_two_tables_stay_two_where_they_are_not_one(
    made: tuple[Path, Path, dict[str, Any], Any], tmp_path: Path
) -> None:
    convert_gguf(made[0], tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(found[name], made[2][name])
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_converted_model_computes_what_the_numbers_say(
    made: tuple[Path, Path, dict[str, Any], Any], tmp_path: Path
) -> None:
    """Rows of queries and keys are in the order of a model folder: nothing is exchanged."""
    from transformers import AutoModelForCausalLM

    convert_gguf(made[0], tmp_path, retie=True)
    model = AutoModelForCausalLM.from_pretrained(made[1], dtype=torch.float32)
    state = {k: v for k, v in made[2].items() if k != "model.embed_tokens.weight"}
    state["model.embed_tokens.weight"] = state["lm_head.weight"]
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    engine = load_engine(f"hf:{tmp_path}", dtype="float32", slots=2)
    prompt = engine.encode_prompt("Be brief.", "What is the capital of Italy?")
    done = asyncio.run(engine.generate(prompt, Sampling(max_tokens=24, temperature=1.0, key=1)))
    asyncio.run(engine.close())
    with torch.no_grad():
        logs = model(torch.tensor([prompt + done.ids])).logits[0].log_softmax(-1)
    expected = [logs[len(prompt) - 1 + i, token].item() for i, token in enumerate(done.ids)]
    assert done.logprobs == pytest.approx(expected, abs=1e-4)


def test_the_tokenizer_is_the_one_of_the_file(
    made: tuple[Path, Path, dict[str, Any], Any], tmp_path: Path
) -> None:
    convert_gguf(made[0], tmp_path)
    read, wanted = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), made[3]
    for text in (
        *("</plan>\n\n<think> 12,345", "don't WE'LL it's", "  a\t\r\n b ", "cafe\u0301 caf\u00e9"),
        *("<tool_call>{}", "<|im_start|>user\nx<|im_end|>", "na\u00efve \U0001f642 \u6771\u4eac"),
    ):
        for special in (False, True):  # whether text that looks like a special token is one
            read.encode_special_tokens = wanted.encode_special_tokens = special
            ids = read.encode(text, add_special_tokens=False).ids
            assert ids == wanted.encode(text, add_special_tokens=False).ids, text
        assert read.decode(ids, skip_special_tokens=False) == wanted.decode(
            ids, skip_special_tokens=False
        )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["pad_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert "bos_token" not in config and config["chat_template"] == TEMPLATE


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for kind, message in (
        ("mamba", r"of architecture 'mamba', expected one of llama, qwen2\."),
        ("qwen2", r"pre-type 'strange', expected smollm or qwen2\."),
    ):
        writer = gguf.GGUFWriter(tmp_path / f"{kind}.gguf", kind)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e4)
        writer.add_head_count(1)
        writer.add_head_count_kv(1)
        writer.add_tokenizer_pre("strange")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_types([1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_tensor("token_embd.weight", numpy.zeros((1, 32), "float32"))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelError, match=message):
            convert_gguf(tmp_path / f"{kind}.gguf", tmp_path / "out")
