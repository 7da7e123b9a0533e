"""Rows in the form in which each benchmark is published, all written by us, and files of them.

`REAL` is the folder of real files, where there is one.
"""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import json
import os
import pickle
import zlib
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from coa.environments.published import load_benchmark
from coa.tasks import TaskSet

ROOT = Path(__file__).parents[1]
REAL = Path(
    os.environ.get("COA_TEST_BENCHMARKS") or ROOT.parent / "shared" / "data" / "afm-benchmarks"
)
real = pytest.mark.skipif(not REAL.is_dir(), reason="the folder of real files is not here")
FILES = {
    "nq": ("nq_full.jsonl", 3610),
    "webwalker": ("webwalker_main.json", 680),
    "aime24": ("aime24.parquet", 30),
    "aime25": ("aime25.parquet", 30),
    "amc23": ("amc23.parquet", 40),
    "math500": ("math500.parquet", 500),
    "olympiadbench": ("OlympiadBench.parquet", 675),
    "livecodebench-v4": ("livecodebench_v4.parquet", 100),
    "livecodebench-v5": ("livecodebench_v5.parquet", 167),
}
CANARY = "a canary of ours"
SHOWN = {
    *("set", "grammar", "reward", "family", "level", "hops", "lang", "domain", "root_url"),
    *("answer_type", "platform", "contest_date", "question_title", "tests_left_out"),
    "entry_point",
}
"""All that a task of a benchmark may show beside its question."""


def sealed(text: str) -> str:
    key = cycle(hashlib.sha256(CANARY.encode()).digest())
    hidden = bytes(a ^ b for a, b in zip(text.encode(), key, strict=False))
    return base64.b64encode(hidden).decode()


def packed(cases: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def verl(question: str, truth: Any, **extra: Any) -> dict[str, Any]:
    """A row as AFM publishes it."""
    asked = f"Solve it in blocks.\n1. 'plan': first.\n\nTask: {question}"
    return {
        "data_source": "ours",
        "prompt": [{"content": asked, "role": "user"}],
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"split": "test", **extra},
    }


STDIN = {"stdin": ["1 2\n"], "expected_output": ["3\n"], "question_id": "q1"}
LIVE = {
    "question_title": "Sum",
    "question_content": "Add two numbers.",
    "platform": "atcoder",
    "question_id": "abc1_a",
    "contest_date": "2024-08-10T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "private_test_cases": packed([{"input": "4 5\n", "output": "9\n", "testtype": "stdin"}]),
    "metadata": "{}",
}
CALLED = LIVE | {
    "platform": "leetcode",
    "starter_code": "class Solution:\n    def add(self, a: int, b: list[int]) -> int:\n        ",
    "public_test_cases": json.dumps(
        [{"input": "1\n[2, 3]", "output": "6", "testtype": "functional"}]
    ),
    "private_test_cases": "[]",
    "metadata": '{"func_name": "add"}',
}
GOLD = "Lagoon City"
ROWS: dict[str, list[dict[str, Any]]] = {
    "nq": [
        {"question": "which town is it", "answer": [GOLD, "Lagoon"], "data_source": "nq"},
        {"id": "test_1", "question": "which town is it, then", "golden_answers": [GOLD]},
    ],
    "triviaqa": [
        {
            "Question": "Which town?",
            "QuestionId": "tc_1",
            "Answer": {"Value": GOLD, "Aliases": ["Lagoon"], "NormalizedValue": "lagoon city"},
        }
    ],
    "popqa": [
        {"id": 7, "prop": "capital", "question": "Which town?", "possible_answers": f'["{GOLD}"]'}
    ],
    "hotpotqa": [
        {
            "_id": "5a",
            "question": "Which town?",
            "answer": GOLD,
            "type": "bridge",
            "level": "hard",
            "supporting_facts": [[GOLD, 0]],
            "context": [[GOLD, ["It is a town."]]],
        }
    ],
    "2wiki": [
        {"_id": "b", "question": "Which town?", "answer": GOLD, "type": "comparison"},
    ],
    "musique": [
        {
            "id": "3hop1__1_2_3",
            "question": "Which town?",
            "answer": GOLD,
            "answer_aliases": ["Lagoon"],
            "answerable": True,
            "question_decomposition": [{"answer": GOLD}],
        }
    ],
    "bamboogle": [{"Question": "Which town?", "Answer": GOLD}],
    "gaia": [
        {
            "task_id": "c61d",
            "Question": "Which town?",
            "Level": 2,
            "Final answer": GOLD,
            "file_name": "",
            "Annotator Metadata": {"Steps": f"1. It is {GOLD}."},
        }
    ],
    "webwalker": [
        {
            "question": "Which town?",
            "answer": GOLD,
            "root_url": "https://towns.example/",
            "info": {
                "domain": "travel",
                "source_website": ["https://towns.example/lagoon"],
                "golden_path": [f"root->{GOLD}"],
                "type": "single_source",
                "Level": "easy",
                "lang": "en",
            },
        }
    ],
    "browsecomp": [
        {
            "problem": sealed("Which town?"),
            "answer": sealed(GOLD),
            "problem_topic": "Towns",
            "canary": CANARY,
        }
    ],
    "hle": [
        {
            "id": "66e8",
            "question": "Which town?",
            "image": "",
            "answer": GOLD,
            "answer_type": "exactMatch",
            "rationale": f"Since it is {GOLD}.",
            "category": "Other",
        }
    ],
    "aime24": [verl("What is $200 + 4$?", "204", index="0")],
    "aime25": [{"problem": "What is $60 + 10$?", "answer": "70"}],
    "amc23": [verl("How many miles?", "27.0", index="0")],
    "math500": [
        {
            "problem": "What is half of one?",
            "solution": "It is $\\frac12$.",
            "answer": "\\frac{1}{2}",
            "subject": "Algebra",
            "level": 3,
            "unique_id": "test/algebra/1.json",
        }
    ],
    "olympiadbench": [
        {"id": 1, "question": "Which two?", "final_answer": ["$2$", "$3$"], "subfield": "Algebra"}
    ],
    "livecodebench-v4": [LIVE, CALLED | {"question_id": "3000"}],
    "livecodebench-v5": [verl("Add.", json.dumps(STDIN), index="q1", difficulty="easy")],
    "codecontests": [
        {
            "name": "1_A. Sum",
            "description": "Add two numbers.",
            "source": 2,
            "cf_rating": 800,
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": ["4 5\n"], "output": ["9\n"]},
            "generated_tests": {"input": [], "output": []},
            "solutions": {"solution": ["print(sum(map(int, input().split())))"]},
        }
    ],
    "humaneval": [
        {
            "task_id": "Own/0",
            "prompt": 'def twice(n: int) -> int:\n    """Twice n."""\n',
            "entry_point": "twice",
            "canonical_solution": "    return 2 * n\n",
            "test": "def check(candidate):\n    assert candidate(4) == 8\n",
        }
    ],
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            mark = "\t" if path.suffix == ".tsv" else ","
            table = csv.DictWriter(file, list(rows[0]), delimiter=mark)
            table.writeheader()
            table.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def loaded(name: str, path: Path) -> TaskSet:
    return load_benchmark(name, path).tasks
