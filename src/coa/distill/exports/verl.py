"""Parquet for verl: chains to imitate, and tasks with gold to learn from by trial.

`ground_truth` is a struct `{target: [...], question}`: the scorers of AFM and verl that compare
texts index it as a dict and fail on a JSON string. Scorers of mathematics take one plain string:
`truth="text"` writes the first answer. Every task has an index of its own, because AFM's trainer
groups rollouts by it. Tools are told the question and never the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from coa.runs import Json
from coa.tasks.task import Task

Truth = Literal["struct", "text"]


def sft_schema(pyarrow: Any) -> Any:
    return pyarrow.schema([("task_id", pyarrow.string()), ("messages", _messages(pyarrow))])


def rl_rows(tasks: Iterable[Task], system: str, tools: Sequence[str], truth: Truth) -> list[Json]:
    """One row a task; those without a gold answer must have been left out."""
    return [_rl_row(task, system, tools, truth) for task in tasks]


def _rl_row(task: Task, system: str, tools: Sequence[str], truth: Truth) -> Json:
    source = str(task.meta.get("data_source") or task.meta.get("set") or "coa")
    told = {"question": task.question, "data_source": source, "ground_truth": ""}
    target: Any = list(task.answers)
    return {
        "data_source": source,
        "prompt": [
            {"role": "system", "content": system},
            {"role": "user", "content": task.question},
        ],
        "ability": "coding" if "code" in tools else "fact-reasoning",
        "reward_model": {
            "style": "rule",
            "ground_truth": task.answers[0]
            if truth == "text"
            else {"target": target, "question": task.question},
        },
        "extra_info": {
            "index": task.id,
            "split": str(task.meta.get("split", "train")),
            "question": task.question,
            "answer": target,
            "gold": json.dumps(dict(task.gold), ensure_ascii=False, sort_keys=True),
            "need_tools_kwargs": bool(tools),
            **({"tools_kwargs": {t: {"create_kwargs": told} for t in tools}} if tools else {}),
        },
    }


def rl_schema(pyarrow: Any, tools: Sequence[str], truth: Truth) -> Any:
    text, texts = pyarrow.string(), pyarrow.list_(pyarrow.string())
    target = pyarrow.struct([("target", texts), ("question", text)])
    told = [("question", text), ("data_source", text), ("ground_truth", text)]
    tool = pyarrow.struct([("create_kwargs", pyarrow.struct(told))])
    rest = [
        ("index", text),
        ("split", text),
        ("question", text),
        ("answer", texts),
        ("gold", text),
        ("need_tools_kwargs", pyarrow.bool_()),
    ]
    if tools:  # parquet has no struct without fields
        rest.append(("tools_kwargs", pyarrow.struct([(name, tool) for name in tools])))
    return pyarrow.schema(
        [
            ("data_source", text),
            ("prompt", _messages(pyarrow)),
            ("ability", text),
            (
                "reward_model",
                pyarrow.struct(
                    [("style", text), ("ground_truth", text if truth == "text" else target)]
                ),
            ),
            ("extra_info", pyarrow.struct(rest)),
        ]
    )


def _messages(pyarrow: Any) -> Any:
    text = pyarrow.string()
    return pyarrow.list_(pyarrow.struct([("role", text), ("content", text)]))
