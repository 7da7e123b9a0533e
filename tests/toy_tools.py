"""A toy world in which learning shows within a minute: two tools, a tiny model, sloppy imitation.

A question asks for the price or for the stock of a fruit. Both are digits drawn for each task, and
never the same, so an answer is right only if the right tool was asked about the right fruit and its
answer was copied. Demonstrations know the form; which tool they take is little more than chance.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from coa.grammar import grammar_from_toml, system_prompt
from coa.tasks import Task
from coa.tools.base import Tool, Toolbox, ToolMistake
from coa.train.rows import Row, build_row
from coa.trajectory import Author, Segment, StopReason, Trajectory
from tiny_model import TEMPLATE

TOOLS = ("price", "stock")
FRUITS = ("plum", "pear", "fig", "date", "lime", "kiwi", "sloe", "quince")
GRAMMAR = grammar_from_toml(
    """
name = "toy"
brief = "Ask, then answer."
start = ["tool", "answer"]
[roles.price]
kind = "tool"
next = ["tool", "answer"]
[roles.stock]
kind = "tool"
next = ["tool", "answer"]
[roles.answer]
kind = "answer"
"""
)


def value_of(task_id: str, tool: str, fruit: str) -> str:
    """What a tool says about a fruit in the world of a task."""
    digits = random.Random(f"{task_id}|{fruit}").sample("0123456789", len(TOOLS))
    return digits[TOOLS.index(tool)]


def toy_tasks(count: int, name: str = "train") -> list[Task]:
    """As many tasks with each tool, and with each fruit, as there can be."""
    made = []
    for number in range(count):
        tool, fruit = TOOLS[number % 2], FRUITS[number // 2 % len(FRUITS)]
        task_id = f"{name}-{number}"
        gold = value_of(task_id, tool, fruit)
        made.append(Task(f"{tool}({fruit})?", (gold,), id=task_id, meta={"tool": tool}))
    return made


def toy_toolbox(task: Task) -> Toolbox:
    """Both tools, in the world of this task."""

    def make(name: str) -> Tool:
        async def run(argument: str) -> str:
            if argument not in FRUITS:
                raise ToolMistake(f"there is no {argument!r}.")
            return value_of(task.id, name, argument)

        return Tool(name, run, about=f"The {name} of a fruit", pure=True)

    return Toolbox(map(make, TOOLS))


def demonstrate(
    task: Task, draw: random.Random, luck: float = 0.6, care: float = 0.75
) -> Trajectory:
    """A chain by somebody who takes the right tool with `luck`, and copies with `care`."""
    right = draw.random() < luck
    tool = next(name for name in TOOLS if (name == task.meta["tool"]) == right)
    asked = task.question.partition("(")[2].removesuffix(")?")
    fruit = asked if draw.random() < care else draw.choice(FRUITS)
    seen = value_of(task.id, tool, fruit)
    said = seen if draw.random() < care else draw.choice("0123456789")
    call = f"<{tool}>{fruit}</{tool}>"
    return Trajectory(
        task.id,
        task.question,
        GRAMMAR.name,
        [
            Segment(Author.PROMPT, system_prompt(GRAMMAR)),
            Segment(Author.MODEL, call),
            Segment(Author.ENV, GRAMMAR.render_observation(seen, call)),
            Segment(Author.MODEL, f"<answer>{said}</answer>"),
        ],
        tools=list(TOOLS),
        stop=StopReason.ANSWERED,
        answer=said,
    )


def demonstrations(count: int, seed: int = 0) -> list[Trajectory]:
    draw = random.Random(f"demonstrations|{seed}")
    return [demonstrate(task, draw) for task in toy_tasks(count, f"shown-{seed}")]


def make_toy_model(path: Path, seed: int = 0) -> Path:
    """A random llama of two layers whose tokenizer has a token for each word of this world."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chains = [f"{chain.question}\n{chain.text}" for chain in demonstrations(200)]
    headings = [system_prompt(GRAMMAR), "system", "user", "assistant"]
    tokenizer.train_from_iterator([*chains, *headings * 20], trainer)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # LoRA leaves embeddings alone: wide enough to be sure of a token
        model.get_input_embeddings().weight.mul_(3.0)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return path


def imitate(
    model: Path,
    root: Path,
    *,
    count: int = 8000,
    seed: int = 0,
    change: Callable[[Row], Row] = lambda row: row,
) -> Path:
    """Fine-tune the model on demonstrations, `change` having its way with each row; the folder of
    its adapter."""
    from coa.train.policy import make_policy
    from coa.train.settings import SftSettings
    from coa.train.sft import run_sft

    settings = SftSettings(
        model=f"hf:{model}",
        rank=32,
        lr=3e-3,
        batch_size=32,
        dtype="float32",
        seed=seed,
        threads=1,
        checkpoint_every=1000,
    )
    policy = make_policy(settings)
    make_row = partial(build_row, codec=policy.codec)
    rows = [change(make_row(chain)) for chain in demonstrations(count, seed)]
    made = {"grammar": GRAMMAR.name, "prompt": "compact"}
    return run_sft(settings, rows, root, policy=policy, manifest=made).adapter


def mean_reward(trajectories: Sequence[Trajectory], tasks: Sequence[Task]) -> float:
    gold = {task.id: task.answers for task in tasks}
    return sum(t.answer in gold[t.task_id] for t in trajectories) / len(trajectories)
