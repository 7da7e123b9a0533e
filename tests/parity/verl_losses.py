"""Expected values of the real verl: its own functions on the inputs of cases.py.

    PEERS/bin/python tests/parity/verl_losses.py OUT.json

Nothing of verl is replaced. Its actor settings are its own ActorConfig. Gradients are with respect
to what a network would have computed: logprobs, values, logits.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import torch
from cases import GROUPS, inputs, masks, write_expected
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig
from verl.workers.reward_manager.dapo import DAPORewardManager

torch.set_num_threads(1)
Tensors = dict[str, torch.Tensor]


def tensors(seed: int, spread: float = 0.3) -> Tensors:
    return {name: torch.tensor(value) for name, value in inputs(seed, spread).items()}


def actor(low: float, high: float, dual: float, **batch: Any) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
        global_batch_info=batch,
    )


def policy(
    kind: str,
    mode: str,
    *,
    seed: int = 1,
    spread: float = 0.3,
    low: float = 0.2,
    high: float = 0.28,
    dual: float = 1e9,
    by_token: bool = False,
    empty: tuple[int, ...] = (),
    correct: tuple[str, Any] | None = None,
    batch: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Loss and gradient of a registered policy loss."""
    given = tensors(seed, spread)
    mask = torch.tensor(masks(seed, empty))
    leaf = given["new"].requires_grad_()
    advantages = given["token_advantages"]
    if not by_token:
        advantages = given["advantages"][:, None].expand_as(leaf)
    weights = None
    if correct is not None:
        gap = given["old"] - given["sampled"]
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(gap, mask, *correct)
    run = core_algos.get_policy_loss_fn(kind)
    settings = actor(low, high, dual, **(batch or {}))
    loss, metrics = run(given["old"], leaf, advantages, mask, mode, settings, weights)
    loss.backward()
    return {
        "asked": {
            **{"seed": seed, "spread": spread, "mode": mode, "low": low, "high": high},
            **{"dual": dual if dual < 1e9 else None, "by_token": by_token, "empty": list(empty)},
            **{"correct": correct, "batch": batch},
        },
        "loss": loss.item(),
        "grad": leaf.grad.tolist(),
        "metrics": metrics,
    }


def outcome(estimator: str, **options: Any) -> dict[str, Any]:
    """Advantages of outcome rewards; the reward is on the last token, as verl's managers put it."""
    given, mask = tensors(2), torch.tensor(masks(2))
    rewards = torch.zeros_like(mask)
    for at, row in enumerate(mask):
        rewards[at, int(row.nonzero().max())] = given["rewards"][at]
    index = np.array(GROUPS, dtype=object)
    run = core_algos.get_adv_estimator_fn(estimator)
    found, _ = run(token_level_rewards=rewards, response_mask=mask, index=index, **options)
    return {"asked": {"seed": 2, **options}, "advantages": found.tolist()}


def gae(gamma: float, lam: float) -> dict[str, Any]:
    given, mask = tensors(3), torch.tensor(masks(3))
    rewards = given["returns"] * mask
    found, returns = core_algos.compute_gae_advantage_return(
        rewards, given["values"], mask, gamma, lam
    )
    asked = {"seed": 3, "gamma": gamma, "lam": lam}
    return {"asked": asked, "advantages": found.tolist(), "returns": returns.tolist()}


def gae_with_lost_reward() -> dict[str, Any]:
    """A reward on an observation token: how much of it arrives anywhere."""
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    _, returns = core_algos.compute_gae_advantage_return(rewards, torch.zeros(1, 3), mask, 1.0, 1.0)
    return {"returns": (returns * mask).tolist()}


def value(mode: str, clip: float) -> dict[str, Any]:
    given, mask = tensors(4), torch.tensor(masks(4))
    leaf = given["values"].requires_grad_()
    loss, share = core_algos.compute_value_loss(
        leaf, given["returns"], given["old_values"], mask, clip, mode
    )
    loss.backward()
    asked = {"seed": 4, "mode": mode, "clip": clip}
    found = {"loss": loss.item(), "grad": leaf.grad.tolist(), "clipped": share.item()}
    return {"asked": asked, **found}


def divergence(kind: str) -> dict[str, Any]:
    given = tensors(5)
    leaf = given["new"].requires_grad_()
    found = core_algos.kl_penalty(leaf, given["reference"], kind)
    found.sum().backward()
    values = found.detach().tolist()
    return {"asked": {"seed": 5, "kind": kind}, "values": values, "grad": leaf.grad.tolist()}


