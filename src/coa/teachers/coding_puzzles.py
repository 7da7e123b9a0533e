"""Programs for puzzles that are solved by trying all cases."""

from __future__ import annotations

import re

from coa.teachers.coding_plans import BOARD, BUTTONS, ROWS, Plan, Recognisers

PUZZLES = Recognisers()


@PUZZLES.add(
    "mini_sudoku", r".*Solve this 4x4 Mini Sudoku puzzle:\n((?:[_1-4](?: [_1-4]){3}\n){4}).*"
)
def _sudoku(found: re.Match[str]) -> Plan:
    rows = [row.replace(" ", "") for row in found[1].split("\n")[:4]]
    program = (
        "from itertools import permutations, product\n"
        f"g = {rows}\n"
        "def fits(p, row):\n"
        "    return all(a in ('_', b) for a, b in zip(row, p))\n"
        "rows = [[p for p in permutations('1234') if fits(p, row)] for row in g]\n"
        "for s in product(*rows):\n"
        "    boxes = [a[c:c + 2] + b[c:c + 2] for a, b in (s[:2], s[2:]) for c in (0, 2)]\n"
        "    if all(len(set(part)) == 4 for part in [*zip(*s), *boxes]):\n"
        "        break\n"
        "for row in s:\n"
        "    print(*row)"
    )
    steps = ("List what each row can be.", "Try all on columns and boxes.")
    return Plan(steps, "I try permutations for each row.", program, ROWS)


@PUZZLES.add(
    "n_queens",
    r".*such that no two queens attack each other\.\n((?:[Q_](?: [Q_])*\n)+[Q_](?: [Q_])*)",
)
def _queens(found: re.Match[str]) -> Plan:
    rows = [row.replace(" ", "") for row in found[1].split("\n")]
    program = (
        "from itertools import permutations\n"
        f"rows = {rows}\n"
        f"n = {len(rows)}\n"
        "for p in permutations(range(n)):\n"
        '    fits = all(rows[r].find("Q") in (-1, p[r]) for r in range(n))\n'
        "    falling = {p[r] - r for r in range(n)}\n"
        "    rising = {p[r] + r for r in range(n)}\n"
        "    if fits and len(falling) == len(rising) == n:\n"
        "        break\n"
        "for c in p:\n"
        '    print(*["Q" if i == c else "_" for i in range(n)])'
    )
    steps = ("Try all ways to put one queen in each row and column.", "Check the diagonals.")
    return Plan(steps, "Each queen has a column of its own.", program, BOARD)


_EFFECTS = {"Add": "1, {}", "Subtract": "1, -{}", "Multiply": "{}, 0"}


@PUZZLES.add(
    "quantum_lock",
    r".*\nStart: (\d+) \((red|green)\)\nTarget: (\d+)\nButtons:"
    r"((?:\n[A-Z]: (?:Add|Subtract|Multiply) \d+ \(when (?:any|red|green)\))+)",
)
def _lock(found: re.Match[str]) -> Plan:
    start, light, target, listed = found.groups()
    buttons = ", ".join(
        f'"{name}": ({_EFFECTS[verb].format(value)}, "{when}")'
        for name, verb, value, when in re.findall(r"(\w): (\w+) (\d+) \(when (\w+)\)", listed)
    )
    program = (
        f"buttons = {{{buttons}}}\n"
        f'queue, seen = [({start}, "{light}", [])], set()\n'
        "for value, light, path in queue:\n"
        f"    if value == {target}:\n"
        "        break\n"
        "    if (value, light) not in seen and len(path) < 16:\n"
        "        seen.add((value, light))\n"
        '        other = "green" if light == "red" else "red"\n'
        "        for name, (times, plus, when) in buttons.items():\n"
        '            if when in ("any", light):\n'
        "                queue.append((value * times + plus, other, path + [name]))\n"
        'print(" \u2192 ".join(path))'
    )
    steps = ("Write each button as times and plus.", "Search the shortest sequence to the target.")
    return Plan(steps, "I use a breadth-first search.", program, BUTTONS)
