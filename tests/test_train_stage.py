"""The fine-tuning stage: from trajectories to an adapter that says what it was trained on."""

from __future__ import annotations

import io
import json
import re
import resource
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sft_worker import tiny_settings

torch = pytest.importorskip("torch")

from coa.errors import RecordError, TrainingError  # noqa: E402
from coa.grammar import load_grammar  # noqa: E402
from coa.grammar.load import GrammarBook  # noqa: E402
from coa.models.codec import Codec  # noqa: E402
from coa.models.references import trained_on  # noqa: E402
from coa.train.sft import (  # noqa: E402
    choose,
    plan_from_recipe,
    preview_from_recipe,
    protocol_of,
    sft_from_recipe,
    train_on,
)
from coa.trajectory import Author, Segment, Trajectory, save_trajectories  # noqa: E402

TURNS = ("<think>Rome?</think><wiki_search>Rome</wiki_search>", "<answer>Italy</answer>")
BOOK = GrammarBook([load_grammar("mhqa")]).to_json()


def trajectory(index: int, **changes: Any) -> Trajectory:
    segments = [
        Segment(Author.PROMPT, "You are an agent."),
        Segment(Author.MODEL, TURNS[0]),
        Segment(Author.ENV, "<observation>Rome is in Italy.</observation>"),
        Segment(Author.MODEL, TURNS[1]),
    ]
    return Trajectory(f"t{index}", "Where is Rome?", "mhqa", segments, **changes)


def test_an_adapter_remembers_its_protocol_and_cut_rows_are_said(
    tiny_model: Path, tmp_path: Path
) -> None:
    codec = Codec.from_folder(tiny_model)
    made = [trajectory(i) for i in range(3)]
    made[0].segments[3].text = "<answer>" + "a long answer " * 90 + "</answer>"
    sampled = made[1]  # as a rollout writes it: ids everywhere, an end of sequence at the end
    sampled.segments[0].ids = codec.encode_prompt("You are an agent.", "Where is Rome?")
    for segment in sampled.segments[1:]:
        segment.ids = codec.encode(segment.text)
    end = codec.tokenizer.token_to_id("<|im_end|>")
    assert end is not None and sampled.segments[3].ids is not None
    sampled.segments[3].ids.append(end)
    settings = tiny_settings(tiny_model, epochs=1, max_length=256, checkpoint_every=1)
    said = list[str]()
    adapter = train_on(made, settings, tmp_path / "sft", said.append)
    assert said[2:] == ["1 row lost its end: longer than sft.max_length 256"]
    (saved,) = (tmp_path / "sft").glob("checkpoints/*/adapter")  # a run may start from it, too
    for folder in (adapter, saved):
        known = {"grammar": "mhqa", "prompt": "compact", "grammars": BOOK}
        assert trained_on(f"hf:{tiny_model}+{folder}") == known
    manifest = json.loads((adapter / "manifest.json").read_text())
    assert (manifest["stage"], manifest["updates"]) == ("sft", 1)
    assert train_on(made, settings, tmp_path / "sft", said.append) == adapter
    assert said[-1] == f"{adapter} is finished already"


def test_several_protocols_are_a_list() -> None:
    mixed = [trajectory(0), trajectory(1, prompt="full")]
    known = {"grammar": "mhqa", "prompt": ["compact", "full"], "grammars": BOOK}
    assert protocol_of(mixed) == known
    homes = [trajectory(i, meta={"environment": name}) for i, name in enumerate("ba")]
    assert protocol_of([*mixed, *homes]) == known | {"environments": ["a", "b"]}


def test_an_adapter_keeps_the_grammars_that_its_start_knew(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "manifest.json").write_text('{"grammar": ["code", "mhqa"], "prompt": "full"}')
    made = protocol_of([trajectory(0)], f"smollm2-135m+{tmp_path}")
    assert made == {"grammar": ["code", "mhqa"], "prompt": "compact", "grammars": BOOK}


def test_two_definitions_of_one_grammar_are_not_trained_on_together() -> None:
    other = replace(load_grammar("mhqa"), brief="Answer in another way.")
    foreign = trajectory(1, grammar_id=other.fingerprint(), book=GrammarBook([other]))
    assert protocol_of([foreign])["grammars"].keys() == {other.fingerprint()}
    with pytest.raises(RecordError, match="the dataset: holds two definitions of the grammar 'mh"):
        protocol_of([trajectory(0), foreign])


