"""The funnel as table and plot, and the dataset card: every number in them is counted."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from coa.distillation.card import Making, dataset_card
from coa.distillation.filters import Candidate, Filtered, FilterSettings, apply_filters
from coa.distillation.funnel import markdown, plot, stage_record, table
from coa.io.runs import Json
from coa.io.settings import to_json
from coa.trajectory import Trajectory
from made_chains import Said, chain, checked, searched

SVG = "{http://www.w3.org/2000/svg}"
STAGES: list[Json] = [
    {"stage": "convert", "entered": 1200, "left": 1100, "reasons": {"no answer": 100}},
    stage_record(
        "quality", 1100, [{"reason": "wrong <answer> & more"}] * 2 + [{"reason": "does not replay"}]
    ),
    stage_record("correction", 1097, [{"reason": "a low check was put right", "copies": 3}] * 2),
]


# -- funnel ----------------------------------------------------------------------------------


def test_the_table_has_every_stage_and_beneath_it_its_reasons() -> None:
    assert table(STAGES) == [
        "stage                         entered   dropped  repeated      left",
        "convert                         1,200       100         0     1,100",
        "  no answer                                 100",
        "quality                         1,100         3         0     1,097",
        "  wrong <answer> & more                       2",
        "  does not replay                             1",
        "correction                      1,097         0         6     1,103",
        "  a low check was put right                             6",
    ]


def test_the_table_of_a_document_has_the_same_numbers() -> None:
    lines = markdown(STAGES)
    assert lines[2] == "| **convert** | 1,200 | 100 | 0 | 1,100 |"
    assert lines[-1] == "| a low check was put right |  |  | 6 |  |"
    assert {line.count("|") for line in lines} == {6}


def test_the_plot_is_an_image_that_can_be_read_without_seeing_it() -> None:
    text = plot(STAGES, "Funnel <of> 1 & 2")
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "Funnel <of> 1 & 2"
    described = root.findtext(f"{SVG}desc") or ""
    assert "quality: 1,100 entered, 1,097 left" in described
    named = (root.get("aria-labelledby") or "").split()
    assert named == [each.get("id") for each in root if each.tag in (f"{SVG}title", f"{SVG}desc")]
    words = [each.text for each in root.iter(f"{SVG}text")]
    assert {"convert", "1,100", "2 wrong <answer> & more", "6 a low check was put right"} <= set(
        words
    )
    assert not re.search(r"<script|href|url\(|http(?!://www\.w3\.org/2000/svg)", text)


def test_bars_show_the_shares_and_stay_within_the_plot() -> None:
    root = ElementTree.fromstring(plot(STAGES))
    width = float(root.get("width") or 0)
    bars = [each for each in root.iter(f"{SVG}rect") if each.get("x")]
    sizes = [float(each.get("width") or 0) for each in bars]
    assert all(float(b.get("x") or 0) + size <= width for b, size in zip(bars, sizes, strict=True))
    kept, lost = sizes[:2]
    assert lost / kept == pytest.approx(100 / 1100, rel=0.01)


def test_a_funnel_of_nothing_is_a_table_and_a_plot_too() -> None:
    nothing = [stage_record("quality", 0, [])]
    assert len(table(nothing)) == 2 and len(table([])) == 1
    for stages in (nothing, []):
        ElementTree.fromstring(plot(stages))


# -- card ------------------------------------------------------------------------------------


def known(number: int) -> Json:
    return {"world": 0, "family": "capitals", "split": "train", "alarms": 1, "misreadings": number}


def made() -> Filtered:
    wrong: Said = ("wiki_search", " captal", True)
    said: list[Said] = [("plan", " 1. look"), wrong, ("reflection", " It does not say.")]
    said += [("wiki_search", " capital of Peru"), ("answer", " Lima")]
    given = [
        chain(said, task_id="m1", meta=known(1), weights="experts"),
        checked(
            *(2, 4),
            task_id="w1",
            meta=known(2) | {"set": "atlas-web", "false_alarms": 1},
            weights="experts",
        ),
        searched("Peru", task_id="m2", meta=known(0), answer="Cusco"),
    ]
    scores = (1.0, 1.0, 0.0)
    candidates = [Candidate(each, score) for each, score in zip(given, scores, strict=True)]
    return apply_filters(candidates, FilterSettings(copies_of_corrected=2))


MAKING = Making(
    command="coa distill --episodes /data/someone/e.jsonl --tasks tasks.jsonl --out runs/d",
    seed=3,
    settings={
        "grammar": "/srv/mine/own.toml",
        "notes": ["~/someone/n.md"],
        "filter": to_json(FilterSettings()),
    },
    against=("exam.jsonl",),
)


def section(card: str, title: str) -> str:
    return card.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_card_counts_rows_and_distinct_chains() -> None:
    done = made()
    card = dataset_card(done.kept, done.stages, MAKING)
    counts = section(card, "Counts")
    for line in (
        "| rows | 6 |",
        "| distinct chains | 2 |",
        "| copies by up-sampling | 4 |",
        "| chains with a reflection | 1 |",
        "| chains with a marked mistake | 1 |",
        "| mhqa | 1 |",
        "| answered | 2 |",
    ):
        assert line in counts.splitlines()
    assert "| wrong answer |  | 1 |  |  |" in section(card, "Funnel")
    assert "(funnel.svg)" in section(card, "Funnel")
    agents = section(card, "Agents and tools").splitlines()
    assert "| `wiki_search` | tool | 2 | 1 |" in agents and "| `think` | think | 14 | 2 |" in agents
    sources = section(card, "Tasks and teachers").splitlines()
    for line in ("| atlas-web | 1 |", "| capitals | 2 |", "| experts | 2 |"):
        assert line in sources
    assert "| not stated | 1 |" in dataset_card([searched("Peru")], [])


def test_the_card_reports_how_good_the_critics_were() -> None:
    done = made()
    text = section(dataset_card(done.kept, done.stages), "Mistakes and critics")
    for line in ("| misreadings | 3 |", "| alarms | 2 |", "| false alarms | 1 |"):
        assert line in text.splitlines()
    assert "missed mistakes" not in text
    plain = searched("Peru", meta={"world": 0})
    assert "Mistakes and critics" not in dataset_card([plain], [])


def test_tokens_are_counted_where_there_is_something_to_count_with() -> None:
    done = made()
    bare = dataset_card(done.kept, done.stages)
    words_of = Making(tokenizer="a pair of scissors", count_tokens=lambda text: len(text.split()))
    counted = dataset_card(done.kept, done.stages, words_of)
    assert "Tokens are those of a pair of scissors." in counted
    assert "tokens" not in section(bare, "Lengths")
    originals = [each for each in done.kept if "copy" not in each.meta]
    words = sum(len(s.text.split()) for each in originals for s in each.segments)
    assert re.search(rf"\| tokens with prompt \|.* \| {words:,} \|\n", counted)
    longest = max(len(each.text) for each in originals)
    assert re.search(rf"\| characters \|.* \| {longest:,} \| [\d,]+ \|\n", counted)


def test_the_card_has_no_path_of_a_machine_and_is_the_same_twice() -> None:
    done = made()
    card = dataset_card(done.kept, done.stages, MAKING)
    assert card == dataset_card(done.kept, done.stages, MAKING)
    assert "/data/" not in card and "/srv/" not in card and "someone" not in card
    assert "coa distill --episodes e.jsonl --tasks tasks.jsonl --out runs/d" in card
    assert '| `grammar` | `"own.toml"` |' in card and "| `filter.low_check` | `2` |" in card
    assert "questions of exam.jsonl" in card and "Seed of the filters: 3." in card


@pytest.mark.parametrize(
    ("meta", "licence", "told"),
    [
        ({"world": 0}, "- apache-2.0\n- cc-by-4.0", "GeoNames"),
        ({"set": "atlas-web", "world": 2}, "- apache-2.0\n- cc-by-4.0", "GeoNames"),
        ({"set": "gym-code"}, "- apache-2.0", "reasoning-gym"),
        ({}, "- unknown", "State them\nhere before publishing."),
    ],
)
def test_licences_are_those_of_the_sources(meta: Json, licence: str, told: str) -> None:
    card = dataset_card([searched("Peru", meta=meta, weights="experts")], [])
    own = "language:\n- en\n" if "unknown" not in licence else ""
    assert f"\nlicense:\n{licence}\n{own}configs:" in card and told in section(card, "Licences")
    assert ("GeoNames" in card) == ("world" in meta)


def test_what_a_language_model_wrote_is_not_ours_to_license() -> None:
    chains = [searched("Peru", meta={"world": 0}, weights=name) for name in ("experts", "llm")]
    card = dataset_card(chains, [])
    assert "\nlicense:\n- unknown\n" in card
    terms = section(card, "Licences")
    assert (
        "Chains of the experts: Apache-2.0." in terms and "provider of a\nlanguage model" in terms
    )
    assert "language model" not in dataset_card(chains[:1], [])


def test_the_limits_are_those_of_the_chains_at_hand() -> None:
    expert = searched("Peru", meta={"world": 0}, weights="experts")
    judged = section(dataset_card([expert], []), "Limits")
    assert "wrong answer were dropped" in judged and "Nobody could judge" not in judged
    assert "Rule-based experts" in judged and "about places" in judged
    foreign = searched("Peru", weights="llm")
    unjudged = section(dataset_card([foreign], [], Making(unjudged=1)), "Limits")
    assert "Nobody could judge the answers of 1 chains: some may be wrong." in unjudged
    for untrue in ("were dropped", "Rule-based experts", "about places"):
        assert untrue not in unjudged


def test_the_hub_reads_the_front_matter() -> None:
    hub = pytest.importorskip("huggingface_hub")
    done = made()
    read = hub.DatasetCard(dataset_card(done.kept, done.stages, MAKING)).data
    assert read.pretty_name == "Chain-of-agents trajectories" and read.size_categories == ["n<1K"]
    assert read.license == ["apache-2.0", "cc-by-4.0"] and read.language == ["en"]
    # Other files of the directory have other columns, so that all together cannot be loaded.
    assert read.configs == [{"config_name": "default", "data_files": "trajectories.jsonl"}]
    assert {"chain-of-agents", "grammar-mhqa", "grammar-web"} <= set(read.tags)


def test_the_card_shows_a_chain_whatever_stands_in_it() -> None:
    tricky = searched("~~~ | `x`", reflection="It fits | well.", question="Who?\n## Not a heading")
    card = dataset_card([tricky], [], MAKING)
    assert "> Who? ## Not a heading\n" in section(card, "Example")
    assert card.count("\n~~~~\n") == 2
    long: list[Trajectory] = [searched("x" * 5000)]
    assert "## Example" not in dataset_card(long, [])


def test_a_dataset_of_nothing_has_a_card() -> None:
    card = dataset_card([], [stage_record("quality", 0, [])])
    assert "| rows | 0 |" in card and "| characters | - | - | - | - | 0 |" in card
