"""Programs for angles, circles and points."""

from __future__ import annotations

import re

from coa.teachers.coding_plans import ANGLE, NUMBER, POINT, WHOLE, Plan, Recognisers

GEOMETRY = Recognisers()


@GEOMETRY.add(
    "simple_geometry", r".*?\b(\d+)(?:-gon| sides).*interior angles are: ([\d., \u00b0]+)\. .*"
)
def _angle(found: re.Match[str]) -> Plan:
    angles = ", ".join(re.findall(r"(\d+)\.0", found[2]))
    program = f"angles = [{angles}]\nprint(180 * ({found[1]} - 2) - sum(angles))"
    steps = ("The angles of an n-gon add up to 180 * (n - 2).", "Subtract the known ones.")
    return Plan(steps, f"There are {found[1]} sides.", program, WHOLE)


_CORNERS = r".*A=\((-?\d+, -?\d+)\), B=\((-?\d+, -?\d+)\), and C=\((-?\d+, -?\d+)\)"


def _points(found: re.Match[str]) -> str:
    """The corners of a triangle as complex numbers: a side is a difference, its length abs."""
    return f"a, b, c = {', '.join(f'complex({each})' for each in found.group(1, 2, 3))}\n"


@GEOMETRY.add("advanced_geometry", rf"(?=.*\b(?:angle ABC|angle at B)){_CORNERS}.*")
def _angle_at(found: re.Match[str]) -> Plan:
    program = (
        "import cmath, math\n"
        f"{_points(found)}"
        "angle = abs(math.degrees(cmath.phase((a - b) / (c - b))))\n"
        'print(f"{angle:.2f}\u00b0")'
    )
    steps = ("Divide the sides from B as complex numbers.", "Print the angle in degrees.")
    return Plan(steps, "The phase of the quotient is the angle.", program, ANGLE)


@GEOMETRY.add("advanced_geometry", rf"(?=.*incircle){_CORNERS}.*")
def _incircle(found: re.Match[str]) -> Plan:
    program = (
        f"{_points(found)}"
        "area = abs(((b - a) * (c - a).conjugate()).imag) / 2\n"
        "around = abs(a - b) + abs(b - c) + abs(c - a)\n"
        'print(f"{2 * area / around:.3f}")'
    )
    steps = ("Take the area and the length around.", "Print 2 * area / length.")
    return Plan(steps, "The radius is the area over half the length.", program, NUMBER)


@GEOMETRY.add("advanced_geometry", rf"(?=.*orthocenter){_CORNERS}.*")
def _orthocenter(found: re.Match[str]) -> Plan:
    program = (
        f"{_points(found)}"
        "turns = [(a, b, c), (b, c, a), (c, a, b)]\n"
        "up = sum(p * p.conjugate() * (q - r) for p, q, r in turns)\n"
        "down = sum(p.conjugate() * (q - r) for p, q, r in turns)\n"
        "h = a + b + c - 2 * up / down\n"
        'print(f"({h.real:.3f}, {h.imag:.3f})")'
    )
    steps = ("Take the centre of the circle around it, up / down.", "Print a + b + c - 2 * that.")
    return Plan(steps, "The sum of the corners has two centres in it.", program, POINT)
