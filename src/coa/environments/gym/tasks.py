"""Tasks for code agents from the generators of reasoning-gym, scored by the package's verifiers.

Splits: `train`; `heldout_seed`, from the same generators; `heldout_generator`, from generators that
`train` never draws from. A generator makes its item from one number, so `train` takes even numbers
and the others odd ones; and because small generators repeat themselves, the facts of a problem also
decide whether it may be trained on: no problem of `heldout_seed` is ever in `train`, in whatever
words.
"""

from __future__ import annotations

import ast
import decimal
import hashlib
import io
import json
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import islice
from typing import Any

from coa.environments import GYM, chosen_names
from coa.errors import MissingExtra, RecordError, UsageError, did_you_mean
from coa.tasks import Task, TaskSet, in_turn

_DATE = re.compile(r"\b(\d\d)/(\d\d)/\d{4}\b")


def is_doubtful(name: str, entry: Mapping[str, Any]) -> bool:
    """Whether somebody who reads the question as it stands may rightly answer something else."""
    doubt = _DOUBTS.get(name)
    return doubt is not None and doubt(entry)


def _bare_negative_base(entry: Mapping[str, Any]) -> bool:
    """`-3^2` is -9 in Python and in most books; the package means 9."""
    facts = entry["metadata"]
    return bool(facts["base"] < 0 and facts["exponent"] % 2 == 0)


def _counted_in_both_cases(entry: Mapping[str, Any]) -> bool:
    facts = entry["metadata"]
    return " ".join(facts["span"]).count(facts["target_letter"]) != int(entry["answer"])


def _divided_without_rest(entry: Mapping[str, Any]) -> bool:
    """The package takes `/` for the whole part of a quotient."""
    expression = ast.parse(entry["metadata"]["expression"].strip(), mode="eval").body
    return _value(expression) != Fraction(entry["answer"])


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right):
            return _OPERATIONS[type(sign)](_value(left), _value(right))
    raise ValueError(f"no arithmetic: {ast.unparse(node)}")


def _month_or_day(entry: Mapping[str, Any]) -> bool:
    """No date tells whether the month stands first, and one would be another day."""
    dates = [(int(first), int(second)) for first, second in _DATE.findall(entry["question"])]
    return all(max(date) <= 12 for date in dates) and any(a != b for a, b in dates)


_DOUBTS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "power_function": _bare_negative_base,
    "letter_counting": _counted_in_both_cases,
    "basic_arithmetic": _divided_without_rest,
    "calendar_arithmetic": _month_or_day,
    "time_intervals": _month_or_day,
}


# ------------------------------------------------------------------------------------------------
# The reasoning-gym generators of the set `gym-code`, each with its fixed configuration.
#
# Chosen because a short program solves their problems and guessing does not satisfy their
# verifiers; `docs/gym.md` lists those that accept more than the right answer, and the generators
# left out, with the reason. Configurations are modest: a question has a few hundred characters
# and its answer a line or a small grid. They are part of a task's identity, so changing one makes
# other tasks.
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generator:
    """One generator of the package: where it belongs and how it is configured."""

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    held_out: bool = False
    """Whether it is kept for the split `heldout_generator`, and never trained on."""


def _train(kind: str, **config: Any) -> Generator:
    return Generator(kind, config)


def _held_out(kind: str, **config: Any) -> Generator:
    return Generator(kind, config, held_out=True)


# Not all calendar questions can be answered: two of its kinds leave the year out or print a wrong
# one. Of the time intervals only dates do not depend on the day on which they are made.
_CALENDAR = ["weekday_offset", "weekday_of_date", "recurring_event_day", "count_days"]

