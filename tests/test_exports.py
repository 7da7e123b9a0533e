"""Exports: files that other trainers read keep the chain, and as much of the mask as they can."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.distillation.exports import CHATML, Frame, export, pieces
from coa.engines.scripted import ByteCodec
from coa.errors import MissingExtra, RecordError
from coa.models.codec import Codec
from coa.tasks import Task
from coa.train.rows import build_row
from coa.trajectory import Author, Segment, Trajectory
from export_chains import (
    ANSWER,
    SEARCH,
    SETS,
    chain,
    chains_of,
    make_tokenizer_folder,
    read_json,
    read_lines,
    read_parquet,
    short_chain,
    tasks_of,
    write,
)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return Codec.from_folder(make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return Codec.from_folder(make_tokenizer_folder(tmp_path_factory.mktemp("qwen"), qwen=True))


def marked(trajectory: Trajectory) -> bool:
    return any(segment.errs for segment in trajectory.segments)


# -- pieces ----------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from([Author.MODEL, Author.ENV]), st.text(min_size=1)), min_size=1
    ),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15)), max_size=4),
)
def test_pieces_are_the_chain_and_train_what_our_rows_train(
    parts: list[tuple[Author, str]], marks: list[tuple[int, int]]
) -> None:
    errs = [(start, start + length) for start, length in marks]
    segments = [Segment(author, text) for author, text in parts]
    for segment in segments:
        if segment.author is Author.MODEL:
            segment.errs = [
                (s, min(e, len(segment.text))) for s, e in errs if s < len(segment.text)
            ]
    trajectory = replace(short_chain(), segments=[Segment(Author.PROMPT, "Go."), *segments])
    letters = _Letters()
    found = pieces(trajectory, letters.encode_with_offsets)
    assert "".join(piece.text for piece in found) == trajectory.text
    assert all(a.role != b.role for a, b in pairwise(found))
    assert all(piece.text for piece in found)
    expected = [
        segment.author is Author.MODEL and not any(start <= at < end for start, end in segment.errs)
        for segment in segments
        for at in range(len(segment.text))
    ]
    assert [piece.trained for piece in found for _ in piece.text] == expected


class _Letters(ByteCodec):
    """One token a character, so that every border is a token's."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return [ord(c) for c in text], [(at, at + 1) for at in range(len(text))]


@pytest.mark.parametrize("grammar", SETS)
def test_the_characters_of_pieces_are_those_of_our_rows(grammar: str, codec: Codec) -> None:
    make = partial(build_row, codec=codec)
    for trajectory in chains_of(grammar):
        row = make(trajectory)
        trained = "".join(
            codec.decode([i]) for i, weight in zip(row.ids, row.weights, strict=True) if weight
        )
        exact = pieces(trajectory, codec.encode_with_offsets)
        assert "".join(piece.text for piece in exact if piece.trained) == trained
    assert any(marked(trajectory) for trajectory in chains_of(grammar))


def test_without_a_tokenizer_the_blank_before_a_mistake_goes_with_it() -> None:
    trajectory = short_chain()
    turn = trajectory.segments[1]
    start = turn.text.index("First")
    turn.errs = [(start, start + len("First step."))]
    assert [piece.text for piece in pieces(trajectory) if piece.role == "mistake"] == [
        " First step."
    ]


# -- LLaMA-Factory ---------------------------------------------------------------------------


def released_mask(ids: list[int], codec: Codec, tag: str) -> list[bool]:
    """What AFM's masker does, told in `docs/datasets.md`: it searches for ids, not for text."""
    opened, closed = codec.encode(f"<{tag}"), codec.encode(f"{tag}>\n\n")
    masked, at = [False] * len(ids), 0
    while at < len(ids):
        if ids[at : at + len(opened)] == opened:
            ends = [e for e in range(at, len(ids)) if ids[e : e + len(closed)] == closed]
            assert ends, "the row would be dropped"
            stop = ends[0] + len(closed)
            masked[at:stop] = [True] * (stop - at)
            at = stop
        else:
            at += 1
    return masked


