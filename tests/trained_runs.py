"""A run directory with an adapter in it, as `coa sft` leaves one, without any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_model import make_tiny_model

PACKAGES = {"coa": "0.1.0", "torch": "2.13.0"}


def make_base(cache: Path, *, seed: int = 0) -> Path:
    """A tiny random model in the place of the embedded one; its tokenizer splits as that one's."""
    folder = make_tiny_model(cache / "models" / "smollm2-135m", seed=seed)
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, spec["pre_tokenizer"]]}
    path.write_text(json.dumps(spec), encoding="utf-8")
    names = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    names |= {"pad_token": "<|im_end|>", "unk_token": "<|endoftext|>", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return folder


def make_run(run: Path, model: str, *, stage: str = "sft", seed: int = 0, **told: Any) -> Path:
    """Returns RUN/adapter: random factors on `model`, which may have an adapter itself."""
    import torch

    from coa.models.references import resolve
    from coa.models.weights import adapter_hash
    from coa.train.policy import Policy

    policy = Policy(model, rank=4, seed=seed)
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    remembered = {"stage": stage, "updates": 3, "grammar": ["mhqa", "web"], "prompt": "compact"}
    policy.save(run / "adapter", **remembered, settings={"model": model}, **told)
    inputs = {"rows": "6062cd771ff9879c"}
    if (before := resolve(model).adapter) is not None:
        inputs["adapter"] = adapter_hash(before)
    settings = {"model": model, "lr": 0.001}
    record = {"schema": 1, "stage": stage, "seed": seed, "inputs": inputs, "packages": PACKAGES}
    record |= {"recipe": settings if stage == "sft" else {stage: settings}, "commit": "0123abcd"}
    (run / "manifest.json").write_text(json.dumps(record), encoding="utf-8")
    return run / "adapter"


def make_evaluation(folder: Path, adapter: str | None, base: str = "144c", **summary: Any) -> Path:
    """A finished run of `coa eval` of some weights, with invented figures."""
    folder.mkdir(parents=True)
    inputs = {"tasks": "d3f14d4e3a771d08", "base": base}
    inputs |= {} if adapter is None else {"adapter": adapter}
    recipe = {"k": 1, "turns": 8, "context": 1536, "deterministic": True, "observations": "real"}
    manifest = {"schema": 1, "stage": "eval", "recipe": recipe, "inputs": inputs}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    figures: dict[str, Any] = {"model": "afm-135m", "tasks": "heldout.jsonl", "n": 200}
    figures |= {"accuracy": 0.795, "ci95": [0.7337, 0.8451], "tokens_per_task": 312.5}
    figures |= {"by_phrasing_heldout": {"True": {"n": 46, "accuracy": 0.5, "ci95": [0.4, 0.6]}}}
    (folder / "summary.json").write_text(json.dumps(figures | summary), encoding="utf-8")
    return folder
