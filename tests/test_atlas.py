from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from atlas_solver import Library, solve
from coa.environments.atlas.catalogues import MHQA, is_held_out, understand
from coa.environments.atlas.families import FAMILIES, LookupChain
from coa.environments.atlas.pages import SECTION_OF, pages, passage_for, read
from coa.environments.atlas.tasks import SPLITS, families_of, held_out, make_tasks
from coa.environments.atlas.world import RELATIONS, World, load_world, values_of
from coa.errors import CoaError

WORLDS = (0, 7)


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    return load_world(request.param)


def all_names(world: World) -> list[str]:
    return [
        *world.countries,
        *world.cities,
        *world.currencies,
        *world.languages,
        *world.elements,
        *world.continents,
    ]


def test_the_world_is_large_enough(world: World) -> None:
    assert len(world.countries) >= 200
    assert len(world.cities) >= 3000
    assert len(world.elements) == 118
    assert len(world.currencies) >= 140 and len(world.languages) >= 100


def test_the_embedded_file_is_small() -> None:
    path = Path(sys.modules["coa.environments.atlas.world"].__file__ or "").with_name(
        "atlas_facts.json"
    )
    assert path.stat().st_size < 600_000


def test_the_world_agrees_with_itself(world: World) -> None:
    for country in world.countries.values():
        assert world.cities[country.capital].country == country.name
        assert world.cities[country.capital].is_capital
        assert country.currency in world.currencies
        assert set(country.languages) <= set(world.languages)
        assert country.name not in country.borders
        for neighbour in country.borders:
            assert country.name in world.countries[neighbour].borders
        for city in world.cities_of[country.name]:
            assert world.cities[city].population <= country.population
    assert sum(city.is_capital for city in world.cities.values()) == len(world.countries)
    assert {element.place for element in world.elements.values()} <= {"", *world.countries}
    for codes in (
        [currency.code for currency in world.currencies.values()],
        [element.symbol for element in world.elements.values()],
        [country.domain for country in world.countries.values()],
        [language.code for language in world.languages.values()],
    ):
        assert len(codes) == len(set(codes))


def test_names_are_distinct_and_plain(world: World) -> None:
    names = [name.lower() for name in all_names(world)]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert [name for name in names if not re.fullmatch(r"[a-z' &()-]+", name)] == []
    assert [name for name in names if " and " in name] == []


def test_an_invented_world_shares_no_name_with_the_real_one_nor_with_another() -> None:
    real, one, other = (set(all_names(load_world(seed))) for seed in (0, 7, 8))
    assert not real & one
    assert len(one & other) < len(one) / 10
    assert max(map(len, one)) <= 12


def test_known_facts() -> None:
    real = load_world()
    assert real.countries["France"].capital == "Paris"
    assert real.countries["Bolivia"].currency == "Bolivian boliviano"
    assert "Spain" in real.countries["Portugal"].borders
    assert real.elements["Iron"].symbol == "Fe"
    assert real.languages["Hungarian"].family == "Uralic"
    assert real.cities["Osaka"].country == "Japan"


def test_pages_are_short_distinct_and_linked(world: World) -> None:
    written = pages(world)
    urls = {page.url for page in written}
    assert len(urls) == len(written) == len({page.title for page in written})
    for page in written:
        assert set(page.links) <= urls
        subject = page.title.removesuffix(" language")
        for passage in page.passages:
            assert len(passage.text.split()) <= 40, passage.text
            assert subject.lower() in passage.text.lower(), passage.text
            assert passage.text.endswith(".") and "{" not in passage.text
    texts = [passage.text for page in written for passage in page.passages]
    assert len(texts) == len(set(texts))


def test_long_lists_are_complete() -> None:
    world = load_world()
    text = next(page.text for page in pages(world) if page.title == "Euro")
    for user in world.currency_users["euro"]:
        assert re.search(rf"\b{re.escape(user)}\b", text), user


def subjects_of(world: World, relation: str) -> list[str]:
    kind = RELATIONS[relation].subject
    names = {
        "country": list(world.countries),
        "city": list(world.cities)[::40],
        "currency": [n for n, users in world.currency_users.items() if len(users) < 10],
        "language": list(world.languages),
        "element": list(world.elements),
    }[kind]
    return names + (list(world.cities)[::40] if relation == "population" else [])