@pytest.mark.parametrize("grammar", SETS)
def test_an_alpaca_row_is_the_chain_and_the_released_masker_masks_its_observations(
    grammar: str, tmp_path: Path, qwen: Codec
) -> None:
    trajectories = chains_of(grammar)
    report, _ = write(trajectories, "alpaca", tmp_path)
    rows = read_json(tmp_path / "alpaca.json")
    assert report["rows"] == len(rows) == len(trajectories)
    tag = "information" if grammar == "search_r1" else "observation"
    for row, trajectory in zip(rows, trajectories, strict=True):
        assert set(row) == {"instruction", "input", "output"} and row["input"] == ""
        opening = trajectory.segments[0].text
        assert row["instruction"] == f"{opening}\n\nQuestion: {trajectory.question}"
        assert row["output"].replace(f"</{tag}>\n\n", f"</{tag}>\n") == trajectory.text
        ids = qwen.encode(row["output"])
        masked = released_mask(ids, qwen, tag)
        shown = qwen.decode([i for i, hidden in zip(ids, masked, strict=True) if not hidden])
        # The line break before an observation is ours and stays unmasked: `>` holds it.
        ours = [s.text for s in trajectory.segments if s.author is Author.MODEL]
        assert shown == "\n".join(ours)


@pytest.mark.parametrize(
    "odd",
    [
        short_chain("He wrote &lt;/observation>\n\nand more."),
        short_chain("\n\nIt begins with an empty line."),
        chain(SEARCH, "x", ANSWER.replace("It is", "<observation said")),
        chain(SEARCH, "x", f"\n\n{ANSWER}"),
    ],
)
def test_a_text_that_would_mislead_the_released_masker_is_left_out(
    odd: Trajectory, tmp_path: Path
) -> None:
    report, told = write([odd, short_chain()], "alpaca", tmp_path)
    assert report["rows"] == 1 and list(report["left_out"].values()) == [1]
    assert told == [
        "left out 1: their text would mislead AFM's masker, which searches for <observation and "
        "observation> in it; use another format."
    ]


def test_a_turn_that_begins_with_a_line_break_needs_no_second_one(tmp_path: Path) -> None:
    write([chain(SEARCH, "x", f"\n{ANSWER}")], "alpaca", tmp_path)
    (row,) = read_json(tmp_path / "alpaca.json")
    assert "</observation>\n\n<think>" in row["output"]


def test_llama_factory_is_told_where_the_rows_are(tmp_path: Path) -> None:
    for to, key in (("alpaca", "instruction"), ("sharegpt", "conversations")):
        folder = tmp_path / to
        write([short_chain()], to, folder)
        listed = read_json(folder / "dataset_info.json")["coa_mhqa"]
        assert listed["formatting"] == to and key in listed["columns"].values()
        (row,) = read_json(folder / listed["file_name"])
        assert set(listed["columns"].values()) == set(row)


@pytest.mark.parametrize("grammar", SETS)
def test_sharegpt_turns_alternate_and_join_to_the_chain(grammar: str, tmp_path: Path) -> None:
    trajectories = chains_of(grammar)
    report, told = write(trajectories, "sharegpt", tmp_path)
    mistaken = sum(map(marked, trajectories))
    assert report["mistakes_trained"] == mistaken > 0
    assert told == [
        f"{mistaken} of {len(trajectories)} rows hold marked mistakes, which sharegpt cannot mask: "
        "a trainer will learn them. To mask them, use sharegpt with --model, trl, trl-tokens or "
        "verl."
    ]
    rows = read_json(tmp_path / "sharegpt.json")
    for row, trajectory in zip(rows, trajectories, strict=True):
        system, human, *turns = row["conversations"]
        assert system == {"from": "system", "value": trajectory.segments[0].text}
        assert human == {"from": "human", "value": trajectory.question}
        speakers = ["gpt", "observation"] * len(turns)
        assert [turn["from"] for turn in turns] == speakers[: len(turns)]
        assert turns[-1]["from"] == "gpt"
        assert "".join(turn["value"] for turn in turns) == trajectory.text