def test_what_cannot_be_trained_on_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    headless, strange = trajectory(0), trajectory(1)
    del headless.segments[0]
    strange.segments[1].ids = [5, 6, 7]
    for wrong, message in ((headless, "does not begin with"), (strange, "another tokenizer")):
        with pytest.raises(RecordError, match=message):
            train_on([wrong], tiny_settings(tiny_model), tmp_path / "sft", lambda line: None)
    assert not (tmp_path / "sft").exists()


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path) -> Path:
    """A recipe for the tiny model, with trajectories beside it."""
    made = [trajectory(i) for i in range(6)]
    made[5].segments[1].errs = [(0, len(TURNS[0]))]
    save_trajectories(tmp_path / "trajectories.jsonl", made)
    path = tmp_path / "sft.toml"
    settings = {"model": f"hf:{tiny_model}", "dtype": "float32", "rank": 4, "threads": 1}
    settings |= {"batch_size": 2, "epochs": 2, "max_length": 256}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    places = [f'trajectories = "{tmp_path}"', f'out = "{tmp_path / "out"}"', "[sft]"]
    path.write_text("\n".join([*places, *lines]))
    return path


def test_a_preview_shows_rows_and_trains_nothing(recipe: Path) -> None:
    out = io.StringIO()
    report = preview_from_recipe(recipe, [], Console(file=out, soft_wrap=True, markup=False))
    shown = out.getvalue()
    assert f"{{{{{TURNS[0]}}}}}[[<observation>Rome is in Italy." in shown
    assert f"6 rows, {report.tokens} tokens, {report.trained} trained" in shown
    assert (report.rows, report.updates) == (6, 6)
    assert preview_from_recipe(recipe, [], None).to_json() == report.to_json()
    assert not (recipe.parent / "out").exists()


def test_a_plan_tries_two_parts_and_writes_nothing(recipe: Path) -> None:
    for layout in ("bucket", "pack"):
        plan = plan_from_recipe(recipe, [f"sft.layout={layout}"])
        assert plan.tokens == 2 * plan.report.tokens
        assert plan.seconds > 0 and plan.tokens_per_second > 0
        assert 0.01 < plan.memory_gb < 24
        lines = list(plan.lines())
        assert f"layout {layout}" in lines[2]
        assert lines[-1].endswith("nothing was written")
        assert plan.to_json()["report"]["layout"] == layout
    assert not (recipe.parent / "out").exists()