@pytest.mark.parametrize("relation", RELATIONS)
def test_reading_gives_what_the_page_says(world: World, relation: str) -> None:
    assert relation in SECTION_OF
    for subject in subjects_of(world, relation):
        values = values_of(world, relation, subject)
        if not values:
            continue
        passage = passage_for(world, relation, subject)
        line = f"[2] {passage.title}: {passage.text}"
        assert tuple(read(relation, subject, passage.text)) == values
        assert tuple(read(relation, subject, line)) == values
        assert tuple(read(relation, subject, f"[1] Other: Nothing here.\n{line}\n")) == values


def test_reading_is_silent_about_what_is_not_stated() -> None:
    text = passage_for(load_world(), "population", "France").text
    assert read("capital", "France", text) == []
    assert read("population", "Germany", text) == []
    assert read("population", "France", "") == []
    assert read("capital", "Niger", "The capital of Nigeria is Abuja.") == []
    assert read("capital_of", "Abuja", "The capital of Nigeria is Abuja.") == ["Nigeria"]
    with pytest.raises(CoaError, match="Did you mean 'currency'"):
        read("curency", "France", text)


@pytest.fixture(scope="module", params=[(split, seed) for split in SPLITS for seed in WORLDS])
def tasks(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    split, world_seed = request.param
    return make_tasks(split, 700, seed=3, world_seed=world_seed)


def test_an_independent_program_derives_every_gold_answer(tasks) -> None:  # type: ignore[no-untyped-def]
    library = Library(pages(load_world(tasks[0].meta["world"])))
    for task in tasks:
        found = solve(library, task.meta["family"], task.question)
        assert found in task.answers, (task.question, found, task.answers)
    assert {task.meta["family"] for task in tasks} == set(families_of(tasks[0].meta["split"]))


def test_every_question_is_understood(tasks) -> None:  # type: ignore[no-untyped-def]
    for task in tasks:
        understood = understand(task.question)
        assert understood is not None, task.question
        assert understood.family == task.meta["family"], task.question
        assert understood.phrasing == task.meta["phrasing"], task.question
        world = load_world(task.meta["world"])
        solution = understood.meaning.shape.solve(world, understood.slots)
        assert solution is not None and solution.answer == task.answers[0], task.question


def test_gold_hops_hold_what_they_claim(tasks) -> None:  # type: ignore[no-untyped-def]
    for task in tasks:
        hops = task.gold["hops"]
        assert len(hops) == task.meta["hops"] <= 4
        for hop in hops:
            assert {"query", "page", "passage", "answer"} <= set(hop)
            values = read(hop["relation"], hop["subject"], hop["passage"])
            assert ", ".join(values) == hop["answer"]
        assert task.public().gold == {} and task.public().answers == ()


def test_what_is_not_ours_is_not_understood() -> None:
    for question in (
        "",
        "Who wrote Hamlet?",
        "What is the capital?",
        "\N{SLIGHTLY SMILING FACE}" * 50,
    ):
        assert understand(question) is None


def test_every_phrasing_is_traced_back_to_its_own_family(world: World) -> None:
    for name, templates in MHQA.phrasings.items():
        assert len(templates) >= 8 and len(set(templates)) == len(templates)
        kinds = FAMILIES[name].shape.slots
        fill = {
            "country": ["Saint Kitts & Nevis", "the Netherlands", "Chad"],
            "city": ["The Hague", "Ho Chi Minh City"],
            "element": ["Iron", "Tin", "Gold"],
        }
        for index, template in enumerate(templates):
            slots = {slot: fill[kind][place] for place, (slot, kind) in enumerate(kinds.items())}
            understood = understand(template.format(**slots))
            assert understood is not None, template
            bare = {slot: name.removeprefix("the ") for slot, name in slots.items()}
            assert (understood.family, understood.phrasing) == (name, index), template
            assert dict(understood.slots) == bare, template


def test_families_cover_the_kinds_and_held_out_ones_compose_trained_relations() -> None:
    assert set(MHQA.phrasings) == set(FAMILIES) and len(FAMILIES) >= 16
    trained = [FAMILIES[name] for name in families_of("train")]
    new = [FAMILIES[name] for name in families_of("heldout_family")]
    assert len(trained) >= 12 and len(new) >= 3
    kinds = {
        "lookup",
        "chain",
        "comparison",
        "counting",
        "superlative",
        "intersection",
        "arithmetic",
    }
    assert {family.kind for family in trained} == kinds
    known = {relation for family in trained for relation in family.shape.relations}
    shapes = {(type(family.shape), family.shape.relations) for family in trained}
    paths = {f.shape.relations for f in trained if isinstance(f.shape, LookupChain)}
    for family in new:
        assert set(family.shape.relations) <= known
        assert (type(family.shape), family.shape.relations) not in shapes
        if isinstance(family.shape, LookupChain):
            assert family.shape.relations not in paths


def entities(task) -> set[str]:  # type: ignore[no-untyped-def]
    understood = understand(task.question)
    assert understood is not None
    return {*understood.slots.values(), *(hop["subject"] for hop in task.gold["hops"])}


def test_splits_share_no_entity_and_hold_out_phrasings(world: World) -> None:
    outside = held_out(world)
    names = {name for _, name in outside}
    train = make_tasks("train", 3000, seed=5, world_seed=world.seed)
    unseen = make_tasks("heldout_entity", 1500, seed=5, world_seed=world.seed)
    new = make_tasks("heldout_family", 500, seed=5, world_seed=world.seed)
    for task in train:
        assert not entities(task) & names, task.question
        assert task.answers[0] not in names
        assert not is_held_out(task.meta["phrasing"])
        assert task.meta["phrasing_heldout"] is False
    for task in unseen:
        assert entities(task) <= names, task.question
        assert task.meta["phrasing_heldout"] == is_held_out(task.meta["phrasing"])
    share = sum(task.meta["phrasing_heldout"] for task in unseen) / len(unseen)
    assert 0.2 < share < 0.3
    assert not {t.meta["family"] for t in new} & {t.meta["family"] for t in train}
    assert len({task.id for tasks in (train, unseen, new) for task in tasks}) == 5000
    wholes = {"country": world.countries, "city": world.cities, "element": world.elements}
    for kind, whole in wholes.items():
        assert 0.2 < sum(each == kind for each, _ in outside) / len(whole) < 0.3


def test_comparisons_have_a_clear_margin(world: World) -> None:
    names = ["more_populous_country", "larger_country", "most_populous_of_three"]
    for task in make_tasks("train", 300, seed=1, world_seed=world.seed, families=names):
        amounts = sorted(int(hop["answer"].replace(",", "")) for hop in task.gold["hops"])
        assert amounts[-1] >= 1.1 * amounts[-2]


def test_ambiguous_names_are_not_asked_about() -> None:
    for split in SPLITS:
        for task in make_tasks(split, 1000, seed=2):
            for name in ("Georgia", "Congo", "Luxembourg", "Singapore", "(city)"):
                assert name not in {*entities(task), *task.answers}, task.question
            if task.meta["family"].startswith("city_"):
                assert not entities(task) & {"Hamilton", "Tripoli", "Victoria", "San Jose"}


def test_ten_thousand_tasks_are_distinct() -> None:
    tasks = make_tasks("train", 10_000, seed=11)
    assert len({task.id for task in tasks}) == len({t.question for t in tasks}) == 10_000


def test_a_smaller_set_is_the_start_of_a_larger_one_and_seeds_differ() -> None:
    small, large = (make_tasks("train", n, seed=4) for n in (50, 400))
    assert list(large)[:50] == list(small)
    assert make_tasks("train", 50, seed=9).fingerprint() != small.fingerprint()
    counts = Counter(task.meta["family"] for task in large)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_the_same_in_a_fresh_process_with_another_hash_seed() -> None:
    program = (
        "from coa.environments.atlas.tasks import make_tasks\n"
        "from coa.environments.atlas.pages import atlas_index\n"
        "print(make_tasks('heldout_entity', 60, 4, 7).fingerprint())\n"
        "print([h.url for h in atlas_index(7).search('capital of the city', 5)])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert make_tasks("heldout_entity", 60, 4, 7).fingerprint() in outputs.pop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian", 5, 0), "unknown split 'trian'. Did you mean 'train'?"),
        (("train", 0, 0), "n = 0: expected a positive number"),
        (("train", 5, 0, -1), "world seed -1"),
        (("train", 5, 0, 0, ["city_curency"]), "Did you mean 'city_currency'?"),
        (("train", 5, 0, 0, ["capital_area"]), "does not belong to split 'train'"),
        (("train", 5, 0, 0, []), "the list is empty"),
        (("train", 10**6, 0, 0, ["element_place"]), "Ask for fewer"),
    ],
)
def test_mistakes_are_named_in_one_line(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(CoaError) as caught:
        make_tasks(*arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
