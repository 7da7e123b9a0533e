"""Programs for weekdays, leap years and the days between two dates."""

from __future__ import annotations

import re

from coa.environments.gym.plans import (
    ANGLE,
    DAYS,
    NUMBER,
    POINT,
    WEEKDAY,
    WHOLE,
    YES_NO,
    ProgramPlan,
    Recognisers,
)

DATES = Recognisers()

_MONTHS = (
    "January February March April May June July August September October November December"
).split()
_NUMBER_OF = {name[:3]: number for number, name in enumerate(_MONTHS, start=1)}
_MONTH = "|".join(_MONTHS)
_WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_WEEKDAY = "|".join(_WEEKDAYS)
_PLACES = {"first": 0, "second": 1, "third": 2, "fourth": 3, "last": -1}


def _date(year: str, month: str, day: str) -> str:
    """A date as Python writes it; the month is a name or a number."""
    number = int(month) if month.isdecimal() else _NUMBER_OF[month[:3]]
    return f"date({int(year)}, {number}, {int(day)})"


@DATES.add(
    "calendar_arithmetic",
    r"(?:Determine if the year|Is|Tell me whether) (\d{1,4}) (?:is )?a leap year[.?] .*",
)
def _leap(found: re.Match[str]) -> ProgramPlan:
    program = f'import calendar\nprint("Yes" if calendar.isleap({found[1]}) else "No")'
    steps = ("Ask the calendar.", "Print Yes or No.")
    return ProgramPlan(steps, "I use calendar.isleap.", program, YES_NO)


@DATES.add(
    "calendar_arithmetic",
    rf"(?:What day of the week was|On which weekday did) ({_MONTH}) (\d{{1,2}}), (\d{{4}}).*",
)
def _weekday_of(found: re.Match[str]) -> ProgramPlan:
    return _weekday(_date(found[3], found[1], found[2]))


@DATES.add("calendar_arithmetic", r"Name the day of the week for (\d\d)/(\d\d)/(\d{4})\..*")
def _weekday_of_numbers(found: re.Match[str]) -> ProgramPlan:
    return _weekday(_date(found[3], found[1], found[2]))


def _weekday(day: str) -> ProgramPlan:
    program = f'from datetime import date\nprint({day}.strftime("%A"))'
    steps = ("Make the date.", "Print the name of its weekday.")
    return ProgramPlan(steps, "I use strftime.", program, WEEKDAY)


@DATES.add(
    "calendar_arithmetic",
    rf"(?:If today is|Starting from|Count (?:forward|backward)).*? (?P<month>{_MONTH}) "
    r"(?P<day>\d{1,2}), (?P<year>\d{4}).*",
)
def _weekday_after(found: re.Match[str]) -> ProgramPlan | None:
    count = re.search(r"\b(\d{1,6})[- ]day", found[0])
    if count is None:
        return None
    offset, back = count[1], re.search(r"ago|before|backward", found[0])
    sign = "-" if back else "+"
    program = (
        "from datetime import date, timedelta\n"
        f"d = {_date(found['year'], found['month'], found['day'])} {sign} timedelta({offset})\n"
        'print(d.strftime("%A"))'
    )
    way = "back" if back else "forward"
    steps = (f"Go {offset} days {way} from the date.", "Print the name of the weekday.")
    return ProgramPlan(steps, "I use timedelta.", program, WEEKDAY)


@DATES.add(
    "calendar_arithmetic",
    rf".*\b(?P<place>first|second|third|fourth|last) (?P<name>{_WEEKDAY})\b.*"
    r"Answer with -1 if the ordinal does not exist in the month\.",
)
def _recurring(found: re.Match[str]) -> ProgramPlan | None:
    when = re.search(rf"({_MONTH}) (\d{{4}})", found[0])
    if when is None:
        return None
    (month, year), column = when.groups(), _WEEKDAYS.index(found["name"])
    program = (
        "import calendar\n"
        f"weeks = calendar.monthcalendar({year}, {_NUMBER_OF[month[:3]]})\n"
        f"days = [week[{column}] for week in weeks if week[{column}]]\n"
        f"print(days[{_PLACES[found['place']]}])"
    )
    steps = (f"List the {found['name']}s of the month.", f"Print the {found['place']}.")
    idea = f"{found['name']} is column {column} of the calendar."
    return ProgramPlan(steps, idea, program, WHOLE)


@DATES.add(
    "calendar_arithmetic",
    rf"(?:How many (?:{_WEEKDAY})s|Count the occurrences of|Between (?:{_WEEKDAY})).*? "
    rf"(?P<month>{_MONTH}) (?P<day>\d{{1,2}}).*? (?P<last_month>{_MONTH}) (?P<last_day>\d{{1,2}}), "
    r"(?P<year>\d{4}).*",
)
def _count_weekdays(found: re.Match[str]) -> ProgramPlan | None:
    named = re.search(rf"(?:many|of|does) ({_WEEKDAY})", found[0])
    if named is None:
        return None
    name = named[1]
    first = _date(found["year"], found["month"], found["day"])
    last = _date(found["year"], found["last_month"], found["last_day"])
    program = (
        "from datetime import date\n"
        f"a, b = {first}.toordinal(), {last}.toordinal()\n"
        'days = [date.fromordinal(d).strftime("%A") for d in range(a, b + 1)]\n'
        f'print(days.count("{name}"))'
    )
    steps = ("List the weekdays from the first to the last date.", f"Count {name}.")
    return ProgramPlan(steps, "I number the days.", program, WHOLE)


