"""Guards around the verifiers of reasoning-gym: what may be handed to them.

Some of them `eval` the answer, which a model wrote, or a part of the gold, which comes from a file;
two take 'nan' for a right number. Such text is stopped here: nothing is evaluated that is not made
of plain numbers, letters and brackets.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from coa.errors import RecordError

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
