"""Programs for arithmetic, algebra and number theory."""

from __future__ import annotations

import re

from coa.environments.gym.plans import (
    COMPLEX,
    DIGITS,
    FACTORS,
    FRACTION,
    HEXADECIMAL,
    NUMBER,
    WHOLE,
    ProgramPlan,
    Recognisers,
)

NUMBERS = Recognisers()


@NUMBERS.add("basic_arithmetic", r"Calculate ([-+*/() \d]+)\.")
def _expression(found: re.Match[str]) -> ProgramPlan:
    expression = found[1].replace("/", "//")
    steps = ("Write the expression in Python; / is whole division.", "Print its value.")
    idea = "I copy the expression."
    return ProgramPlan(steps, idea, f"print({expression})", WHOLE)


@NUMBERS.add("chain_sum", r"State the final answer to the following[a-z ]+: ([-+ \d]+) =")
def _sum(found: re.Match[str]) -> ProgramPlan:
    steps = ("Write the sum in Python.", "Print its value.")
    return ProgramPlan(steps, "I copy the sum.", f"print({found[1]})", WHOLE)


_DECIMAL = re.compile(r"\d+\.\d+|\d+")


def _decimals(expression: str) -> str:
    return _DECIMAL.sub(lambda number: f'D("{number[0]}")', expression)


@NUMBERS.add("decimal_chain_sum", r"State the final answer to the following[a-z ]+: ([-+. \d]+) =")
def _decimal_sum(found: re.Match[str]) -> ProgramPlan:
    program = f"from decimal import Decimal as D\nprint({_decimals(found[1])})"
    steps = ("Write the numbers as decimals, which are exact.", "Print the sum.")
    return ProgramPlan(steps, "I use Decimal.", program, NUMBER)


@NUMBERS.add(
    "decimal_arithmetic",
    r"Please solve this problem to a maximum of (\d+) significant digits.*\n([-+*/().\d]+) = \?",
)
def _decimal_expression(found: re.Match[str]) -> ProgramPlan:
    program = (
        "from decimal import Decimal as D, getcontext\n"
        f"getcontext().prec = {found[1]}\n"
        f"print({_decimals(found[2])})"
    )
    steps = (f"Set the precision to {found[1]} digits.", "Print the value of the expression.")
    return ProgramPlan(steps, "I use Decimal.", program, NUMBER)


@NUMBERS.add("bitwise_arithmetic", r"Please solve this problem.*\n([-+*<>() 0-9a-fx]+)")
def _bitwise(found: re.Match[str]) -> ProgramPlan:
    steps = ("Write the expression in Python.", "Print its value in hexadecimal.")
    idea = "I copy the expression."
    return ProgramPlan(steps, idea, f"print(hex({found[1]}))", HEXADECIMAL)


@NUMBERS.add("products", r"Solve the following multiplication: ([* \d]+)\. .*")
def _product(found: re.Match[str]) -> ProgramPlan:
    steps = ("Write the product in Python.", "Print its value.")
    return ProgramPlan(steps, "I copy the product.", f"print({found[1]})", WHOLE)


@NUMBERS.add("gcd", r"Find the Greatest Common Divisor \(GCD\) of these numbers: ([\d, ]+)\. .*")
def _gcd(found: re.Match[str]) -> ProgramPlan:
    steps = ("Take the greatest common divisor of the numbers.", "Print it.")
    program = f"import math\nprint(math.gcd({found[1]}))"
    return ProgramPlan(steps, "I use math.gcd.", program, WHOLE)


@NUMBERS.add("lcm", r"Find the Least Common Multiple \(LCM\) of these numbers: ([\d, ]+)")
def _lcm(found: re.Match[str]) -> ProgramPlan:
    steps = ("Take the least common multiple of the numbers.", "Print it.")
    program = f"import math\nprint(math.lcm({found[1]}))"
    return ProgramPlan(steps, "I use math.lcm.", program, WHOLE)


