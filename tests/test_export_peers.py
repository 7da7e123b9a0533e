"""Export files in the hands of those they are for: datasets, TRL, verl and LLaMA-Factory.

`make test-peers` installs them into an environment of their own and runs this file. Without it, or
without the model (`coa model pull`), the tests are skipped and say why. What each trainer would
train on is compared with our own rows, token by token.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from coa.distillation.dataset import Conversion, conclude, save_distilled
from coa.distillation.exports import FORMATS, Format, export
from coa.distillation.filters import FilterSettings
from coa.models import references as store
from coa.models.codec import Codec
from coa.train.rows import build_row
from coa.trajectory import Trajectory
from export_chains import SETS, chains_of, make_tokenizer_folder, short_chain, tasks_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(os.environ.get("COA_TEST_PEERS") or ROOT / ".cache" / "peers")
SCRIPT = Path(__file__).with_name("export_readers.py")
READERS: dict[Format, str] = {
    "sharegpt": "llama_factory",
    "trl": "trl",
    "trl-tokens": "trl",
    "verl": "verl",
}
"""Format -> who reads it. AFM's own fork reads alpaca; see test_exports.py for its masker."""


class Labelled(NamedTuple):
    """One training row: ids, and -100 where nothing is trained."""

    ids: list[int]
    labels: list[int]


def read(reader: str, folder: Path, model: Path | None = None) -> Any:
    python = PEERS / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no trainers in {PEERS}: make test-peers")
    command = [str(python), str(SCRIPT), reader, str(folder), *([str(model)] if model else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def rows_of(to: Format, folder: Path, model: Path) -> list[Labelled]:
    return [Labelled(row["ids"], row["labels"]) for row in read(READERS[to], folder, model)]


def our_rows(trajectories: tuple[Trajectory, ...], codec: Codec) -> list[Labelled]:
    rows = []
    for row in (build_row(trajectory, codec) for trajectory in trajectories):
        pairs = zip(row.ids, row.weights, strict=True)
        rows.append(Labelled(row.ids, [i if weight else -100 for i, weight in pairs]))
    return rows


def write(trajectories: tuple[Trajectory, ...], to: Format, out: Path, codec: Codec) -> None:
    tasks = tasks_of("atlas-mhqa") if to == "verl" else ()
    how: Any = {"codec": codec, "tasks": tasks}
    export(trajectories, to, out, note=lambda line: None, **how)


@pytest.fixture(scope="module")
def smollm() -> Path:
    if not store.is_pulled():
        pytest.skip("the embedded model is not in the cache: coa model pull")
    return store.base_folder()


@pytest.fixture(scope="module")
def qwen_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("qwen"), qwen=True)


def test_datasets_loads_every_file(tmp_path: Path, smollm: Path) -> None:
    codec, chains = Codec.from_folder(smollm), chains_of("mhqa")
    for to in FORMATS:
        write(chains, to, tmp_path / to, codec)
    found = read("datasets", tmp_path)
    rl = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    columns = {
        "alpaca/alpaca.json": ["instruction", "input", "output"],
        "sharegpt/sharegpt.json": ["conversations"],
        "trl-tokens/train.jsonl": ["task_id", "input_ids", "labels"],
        "trl/train.jsonl": ["task_id", "messages"],
        "verl/rl.parquet": rl,
        "verl/sft.parquet": ["task_id", "messages"],
    }
    assert {name: file["columns"] for name, file in found.items()} == columns
    for name, file in found.items():
        tasks = name.endswith("rl.parquet")
        assert file["rows"] == (len(tasks_of("atlas-mhqa")) if tasks else len(chains))


def test_a_dataset_loads_as_its_card_says_though_other_files_lie_beside_it(tmp_path: Path) -> None:
    chains = [*chains_of("mhqa"), *chains_of("web")]
    made = [Conversion(each.task_id, each.task_id, each, score=1.0) for each in chains]
    made.append(Conversion("none", "none", reason="the planner could not plan"))
    distilled = conclude(made, FilterSettings())
    assert distilled.kept and distilled.rejected
    save_distilled(tmp_path, distilled)
    assert read("hub", tmp_path) == {"train": len(distilled.kept)}


@pytest.mark.parametrize("grammar", SETS)
@pytest.mark.parametrize("to", READERS)
def test_a_trainer_makes_the_same_ids_and_the_same_mask_of_our_files(
    to: Format, grammar: str, tmp_path: Path, smollm: Path
) -> None:
    codec, chains = Codec.from_folder(smollm), chains_of(grammar)
    write(chains, to, tmp_path, codec)
    assert rows_of(to, tmp_path, smollm) == our_rows(chains, codec)


def test_verl_reads_tasks_with_their_gold_and_without_mixing_them(
    tmp_path: Path, smollm: Path
) -> None:
    write(chains_of("mhqa"), "verl", tmp_path, Codec.from_folder(smollm))
    tasks = tasks_of("atlas-mhqa")
    rows = read("verl_tasks", tmp_path, smollm)
    assert [row["index"] for row in rows] == [task.id for task in tasks]
    for row, task in zip(rows, tasks, strict=True):
        assert row["raw_prompt"][-1] == {"role": "user", "content": task.question}
        assert row["reward_model"]["ground_truth"]["target"] == list(task.answers)
        assert list(row["tools_kwargs"]) == ["wiki_search"]


@pytest.mark.parametrize("to", ["sharegpt", "trl-tokens", "verl"])
def test_pieces_that_are_encoded_one_by_one_keep_the_mask_where_borders_would_merge(
    to: Format, tmp_path: Path, qwen_like: Path
) -> None:
    """Qwen's tokenizers put `>` and a line break into one token; our rows never do so between the
    model and the environment, and neither does a trainer that encodes turn by turn."""
    codec, chains = Codec.from_folder(qwen_like), chains_of("mhqa")
    write(chains, to, tmp_path, codec)
    for theirs, ours in zip(rows_of(to, tmp_path, qwen_like), our_rows(chains, codec), strict=True):
        assert trained_text(theirs, codec) == trained_text(ours, codec)
        assert codec.tokenizer.decode(theirs.ids) == codec.tokenizer.decode(ours.ids)


def test_messages_that_are_encoded_as_one_text_train_only_line_breaks_more(
    tmp_path: Path, qwen_like: Path
) -> None:
    codec, chains = Codec.from_folder(qwen_like), chains_of("mhqa")
    write(chains, "trl", tmp_path, codec)
    more = 0
    for theirs, ours in zip(
        rows_of("trl", tmp_path, qwen_like), our_rows(chains, codec), strict=True
    ):
        assert codec.tokenizer.decode(theirs.ids) == codec.tokenizer.decode(ours.ids)
        mine, found = trained_text(ours, codec), trained_text(theirs, codec)
        assert "".join(found.split()) == "".join(mine.split())
        more += found.count("\n") - mine.count("\n")
    assert more > 0, "no border merged: this tokenizer tests nothing"


def trained_text(row: Labelled, codec: Codec) -> str:
    return codec.decode([label for label in row.labels if label >= 0])


def test_the_tokens_shown_in_the_documentation_are_real(smollm: Path) -> None:
    page = (ROOT / "docs" / "datasets.md").read_text(encoding="utf-8")
    codec = Codec.from_folder(smollm)
    (row,) = our_rows((short_chain(),), codec)
    shown = json.loads(page.partition("<!-- trl-tokens -->\n```json\n")[2].partition("```")[0])
    assert shown["input_ids"] == row.ids and shown["labels"] == row.labels
