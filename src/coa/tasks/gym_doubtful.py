"""Items of a generator whose gold answer is not the only one, or not the one, that their words ask
for. They are left out: a right answer must not be judged wrong."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

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