_WRITTEN = (
    r"(\d{4}-\d\d-\d\d(?: \(\w+\))?|(?:\w+, )?[A-Z]\w+ \d\d, \d{4}|\d\d/\d\d/\d{4}"
    r"|[A-Z]\w\w [A-Z]\w\w \d\d \d{4}|\d\d [A-Z]\w+ \d{4})"
)
_NAME = f"(?:{_MONTH}|{'|'.join(_NUMBER_OF)})"
_ORDERS = (
    re.compile(r"(?P<y>\d{4})-(?P<m>\d\d)-(?P<d>\d\d)"),
    re.compile(r"(?P<m>\d\d)/(?P<d>\d\d)/(?P<y>\d{4})"),
    re.compile(rf"(?P<m>{_NAME}) (?P<d>\d\d),? (?P<y>\d{{4}})"),
    re.compile(rf"(?P<d>\d\d) (?P<m>{_NAME}) (?P<y>\d{{4}})"),
)


@DATES.add("time_intervals", rf".*?\b{_WRITTEN} (?:and|to) .*?{_WRITTEN}[?.] .*in D days\.")
def _days_between(found: re.Match[str]) -> ProgramPlan | None:
    first, last = (_read(text) for text in found.groups())
    if not (first and last):
        return None
    program = f'from datetime import date\nprint(({last} - {first}).days, "days")'
    steps = ("Make both dates.", "Print the number of days between them.")
    return ProgramPlan(steps, "I subtract the dates.", program, DAYS)


def _read(text: str) -> str:
    """A written date as Python writes it; empty when it is none."""
    for order in _ORDERS:
        match = order.search(text)
        if match:
            return _date(match["y"], match["m"], match["d"])
    return ""


# ------------------------------------------------------------------------------------------------
# Programs for angles, circles and points.
# ------------------------------------------------------------------------------------------------


GEOMETRY = Recognisers()


@GEOMETRY.add(
    "simple_geometry", r".*?\b(\d+)(?:-gon| sides).*interior angles are: ([\d., \u00b0]+)\. .*"
)
def _angle(found: re.Match[str]) -> ProgramPlan:
    angles = ", ".join(re.findall(r"(\d+)\.0", found[2]))
    program = f"angles = [{angles}]\nprint(180 * ({found[1]} - 2) - sum(angles))"
    steps = ("The angles of an n-gon add up to 180 * (n - 2).", "Subtract the known ones.")
    return ProgramPlan(steps, f"There are {found[1]} sides.", program, WHOLE)


_CORNERS = r".*A=\((-?\d+, -?\d+)\), B=\((-?\d+, -?\d+)\), and C=\((-?\d+, -?\d+)\)"


def _points(found: re.Match[str]) -> str:
    """The corners of a triangle as complex numbers: a side is a difference, its length abs."""
    return f"a, b, c = {', '.join(f'complex({each})' for each in found.group(1, 2, 3))}\n"


@GEOMETRY.add("advanced_geometry", rf"(?=.*\b(?:angle ABC|angle at B)){_CORNERS}.*")
def _angle_at(found: re.Match[str]) -> ProgramPlan:
    program = (
        "import cmath, math\n"
        f"{_points(found)}"
        "angle = abs(math.degrees(cmath.phase((a - b) / (c - b))))\n"
        'print(f"{angle:.2f}\u00b0")'
    )
    steps = ("Divide the sides from B as complex numbers.", "Print the angle in degrees.")
    return ProgramPlan(steps, "The phase of the quotient is the angle.", program, ANGLE)


@GEOMETRY.add("advanced_geometry", rf"(?=.*incircle){_CORNERS}.*")
def _incircle(found: re.Match[str]) -> ProgramPlan:
    program = (
        f"{_points(found)}"
        "area = abs(((b - a) * (c - a).conjugate()).imag) / 2\n"
        "around = abs(a - b) + abs(b - c) + abs(c - a)\n"
        'print(f"{2 * area / around:.3f}")'
    )
    steps = ("Take the area and the length around.", "Print 2 * area / length.")
    return ProgramPlan(steps, "The radius is the area over half the length.", program, NUMBER)


@GEOMETRY.add("advanced_geometry", rf"(?=.*orthocenter){_CORNERS}.*")
def _orthocenter(found: re.Match[str]) -> ProgramPlan:
    program = (
        f"{_points(found)}"
        "turns = [(a, b, c), (b, c, a), (c, a, b)]\n"
        "up = sum(p * p.conjugate() * (q - r) for p, q, r in turns)\n"
        "down = sum(p.conjugate() * (q - r) for p, q, r in turns)\n"
        "h = a + b + c - 2 * up / down\n"
        'print(f"({h.real:.3f}, {h.imag:.3f})")'
    )
    steps = ("Take the centre of the circle around it, up / down.", "Print a + b + c - 2 * that.")
    return ProgramPlan(steps, "The sum of the corners has two centres in it.", program, POINT)
