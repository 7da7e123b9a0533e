"""Expected values of the real TRL: its own trainers on the inputs of cases.py.

    PEERS/bin/python tests/parity/trl_losses.py OUT.json

Trainers are real ones (GRPOTrainer, RLOOTrainer, SFTTrainer) around a Llama of a few hundred
weights, made by their own configurations, and their own methods compute everything. For the policy
losses one method is replaced on the instance: the forward pass, so that logprobs are the leaf whose
gradient is wanted. KL and sampler correction are switched on by the attributes that the constructor
would set, because a reference model and vLLM are not needed for what is given as a tensor.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}

import torch
from cases import LENGTH, SEQUENCES, inputs, masks, write_expected
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import (
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

torch.set_num_threads(1)
FOLDER = tempfile.mkdtemp(prefix="parity-")
WORDS = ["<pad>", "<end>", *"abcdefghi"]
COMMON = {"output_dir": FOLDER, "use_cpu": True, "bf16": False, "report_to": []}
Tensors = dict[str, torch.Tensor]


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), num_attention_heads=2, **shape))


def tokenizer() -> PreTrainedTokenizerFast:
    words = models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<end>"
    )


def trainer_of(
    kind: Any, config: Any, rewards: list[float | None] | None = None, **options: Any
) -> Any:
    count = SEQUENCES if rewards is None else len(rewards)
    args = config(
        per_device_train_batch_size=count,
        gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        **COMMON,
        **{"num_generations": 2, "beta": 0.0, **options},
    )
    trainer = kind(
        model=small_model(),
        reward_funcs=lambda completions, **_: list(rewards or [0.0] * len(completions)),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"] * count}),
        processing_class=tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1  # set by Trainer.train()
    trainer.model.train()
    return trainer


def with_logprobs(trainer: Any, given: Tensors) -> torch.Tensor:
    leaf = given["new"].clone().requires_grad_()
    answer = (leaf, given["entropy"].requires_grad_(), None)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: answer
    return leaf


def batch(given: Tensors, mask: torch.Tensor) -> Tensors:
    """What TRL keeps of a rollout; a mask with holes is completion_mask times tool_mask."""
    whole = torch.ones_like(mask)
    ids = torch.full(mask.shape, 3)
    one = torch.full((len(mask), 1), 2)
    return {
        **{"prompt_ids": one, "prompt_mask": torch.ones_like(one)},
        **{"completion_ids": ids, "completion_mask": whole, "tool_mask": mask},
        **{"advantages": given["advantages"], "num_items_in_batch": mask.sum()},
        **{"old_per_token_logps": given["old"], "ref_per_token_logps": given["reference"]},
    }


def grpo(
    kind: str,
    *,
    level: str = "token",
    seed: int = 1,
    spread: float = 0.3,
    low: float = 0.2,
    high: float = 0.28,
    delta: float | None = None,
    beta: float = 0.0,
    reweighted: bool = False,
    entropy: float = 0.0,
    empty: tuple[int, ...] = (),
    items: int | None = None,
    correct: bool = False,
    fresh: bool = False,
) -> dict[str, Any]:
    """Loss and gradient of GRPOTrainer._compute_loss."""
    given = {name: torch.tensor(value) for name, value in inputs(seed, spread).items()}
    mask = torch.tensor(masks(seed, empty))
    clips = {"epsilon": low, "epsilon_high": high, "delta": delta, "entropy_coef": entropy}
    trainer = trainer_of(
        GRPOTrainer,
        GRPOConfig,
        loss_type=kind,
        importance_sampling_level=level,
        use_bias_correction_kl=reweighted,
        **clips,
    )
    leaf, asked = with_logprobs(trainer, given), batch(given, mask)
    trainer.beta = beta
    if items is not None:
        asked["num_items_in_batch"] = torch.tensor(items)
    if fresh:
        del asked["old_per_token_logps"]
    if correct:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        gap = given["old"] - given["sampled"]
        asked["importance_sampling_ratio"] = torch.exp(gap).clamp(max=1.1)
    loss = trainer._compute_loss(trainer.model, asked)
    loss.backward()
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    slope = given["entropy"].grad
    return {
        "asked": {
            **{"kind": kind, "level": level, "seed": seed, "spread": spread, "low": low},
            **{"high": high, "delta": delta, "beta": beta, "reweighted": reweighted},
            **{"entropy": entropy, "empty": list(empty), "items": items, "correct": correct},
            "fresh": fresh,
        },
        "loss": loss.item(),
        "grad": leaf.grad.tolist(),
        "entropy_grad": None if slope is None else slope.tolist(),
        "metrics": {name: value for name, value in logged.items() if isinstance(value, float)},
    }


def rloo() -> dict[str, Any]:
    """Loss and gradient of RLOOTrainer._compute_loss, which has no mask of tools."""
    given = {name: torch.tensor(value) for name, value in inputs(1, 0.1).items()}
    mask = torch.tensor(masks(1))
    trainer = trainer_of(RLOOTrainer, RLOOConfig, epsilon=0.2, epsilon_high=0.28)
    leaf, asked = with_logprobs(trainer, given), batch(given, mask)
    asked |= {"completion_mask": mask, "old_logps": (given["old"] * mask).sum(1)}
    loss = trainer._compute_loss(trainer.model, asked)
    loss.backward()
    return {"asked": {"seed": 1, "spread": 0.1}, "loss": loss.item(), "grad": leaf.grad.tolist()}


def advantages(kind: str, scale: str, rewards: list[float | None], size: int) -> dict[str, Any]:
    """Advantages of a whole generation step: sampled by the small model, scored as given."""
    if kind == "grpo":
        trainer = trainer_of(
            GRPOTrainer, GRPOConfig, rewards, num_generations=size, scale_rewards=scale
        )
    else:
        trainer = trainer_of(RLOOTrainer, RLOOConfig, rewards, num_generations=size)
    groups = [at // size for at in range(len(rewards))]
    prompts = [{"prompt": "ab"[group % 2]} for group in groups]
    found = trainer._generate_and_score_completions(prompts)["advantages"]
    asked = {"kind": kind, "scale": scale, "rewards": rewards, "groups": groups}
    return {"asked": asked, "advantages": found.tolist()}


def forward(temperature: float) -> dict[str, Any]:
    """Logprobs and entropies that GRPOTrainer computes from hidden states of a real forward."""
    trainer = trainer_of(GRPOTrainer, GRPOConfig, temperature=temperature)
    ids = torch.tensor([[2, 3, 4, 5, 6, 7], [8, 9, 10, 2, 2, 3]])
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, torch.ones_like(ids), 4, compute_entropy=True
    )
    hidden = trainer.model.model(ids).last_hidden_state[:, 1:-1]
    return {
        "asked": {"temperature": temperature, "targets": ids[:, 2:].tolist()},
        "hidden": hidden.tolist(),
        "head": trainer.model.lm_head.weight.tolist(),
        "logprobs": logps.tolist(),
        "entropies": entropies.tolist(),
    }


def sft(items: int | None) -> dict[str, Any]:
    """Loss of SFTTrainer.compute_loss, and its gradient with respect to the output layer."""
    ids = [[2, 3, 4, 5, 6, 7], [8, 9, 10, 2, 2, 3]]
    labels = [[-100, -100, 4, 5, -100, 7], [-100, 9, 10, -100, -100, 3]]
    rows = Dataset.from_dict({"input_ids": ids, "labels": labels})
    trainer = SFTTrainer(
        model=small_model(),
        args=SFTConfig(max_length=None, per_device_train_batch_size=2, **COMMON),
        train_dataset=rows,
        processing_class=tokenizer(),
    )
    trainer.model.train()
    # The gradients of the layers below reach the output layer's own only through tied weights.
    trainer.model.zero_grad()
    inner = next(iter(trainer.get_train_dataloader()))
    order = [ids.index(row) for row in inner["input_ids"].tolist()]
    hidden = trainer.model.model(inner["input_ids"]).last_hidden_state.detach()
    count = None if items is None else torch.tensor(items)
    loss = trainer.compute_loss(trainer.model, dict(inner), num_items_in_batch=count)
    loss.backward()
    head = trainer.model.lm_head.weight
    return {
        "asked": {"ids": [ids[at] for at in order], "labels": [labels[at] for at in order]},
        "items": items,
        "hidden": hidden.tolist(),
        "head": head.tolist(),
        "loss": loss.item(),
        "grad": head.grad.tolist(),
    }


KINDS = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
JUDGED = [0.1, 0.9, 0.4, 1.0, 0.0, 0.3]
UNJUDGED = [0.1, None, 0.4, 1.0, None, None]
CASES: dict[str, Callable[[], Any]] = {
    **{f"{kind}": lambda k=kind: grpo(k) for kind in KINDS},
    **{f"{kind} sequence": lambda k=kind: grpo(k, level="sequence") for kind in KINDS},
    **{f"{kind} delta": lambda k=kind: grpo(k, spread=0.9, delta=3.0) for kind in KINDS},
    **{f"{kind} kl": lambda k=kind: grpo(k, beta=0.04) for kind in KINDS},
    "cispo": lambda: grpo("cispo", spread=0.9, high=1.5),
    "kl reweighted": lambda: grpo("dapo", beta=0.1, reweighted=True),
    "correction": lambda: grpo("dapo", correct=True),
    "part of a batch": lambda: grpo("dapo", items=100),
    "fresh samples": lambda: grpo("dapo", fresh=True),
    "empty sequence": lambda: grpo("grpo", empty=(1, 4)),
    "rloo": rloo,
    **{
        f"advantage {scale}": lambda s=scale: advantages("grpo", s, JUDGED, 3)
        for scale in ("group", "batch", "none")
    },
    "advantage unjudged": lambda: advantages("grpo", "group", UNJUDGED, 3),
    "advantage rloo": lambda: advantages("rloo", "none", JUDGED, 3),
    "advantage rloo unjudged": lambda: advantages("rloo", "none", UNJUDGED, 3),
    "forward": lambda: forward(1.0),
    "forward at 0.7": lambda: forward(0.7),
    "sft": lambda: sft(None),
    "sft part of a batch": lambda: sft(20),
}

if __name__ == "__main__":
    versions = {name: importlib.metadata.version(name) for name in ("trl", "torch")}
    write_expected({name: text.split("+")[0] for name, text in versions.items()}, CASES)
