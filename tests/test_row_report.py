"""What is told about rows before anybody trains on them."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from coa.models.codec import Codec
from coa.train.row_report import OUTSIDE, UNKNOWN, agents_of, print_preview, row_report
from coa.train.rows import Row, build_row
from coa.train.settings import SftSettings
from coa.trajectory import Author, Segment, Trajectory

THINK, SEARCH = "<think> Rome, then.</think>\n", "<wiki_search> Rome</wiki_search>"
SEEN = "<observation>Rome is in Italy.</observation>"
ANSWER = "<answer> Italy</answer>"


@pytest.fixture(scope="module")
def codec(tiny_model: Path) -> Codec:
    return Codec.from_folder(tiny_model)


def trajectory(*segments: Segment, grammar: str = "mhqa") -> Trajectory:
    prompt = Segment(Author.PROMPT, "You are an agent.")
    return Trajectory("t-1", "Where is Rome?", grammar, [prompt, *segments])


def model(text: str, **more: object) -> Segment:
    return Segment(Author.MODEL, text, **more)  # type: ignore[arg-type]


def made(codec: Codec, *trajectories: Trajectory, **limits: int) -> list[Row]:
    return [build_row(each, codec, **limits) for each in trajectories]  # type: ignore[arg-type]


def agent_tokens(chain: Trajectory, codec: Codec) -> Counter[str]:
    """Tokens that the model wrote, by the role of their block."""
    own = [segment for segment in chain.segments if segment.author is Author.MODEL]
    return Counter(agent for segment in own for agent in agents_of(chain, segment, codec))


def test_tokens_are_counted_by_author_and_by_agent(codec: Codec) -> None:
    wrong = (len(THINK), len(THINK + SEARCH))
    chain = trajectory(
        model(THINK + SEARCH, errs=[wrong]), Segment(Author.ENV, SEEN), model(THINK + ANSWER)
    )
    rows = made(codec, chain, chain)
    report = row_report([chain, chain], rows, SftSettings(batch_size=1), codec)
    size = {text: len(codec.encode(text)) for text in (THINK, SEARCH, SEEN, ANSWER)}
    assert len(codec.encode(THINK + SEARCH)) == size[THINK] + size[SEARCH]  # no token in both
    assert report.agents["think"] == (4 * size[THINK], 4 * size[THINK])
    assert report.agents["wiki_search"] == (2 * size[SEARCH], 0)
    assert report.agents["answer"] == (2 * size[ANSWER], 2 * size[ANSWER])
    assert list(report.agents) == sorted(report.agents, key=lambda a: -report.agents[a].tokens)
    assert report.authors["env"] == (2 * size[SEEN], 0)
    assert report.authors["prompt"].trained == 0
    assert sum(tally.tokens for tally in report.authors.values()) == report.tokens
    assert sum(tally.trained for tally in report.authors.values()) == report.trained
    assert (report.rows, report.updates, report.cut, report.fill) == (2, 2, 0, 1.0)
    assert report.to_json()["agents"]["wiki_search"] == {"tokens": 2 * size[SEARCH], "trained": 0}


def test_lengths_and_cut_rows_are_those_of_the_rows(codec: Codec) -> None:
    chains = [trajectory(*[model(ANSWER)] * n) for n in range(1, 12)]
    whole = made(codec, *chains)
    limit = len(whole[5].ids)
    rows = made(codec, *chains, max_length=limit)
    report = row_report(chains, rows, SftSettings(layout="pack", max_length=limit), codec)
    assert report.cut == 5
    assert report.lengths["min"] == len(whole[0].ids)
    assert report.lengths["median"] == report.lengths["max"] == limit
    assert any("5 lost their end" in line for line in report.lines())
    assert any("of packs filled" in line for line in report.lines())


def test_sampled_ids_are_placed_by_what_they_decode_to(codec: Codec) -> None:
    ids = [*codec.encode(THINK[:9]), *codec.encode(THINK[9:] + ANSWER), 2]  # no encoder's choice
    chain = trajectory(model(THINK + ANSWER, ids=ids))
    found = agent_tokens(chain, codec)
    assert sum(found.values()) == len(ids)
    assert found["answer"] == len(codec.encode(ANSWER)) + 1  # and the end of sequence
    assert OUTSIDE not in found


def test_text_outside_of_blocks_and_a_strange_grammar_are_counted_too(codec: Codec) -> None:
    assert agent_tokens(trajectory(model(" so")), codec)[OUTSIDE] == len(codec.encode(" so"))
    elsewhere = trajectory(model(ANSWER), grammar="their/own.toml")
    assert set(agent_tokens(elsewhere, codec)) == {UNKNOWN}


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([*"<>/ab\n", "<think>", "</think>", "<answer>", "\u6771"])),
    sampled=st.booleans(),
)
def test_every_token_of_any_text_has_one_agent(
    codec: Codec, pieces: list[str], sampled: bool
) -> None:
    text = "".join(pieces)
    ids = codec.encode(text)
    chain = trajectory(model(text, ids=ids if sampled else None))
    assert sum(agent_tokens(chain, codec).values()) == len(ids)


def preview(codec: Codec, chain: Trajectory, **looks: object) -> str:
    out = io.StringIO()
    console = Console(file=out, highlight=False, markup=False, soft_wrap=True, **looks)  # type: ignore[arg-type]
    print_preview(console, [chain], made(codec, chain), codec)
    return out.getvalue()


def test_a_preview_tells_trained_untrained_and_mistaken_text_apart(codec: Codec) -> None:
    chain = trajectory(
        model(SEARCH, errs=[(0, len(SEARCH))]),
        Segment(Author.ENV, f"<observation>{'far and wide ' * 90}\x1b[2J</observation>"),
        model(THINK + ANSWER),
    )
    shown = preview(codec, chain)
    assert shown.startswith("t-1: ")
    assert "[[<|im_start|>system You are an agent.<|im_end|>" in shown
    assert "{{<wiki_search> Rome</wiki_search>}}[[<observation>far and" in shown
    assert f"]]{THINK}{ANSWER}" in shown
    assert "... (+" in shown and shown.count("far and wide") < 30
    assert "\x1b" not in shown
    assert shown.rstrip().endswith("[[not trained]] {{mistake}}")


def test_a_preview_on_a_terminal_has_colours_instead_of_marks(codec: Codec) -> None:
    chain = trajectory(model(SEARCH, errs=[(0, len(SEARCH))]), model(ANSWER))
    shown = preview(codec, chain, force_terminal=True, color_system="standard")
    assert "[[" not in shown and "{{" not in shown
    assert f"\x1b[31m{SEARCH}\x1b[0m" in shown
    assert f"\x1b[32m{ANSWER}\x1b[0m" in shown
    assert "\x1b[2m<|im_start|>system You are an agent." in shown