@NUMBERS.add("count_bits", r"How many 1 bits are there in the .* of the number (\d+)\?")
def _bits(found: re.Match[str]) -> ProgramPlan:
    steps = ("Write the number in binary.", "Count the ones.")
    program = f'print(bin({found[1]}).count("1"))'
    return ProgramPlan(steps, "I use bin.", program, WHOLE)


@NUMBERS.add("count_primes", r"Count how many prime .* between (\d+) and (\d+) \(inclusive\) \?")
def _primes(found: re.Match[str]) -> ProgramPlan:
    program = (
        "count = 0\n"
        f"for n in range({found[1]}, {found[2]} + 1):\n"
        "    if n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)):\n"
        "        count += 1\n"
        "print(count)"
    )
    steps = ("Go through all numbers of the range.", "Count those that no smaller one divides.")
    return ProgramPlan(steps, "I try divisors up to the root.", program, WHOLE)


@NUMBERS.add("prime_factorization", r"Find the prime factorization of (\d+)\. .*")
def _factors(found: re.Match[str]) -> ProgramPlan:
    program = (
        f"n = {found[1]}\n"
        "factors = []\n"
        "for d in range(2, n + 1):\n"
        "    while n % d == 0:\n"
        "        factors.append(d)\n"
        "        n //= d\n"
        'print(" \u00d7 ".join(map(str, factors)))'
    )
    steps = ("Divide by 2, 3, 4 ... as often as it goes.", "Print the divisors, joined by \u00d7.")
    return ProgramPlan(steps, "I divide from below.", program, FACTORS)


@NUMBERS.add("power_function", r".*Compute (-?[\d.]+(?:e-\d+)?)\^(-?\d+)\. .*")
def _power(found: re.Match[str]) -> ProgramPlan:
    steps = ("Take the power.", "Print it with 3 significant figures.")
    program = f'print(f"{{({found[1]}) ** ({found[2]}):.2e}}")'
    return ProgramPlan(steps, "I format with .2e.", program, NUMBER)


@NUMBERS.add("number_format", r".*pick the (largest|smallest) number of the .*: ([-\d.,e+ ]+)")
def _extreme(found: re.Match[str]) -> ProgramPlan:
    function = "max" if found[1] == "largest" else "min"
    program = (
        f"numbers = {found[2].split()}\n"
        f'print({function}(numbers, key=lambda s: float(s.replace(",", ""))))'
    )
    steps = ("Read every candidate as a number.", f"Print the {found[1]}.")
    return ProgramPlan(steps, f"I use {function} with a key.", program, NUMBER)


@NUMBERS.add(
    "fraction_simplification", r"Simplify the fraction \D*(\d+)\D+(\d+)\D* to its lowest terms\..*"
)
def _fraction(found: re.Match[str]) -> ProgramPlan:
    program = (
        "from fractions import Fraction\n"
        f"f = Fraction({found[1]}, {found[2]})\n"
        'print(f"{f.numerator}/{f.denominator}")'
    )
    steps = ("Make a Fraction, which reduces itself.", "Print it.")
    return ProgramPlan(steps, "I use Fraction.", program, FRACTION)


@NUMBERS.add("dice", r"I have these dice: ([\dd, ]+)\. .* odds of rolling (\d+) or higher\?.*")
def _dice(found: re.Match[str]) -> ProgramPlan:
    sides = ", ".join(re.findall(r"d(\d+)", found[1]))
    program = (
        "from fractions import Fraction\n"
        "from itertools import product\n"
        f"dice = [{sides}]\n"
        "rolls = list(product(*[range(1, d + 1) for d in dice]))\n"
        f"hits = [roll for roll in rolls if sum(roll) >= {found[2]}]\n"
        "f = Fraction(len(hits), len(rolls))\n"
        'print(f"{f.numerator}/{f.denominator}")'
    )
    steps = ("List all rolls of the dice.", "Count those that are high enough.", "Divide.")
    return ProgramPlan(steps, "I list the rolls with product.", program, FRACTION)


