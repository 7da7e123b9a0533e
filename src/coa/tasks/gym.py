"""Tasks for code agents from the generators of reasoning-gym, scored by the package's verifiers.

Splits: `train`; `heldout_seed`, from the same generators; `heldout_generator`, from generators that
`train` never draws from. A generator makes its item from one number, so `train` takes even numbers
and the others odd ones; and because small generators repeat themselves, the text of a question also
decides whether it may be trained on: no question of `heldout_seed` is ever in `train`.
"""

from __future__ import annotations

import decimal
import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import Any

from coa.errors import MissingExtra, RecordError, UsageError, did_you_mean
from coa.tasks.gym_generators import GENERATORS
from coa.tasks.gym_verifiers import check_gold, is_safe
from coa.tasks.task import Task, TaskSet

SET = "gym-code"
SPLITS = ("train", "heldout_seed", "heldout_generator")
HELD_OUT_SHARE = 0.25
INDEX_BITS = 16
LARGEST_SEED = 2**15 - 1
"""An item's number has 32 bits, as a seed of numpy has: the seed, the index, a bit of the split."""
PATIENCE = 300
"""Items in a row without a new question after which a generator has no more of them."""


def make_tasks(split: str, n: int, seed: int, generators: Sequence[str] | None = None) -> TaskSet:
    """`n` distinct tasks of a split, spread evenly over its generators (or over those named).

    The same arguments give the same tasks, and a smaller `n` gives the first of them.
    """
    chosen = _chosen_generators(split, generators)
    if n < 1:
        raise UsageError(f"n = {n!r}: expected a positive number of tasks.")
    if not 0 <= seed <= LARGEST_SEED:
        raise UsageError(f"seed = {seed!r}: expected 0 to {LARGEST_SEED}.")
    tasks: dict[str, Task] = {}
    for task in _in_turn([_drawn(name, split, seed) for name in chosen]):
        tasks.setdefault(task.id, task)
        if len(tasks) == n:
            break
    if len(tasks) < n:
        raise UsageError(
            f"{n} tasks of split {split!r} are more than the {len(tasks)} that these generators "
            f"make with seed {seed}. Ask for fewer, for more generators or for another seed."
        )
    return TaskSet(tuple(tasks.values()), name=f"gym-{split}-s{seed}")


def generators_of(split: str) -> tuple[str, ...]:
    """Names of the generators a split draws from."""
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    wanted = split == "heldout_generator"
    return tuple(name for name, each in GENERATORS.items() if each.held_out == wanted)


def score(task: Task, answer: str | None) -> float | None:
    """The score that the generator's own verifier gives; None for a task without its gold.

    Partial credit is kept. What a verifier cannot read is wrong, as is an answer that is not safe
    to hand to it.
    """
    name = task.gold.get("generator")
    if name is None:
        return None
    if name not in GENERATORS:
        hint = did_you_mean(str(name), GENERATORS)
        raise RecordError(f"task {task.id}: {name!r} is not a generator of {SET}.{hint}")
    entry = {"question": task.question, **task.gold}
    check_gold(name, entry)
    answer = (answer or "").strip()
    if not answer or not is_safe(name, answer):
        return 0.0
    verifier = _dataset(name)
    with _undisturbed():
        try:
            found = float(verifier.score_answer(answer, entry))
        except Exception:  # not every verifier catches what it cannot parse
            return 0.0
    return min(1.0, max(0.0, found)) if math.isfinite(found) else 0.0


def _chosen_generators(split: str, names: Sequence[str] | None) -> list[str]:
    known = generators_of(split)
    if names is not None and not names:
        raise UsageError("generators: the list is empty. Leave it out to use all of them.")
    for name in names or ():
        if name not in GENERATORS:
            raise UsageError(f"unknown generator {name!r}.{did_you_mean(name, known)}")
        if name not in known:
            raise UsageError(
                f"generator {name!r} does not belong to split {split!r}.{did_you_mean('', known)}"
            )
    return list(dict.fromkeys(names or known))


def _in_turn(queues: list[Iterator[Task]]) -> Iterator[Task]:
    """One task of each queue after the other, until all are empty."""
    while queues:
        going = []
        for queue in queues:
            task = next(queue, None)
            if task is not None:
                going.append(queue)
                yield task
        queues = going


def item_number(split: str, seed: int, index: int) -> int:
    """The number from which an item is made; no two of (seed, index) share one, nor do `train` and
    another split."""
    return (seed << INDEX_BITS | index) << 1 | (split != "train")


def _drawn(name: str, split: str, seed: int) -> Iterator[Task]:
    """The tasks of one generator, in the order of their index; no question twice."""
    seen: set[str] = set()
    misses = 0
    for index in range(2**INDEX_BITS):
        entry = _entry(name, item_number(split, seed, index))
        if entry is None or entry["question"] in seen or not _belongs(entry["question"], split):
            misses += 1
            if misses == PATIENCE:
                return
            continue
        misses = 0
        seen.add(entry["question"])
        yield _task(name, split, seed, index, entry)


def _belongs(question: str, split: str) -> bool:
    if split == "heldout_generator":
        return True
    first = hashlib.sha256(question.encode()).digest()[0]
    return (first < 256 * HELD_OUT_SHARE) == (split == "heldout_seed")


def _entry(name: str, number: int) -> dict[str, Any] | None:
    """One item as JSON can hold it; None where the generator fails or has no answer to give."""
    dataset = _dataset(name)
    with _undisturbed():
        try:
            made = dataset[number]
        except (ArithmeticError, ValueError, RuntimeError):  # a division by zero it did not foresee
            return None
    entry: dict[str, Any] = json.loads(json.dumps(made, default=_plain))
    entry["question"] = entry["question"].strip()
    return entry if str(entry["answer"] or "").strip() else None


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's own; dates and symbols as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _task(name: str, split: str, seed: int, index: int, entry: Mapping[str, Any]) -> Task:
    meta = {"set": SET, "family": name, "kind": GENERATORS[name].kind, "split": split}
    return Task(
        question=entry["question"],
        answers=(str(entry["answer"]),),
        meta={**meta, "seed": seed, "index": index},
        gold={"generator": name, "answer": entry["answer"], "metadata": entry["metadata"]},
    )


@cache
def _dataset(name: str) -> Any:
    """The package's generator; its item number k is made from `Random(k)`."""
    try:
        import reasoning_gym
    except ImportError:
        raise MissingExtra("the task set gym-code", "gym") from None
    return reasoning_gym.create_dataset(name, seed=0, **GENERATORS[name].config)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Undo what generators do to the process: they set the precision of decimals and numpy's shared
    seed, and print."""
    import numpy as np

    state = np.random.get_state()
    with decimal.localcontext(), redirect_stdout(io.StringIO()):
        try:
            yield
        finally:
            np.random.set_state(state)