GENERATORS: dict[str, Generator] = {
    "basic_arithmetic": _train("arithmetic", max_terms=4, max_digits=3),
    "calendar_arithmetic": _train("arithmetic", tasks=[*_CALENDAR, "is_leap_year"]),
    "chain_sum": _train("arithmetic", max_terms=5, max_digits=4),
    "count_bits": _train("arithmetic", max_n=1_000_000),
    "decimal_arithmetic": _train("arithmetic", max_terms=4),
    "dice": _train("arithmetic", num_dice=3, max_dice_size=12),
    "fraction_simplification": _train("arithmetic", max_factor=50),
    "gcd": _train("arithmetic", max_numbers=3),
    "leg_counting": _train("arithmetic", max_animals=5),
    "number_format": _train("arithmetic", max_num_candidates=4, max_n=1_000_000),
    "prime_factorization": _train("arithmetic", max_value=5000),
    "products": _train("arithmetic", max_terms=3, max_digits=4),
    "time_intervals": _train("arithmetic", task_types=["date"], max_date_difference_days=1000),
    "bitwise_arithmetic": _held_out("arithmetic", difficulty=2),
    "decimal_chain_sum": _held_out("arithmetic", max_terms=4),
    "lcm": _held_out("arithmetic", max_numbers=3),
    "power_function": _held_out("arithmetic", min_exponent=1, max_exponent=6),
    "complex_arithmetic": _train("algebra"),
    "simple_equations": _train("algebra"),
    "ab": _train("algorithmic", length=8),
    "base_conversion": _train("algorithmic", min_value=1, max_value=5000),
    "binary_matrix": _train("algorithmic", max_n=4),
    "caesar_cipher": _train("algorithmic", min_words=6, max_words=12),
    "count_primes": _train("algorithmic", max_n=500),
    "game_of_life": _train("algorithmic", grid_size_x=5, grid_size_y=5, filled_cells=12),
    "jugs": _train("algorithmic", difficulty=3),
    "letter_counting": _train("algorithmic", max_words=10),
    "manipulate_matrix": _train("algorithmic", max_rows=4, max_cols=4, max_transforms=3),
    "number_filtering": _train("algorithmic", max_numbers=8, max_decimals=2),
    "number_sorting": _train("algorithmic", max_numbers=8),
    "palindrome_generation": _train("algorithmic", min_length=5, max_length=12),
    "palindrome_partitioning": _train("algorithmic", max_string_len=8),
    "pool_matrix": _train("algorithmic", max_rows=4, max_cols=4, min_pool_size=2),
    "rotate_matrix": _train("algorithmic", max_n=5),
    "rotten_oranges": _train("algorithmic", min_n=3, max_n=4, p_rotten=0.2),
    "spell_backward": _train("algorithmic"),
    "string_insertion": _train("algorithmic"),
    "word_sorting": _train("algorithmic", max_words=8),
    "binary_alternation": _held_out("algorithmic", max_n=20),
    "group_anagrams": _held_out("algorithmic", max_anagram_groups=4, max_words_per_group=3),
    "spiral_matrix": _held_out("algorithmic", max_n=4),
    "word_sequence_reversal": _held_out("algorithmic"),
    "bf": _train("code"),
    # In a smaller maze there is sometimes one passage only, and its generator never ends.
    "maze": _train("games", min_grid_size=7, max_grid_size=7, max_dist=8),
    "mini_sudoku": _train("games"),
    "n_queens": _held_out("games", n=7, min_remove=3, max_remove=5),
    "advanced_geometry": _train("geometry"),
    "simple_geometry": _held_out("geometry"),
    "largest_island": _train("graphs", min_rows=4, max_rows=5, min_cols=4, max_cols=5),
    "quantum_lock": _train("graphs", difficulty=4),
    "shortest_path": _train("graphs", min_rows=4, max_rows=5, min_cols=4, max_cols=5),
    "course_schedule": _held_out("graphs", max_num_courses=7),
    "self_reference": _train("logic"),
}

WITHOUT_FACTS = frozenset(["ab", "decimal_arithmetic", "game_of_life", "self_reference"])
"""Generators whose metadata do not tell the problem. Each has one wording: the text tells it."""


# ------------------------------------------------------------------------------------------------
# Guards around the verifiers of reasoning-gym: what may be handed to them.
#
# Some of them `eval` the answer, which a model wrote, or a part of the gold, which comes from a
# file; two take 'nan' for a right number. Such text is stopped here: nothing is evaluated that is
# not made of plain numbers, letters and brackets.
# ------------------------------------------------------------------------------------------------


LONGEST_ANSWER = 4000
"""Characters; the longest gold answer has a few hundred."""

_EVALUATES_ANSWER = {
    "binary_matrix": re.compile(r"[0-9\s]+"),
    "n_queens": re.compile(r"[Q_\s]+"),
    "spiral_matrix": re.compile(r"[0-9\s]+"),
    "string_insertion": re.compile(r"[A-E]+"),
}
"""Verifiers that `eval` an answer that is not the gold one -> answers that this does not hurt."""
_TAKES_NAN = ("complex_arithmetic", "number_sorting")
_ARITHMETIC = re.compile(r"(?:0x[0-9a-f]+|(?:<<|>>) 0x[0-3](?![0-9a-f])|\*(?!\*)|[-+() ])+")
"""Without powers, and with shifts by at most 3, as the generator makes them: others fill memory."""


def is_safe(generator: str, answer: str) -> bool:
    """Whether the generator's verifier may see the answer; otherwise it is wrong anyway."""
    if len(answer) > LONGEST_ANSWER:
        return False
    if generator in _TAKES_NAN and "nan" in answer.lower():
        return False
    plain = _EVALUATES_ANSWER.get(generator)
    return plain is None or bool(plain.fullmatch(answer)) or _is_literal(answer)


def check_gold(generator: str, entry: Mapping[str, Any]) -> None:
    """Refuse a gold entry that its verifier would evaluate to something else than a value."""
    if generator == "bitwise_arithmetic":
        fits = bool(_ARITHMETIC.fullmatch(str(entry["metadata"].get("problem"))))
    else:
        fits = generator != "number_sorting" or _is_literal(str(entry["answer"]))
    if not fits:
        raise RecordError(
            f"a task of generator {generator!r} has gold that the generator does not make. "
            "Was the task file edited? Make it again with `coa tasks make`."
        )


def _is_literal(text: str) -> bool:
    """Whether evaluating the text gives a list of plain values and does nothing else."""
    try:
        return isinstance(ast.literal_eval(text.strip()), list)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False


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
    chosen = chosen_names("generator", generators, generators_of(split), GENERATORS, split)
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
