"""Tasks for code agents from the generators of reasoning-gym, scored by the package's verifiers.

Splits: `train`; `heldout_seed`, from the same generators; `heldout_generator`, from generators that
`train` never draws from. A generator makes its item from one number, so `train` takes even numbers
and the others odd ones; and because small generators repeat themselves, the facts of a problem also
decide whether it may be trained on: no problem of `heldout_seed` is ever in `train`, in whatever
words.
"""

from __future__ import annotations

import decimal
import hashlib
import io
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from itertools import islice
from typing import Any

from coa.errors import MissingExtra, RecordError, UsageError, did_you_mean
from coa.tasks.gym_doubtful import is_doubtful
from coa.tasks.gym_generators import GENERATORS, WITHOUT_FACTS
from coa.tasks.gym_verifiers import check_gold, is_safe
from coa.tasks.sets import GYM
from coa.tasks.task import Task, TaskSet, in_turn

SPLITS = ("train", "heldout_seed", "heldout_generator")
HELD_OUT_SHARE = 0.25
INDEX_BITS = 16
LARGEST_SEED = 2**15 - 1
"""An item's number has 32 bits, as a seed of numpy has: the seed, the index, a bit of the split."""
PATIENCE = 300
"""Items in a row without a new question after which a generator has no more of them."""
_ORIGIN = ("source_dataset", "source_index", "difficulty")
"""Metadata that tell where an item comes from, not what it asks."""


def make_tasks(split: str, n: int, seed: int, generators: Sequence[str] | None = None) -> TaskSet:
    """`n` distinct tasks of a split, spread evenly over its generators (or over those named).

    The same arguments give the same tasks, and a smaller `n` gives the first of them.
    """
    chosen = _chosen_generators(split, generators)
    if n < 1:
        raise UsageError(f"n = {n!r}: expected a positive number of tasks.")
    if not 0 <= seed <= LARGEST_SEED:
        raise UsageError(f"seed = {seed!r}: expected 0 to {LARGEST_SEED}.")
    drawn = in_turn([_drawn(name, split, seed) for name in chosen])
    known: dict[str, Task] = {}
    new = (known.setdefault(task.id, task) for task in drawn if task.id not in known)
    tasks = tuple(islice(new, n))
    if len(tasks) < n:
        raise UsageError(
            f"{n} tasks of split {split!r} are more than the {len(tasks)} that these generators "
            f"make with seed {seed}. Ask for fewer, for more generators or for another seed."
        )
    return TaskSet(tasks, name=f"gym-{split}-s{seed}")


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
        raise RecordError(f"task {task.id}: {name!r} is not a generator of {GYM}.{hint}")
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
    if not math.isfinite(found):
        return 0.0
    # Above 1 is a sum of partial credits with its rounding, and no right answer.
    return max(0.0, found) if found <= 1.0 else math.nextafter(1.0, 0.0)


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
        if entry is None or entry["question"] in seen or not _belongs(name, entry, split):
            misses += 1
            if misses == PATIENCE:
                return
            continue
        misses = 0
        seen.add(entry["question"])
        yield _task(name, split, seed, index, entry)


def _belongs(name: str, entry: Mapping[str, Any], split: str) -> bool:
    if split == "heldout_generator":
        return True
    first = hashlib.sha256(problem_of(name, entry).encode()).digest()[0]
    return (first < 256 * HELD_OUT_SHARE) == (split == "heldout_seed")


def problem_of(name: str, entry: Mapping[str, Any]) -> str:
    """What an item asks, whatever the words: its facts, or its text where it does not tell them."""
    if name in WITHOUT_FACTS:
        return str(entry["question"])
    metadata = entry["metadata"].items()
    facts = {key: value for key, value in metadata if key not in _ORIGIN}
    return json.dumps(facts, sort_keys=True)


def _entry(name: str, number: int) -> dict[str, Any] | None:
    """One item as JSON can hold it; None where the generator fails, or has no answer to give or one
    that its words do not ask for."""
    dataset = _dataset(name)
    with _undisturbed():
        try:
            made = dataset[number]
        except (ArithmeticError, ValueError, RuntimeError):  # a division by zero it did not foresee
            return None
    entry: dict[str, Any] = json.loads(json.dumps(made, default=_plain))
    entry["question"] = entry["question"].strip()
    if not str(entry["answer"] or "").strip() or is_doubtful(name, entry):
        return None
    return entry


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's own; dates and symbols as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _task(name: str, split: str, seed: int, index: int, entry: Mapping[str, Any]) -> Task:
    meta = {"set": GYM, "family": name, "kind": GENERATORS[name].kind, "split": split}
    return Task(
        question=entry["question"],
        answers=(str(entry["answer"]),),
        meta={**meta, "seed": seed},
        # With the index anybody could make the item again, and its answer: it is gold.
        gold={
            "generator": name,
            "index": index,
            "answer": entry["answer"],
            "metadata": entry["metadata"],
        },
    )


@cache
def _dataset(name: str) -> Any:
    """The package's generator; its item number k is made from `Random(k)`."""
    try:
        with warnings.catch_warnings():  # what it imports is compiled with complaints, once
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError:
        raise MissingExtra(f"the task set {GYM}", "gym") from None
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