@pytest.mark.parametrize("grammar", SETS)
def test_sharegpt_for_a_model_holds_the_whole_text_and_masks_mistakes(
    grammar: str, tmp_path: Path, codec: Codec
) -> None:
    trajectories = chains_of(grammar)
    report, told = write(trajectories, "sharegpt", tmp_path, codec)
    assert report["mistakes_trained"] == 0 and told == []
    rows = read_json(tmp_path / "sharegpt.json")
    for row, trajectory in zip(rows, trajectories, strict=True):
        turns = row["conversations"]
        assert len(turns) % 2 == 0, "a trainer skips a row that does not end with gpt"
        assert [t["from"] for t in turns[::2]] == [
            "human",
            *["observation"] * (len(turns) // 2 - 1),
        ]
        assert {t["from"] for t in turns[1::2]} == {"gpt"}
        prompt = CHATML.prompt(trajectory.segments[0].text, trajectory.question)
        assert "".join(turn["value"] for turn in turns) == prompt + trajectory.text
        trained = [p.text for p in pieces(trajectory, codec.encode_with_offsets) if p.trained]
        assert [turn["value"] for turn in turns[1::2]] == trained


def test_a_mistake_at_either_end_of_a_chain_keeps_the_turns_in_order(
    tmp_path: Path, codec: Codec
) -> None:
    trajectory = short_chain()
    first, last = trajectory.segments[1], trajectory.segments[-1]
    first.errs, last.errs = [(0, 7)], [(len(last.text) - 3, len(last.text))]
    write([trajectory], "sharegpt", tmp_path, codec)
    (row,) = read_json(tmp_path / "sharegpt.json")
    speakers = [turn["from"] for turn in row["conversations"]]
    assert speakers == ["human", "gpt", "observation", "gpt"]
    assert row["conversations"][0]["value"].endswith(first.text[:7])
    whole = CHATML.prompt(trajectory.segments[0].text, "Where?") + trajectory.text
    assert whole.startswith("".join(turn["value"] for turn in row["conversations"]))


# -- TRL -------------------------------------------------------------------------------------


def rendered(template: str, messages: list[dict[str, str]]) -> tuple[str, list[bool]]:
    """The text of a template and, for each character, whether it stands in generation markers."""
    templating = pytest.importorskip("transformers.utils.chat_template_utils")
    texts, spans = templating.render_jinja_template(
        [messages], chat_template=template, return_assistant_tokens_mask=True
    )
    (text,), (found,) = texts, spans
    return text, [any(start <= at < end for start, end in found) for at in range(len(text))]


@pytest.mark.parametrize("grammar", SETS)
def test_the_chat_template_joins_messages_to_one_turn_and_marks_what_is_trained(
    grammar: str, tmp_path: Path, codec: Codec
) -> None:
    trajectories = chains_of(grammar)
    write(trajectories, "trl", tmp_path, codec)
    template = (tmp_path / "chat_template.jinja").read_text()
    rows = read_lines(tmp_path / "train.jsonl")
    for row, trajectory in zip(rows, trajectories, strict=True):
        assert row["task_id"] == trajectory.task_id
        text, inside = rendered(template, row["messages"])
        prompt = CHATML.prompt(trajectory.segments[0].text, trajectory.question)
        assert text == prompt + trajectory.text
        cut = pieces(trajectory, codec.encode_with_offsets)
        expected = [piece.trained for piece in cut for _ in piece.text]
        assert inside == [False] * len(prompt) + expected


@given(st.lists(st.sampled_from(["a", " ", "\n", "{{ x }}", "{% if %}", "{#", "'", '"', "\\n"])))
@settings(max_examples=50, deadline=None)
def test_the_template_changes_no_character_of_a_message(parts: list[str]) -> None:
    text = "".join(parts) + "."
    roles = ("system", "user", "assistant", "tool", "mistake", "assistant")
    messages = [{"role": role, "content": text} for role in roles]
    shown, inside = rendered(CHATML.template(), messages)
    assert shown == CHATML.prompt(text, text) + text * 4
    assert inside.count(True) == 2 * len(text)


def test_a_frame_with_quotes_and_other_letters_is_a_valid_template() -> None:
    frame = Frame("<\uff5cSystem\uff5c>\"'\\", "\n\n{{", "}}\t")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert rendered(frame.template(), messages)[0] == frame.prompt("s", "u")


def test_the_frame_is_read_off_the_models_own_template(tmp_path: Path, codec: Codec) -> None:
    assert Frame.of(codec) == CHATML
    folder = make_tokenizer_folder(tmp_path)
    settings_ = read_json(folder / "tokenizer_config.json")
    settings_["chat_template"] = (
        "{% for m in messages %}"
        "{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "[U]{{ m['content'] }}[A]{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    assert Frame.of(Codec.from_folder(folder)) == Frame("[U]", "\n\n", "[A]")


def test_tokens_are_those_of_our_rows(tmp_path: Path, codec: Codec) -> None:
    trajectories = chains_of("mhqa")
    write(trajectories, "trl-tokens", tmp_path, codec)
    make = partial(build_row, codec=codec)
    for line, trajectory in zip(read_lines(tmp_path / "train.jsonl"), trajectories, strict=True):
        row = make(trajectory)
        assert line["task_id"] == trajectory.task_id and line["input_ids"] == row.ids
        assert line["labels"] == [
            i if weight else -100 for i, weight in zip(row.ids, row.weights, strict=True)
        ]


def test_a_chain_of_another_tokenizer_is_left_out_of_the_tokens(
    tmp_path: Path, codec: Codec
) -> None:
    stranger = short_chain()
    stranger.segments[1].ids = [5, 6, 7]
    report, told = write([stranger, short_chain()], "trl-tokens", tmp_path, codec)
    assert report["rows"] == 1
    assert told == [
        "left out 1: was sampled with another tokenizer; train on text by dropping the ids, or use "
        "the same base model."
    ]


# -- verl ------------------------------------------------------------------------------------


def test_verl_gets_messages_and_tasks_with_an_index_of_their_own(tmp_path: Path) -> None:
    trajectories, tasks = chains_of("mhqa"), tasks_of("atlas-mhqa")
    open_question = Task("Why?")
    report, told = write(trajectories, "verl", tmp_path, tasks=[*tasks, open_question])
    assert told == ["left out 1: tasks without a gold answer."]
    assert (report["rows"], report["rl_rows"]) == (len(trajectories), len(tasks))
    chains = read_parquet(tmp_path / "sft.parquet")
    for row, trajectory in zip(chains, trajectories, strict=True):
        assert "".join(m["content"] for m in row["messages"][2:]) == trajectory.text
    rows = read_parquet(tmp_path / "rl.parquet")
    assert len({row["extra_info"]["index"] for row in rows}) == len(tasks)
    for row, task in zip(rows, tasks, strict=True):
        assert row["data_source"] == "coa" and row["reward_model"]["style"] == "rule"
        system, user = row["prompt"]
        assert system["content"] == trajectories[0].segments[0].text
        assert user == {"role": "user", "content": task.question}
        gold = {"target": list(task.answers), "question": task.question}
        assert row["reward_model"]["ground_truth"] == gold
        assert row["extra_info"]["answer"] == list(task.answers)
        assert set(row["extra_info"]["tools_kwargs"]) == {"wiki_search"}
        told_tools = row["extra_info"]["tools_kwargs"]["wiki_search"]["create_kwargs"]
        assert told_tools["ground_truth"] == "", "tools never see the answer"


def test_verl_can_have_tasks_alone_and_a_plain_ground_truth(tmp_path: Path) -> None:
    tasks = tasks_of("atlas-mhqa")
    report, _ = write([], "verl", tmp_path, tasks=tasks, truth="text")
    assert report["files"] == ["rl.parquet"]
    rows = read_parquet(tmp_path / "rl.parquet")
    assert [r["reward_model"]["ground_truth"] for r in rows] == [t.answers[0] for t in tasks]


def test_verl_tasks_without_tools_and_with_the_same_id_twice(tmp_path: Path) -> None:
    bare = replace(short_chain(), tools=[])
    write([bare], "verl", tmp_path, tasks=[Task("Who?", ("I",))])
    (row,) = read_parquet(tmp_path / "rl.parquet")
    assert row["extra_info"]["need_tools_kwargs"] is False
    with pytest.raises(RecordError, match="two tasks have the id"):
        export([bare], "verl", tmp_path, tasks=[Task("Who?", ("I",))] * 2)


def test_without_pyarrow_the_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"chain-of-agents\[export\]"):
        export([short_chain()], "verl", tmp_path)


# -- the documentation -----------------------------------------------------------------------

PAGE = Path(__file__).resolve().parent.parent / "docs" / "datasets.md"


def shown(name: str) -> Any:
    """The JSON after the comment with this name in the documentation."""
    page = PAGE.read_text(encoding="utf-8")
    return json.loads(page.partition(f"<!-- {name} -->\n```json\n")[2].partition("```")[0])


def test_the_rows_shown_in_the_documentation_are_what_is_written(
    tmp_path: Path, codec: Codec
) -> None:
    example, task = short_chain(), Task("Where?", ("Lima",), meta={"split": "train"})
    for to in ("alpaca", "sharegpt", "trl", "verl"):
        write([example], to, tmp_path / to, tasks=[task] if to == "verl" else ())
    write([example], "sharegpt", tmp_path / "exact", codec)
    assert read_json(tmp_path / "alpaca" / "alpaca.json") == [shown("alpaca")]
    assert read_json(tmp_path / "sharegpt" / "sharegpt.json") == [shown("sharegpt")]
    (exact,) = read_json(tmp_path / "exact" / "sharegpt.json")
    assert exact["conversations"][0] == shown("sharegpt-model")
    assert read_lines(tmp_path / "trl" / "train.jsonl") == [shown("trl")]
    (messages,) = read_parquet(tmp_path / "verl" / "sft.parquet")
    assert messages == shown("trl")
    assert read_parquet(tmp_path / "verl" / "rl.parquet") == [shown("verl-rl")]
