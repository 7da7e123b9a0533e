"""Programs for matrices, mazes and graphs."""

from __future__ import annotations

import re

from coa.environments.gym.plans import (
    LIST,
    ROWS,
    SENTENCE,
    TRUE_FALSE,
    WHOLE,
    ProgramPlan,
    Recognisers,
)

GRIDS = Recognisers()

_GRID = r"(\d+(?: \d+)*(?:\n\d+(?: \d+)*)*)"
_CELLS = "cells = {complex(r, c): v for r, row in enumerate(g) for c, v in enumerate(row)}\n"
_NEXT_TO = "p + 1, p - 1, p + 1j, p - 1j"
"""Cells as complex numbers: a step is an addition, which takes fewer tokens than a pair."""


def _matrix(text: str) -> str:
    """Rows of numbers as a Python list of lists."""
    rows = (", ".join(row.split()) for row in text.split("\n"))
    return "[" + ", ".join(f"[{row}]" for row in rows) + "]"


def _strings(text: str) -> list[str]:
    """Rows of cells as one string each, which is shorter."""
    return [row.replace(" ", "") for row in text.split("\n")]


@GRIDS.add("rotate_matrix", rf".*Rotate the matrix below by (\d+) degrees clockwise:\n{_GRID}")
def _rotate(found: re.Match[str]) -> ProgramPlan:
    program = (
        f"m = {_matrix(found[2])}\n"
        f"for turn in range({found[1]} // 90):\n"
        "    m = list(zip(*m[::-1]))\n"
        "for row in m:\n"
        "    print(*row)"
    )
    steps = (f"Turn the matrix by 90 degrees, {found[1]} // 90 times.", "Print the rows.")
    return ProgramPlan(steps, "zip turns a reversed matrix.", program, ROWS)


@GRIDS.add("spiral_matrix", rf".*list of elements in spiral order\?\n{_GRID}")
def _spiral(found: re.Match[str]) -> ProgramPlan:
    program = (
        f"m = {_matrix(found[1])}\n"
        "out = []\n"
        "while m:\n"
        "    out += m.pop(0)\n"
        "    m = list(zip(*m))[::-1]\n"
        "print(*out)"
    )
    steps = ("Take the top row.", "Turn the rest to the left and repeat.")
    return ProgramPlan(steps, "I peel off the top row.", program, ROWS)


@GRIDS.add("binary_matrix", rf".*nearest 0 for each cell in the matrix below:\n{_GRID}")
def _distances(found: re.Match[str]) -> ProgramPlan:
    program = (
        f"m = {_matrix(found[1])}\n"
        "n = len(m)\n"
        "zeros = [(r, c) for r in range(n) for c in range(n) if m[r][c] == 0]\n"
        "for r in range(n):\n"
        "    print(*[min(abs(r - a) + abs(c - b) for a, b in zeros) for c in range(n)])"
    )
    steps = ("List the cells that are 0.", "For each cell print the smallest distance to one.")
    return ProgramPlan(steps, "I compare with all zeros.", program, ROWS)


@GRIDS.add("pool_matrix", rf".*Perform (max|average) pooling .* kernel size of (\d+):\n{_GRID}")
def _pool(found: re.Match[str]) -> ProgramPlan:
    value = "max(cells)" if found[1] == "max" else "round(sum(cells) / len(cells), 2)"
    program = (
        f"m = {_matrix(found[3])}\n"
        f"k = {found[2]}\n"
        "for r in range(0, len(m), k):\n"
        "    out = []\n"
        "    for c in range(0, len(m[0]), k):\n"
        "        cells = [x for row in m[r:r + k] for x in row[c:c + k]]\n"
        f"        out.append({value})\n"
        "    print(*out)"
    )
    steps = (f"Cut the matrix into blocks of {found[2]}.", f"Print the {found[1]} of each block.")
    return ProgramPlan(steps, "I go in steps of k.", program, ROWS)


