"""A tiny random model on disk, built in a second: what the default tests run instead of 135M."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CORPUS = [
    "<think>I need the capital of France.</think><wiki_search>capital of France</wiki_search>",
    "<observation>Paris is the capital and the largest city of France.</observation>",
    "<plan>1. find the country 2. find its capital</plan><answer>Paris</answer>",
    "system user assistant You are a helpful agent. What is the capital of Italy? Rome.",
    "Na\u00efve caf\u00e9, \u6771\u4eac, emoji \U0001f642,",
    "and numbers 1 2 3 4 5 6 7 8 9 0 in a line.\n\n",
]
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(vocabulary: int = 400) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def make_tiny_model(path: Path, *, seed: int = 0, kind: str = "llama", **more: Any) -> Path:
    """Write a random 2-layer model (llama, qwen2, qwen3, gpt2 ...) with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    size = tokenizer.get_vocab_size()
    if kind == "gpt2":
        shape: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
    else:
        shape = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
        }
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": size}
    config = AutoConfig.for_model(kind, tie_word_embeddings=True, **(special | shape | more))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # a wider spread than the default, so that greedy choices are clear
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
        model.get_input_embeddings().weight.mul_(3.0)  # tied: wide enough to be sure of a token
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.bias"):  # of a Qwen2: they begin at 0, which would hide them
                parameter.normal_(std=0.5)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return path
