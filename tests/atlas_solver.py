"""Answer Atlas questions from page text, by a program of its own.

It shares nothing with the generator or with `coa.environments.atlas.pages`: it finds the names
in a question by the titles of pages, and reads them with its own patterns. The tests compare its
answers with the gold answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from coa.corpus.page import Page


class Library:
    """Pages by kind and title, and what their text says."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self.pages = {(page.url.split("/")[3], page.title): page for page in pages}
        titles: dict[str, list[str]] = {}
        for kind, title in self.pages:
            titles.setdefault(kind, []).append(title)
        self.patterns = {
            kind: re.compile(
                r"(?<![\w-])(?:"
                + "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
                + r")(?![\w-])"
            )
            for kind, names in titles.items()
        }

    def named(self, kind: str, question: str) -> list[str]:
        """Titles of this kind in the question, in order; a longer title hides those inside it."""
        return self.patterns[kind].findall(question)

    def ask(self, kind: str, name: str, *patterns: str) -> str:
        title = f"{name} language" if kind == "language" else name[:1].upper() + name[1:]
        text = "\n".join(passage.text for passage in self.pages[kind, title].passages)
        subject = rf"(?:[Tt]he )?{re.escape(name)}"
        found = {m[1] for p in patterns for m in re.finditer(p.replace("@", subject), text)}
        assert len(found) == 1, (kind, name, found, text)
        value = found.pop()
        return value.removeprefix("the ")

    def capital(self, country: str) -> str:
        return self.ask(
            "country",
            country,
            r"The capital (?:city )?of @ is ([^.]+)\.",
            r"(?m)^([^.]+) is the capital of @\.",
        )

    def home(self, city: str) -> str:
        return self.ask(
            "city",
            city,
            r"@ is a city (?:in|of) ([^.,]+)[.,]",
            r"city of @ lies in ([^.]+)\.",
            r"@ is the capital (?:city )?of ([^.]+)\.",
            r"capital city of ([^.]+) is @\.",
        )

    def currency(self, country: str) -> str:
        return self.ask(
            "country",
            country,
            r"currency (?:of|used in) @ is the ([^.]+)\.",
            r"its currency is the ([^.]+)\.",
            r"(?m)^The ([^.]+) is the currency of @",
        )

    def language(self, country: str) -> str:
        return self.ask(
            "country",
            country,
            r"official language of @ is ([^.]+)\.",
            r"one official language, ([^,]+),",
            r"\. ([^.]+) is the only official language",
        )

    def population(self, kind: str, name: str) -> str:
        return self.ask(
            kind,
            name,
            r"population of (?:@ is )?about ([\d,]+\d)",
            r"About ([\d,]+) people",
        )

    def area(self, country: str) -> str:
        return self.ask("country", country, r"([\d,]+) square kilometres")

    def neighbours(self, country: str) -> list[str]:
        page = self.pages["country", country]
        (line,) = [p.text for p in page.passages if "neighbour" in p.text]
        listed = line.partition(": ")[2].removesuffix(".")
        names = re.split(r",? and |, ", listed) if listed else []
        count = re.search(r"(\d+) (?:land )?neighbour", line)
        assert count and int(count[1]) == len(names), line
        return [name.removeprefix("the ") for name in names]

    def calling_code(self, country: str) -> str:
        return self.ask("country", country, r"calling code (?:of @ is )?(\+[\d ]*\d)")

    def family(self, language: str) -> str:
        return self.ask("language", language, r"the (\S.*?) family")

    def code(self, currency: str) -> str:
        return self.ask(
            "currency", currency, r"code (?:of @ is )?([A-Z]{3})\b", r"([A-Z]{3}) is the ISO"
        )

    def symbol(self, element: str) -> str:
        return self.ask("element", element, r"symbol (?:of @ is )?([A-Z][a-z]?)\b")

    def number(self, element: str) -> int:
        return int(self.ask("element", element, r"atomic number (?:is )?(\d+)"))

    def year(self, element: str) -> int:
        return int(self.ask("element", element, r"\b(\d{4})\b"))

    def place(self, element: str) -> str:
        return self.ask(
            "element", element, r"\d, in ([^.]+)\.", r"discovered in ([^\d.]+) in the year"
        )


def _amount(text: str) -> int:
    return int(text.replace(",", ""))


def solve(library: Library, family: str, question: str) -> str:
    """The answer to a question of a family."""
    kind = (
        "element"
        if "element" in family or "atomic" in family
        else "city"
        if family.startswith("city_")
        or family in ("capital_currency", "capital_calling_code", "capital_area")
        or family == "capital_neighbour_count"
        else "country"
    )
    names = library.named(kind, question)
    it = names[0]
    pair = {
        "more_populous_country": lambda n: _amount(library.population("country", n)),
        "most_populous_of_three": lambda n: _amount(library.population("country", n)),
        "larger_country": lambda n: _amount(library.area(n)),
        "larger_capital": lambda n: _amount(library.population("city", library.capital(n))),
        "earlier_element": lambda n: -library.year(n),
    }
    if family in pair:
        assert len(names) == (3 if family.endswith("three") else 2), (question, names)
        return max(names, key=pair[family])
    if family in ("atomic_number_gap", "neighbour_count_gap", "common_neighbour"):
        assert len(names) == 2, (question, names)
        if family == "common_neighbour":
            (common,) = set(library.neighbours(names[0])) & set(library.neighbours(names[1]))
            return common
        count = library.number if kind == "element" else lambda n: len(library.neighbours(n))
        return str(abs(count(names[0]) - count(names[1])))
    assert len(names) == 1, (question, names)
    single = {
        "country_capital": lambda: library.capital(it),
        "country_currency": lambda: library.currency(it),
        "city_country": lambda: library.home(it),
        "element_symbol": lambda: library.symbol(it),
        "element_place": lambda: library.place(it),
        "neighbour_count": lambda: str(len(library.neighbours(it))),
        "city_currency": lambda: library.currency(library.home(it)),
        "capital_currency": lambda: library.currency(library.home(it)),
        "city_capital": lambda: library.capital(library.home(it)),
        "city_language": lambda: library.language(library.home(it)),
        "capital_population": lambda: library.population("city", library.capital(it)),
        "country_language_family": lambda: library.family(library.language(it)),
        "country_currency_code": lambda: library.code(library.currency(it)),
        "capital_calling_code": lambda: library.calling_code(library.home(it)),
        "capital_neighbour_count": lambda: str(len(library.neighbours(library.home(it)))),
        "city_language_family": lambda: library.family(library.language(library.home(it))),
        "most_populous_neighbour": lambda: max(
            library.neighbours(it), key=lambda n: _amount(library.population("country", n))
        ),
        "city_currency_code": lambda: library.code(library.currency(library.home(it))),
        "element_capital": lambda: library.capital(library.place(it)),
        "capital_area": lambda: library.area(library.home(it)),
        "smallest_neighbour": lambda: min(
            library.neighbours(it), key=lambda n: _amount(library.area(n))
        ),
    }
    return single[family]()