_TURNS = {
    "90": "m = [list(r) for r in zip(*m[::-1])]",
    "180": "m = [r[::-1] for r in m[::-1]]",
    "270": "m = [list(r) for r in zip(*m)][::-1]",
    "360": "m = m",
}
_CHANGES = (
    (r"Horizontally mirror the matrix", "m = m[::-1]"),
    (r"Vertically mirror the matrix", "m = [r[::-1] for r in m]"),
    (r"Mirror the matrix along the diagonal", "m = [list(r) for r in zip(*m)]"),
    (
        r"Mirror the matrix along the counterdiagonal",
        "m = [list(r) for r in zip(*[r[::-1] for r in m[::-1]])]",
    ),
    (
        r"Map each occurrence of (\d+) to (\d+)",
        "m = [[{1} if x == {0} else x for x in r] for r in m]",
    ),
    (
        r"Set all elements divisible by (\d+) to zero",
        "m = [[0 if x % {0} == 0 else x for x in r] for r in m]",
    ),
    (
        r"Crop the matrix to rows (\d+)-(\d+) and columns (\d+)-(\d+) \(1-indexed\)",
        "m = [r[{2} - 1:{3}] for r in m[{0} - 1:{1}]]",
    ),
    (
        r"Remove every (\d+)-\w+ row \(1-indexed\)",
        "m = [r for i, r in enumerate(m, 1) if i % {0}]",
    ),
    (
        r"Remove every (\d+)-\w+ column \(1-indexed\)",
        "m = [[x for i, x in enumerate(r, 1) if i % {0}] for r in m]",
    ),
)


def _change(operation: str) -> str | None:
    turn = re.fullmatch(r"Rotate the matrix (90|180|270|360) degrees", operation)
    if turn:
        return _TURNS[turn[1]]
    for pattern, line in _CHANGES:
        match = re.fullmatch(pattern, operation)
        if match:
            return line.format(*match.groups())
    return None


@GRIDS.add(
    "manipulate_matrix",
    rf"For the following matrix:\n{_GRID}\n\nPerform the following series of operations in order:"
    r"\n- Identity transformation, i\.e\. no change((?:\n- [^\n]+)+)",
)
def _manipulate(found: re.Match[str]) -> ProgramPlan | None:
    lines = [f"m = {_matrix(found[1])}"]
    for operation in found[2].split("\n- ")[1:]:
        change = _change(operation)
        if change is None:
            return None
        lines.append(change)
    lines += ["for row in m:", "    print(*row)"]
    steps = ("Write one line for each operation.", "Print the rows.")
    return ProgramPlan(steps, "I go in order.", "\n".join(lines), ROWS)


@GRIDS.add("rotten_oranges", rf".*no cell in the grid below has a fresh orange:\n{_GRID}")
def _oranges(found: re.Match[str]) -> ProgramPlan:
    program = (
        f"g = {_strings(found[1])}\n"
        f"{_CELLS}"
        'fresh = {p for p in cells if cells[p] == "1"}\n'
        'rotten = {p for p in cells if cells[p] == "2"}\n'
        "for minute in range(100):\n"
        f"    new = {{p for p in fresh if {{{_NEXT_TO}}} & rotten}}\n"
        "    if not new:\n"
        "        break\n"
        "    fresh, rotten = fresh - new, rotten | new\n"
        "print(-1 if fresh else minute)"
    )
    steps = ("Let the rotten ones spread each minute.", "Stop when nothing changes.")
    return ProgramPlan(steps, "I use sets of cells.", program, WHOLE)


@GRIDS.add(
    "largest_island", rf"You are given the following .* grid:\n{_GRID}\n.*area of an island.*"
)
def _island(found: re.Match[str]) -> ProgramPlan:
    program = (
        f"g = {_strings(found[1])}\n"
        f"{_CELLS}"
        'land = {p for p in cells if cells[p] == "1"}\n'
        "best = 0\n"
        "while land:\n"
        "    island = [land.pop()]\n"
        "    for p in island:\n"
        f"        for q in {_NEXT_TO}:\n"
        "            if q in land:\n"
        "                land.remove(q)\n"
        "                island.append(q)\n"
        "    best = max(best, len(island))\n"
        "print(best)"
    )
    steps = ("Collect the land.", "Take one island after the other from it.", "Keep the largest.")
    return ProgramPlan(steps, "I flood each island.", program, WHOLE)


