"""Files and folders that are not ours are left as they are, whatever `--out` names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coa.distillation.exports import FORMATS, Format, export
from coa.errors import UsageError
from coa.models.codec import Codec
from coa.tasks import Task, TaskSet
from coa.trajectory import load_trajectories, save_trajectories
from export_chains import (
    ANSWER,
    chain,
    make_tokenizer_folder,
    read_json,
    read_lines,
    short_chain,
    tasks_of,
    write,
)
from test_cli import Coa, coa

__all__ = ["coa"]

COMMANDS = {
    "make": ("tasks", "make", "--n", "2"),
    "load": ("tasks", "load", "hotpotqa", "rows.jsonl"),
    "import-rl": ("import", "afm-rl", "rows.jsonl"),
    "import-sft": ("import", "afm-sft", "alpaca/alpaca.json"),
}
OTHERS = {
    "a table": b"question,answer\nWhere?,Lima\n",
    "tasks that a person wrote": b'{"id": "a", "question": "Where?", "answers": ["Lima"]}\n',
    "records of somebody else's": b'{"text": "hello", "schema": 1}\n',
    "a list": b'[{"question": "Where?"}]\n',
    "no text": b"{\xff\x00",
}


@pytest.fixture
def sources(coa: Coa, tmp_path: Path) -> Coa:
    """The command, in a folder with something to load and to import."""
    row = {"id": "a", "question": "Where?", "answer": "Lima", "type": "bridge", "level": "easy"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    export([short_chain()], "alpaca", tmp_path / "alpaca", note=lambda line: None)
    return coa


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("held", OTHERS)
def test_a_file_of_another_kind_is_not_written_over(
    command: str, held: str, sources: Coa, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_bytes(OTHERS[held])
    done = sources(*COMMANDS[command], "--out", "mine.csv")
    kind = "trajectories" if command == "import-sft" else "tasks"
    assert (done.code, done.out) == (2, "") and done.err == (
        f"coa: mine.csv: holds something else, expected a new file or {kind} that coa wrote. "
        "Write somewhere else, or delete it.\n"
    )
    assert mine.read_bytes() == OTHERS[held]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_same_command_wrote_is_replaced_and_so_is_an_empty_file(
    command: str, sources: Coa, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("")
    for _ in range(2):
        done = sources(*COMMANDS[command], "--out", "out.jsonl")
        assert done.code == 0, done.err
        assert load_trajectories(out) if command == "import-sft" else TaskSet.load(out)


def test_tasks_and_trajectories_do_not_replace_each_other(sources: Coa, tmp_path: Path) -> None:
    save_trajectories(tmp_path / "chains.jsonl", [short_chain()])
    TaskSet((Task("Where?", ("Lima",)),)).save(tmp_path / "tasks.jsonl")
    for command, out in (("make", "chains.jsonl"), ("import-sft", "tasks.jsonl")):
        before = (tmp_path / out).read_bytes()
        assert "holds something else" in sources(*COMMANDS[command], "--out", out).err
        assert (tmp_path / out).read_bytes() == before


def test_a_folder_is_no_file_and_what_is_read_is_not_to_be_deleted(
    sources: Coa, tmp_path: Path
) -> None:
    for command in COMMANDS.values():
        said = sources(*command, "--out", "alpaca").err
        assert said == "coa: alpaca: is a directory, expected a file. Name one in it.\n"
    said = sources(*COMMANDS["import-rl"], "--out", "rows.jsonl").err
    assert "rows.jsonl: is the file to read." in said and "delete" not in said


# -- exports ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return Codec.from_folder(make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


def held_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("to", FORMATS)
def test_an_export_replaces_an_earlier_one_also_beside_notes(
    to: Format, tmp_path: Path, codec: Codec
) -> None:
    out = tmp_path / "out"
    how: Any = {"codec": codec, "note": lambda line: None}
    if to == "verl":
        pytest.importorskip("pyarrow")
        how["tasks"] = tasks_of("atlas-mhqa")
    export([short_chain()], to, out, **how)
    before = held_in(out)
    (out / "notes.txt").write_text("My own.")
    export([short_chain(), short_chain("[1] Peru.")], to, out, **how)
    after = held_in(out)
    assert after.pop("notes.txt") == b"My own."
    assert after.keys() == before.keys() and after != before


def test_hidden_files_do_not_make_a_folder_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / ".gitkeep").write_text("kept")
    assert export([short_chain()], "trl", tmp_path, note=lambda line: None)["rows"] == 1


@pytest.mark.parametrize(
    ("to", "name", "content"),
    [
        ("trl", "train.jsonl", '{"messages": []}\n'),
        ("trl", "chat_template.jinja", "{{ messages }}"),
        ("trl-tokens", "train.jsonl", '{"text": "My own."}\n'),
        ("verl", "sft.parquet", "PAR1"),
        ("verl", "chat_template.jinja", "{{ messages }}"),
        ("verl", "rl.parquet", "PAR1"),
        ("alpaca", "alpaca.json", '[{"instruction": "a", "input": "", "output": "b"}]'),
        ("sharegpt", "sharegpt.json", '[{"conversations": []}]'),
    ],
)
def test_a_file_that_no_export_wrote_is_not_replaced_by_one(
    to: Format, name: str, content: str, tmp_path: Path, codec: Codec
) -> None:
    how = {"tasks": tasks_of("atlas-mhqa")} if to == "verl" else {}
    for folder, beside in ((tmp_path / "a", ""), (tmp_path / "b", "dataset_info.json")):
        folder.mkdir()
        (folder / name).write_text(content)
        if beside:
            (folder / beside).write_text('{"my_own": {"file_name": "mine.json"}}')
        before = held_in(folder)
        with pytest.raises(UsageError) as caught:
            write([short_chain()], to, folder, codec, **how)
        assert str(caught.value) == (
            f"{folder / name}: holds something else, expected a new file or one that coa export "
            "wrote. Write somewhere else, or delete it."
        )
        assert held_in(folder) == before


def test_tasks_for_verl_of_somebody_else_are_not_replaced(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    extra = {"index": 1, "split": "train", "need_tools_kwargs": True}
    row = {"data_source": "x", "prompt": [], "reward_model": {"style": "rule"}, "extra_info": extra}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rl.parquet")
    before = held_in(tmp_path)
    with pytest.raises(UsageError, match=r"rl\.parquet: holds something else"):
        export([short_chain()], "verl", tmp_path, tasks=tasks_of("atlas-mhqa"))
    assert held_in(tmp_path) == before


def test_a_folder_of_something_else_is_not_written_into(coa: Coa, tmp_path: Path) -> None:
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    save_trajectories(dataset / "trajectories.jsonl", [short_chain()])
    (dataset / "README.md").write_text("# A dataset\n")
    before = held_in(dataset)
    for to in ("trl", "alpaca"):
        done = coa("export", "dataset", "--to", to, "--out", "dataset")
        assert (done.code, done.out) == (2, "") and done.err == (
            "coa: dataset: holds 'README.md' and no export, expected a folder that is new, empty "
            "or of an earlier export. Name another one with --out.\n"
        )
    assert held_in(dataset) == before
    for _ in range(2):
        assert coa("export", "dataset", "--to", "trl").out == "1 rows in dataset/exports/trl\n"


def test_a_list_of_datasets_makes_room_for_its_own_formats_only(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"my_own": {"file_name": "mine.json"}}')
    (tmp_path / "mine.json").write_text("[]")
    with pytest.raises(UsageError, match=r"holds 'dataset_info\.json' and no export"):
        export([short_chain()], "trl", tmp_path)
    export([short_chain()], "alpaca", tmp_path, note=lambda line: None)
    assert len(read_json(tmp_path / "alpaca.json")) == 1
    export([chain(ANSWER)] * 2, "alpaca", tmp_path, note=lambda line: None)
    assert len(read_json(tmp_path / "alpaca.json")) == 2
    assert {*read_json(tmp_path / "dataset_info.json")} == {"my_own", "coa_mhqa"}


def test_two_formats_may_share_a_folder_and_empty_files_are_in_nobodys_way(tmp_path: Path) -> None:
    for name in ("train.jsonl", "chat_template.jinja"):
        (tmp_path / name).write_text("")
    export([short_chain()], "trl", tmp_path, note=lambda line: None)
    export([short_chain()], "sharegpt", tmp_path, note=lambda line: None)
    assert len(read_lines(tmp_path / "train.jsonl")) == 1


def test_a_file_is_no_folder_and_no_format_is_a_mistake(coa: Coa, tmp_path: Path) -> None:
    save_trajectories(tmp_path / "trajectories.jsonl", [short_chain()])
    (tmp_path / "look.py").write_text("pass\n")
    says = "look.py: is a file, expected a folder. Name another one with --out.\n"
    assert coa("export", ".", "--to", "trl", "--out", "look.py").err == f"coa: {says}"
    done = coa("export", ".", "--to", "trl,alpaca", "--out", "look.py")
    assert done.code == 2 and done.err == f"coa: trl: {says}coa: alpaca: {says}"
    for nothing in ("", " , "):
        done = coa("export", ".", "--to", nothing)
        assert (done.code, done.out) == (2, "") and done.err == (
            f"coa: --to {nothing!r}: expected one or several of "
            "alpaca, sharegpt, trl, trl-tokens, verl, atif.\n"
        )


def test_rows_of_somebody_else_beside_an_import_are_kept(coa: Coa, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "Where?", "answer": "here"}\n')
    (tmp_path / "t.rejected.jsonl").write_text('{"my": "own"}\n')
    done = coa("import", "afm-rl", "rows.jsonl", "--out", "t.jsonl")
    assert done.code == 2 and "t.rejected.jsonl: holds something else, expected a n" in done.err
    assert (tmp_path / "t.rejected.jsonl").read_text() == '{"my": "own"}\n'
    assert not (tmp_path / "t.jsonl").exists()
