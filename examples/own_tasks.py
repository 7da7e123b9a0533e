"""Tasks of your own from a CSV: columns `question` and `answer`; alternatives are joined by |."""

import tempfile
from pathlib import Path

from coa.tasks import TaskSet

TABLE = """question,answer,level
What is the capital of the country where Osaka is located?,Tokyo,1
Which currency is used in the country whose capital is Lima?,Peruvian sol|sol,2
"""

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "questions.csv"
    path.write_text(TABLE)
    tasks = TaskSet.load(path)  # or: coa eval --tasks questions.csv --out runs/mine
    tasks.save(Path(folder) / "tasks.jsonl")
    for task in tasks:
        print(task.id, task.question, task.answers, dict(task.meta))
