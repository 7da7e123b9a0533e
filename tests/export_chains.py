"""Chains to export, the experts' own and small ones made by hand, and reading what was written."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from coa.distillation.convert import NotConvertible, convert
from coa.distillation.exports import Format, export
from coa.environments import make_tasks
from coa.environments.experts import Experts
from coa.grammar import load_grammar, system_prompt
from coa.io.runs import Json
from coa.models.codec import Codec
from coa.tasks import Task
from coa.trajectory import Author, Segment, StopReason, Trajectory
from scripts import TOOLBOX_OF, episodes_of

SETS = {"mhqa": "atlas-mhqa", "react": "atlas-mhqa", "search_r1": "atlas-mhqa", "web": "atlas-web"}
"""Grammar -> the tasks that suit it."""
QWEN_SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Qwen's tokenizers cut text before merging: `>` and line breaks stay together."""


@cache
def tasks_of(name: str, count: int = 12) -> tuple[Task, ...]:
    return tuple(make_tasks(name, "train", count, seed=5))


@cache
def chains_of(grammar: str, count: int = 12) -> tuple[Trajectory, ...]:
    """What the experts, who often err, did under a grammar; mistakes are marked."""
    tasks = tasks_of(SETS[grammar], count)
    found = []
    for task, episode in zip(tasks, episodes_of(tasks, Experts(error_rate=0.4)), strict=True):
        try:
            found.append(convert(episode, TOOLBOX_OF(task).bind(load_grammar(grammar))))
        except NotConvertible:
            continue
    assert len(found) > count / 2
    return tuple(found)


def chain(
    *parts: str, question: str = "Where?", grammar: str = "mhqa", answer: str = "Lima"
) -> Trajectory:
    """Model turns with what the tool returned after each: turn, text, turn, text, turn."""
    loaded = load_grammar(grammar)
    segments = [Segment(Author.PROMPT, system_prompt(loaded))]
    for place, text in enumerate(parts):
        if place % 2:
            rendered = loaded.render_observation(text, segments[-1].text)
            segments.append(Segment(Author.ENV, rendered))
        else:
            segments.append(Segment(Author.MODEL, text))
    return Trajectory(
        task_id=Task(question).id,
        question=question,
        grammar=grammar,
        segments=segments,
        tools=list(loaded.tool_roles),
        stop=StopReason.ANSWERED,
        answer=answer,
    )


SEARCH = (
    "<think> I look it up.</think>\n<plan> 1. find it</plan>\n"
    "<think> First step.</think>\n<wiki_search> where</wiki_search>"
)
ANSWER = "<think> It is Lima.</think>\n<answer> Lima</answer>"


def short_chain(observed: str = "[1] It is Lima.") -> Trajectory:
    return chain(SEARCH, observed, ANSWER)


def make_tokenizer_folder(path: Path, *, qwen: bool = False, markers: bool = True) -> Path:
    """A folder with a small tokenizer in it, which cuts text as GPT-2's or as Qwen's do."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not qwen)
    split = pre_tokenizers.Split(Regex(QWEN_SPLITS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if qwen else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", *(["<|im_start|>", "<|im_end|>"] if markers else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [trajectory.text for trajectory in chains_of("mhqa")]
    tokenizer.train_from_iterator([*texts, ">\n\n", ">\n"] * 2, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    names = {"eos_token": special[-1], "pad_token": special[0], "chat_template": template}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (path / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return path


def write(
    trajectories: Any, to: Format, out: Path, codec: Codec | None = None, **how: Any
) -> tuple[Json, list[str]]:
    """The report and the lines that were told."""
    told: list[str] = []
    if to == "verl":
        pytest.importorskip("pyarrow")
    report = export(list(trajectories), to, out, codec=codec, note=told.append, **how)
    assert sorted(report["files"]) == sorted(path.name for path in out.iterdir())
    return report, told


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_parquet(path: Path) -> list[Json]:
    rows: list[Json] = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    return rows