_BASES = {"binary": "2", "hexadecimal": "16"}


@NUMBERS.add(
    "base_conversion", r".*convert the ([a-z]+|base-\d+) number (\w+) to ([a-z]+|base-\d+)"
)
def _base(found: re.Match[str]) -> ProgramPlan:
    source, target = (_BASES.get(name, name.removeprefix("base-")) for name in found.group(1, 3))
    program = (
        f'n = int("{found[2]}", {source})\n'
        'digits = ""\n'
        "while n:\n"
        f'    digits = "0123456789abcdef"[n % {target}] + digits\n'
        f"    n //= {target}\n"
        "print(digits)"
    )
    steps = (
        f"Read the number in base {source}.",
        f"Divide by {target} and collect the remainders.",
    )
    return ProgramPlan(steps, f"I take digits in base {target}.", program, DIGITS)


@NUMBERS.add(
    "complex_arithmetic",
    r"\w+ the complex numbers: \(([-+.i \d]+)\) ([-+\u00d7\u00f7]) \(([-+.i \d]+)\)",
)
def _complex(found: re.Match[str]) -> ProgramPlan:
    left, right = (_python_complex(text) for text in found.group(1, 3))
    operator = {"\u00d7": "*", "\u00f7": "/"}.get(found[2], found[2])
    program = f'z = ({left}) {operator} ({right})\nprint(f"{{round(z.real)}}{{round(z.imag):+}}i")'
    steps = ("Write both numbers with j for i.", "Calculate.", "Print real and imaginary part.")
    return ProgramPlan(steps, "Python writes i as j.", program, COMPLEX)


def _python_complex(text: str) -> str:
    """'3.0 - 4.0i' -> '3 - 4j'."""
    return re.sub(r"\.0+", "", text).replace("i", "j")


@NUMBERS.add(
    "simple_equations",
    r"(?:Find|Solve|Determine) .*?\b([a-z])(?: in the equation| that satisfies)?: "
    r"((?:[-+*() \d]|\1)+) = (-?\d+)",
)
def _equation(found: re.Match[str]) -> ProgramPlan:
    name, left, right = found.groups()
    program = f"f = lambda {name}: {left} - ({right})\nprint(round(-f(0) / (f(1) - f(0))))"
    steps = ("Bring everything to one side.", "It is linear: divide by the slope.")
    return ProgramPlan(steps, f"The equation is linear in {name}.", program, WHOLE)


_LEGS = {
    name: legs
    for legs, names in {
        0: "snake, sea slug, jellyfish, flatworm, leech",
        2: "chicken, bird, human, duck",
        4: "dog, cat, cow, horse, lion, elephant, giraffe, tiger, deer, sheep",
        5: "starfish",
        6: "insect, ant, butterfly, beetle, bee, wasp, grasshopper, cricket, cockroach, "
        "praying mantis, firefly",
        8: "spider, scorpion",
        10: "crab, lobster, shrimp",
        14: "woodlouse",
    }.items()
    for name in names.split(", ")
}


@NUMBERS.add("leg_counting", r".*how many legs are there in total if you have ([\d\w, ]+)\?")
def _legs(found: re.Match[str]) -> ProgramPlan | None:
    rows = []
    for count, name in re.findall(r"(\d+) ([a-z ]+)", found[1]):
        legs = _LEGS.get(name, _LEGS.get(name.removesuffix("s")))
        if legs is None:
            return None
        rows.append(f'({count}, "{name}", {legs})')
    program = (
        f"animals = [{', '.join(rows)}]\nprint(sum(count * legs for count, name, legs in animals))"
    )
    steps = ("Write down the legs of each animal.", "Multiply by how many there are.", "Add up.")
    return ProgramPlan(steps, "I know how many legs they have.", program, WHOLE)
