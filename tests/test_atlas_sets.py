"""The sets atlas-web and atlas-code: sound gold, questions that are understood, clean splits."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal

import pytest

from atlas_solver import Library
from coa.environments import SETS, make_tasks
from coa.environments.atlas.catalogues import (
    CATALOGUES,
    CODE,
    REWORDED,
    WEB,
    WIDE,
    is_held_out,
    understand,
)
from coa.environments.atlas.code_team import program
from coa.environments.atlas.families import LookupChain
from coa.environments.atlas.inquiries import DENSITY, MEAN, TIMES, TOTAL, Formula, Work
from coa.environments.atlas.pages import pages, passage_for, read
from coa.environments.atlas.tasks import SPLITS, families_of, held_out
from coa.environments.atlas.world import load_world
from coa.errors import UsageError
from coa.tasks import Task

WORLDS = (0, 7)
NEW = (WEB, CODE)
COUNTRY_ASKS: dict[str, Callable[[Library, str], str]] = {
    "capital": Library.capital,
    "currency": Library.currency,
    "official language": Library.language,
    "calling code": Library.calling_code,
    "highest point": lambda library, name: summit(library, name),
}


def summit(library: Library, country: str) -> str:
    return library.ask(
        "country",
        country,
        r"highest point of @ is (.+?), at [\d,]+ metres",
        r"metres, (.+?) is the highest point of @",
        r"(?m)^(.+?), the highest point of @, rises",
    )


def height(library: Library, country: str) -> int:
    return number(library.ask("country", country, r"([\d,]+) metres"))


def languages(library: Library, country: str) -> set[str]:
    text = "\n".join(passage.text for passage in library.pages["country", country].passages)
    several = re.search(r"official languages(?: (?:of|in) [^.:]+ are|:) ([^.]+)\.", text)
    if several is None:
        return {library.language(country)}
    return set(re.split(r", and |, | and ", several[1]))


def number(text: str) -> int:
    return int(text.replace(",", ""))


def solve_web(library: Library, family: str, question: str) -> str:
    """The answer from page text; it reads the question's words, not the family's shape."""

    def size(name: str) -> int:
        by_people = "popul" in question or "more people" in question
        return number(library.population("country", name) if by_people else library.area(name))

    if family.startswith("city_") or family == "capital_domain":
        home = library.home(library.named("city", question)[0])
        if "time zone" in question:
            return library.ask("city", library.capital(home), r"time zone (UTC[\d:+-]*\d)")
        if "population" in question:
            return library.population("city", library.capital(home))
        if "internet domain" in question:
            return library.ask("country", home, r"internet domain (?:of @ )?(?:is )?(\.[a-z]+)")
        return summit(library, home)
    if "neighbour" in question or "border" in question:
        if "capital is" in question:
            home = library.home(library.named("city", question)[0])
        else:
            (home,) = library.named("country", question)
        around = library.neighbours(home)
        if "official language" in question:
            (kin,) = [n for n in around if languages(library, home) <= languages(library, n)]
            return kin
        if "same currency" in question:
            return str(sum(library.currency(n) == library.currency(home) for n in around))
        smaller = "smaller" in question
        return str(sum((size(n) < size(home)) == smaller for n in around))
    pick = min if "less" in question or "smaller" in question else max
    chosen = pick(library.named("country", question), key=size)
    (ask,) = [ask for ask in COUNTRY_ASKS if re.search(rf"\b{ask}\b", question)]
    return COUNTRY_ASKS[ask](library, chosen)


def rounded(value: Decimal, places: int) -> str:
    return str(value.quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP))


def solve_code(library: Library, family: str, question: str) -> str:
    """The answer from page text, in decimal arithmetic."""
    kind = "element" if "element" in question else "city" if "the cities" in question else "country"
    names = library.named(kind, question)

    def people(name: str) -> Decimal:
        return Decimal(number(library.population(kind, name)))

    def density(name: str) -> Decimal:
        return people(name) / number(library.area(name))

    def capital(name: str) -> Decimal:
        return Decimal(number(library.population("city", library.capital(name))))

    if family == "density":
        return rounded(density(names[0]), 1)
    if family == "density_gap":
        return rounded(abs(density(names[0]) - density(names[1])), 1)
    if family == "capital_share":
        return rounded(100 * capital(names[0]) / people(names[0]), 1)
    if family == "capital_population_total":
        return str(sum(map(capital, names)))
    if family == "large_countries":
        return str(sum(people(name) > 10**7 for name in names))
    if family.startswith("neighbours_"):
        names = library.neighbours(names[0])
    read_one: Callable[[str], int | Decimal] = (
        library.number
        if "atomic" in question
        else library.year
        if "discovery" in question
        else (lambda name: height(library, name))
        if "highest point" in question
        else (lambda name: number(library.area(name)))
        if "area" in question
        else (lambda name: len(library.neighbours(name)))
        if "land neighbours" in question and "popul" not in question
        else people
    )
    numbers = [Decimal(read_one(name)) for name in names]
    if family.endswith("_times"):
        return rounded(max(numbers) / min(numbers), 2)
    if "mean" in family:
        return rounded(sum(numbers, Decimal()) / len(numbers), 0)
    if "gap" in family or "span" in family:
        return str(max(numbers) - min(numbers))
    return str(sum(numbers))


@pytest.fixture(
    scope="module",
    params=[
        (c.name, split, world)
        for c in NEW
        for split in SPLITS
        for world in WORLDS[: 1 + (split != "train")]
    ],
    ids=str,
)
def tasks(request: pytest.FixtureRequest) -> list[Task]:
    name, split, world = request.param
    return list(make_tasks(name, split, 260, seed=3, world_seed=world))


def test_an_independent_program_derives_every_gold_answer(tasks: list[Task]) -> None:
    library = Library(pages(load_world(tasks[0].meta["world"])))
    solve = {"atlas-web": solve_web, "atlas-code": solve_code}[tasks[0].meta["set"]]
    for task in tasks:
        found = solve(library, task.meta["family"], task.question)
        assert found in task.answers, (task.question, found, task.answers)


def test_every_question_is_understood(tasks: list[Task]) -> None:
    catalogue = CATALOGUES[tasks[0].meta["set"]]
    for task in tasks:
        understood = understand(task.question, catalogue)
        assert understood is not None, task.question
        assert understood.family == task.meta["family"], task.question
        assert understood.phrasing == task.meta["phrasing"], task.question
        solution = understood.meaning.shape.solve(load_world(task.meta["world"]), understood.slots)
        assert solution is not None and solution.answer == task.answers[0], task.question


def test_gold_hops_hold_what_they_claim(tasks: list[Task]) -> None:
    for task in tasks:
        hops = task.gold["hops"]
        assert 2 <= len(hops) == task.meta["hops"] <= 11
        for hop in hops:
            assert ", ".join(read(hop["relation"], hop["subject"], hop["passage"])) == hop["answer"]
        assert task.public().gold == {} and task.public().answers == ()


def test_the_tasks_name_their_set_and_cover_its_families(tasks: list[Task]) -> None:
    catalogue = CATALOGUES[tasks[0].meta["set"]]
    assert {task.meta["set"] for task in tasks} == {catalogue.name}
    asked = {task.meta["family"] for task in tasks}
    missing = set(families_of(tasks[0].meta["split"], catalogue)) - asked
    # In an invented world few neighbours share a language, and few of them are held out.
    assert not missing or (missing == {"language_kin"} and tasks[0].meta["world"])
    assert len({task.id for task in tasks}) == len(tasks)


@pytest.mark.parametrize("catalogue", NEW, ids=lambda c: c.name)
@pytest.mark.parametrize("seed", WORLDS)
def test_splits_share_no_entity_and_hold_out_phrasings(catalogue, seed: int) -> None:  # type: ignore[no-untyped-def]
    kinds = ("country", "city", "element")
    names = {name for kind, name in held_out(load_world(seed)) if kind in kinds}
    train = make_tasks(catalogue.name, "train", 400, 5, world_seed=seed)
    unseen = make_tasks(catalogue.name, "heldout_entity", 400, 5, world_seed=seed)

    def entities(task: Task) -> set[str]:
        understood = understand(task.question, catalogue)
        assert understood is not None
        return {*understood.slots.values(), *(hop["subject"] for hop in task.gold["hops"])}

    for task in train:
        assert not entities(task) & names, task.question
        assert not is_held_out(task.meta["phrasing"])
    for task in unseen:
        assert entities(task) <= names, task.question
    new = make_tasks(catalogue.name, "heldout_family", 400, 5, world_seed=seed)
    for made in (unseen, new):
        for task in made:
            assert task.meta["phrasing_heldout"] == is_held_out(task.meta["phrasing"])
        assert 0.18 < sum(task.meta["phrasing_heldout"] for task in made) / len(made) < 0.32


@pytest.mark.parametrize("catalogue", (*NEW, WIDE, REWORDED), ids=lambda c: c.name)
def test_every_phrasing_is_traced_back_to_its_own_family(catalogue) -> None:  # type: ignore[no-untyped-def]
    fill = {
        "country": ["Saint Kitts & Nevis", "the Netherlands", "Chad", "Peru", "Guinea-Bissau"],
        "city": ["The Hague", "Ho Chi Minh City"],
        "element": ["Iron", "Tin", "Gold", "Neon"],
    }
    for name, templates in catalogue.phrasings.items():
        assert len(templates) == len(set(templates))
        assert len(templates) >= 12 if catalogue is REWORDED else len(templates) == 8
        kinds = catalogue.families[name].shape.slots
        for index, template in enumerate(templates):
            slots = {slot: fill[kind][place] for place, (slot, kind) in enumerate(kinds.items())}
            understood = understand(template.format(**slots), catalogue)
            assert understood is not None, template
            assert (understood.family, understood.phrasing) == (name, index), template
            assert dict(understood.slots) == {s: n.removeprefix("the ") for s, n in slots.items()}


@pytest.mark.parametrize("catalogue", NEW, ids=lambda c: c.name)
def test_held_out_families_compose_trained_relations_anew(catalogue) -> None:  # type: ignore[no-untyped-def]
    trained = [catalogue.families[name] for name in families_of("train", catalogue)]
    new = [catalogue.families[name] for name in families_of("heldout_family", catalogue)]
    assert len(trained) >= 12 and len(new) >= 4
    known = {relation for family in trained for relation in family.shape.relations}
    shapes = {repr(family.shape) for family in trained}
    for family in new:
        assert set(family.shape.relations) <= known, family.name
        assert repr(family.shape) not in shapes


def test_no_passage_alone_answers_a_question_of_several_pages_or_facts() -> None:
    """What a search shows of a page is one passage; all but the trails need more than one."""
    world = load_world(0)
    for task in make_tasks("atlas-web", "heldout_entity", 300, 2):
        shape = WEB.families[task.meta["family"]].shape
        passages = {
            passage_for(world, hop["relation"], hop["subject"]).text for hop in task.gold["hops"]
        }
        assert len(passages) >= (2 if isinstance(shape, LookupChain) else 3), task.question


def test_the_programs_print_what_exact_arithmetic_gives() -> None:
    for split in SPLITS:
        for task in make_tasks("atlas-code", split, 300, 4):
            understood = understand(task.question, CODE)
            assert understood is not None
            formula = understood.meaning.shape
            assert isinstance(formula, Formula)
            hops = task.gold["hops"]
            facts = {(h["relation"], h["subject"]): h["answer"].split(", ") for h in hops}
            numbers = [int(h["answer"].replace(",", "")) for h in hops if h["answer"][0].isdigit()]
            by_terms = formula.numbers(understood.slots, facts)
            assert by_terms is not None
            assert sorted(n for *_, n in by_terms) == sorted(numbers), task.question
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(program([n for *_, n in by_terms], formula.work.expression), {})
            assert out.getvalue().strip() == task.answers[0], task.question


@pytest.mark.parametrize(
    ("work", "good", "bad"),
    [
        (TOTAL, ("12", "-3"), ("12.0", "1.5", "1e5", "12,000", "", "twelve")),
        (MEAN, ("12",), ("12.33", "12.5")),
        (DENSITY, ("3.1", "0.0"), ("3", "3.14", "3.14159", "3.", "nan")),
        (TIMES, ("3.14", "3.1"), ("3", "3.141", "3.1416")),
    ],
)
def test_a_result_has_the_decimals_that_are_asked_for(
    work: Work, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    assert all(work.fits(text) for text in good) and not any(work.fits(text) for text in bad)


def test_every_gold_answer_has_the_form_of_its_calculation() -> None:
    for task in make_tasks("atlas-code", "train", 280, 4):
        formula = CODE.families[task.meta["family"]].shape
        assert isinstance(formula, Formula)
        assert formula.work.fits(task.answers[0]), (task.question, task.answers)


def test_a_rounded_answer_may_keep_its_zeros() -> None:
    tasks = make_tasks("atlas-code", "train", 600, 4, families=["area_times", "density"])
    padded = [task for task in tasks if len(task.answers) > 1]
    assert padded
    for task in padded:
        assert float(task.answers[0]) == float(task.answers[1])
        assert len(task.answers[1]) > len(task.answers[0])


def test_a_smaller_set_is_the_start_of_a_larger_one_and_the_same_each_time() -> None:
    for name in ("atlas-web", "atlas-code"):
        small, large = (make_tasks(name, "train", n, 4) for n in (40, 160))
        assert list(large)[:40] == list(small)
        assert make_tasks(name, "train", 40, 5).fingerprint() != small.fingerprint()


def test_the_first_set_is_as_it_was() -> None:
    """Files made before the other sets came keep their fingerprints, which resumes depend on."""
    made = make_tasks("atlas-mhqa", "train", 200, 1)
    assert made.fingerprint() == MHQA_FINGERPRINT
    assert all("set" not in task.meta for task in made)
    assert made.name == "atlas-train-w0-s1"
    assert all(t.meta["phrasing_heldout"] for t in make_tasks("atlas-mhqa", "heldout_family", 9, 1))


MHQA_FINGERPRINT = "d35c0c8efa2784bc"


@pytest.mark.parametrize("catalogue", CATALOGUES.values(), ids=lambda c: c.name)
def test_what_is_not_ours_is_not_understood(catalogue) -> None:  # type: ignore[no-untyped-def]
    listed = ", ".join("abcdefgh" * 40)
    for question in (
        "",
        "Who wrote Hamlet?",
        "What is the sum?",
        f"Add up the populations of {listed}, and so on.",
        f"Average the heights of the highest points in metres of {listed}.",
        "Add up the populations of " + "a and " * 4000,
        "\N{SLIGHTLY SMILING FACE}" * 50,
    ):
        assert understand(question, catalogue) is None


def test_mistakes_are_named_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"'atlas-wab' is not a task set\. Did you mean"):
        make_tasks("atlas-wab", "train", 5, 0)
    with pytest.raises(UsageError, match=r"unknown family 'densty'\. Did you mean 'density'"):
        make_tasks("atlas-code", "train", 5, 0, families=["densty"])
    with pytest.raises(UsageError, match="does not belong to split 'train'"):
        make_tasks("atlas-web", "train", 5, 0, families=["capital_of_larger"])
    assert set(CATALOGUES) < set(SETS)