def correction(level: str, threshold: Any) -> dict[str, Any]:
    given, mask = tensors(7), torch.tensor(masks(7))
    gap = given["old"] - given["sampled"]
    weights, metrics = rollout_corr_helper.compute_rollout_correction_weights(
        gap, mask, level, threshold
    )
    return {
        "asked": {"seed": 7, "level": level, "threshold": threshold},
        "weights": weights.tolist(),
        "ess": metrics["rollout_is_eff_sample_size"],
        "mean": metrics["rollout_is_mean"],
    }


def overlong(limit: int, buffer: int) -> dict[str, Any]:
    """What DAPO's reward manager gives to answers of several lengths whose score is 0."""
    lengths = [1, limit - buffer, limit - buffer + 1, limit - 1, limit, limit + buffer]
    count, room = len(lengths), max(lengths)
    responses = torch.ones(count, room, dtype=torch.long)
    seen = torch.tensor([[1] * (length + 1) + [0] * (room - length) for length in lengths])
    rows = DataProto.from_dict(
        tensors={
            **{"prompts": torch.ones(count, 1, dtype=torch.long), "responses": responses},
            "attention_mask": seen,
        },
        non_tensors={
            "reward_model": np.array([{"ground_truth": ""} for _ in lengths], dtype=object),
            "data_source": np.array(["none"] * count, dtype=object),
        },
    )
    manage = DAPORewardManager(
        SimpleNamespace(decode=lambda *_, **__: "", eos_token="<end>"),
        0,
        compute_score=lambda **_: 0.0,
        max_resp_len=limit,
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=buffer, penalty_factor=1.0, log=False),
    )
    asked = {"limit": limit, "buffer": buffer, "lengths": lengths}
    return {"asked": asked, "rewards": manage(rows).sum(-1).tolist()}


MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
HALF = {"batch_num_tokens": 100, "global_batch_size": 12}
CASES: dict[str, Callable[[], Any]] = {
    **{f"ppo {mode}": lambda m=mode: policy("vanilla", m, by_token=True) for mode in MODES},
    **{
        f"dual clip {mode}": lambda m=mode: policy("vanilla", m, spread=0.9, dual=3.0)
        for mode in MODES
    },
    **{f"part of a batch {m}": lambda m=m: policy("vanilla", m, batch=HALF) for m in MODES},
    **{f"empty sequence {m}": lambda m=m: policy("vanilla", m, empty=(1, 4)) for m in MODES},
    **{
        f"gspo {mode}": lambda m=mode: policy("gspo", m, low=0.03, high=0.04)
        for mode in ("seq-mean-token-mean", "token-mean")
    },
    **{f"cispo {mode}": lambda m=mode: policy("cispo", m, by_token=True) for mode in MODES},
    "gspo by token": lambda: policy("gspo", MODES[1], low=0.03, high=0.04, by_token=True),
    "correction token": lambda: policy("vanilla", MODES[0], correct=("token", 1.1)),
    "correction token mask": lambda: policy("vanilla", MODES[0], correct=("token", "0.9_1.1")),
    "correction sequence": lambda: policy("vanilla", MODES[1], correct=("sequence", 1.2)),
    "advantage grpo": lambda: outcome("grpo"),
    "advantage grpo no std": lambda: outcome("grpo", norm_adv_by_std_in_grpo=False),
    "advantage rloo": lambda: outcome("rloo"),
    "advantage rf++": lambda: outcome("reinforce_plus_plus_baseline"),
    "gae": lambda: gae(0.99, 0.95),
    "gae of the paper": lambda: gae(1.0, 1.0),
    "gae lost reward": gae_with_lost_reward,
    **{f"value {mode}": lambda m=mode: value(m, 0.2) for mode in MODES},
    **{f"kl {kind}": lambda k=kind: divergence(k) for kind in ("k1", "k2", "k3", "k1+", "k3+")},
    "overlong": lambda: overlong(40, 5),
    "weights token": lambda: correction("token", 1.1),
    "weights token mask": lambda: correction("token", "0.9_1.1"),
    "weights sequence": lambda: correction("sequence", 1.2),
    "weights sequence mask": lambda: correction("sequence", "0.5_1.5"),
}

if __name__ == "__main__":
    versions = {name: importlib.metadata.version(name) for name in ("verl", "torch")}
    write_expected({name: text.split("+")[0] for name, text in versions.items()}, CASES)
