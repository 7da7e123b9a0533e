"""Programs for puzzles that are solved by trying all cases."""

from __future__ import annotations

import re

from coa.environments.gym.plans import BOARD, BUTTONS, LIST, ROWS, WHOLE, ProgramPlan, Recognisers

PUZZLES = Recognisers()


@PUZZLES.add(
    "mini_sudoku", r".*Solve this 4x4 Mini Sudoku puzzle:\n((?:[_1-4](?: [_1-4]){3}\n){4}).*"
)
def _sudoku(found: re.Match[str]) -> ProgramPlan:
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
    return ProgramPlan(steps, "I try permutations for each row.", program, ROWS)


@PUZZLES.add(
    "n_queens",
    r".*such that no two queens attack each other\.\n((?:[Q_](?: [Q_])*\n)+[Q_](?: [Q_])*)",
)
def _queens(found: re.Match[str]) -> ProgramPlan:
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
    return ProgramPlan(steps, "Each queen has a column of its own.", program, BOARD)


_EFFECTS = {"Add": "1, {}", "Subtract": "1, -{}", "Multiply": "{}, 0"}


@PUZZLES.add(
    "quantum_lock",
    r".*\nStart: (\d+) \((red|green)\)\nTarget: (\d+)\nButtons:"
    r"((?:\n[A-Z]: (?:Add|Subtract|Multiply) \d+ \(when (?:any|red|green)\))+)",
)
def _lock(found: re.Match[str]) -> ProgramPlan:
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
    return ProgramPlan(steps, "I use a breadth-first search.", program, BUTTONS)


@PUZZLES.add(
    "jugs", r".*hold this many litres of water: (A:\d+(?:, [B-Z]:\d+)*)\n.*target is: (\d+) .*"
)
def _jugs(found: re.Match[str]) -> ProgramPlan:
    sizes = re.sub(r"(\w):", r'"\1": ', found[1])
    program = (
        "import json\n"
        f"size = {{{sizes}}}\n"
        "queue, seen = [(dict.fromkeys(size, 0), [])], []\n"
        "for s, path in queue:\n"
        f"    if {found[2]} in s.values():\n"
        "        break\n"
        "    if s not in seen and len(seen) < 999:\n"
        "        seen.append(s)\n"
        "        for x in size:\n"
        '            queue.append(({**s, x: size[x]}, path + ["fill " + x]))\n'
        '            queue.append(({**s, x: 0}, path + ["empty " + x]))\n'
        "            for y in [y for y in size if y != x]:\n"
        "                n = min(s[x], size[y] - s[y])\n"
        "                poured = {**s, x: s[x] - n, y: s[y] + n}\n"
        '                queue.append((poured, path + [f"pour {x}->{y}"]))\n'
        "print(json.dumps(path))"
    )
    steps = ("Try all moves, shortest ways first.", "Stop when a jug holds the target.")
    return ProgramPlan(steps, "I use a breadth-first search.", program, LIST)


_CLAIMS = (
    (r"At least (\d) of these 7 statements are true\.", "t >= {}"),
    (r"At most (\d) of these 7 statements are false\.", "f <= {}"),
    (r"Exactly (\d) of these 7 statements are true\.", "t == {}"),
    (r"Exactly (\d) of these 7 statements are false\.", "f == {}"),
    (r"Either Statement 3 or Statement 4 is true, but not both\.", "s[2] != s[3]"),
    (r"The number of true statements is a prime number\.", "t in (2, 3, 5, 7)"),
    (r"The number of false statements is a composite number\.", "f in (4, 6)"),
)


@PUZZLES.add(
    "self_reference",
    r"Given the truthfulness of these statements.*number of possible solutions: ?"
    + "".join(rf"\n - Statement {i}: '{said}'" for i, (said, _) in enumerate(_CLAIMS, start=1)),
)
def _statements(found: re.Match[str]) -> ProgramPlan:
    numbers = iter(found.groups())
    claims = (form.format(next(numbers)) if "{}" in form else form for _, form in _CLAIMS)
    program = (
        "from itertools import product\n"
        "count = 0\n"
        "for s in product([False, True], repeat=7):\n"
        "    t = sum(s)\n"
        "    f = 7 - t\n"
        f"    count += s == ({', '.join(claims)})\n"
        "print(count)"
    )
    steps = ("Try true and false for all seven.", "Count where each is what it says.")
    return ProgramPlan(steps, "There are 128 cases.", program, WHOLE)