def test_a_recipe_trains_and_packs_if_asked(recipe: Path) -> None:
    said: list[str] = []
    adapter = sft_from_recipe(recipe, ["sft.layout=pack", "sft.pack_tokens=300"], said.append)
    lines = (adapter.parent / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == preview_from_recipe(recipe, ["sft.layout=pack"], None).updates
    assert "loading hf:" in said[0] and said[1].endswith("parameters (rank 4)")


def test_a_trajectory_that_does_not_fit_is_named_or_left_out(
    tiny_model: Path, tmp_path: Path
) -> None:
    codec = Codec.from_folder(tiny_model)
    made = [trajectory(i) for i in range(4)]
    for each in made[:2]:
        each.segments[1].text = "<think>" + "too long " * 90 + "</think>"
    settings = tiny_settings(tiny_model, max_length=256)
    with pytest.raises(
        TrainingError, match=r"^Task 't0': no trainable token within max_length "
    ) as e:
        choose(made, settings, codec)
    assert str(e.value).endswith(
        "1 more are as long. sft.skip_too_long = true leaves such tasks out."
    )
    settings = replace(settings, skip_too_long=True)
    chosen = choose(made, settings, codec)
    assert [each.task_id for each in chosen.trajectories] == ["t2", "t3"]
    assert list(chosen.notes(settings)) == [
        "2 left out: nothing to train within sft.max_length 256"
    ]
    with pytest.raises(TrainingError, match="Task 't0': "):
        choose(made[:2], settings, codec)
    with pytest.raises(RecordError, match="no trajectory"):
        choose([], settings, codec)


def test_a_row_with_nothing_to_train_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    mute = trajectory(7)
    for segment in mute.segments:
        segment.errs = [(0, len(segment.text))] if segment.author is Author.MODEL else []
    with pytest.raises(TrainingError, match=r"^Task 't7': its trajectory has no trainable token"):
        train_on([mute], tiny_settings(tiny_model), tmp_path / "sft", lambda line: None)
    assert not (tmp_path / "sft").exists()


TMPFS = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-ec")
FULL_DISK = """
mount -t tmpfs -o size=16m tmpfs "$1"
head -c $((16777216 - $4)) /dev/zero > "$1/ballast"
$2 -m coa sft "$3" out="$1/run" && exit 9
tar -C "$1/run" -cf "$5/full.tar" .
rm "$1/ballast"
$2 -m coa sft "$3" out="$1/run"
tar -C "$1/run" -cf "$5/done.tar" .
"""


def unpacked(archive: Path) -> Path:
    target = archive.with_suffix("")
    target.mkdir()
    with tarfile.open(archive) as held:
        held.extractall(target, filter="data")
    return target


def run_coa(recipe: Path, *more: str, **how: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "coa", "sft", str(recipe), *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, **how)


def whole_run(recipe: Path) -> Path:
    sft_from_recipe(recipe, EVERY, lambda line: None)
    return recipe.parent / "out"


EVERY = ("sft.checkpoint_every=1", "sft.deterministic=true")


def bytes_of(run: Path) -> dict[str, bytes]:
    files = [run / "metrics.jsonl", *sorted((run / "adapter").iterdir())]
    return {path.name: path.read_bytes() for path in files}


def check_checkpoints(run: Path, expected: Path) -> None:
    """Each has all its files, and only whole ones are there."""
    names = {path.name for path in (expected / "checkpoints").glob("*/*")}
    held = list((run / "checkpoints").iterdir())
    assert held, "no checkpoint was written before the disk was full"
    for each in held:
        assert not each.name.startswith(".")
        assert {path.name for path in each.iterdir()} == names
        assert torch.load(each / "optimizer.pt", weights_only=True)["optimizer"]["state"]


@pytest.mark.skipif(
    subprocess.run(
        [*TMPFS, "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False
    ).returncode
    != 0,
    reason="no small file system can be mounted here",
)
def test_a_disk_that_is_full_costs_one_checkpoint_and_nothing_else(
    recipe: Path, tmp_path: Path
) -> None:
    expected = whole_run(recipe)
    recipe.write_text(recipe.read_text() + "\ncheckpoint_every = 1\ndeterministic = true\n")
    one = max(
        sum(path.stat().st_size for path in each.rglob("*") if path.is_file())
        for each in (expected / "checkpoints").iterdir()
    )
    (tmp_path / "small").mkdir()
    room = str(int(one * 2.6))
    words = [str(tmp_path / "small"), sys.executable, str(recipe), room, str(tmp_path)]
    done = subprocess.run(
        [*TMPFS, FULL_DISK, "sh", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("coa: ")]
    assert re.search(r"update-000000\d: the checkpoint could not be written \(.*\); ", line), line
    assert line.endswith("is the last whole one. Make room and give the same command again.")
    assert "Traceback" not in done.stderr
    check_checkpoints(unpacked(tmp_path / "full.tar"), expected)
    assert bytes_of(unpacked(tmp_path / "done.tar")) == bytes_of(expected)


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_one_line_and_the_run_continues(
    recipe: Path, tmp_path: Path
) -> None:
    expected = whole_run(recipe)
    newest = max((expected / "checkpoints").iterdir())
    most = (newest / "optimizer.pt").stat().st_size - 1000

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    out = f"out={tmp_path / 'limited'}"
    done = run_coa(recipe, out, *EVERY, preexec_fn=limit)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("coa: ")]
    assert "update-0000001: the checkpoint could not be written (" in line
    assert "there is no other. Make room and give the same command again." in line
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "limited" / "checkpoints").iterdir()) == []
    assert run_coa(recipe, out, *EVERY).returncode == 0
    assert bytes_of(tmp_path / "limited") == bytes_of(expected)
