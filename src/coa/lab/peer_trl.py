"""The work of `coa bench sft` and `coa bench rl` done by TRL. A script for TRL's own environment.

On stdin one JSON object: a work of `coa.lab.bench_train`, and `settings`, which change those of
TRL below. On stdout one JSON object: seconds of every update, what was measured on it, version. It
imports nothing of ours, because that environment does not have it.

The settings are TRL's own but for gradient checkpointing, which is off because it costs time. Other
settings are further peers (`peers` of the bench).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib import import_module
from itertools import pairwise
from typing import Any

Asked = dict[str, Any]


def main() -> None:
    # Libraries write to stdout as well; the result gets a copy of it to itself.
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    import_module("torch").set_num_threads(asked["threads"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = sft(asked, folder) if asked["kind"] == "sft" else rl(asked, folder)
        marks, generating = add_marks(trainer), time_generation(trainer.model)
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    done = {
        "seconds": between(marks),
        "tokens": between([0, *(int(log["num_tokens"]) for log in logs)]),
        "loss": [log["loss"] for log in logs],
        "version": f"TRL {import_module('trl').__version__}",
    }
    if asked["kind"] == "rl":
        done |= {"rollout_s": generating, "reward": [log["reward"] for log in logs]}
    print(json.dumps(done), file=result, flush=True)


def sft(asked: Asked, folder: str) -> Any:
    """SFTTrainer over rows that are tokens already, in the batches that they come in."""
    trl = import_module("trl")
    rows = [asked["rows"][at] for at in asked["order"]]
    settings = common(asked, folder) | {
        "per_device_train_batch_size": asked["batch_size"],
        "max_steps": len(rows) // asked["batch_size"],
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    columns = {name: [row[name] for row in rows] for name in ("input_ids", "labels")}
    return trl.SFTTrainer(
        model=network(asked),
        args=trl.SFTConfig(**settings | asked["settings"]),
        train_dataset=import_module("datasets").Dataset.from_dict(columns),
        processing_class=tokenizer(asked),
        peft_config=lora(asked),
    )


def rl(asked: Asked, folder: str) -> Any:
    """GRPOTrainer with the loss of DAPO, generation by transformers, one step for each batch."""
    trl = import_module("trl")
    settings = common(asked, folder) | {
        # All rollouts are generated at once, and trained on group by group.
        "per_device_train_batch_size": asked["group_size"],
        "gradient_accumulation_steps": len(asked["tasks"]),
        "max_steps": asked["updates"],
        "num_generations": asked["group_size"],
        "max_completion_length": asked["tokens"],
        "generation_kwargs": {"min_new_tokens": asked["tokens"]},
        "temperature": 1.0,
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "beta": 0.0,
        "num_iterations": 1,
        "shuffle_dataset": False,
    }
    prompts = [
        [
            {"role": "system", "content": asked["system"]},
            {"role": "user", "content": task["question"]},
        ]
        for task in asked["tasks"]
    ]
    return trl.GRPOTrainer(
        model=network(asked),
        reward_funcs=checksum,
        args=trl.GRPOConfig(**settings | asked["settings"]),
        train_dataset=import_module("datasets").Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(asked),
        peft_config=lora(asked),
    )


def checksum(completions: list[list[dict[str, str]]], **more: Any) -> list[float]:
    """The reward: a number that differs between nearly any two texts, so that no group is flat."""
    return [sum(map(ord, messages[0]["content"])) % 101 / 100 for messages in completions]


def common(asked: Asked, folder: str) -> Asked:
    return {
        "output_dir": folder,
        "learning_rate": asked["lr"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": asked["grad_clip"],
        "gradient_checkpointing": False,  # on by default, and slower
        "bf16": asked["dtype"] == "bfloat16",
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }


def network(asked: Asked) -> Any:
    torch, transformers = import_module("torch"), import_module("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        asked["folder"], dtype=getattr(torch, asked["dtype"]), local_files_only=True
    )


def tokenizer(asked: Asked) -> Any:
    return import_module("transformers").AutoTokenizer.from_pretrained(asked["folder"])


def lora(asked: Asked) -> Any:
    return import_module("peft").LoraConfig(
        r=asked["rank"],
        lora_alpha=asked["alpha"],
        lora_dropout=0.0,
        target_modules=asked["targets"],
        task_type="CAUSAL_LM",
    )


def add_marks(trainer: Any) -> list[float]:
    """A list that will hold the time when training begins, then the end of every update."""
    marks: list[float] = []

    class Marks(import_module("transformers").TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *known: Any, **more: Any) -> None:
            marks.append(time.perf_counter())

        def on_step_end(self, *known: Any, **more: Any) -> None:
            marks.append(time.perf_counter())

    trainer.add_callback(Marks())
    return marks


def time_generation(model: Any) -> list[float]:
    """A list that will hold the seconds of every call of the model's `generate`."""
    generate, seconds = model.generate, list[float]()

    def timed(*known: Any, **more: Any) -> Any:
        started = time.perf_counter()
        made = generate(*known, **more)
        seconds.append(time.perf_counter() - started)
        return made

    model.generate = timed
    return seconds


def between(marks: list[Any]) -> list[Any]:
    return [end - start for start, end in pairwise(marks)]


if __name__ == "__main__":
    main()