@GRIDS.add("shortest_path", r".*path from \* to # in the following grid:\n([*#OX \n]+)")
def _path(found: re.Match[str]) -> ProgramPlan:
    program = (
        f"g = {_strings(found[1])}\n"
        f"{_CELLS}"
        'queue, seen = [(p, []) for p in cells if cells[p] == "*"], set()\n'
        'moves = {"down": 1, "up": -1, "right": 1j, "left": -1j}\n'
        "for p, path in queue:\n"
        '    if cells[p] == "#":\n'
        "        break\n"
        "    for name in moves:\n"
        "        q = p + moves[name]\n"
        '        if cells.get(q, "X") != "X" and q not in seen:\n'
        "            seen.add(q)\n"
        "            queue.append((q, path + [name]))\n"
        "else:\n"
        '    path = ["infeasible"]\n'
        "print(*path)"
    )
    steps = ("Search from * in all directions, nearest cells first.", "Stop at #.")
    return ProgramPlan(steps, "I use a breadth-first search.", program, SENTENCE)


@GRIDS.add(
    "maze",
    r"Navigate from '(?P<start>.)' \(start\) to '(?P<goal>.)' \(goal\):\n\n"
    r"```\n(?P<grid>[!-~\n]+)\n```\nLegend: '(?P<wall>.)' = Wall, '.' = Passage\n"
    r".*minimum number of steps.*",
)
def _maze(found: re.Match[str]) -> ProgramPlan:
    program = (
        f"g = {found['grid'].split()}\n"
        f"{_CELLS}"
        f"queue = [(p, 0) for p in cells if cells[p] == {found['start']!r}]\n"
        f"seen = {{p for p in cells if cells[p] == {found['wall']!r}}}\n"
        "for p, steps in queue:\n"
        f"    if cells[p] == {found['goal']!r}:\n"
        "        break\n"
        f"    for q in {_NEXT_TO}:\n"
        "        if q not in seen:\n"
        "            seen.add(q)\n"
        "            queue.append((q, steps + 1))\n"
        "print(steps)"
    )
    steps = ("Search from the start, nearest cells first.", "Print the steps to the goal.")
    return ProgramPlan(steps, "I use a breadth-first search.", program, WHOLE)


@GRIDS.add(
    "course_schedule",
    r"There are a total of (\d+) courses .*:\n(\[\(\d+, \d+\)(?:, \(\d+, \d+\))*\])"
    r"\n.*finish all.*",
)
def _courses(found: re.Match[str]) -> ProgramPlan:
    program = (
        f"needs = {found[2]}\n"
        f"left = set(range({found[1]}))\n"
        f"for term in range({found[1]}):\n"
        "    left = {c for c in left if any(a == c and b in left for a, b in needs)}\n"
        "print(not left)"
    )
    steps = ("Each term take the courses that need none of those left.", "See whether any is left.")
    return ProgramPlan(steps, "I shrink the set of courses.", program, TRUE_FALSE)


@GRIDS.add(
    "game_of_life",
    r"What will this Game of Life board look like after 1 steps.*\n\n(\[\[[][01, \n]+\]\])\.",
)
def _life(found: re.Match[str]) -> ProgramPlan:
    board = " ".join(found[1].split())
    program = (
        "import json\n"
        f"b = {board}\n"
        "h, w, around = len(b), len(b[0]), (-1, 0, 1)\n"
        "new = [[0] * w for row in b]\n"
        "for r in range(h):\n"
        "    for c in range(w):\n"
        "        n = sum(b[(r + i) % h][(c + j) % w] for i in around for j in around)\n"
        "        new[r][c] = int(n == 3 or (n == 4 and b[r][c] == 1))\n"
        "print(json.dumps(new))"
    )
    steps = ("Sum the nine cells around each cell, wrapping.", "3 gives life, 4 keeps it.")
    return ProgramPlan(steps, "The sum includes the cell itself.", program, LIST)
