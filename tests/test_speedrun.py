"""The whole way on a tiny random model: every stage runs, is skipped when done, and continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from coa.engines import load_engine
from coa.environment import load_environment
from coa.environments import make_tasks
from coa.errors import ConfigError, ModelError
from coa.grammar.load import GrammarBook
from coa.io.runs import Json
from coa.lab.speedrun import SEED, answer_questions, print_speedrun, run_speedrun
from coa.lab.speedrun_recipe import TaskPart
from coa.loop import Budget
from coa.train.sft import known_by
from coa.trajectory import load_trajectories
from coa.view.terminal import console
from tiny_model import make_tiny_model

pytest.importorskip("torch")

SMALL = [
    *("deterministic=true", "sft.rank=4", "sft.batch_size=4", "sft.max_length=480"),
    *("sft.checkpoint_every=1", "rl.updates=2", "rl.tasks_per_update=2", "rl.group_size=2"),
    "rl.minibatches=2",
    *("rl.refills=0", "rl.loss.entropy=0.01", "rl.lr=1e-3", "check.keep=last"),
    *("sft.threads=1", "rl.threads=1", "rollout.turns=2", "rollout.turn_tokens=6"),
    *("rollout.context=480", "rollout.concurrency=4"),
    *("eval.turns=2", "eval.turn_tokens=6", "eval.context=480", "eval.concurrency=4"),
]
"""Entropy moves the weights where a random model's rollouts all earn nothing."""
TASKS = """
tasks = [{set = "atlas-mhqa", families = ["country_capital"], n = 6, worlds = [0, 1]},
         {set = "atlas-web", families = ["capital_domain"], n = 2}]
rl_tasks = [{set = "atlas-mhqa", families = ["country_capital"], n = 3, seed = 31},
            {set = "atlas-web", families = ["capital_domain"], n = 1, seed = 31}]
check_tasks = [{families = ["country_capital"], n = 2, worlds = [6]}]

[[measure]]
name = "held-out entities"
families = ["country_capital"]
n = 4
models = ["team", "base", "sft", "rl"]

[[measure]]
name = "web"
set = "atlas-web"
families = ["capital_domain"]
n = 2

[[measure]]
name = "wrong passages"
families = ["country_capital"]
n = 2
observations = "wrong"
"""


class Finished(NamedTuple):
    root: Path
    recipe: Path
    overrides: list[str]
    result: Json

    def again(self, notes: list[str]) -> Json:
        return run_speedrun(self.root, self.recipe, self.overrides, notes.append)


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A speedrun over two sets, from the first task to the report."""
    folder = tmp_path_factory.mktemp("speedrun")
    recipe = folder / "recipe.toml"
    recipe.write_text(TASKS, encoding="utf-8")
    overrides = [f"sft.model=hf:{tiny_model}", *SMALL]
    root = folder / "run"
    return Finished(
        root, recipe, overrides, run_speedrun(root, recipe, overrides, lambda note: None)
    )


def contents(root: Path) -> dict[str, bytes]:
    """Files by name, without what depends on the clock: seconds, and the page that shows them."""
    timed = ("timings.jsonl", "latency.json", ".lock", "report.html")
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.endswith(timed)
    }


def test_every_stage_leaves_what_the_next_one_reads(finished: Finished) -> None:
    rows = [(row["who"], row["on"], row["n"]) for row in finished.result["rows"]]
    assert rows == [
        *((who, "held-out entities", 4) for who in ("team", "base", "sft", "rl")),
        ("rl", "web", 2),
        ("rl", "wrong passages", 2),
    ]
    gains = [(each["who"], each["against"]) for each in finished.result["gains"]]
    assert gains == [("sft", "base"), ("rl", "sft")]
    assert json.loads((finished.root / "result.json").read_text()) == finished.result
    assert finished.result["model"].endswith("+" + str(finished.root / "rl" / "adapter"))
    assert "<html" in Path(finished.result["report"]).read_text(encoding="utf-8")


def test_one_adapter_learns_the_grammar_of_every_set_and_each_task_gets_its_own(
    finished: Finished,
) -> None:
    chains = load_trajectories(finished.root / "distilled")
    assert {chain.grammar for chain in chains} == {"mhqa", "web"}
    for stage in ("sft", "rl"):
        manifest = json.loads((finished.root / stage / "adapter" / "manifest.json").read_text())
        assert manifest["grammar"] == ["mhqa", "web"]
        assert GrammarBook.from_json(manifest["grammars"]).names == ["mhqa", "web"]
    assert manifest["environments"] == ["atlas-mhqa", "atlas-web"]
    for name, grammar in (("held-out-entities", "mhqa"), ("web", "web")):
        measured = load_trajectories(finished.root / f"eval-rl-{name}")
        assert {chain.grammar for chain in measured} == {grammar}


async def test_rl_in_one_grammar_leaves_an_adapter_that_is_asked_in_all_that_it_knows(
    finished: Finished, tiny_model: Path
) -> None:
    start = f"hf:{tiny_model}+{finished.root / 'sft' / 'adapter'}"
    async with load_environment("atlas-web").open() as opened:
        book = {"grammars": opened.grammars.to_json()}
        both = {"grammar": ["mhqa", "web"], "environments": ["atlas-mhqa", "atlas-web"]}
        named = (["web"], ["atlas-web"], opened.grammars)
        known = known_by(start, *named)
        stored = {grammar["name"] for grammar in known.pop("grammars").values()}
        assert known == both and stored == {"mhqa", "web"}
        one = {"grammar": "web", "environments": ["atlas-web"]}
        assert known_by(f"hf:{tiny_model}", *named) == one | book


def test_rl_goes_on_from_the_fine_tuned_weights_and_changes_them(finished: Finished) -> None:
    manifest = json.loads((finished.root / "rl" / "manifest.json").read_text())
    sft = finished.root / "sft" / "adapter"
    assert manifest["recipe"]["rl"]["model"].endswith(f"+{sft}")
    weights = [(finished.root / s / "adapter/adapter_model.safetensors") for s in ("sft", "rl")]
    assert weights[0].read_bytes() != weights[1].read_bytes()


def test_a_second_call_does_nothing_again(finished: Finished) -> None:
    before, notes = contents(finished.root), list[str]()
    assert finished.again(notes) == finished.result
    assert contents(finished.root) == before
    assert sum("is finished already" in note for note in notes) == 2
    assert not any("measure" in note for note in notes if note.startswith("=="))


def test_the_table_has_a_row_for_each_measurement_and_says_what_was_gained(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    print_speedrun(console(), finished.result)
    shown = capsys.readouterr().out
    assert shown.count("team of experts") == 1 and shown.count("untrained") == 2
    assert "fine-tuned, then RL against fine-tuned: +0.0 points" in shown
    assert shown.index("held-out entities") < shown.index("web") < shown.index("wrong passages")
    assert f"report: {finished.result['report']}" in shown
    assert f"ask --model {finished.result['model']}" in shown


COMPARED = """
controls = true
tasks = [{families = ["country_capital"], n = 3}]
rl_tasks = [{families = ["country_capital"], n = 2, seed = 31}]
all_tasks = [{families = ["country_capital"], n = 6}]
check_tasks = []

[[measure]]
families = ["country_capital"]
n = 2
models = ["sft", "rl", "longer", "all"]
"""


def test_rl_is_compared_with_fine_tuning_for_as_long_and_with_all_chains(
    tiny_model: Path, tmp_path: Path
) -> None:
    recipe, root = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(COMPARED, encoding="utf-8")
    overrides = [f"sft.model=hf:{tiny_model}", *SMALL, "rl.updates=1", "deterministic=false"]
    alone = run_speedrun(root, recipe, [*overrides, "controls=false"], lambda note: None)
    assert [row["who"] for row in alone["rows"]] == ["sft", "rl"]
    result = run_speedrun(root, recipe, overrides, lambda note: None)  # added to what is there
    assert [row["who"] for row in result["rows"]] == ["sft", "rl", "longer", "all"]
    pairs = [(gain["who"], gain["against"]) for gain in result["gains"]]
    assert pairs == [("rl", "sft"), ("rl", "longer"), ("rl", "all")]
    assert result["model"].endswith("rl/adapter")
    timings = [json.loads(line) for line in (root / "timings.jsonl").read_text().splitlines()]
    taken = {each["stage"]: each["seconds"] for each in timings if "stage" in each}
    first, settings = (
        json.loads((root / name / "manifest.json").read_text())["recipe"]
        for name in ("sft", "sft-longer")
    )
    longer = taken["improve by RL"] / taken["fine-tune"] * first["epochs"]
    assert settings["epochs"] == round(longer, 2)
    assert settings["model"].endswith("sft/adapter")
    rows = [len(load_trajectories(root / f"distilled{name}")) for name in ("", "-all")]
    assert 0 < rows[0] < rows[1]


def test_controls_need_what_they_compare(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("rl_tasks = []", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"controls is true.* expected tables \[\[tasks\]\]"):
        run_speedrun(tmp_path / "run", recipe, ["controls=true"], lambda note: None)


def test_questions_are_shown_with_their_chain_and_the_right_answer_after_it(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the kinds that the model was trained for: this one writes no programs."""
    names = ("atlas-mhqa", "atlas-web")
    tasks = [make_tasks(name, "heldout_entity", 1, SEED)[0] for name in names]
    brief = Budget(turns=1, turn_tokens=4)
    chains = answer_questions(lambda note: None, finished.result["model"], budget=brief)
    shown = capsys.readouterr().out
    assert [chain.grammar for chain in chains] == ["mhqa", "web"]
    for task in tasks:
        asked, right = shown.index(task.question), shown.index(f"right is  {task.answers[0]}")
        assert asked < shown.index("  =  ", asked) < right


def test_an_adapter_for_another_base_is_one_line(finished: Finished, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match="trained on a base with hash") as caught:
        load_engine(f"hf:{other}+{finished.root / 'rl' / 'adapter'}")
    assert "\n" not in str(caught.value)


class Stopped(Exception):
    """Where a run is interrupted."""


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Finished:
    """A run of a model of its own that was interrupted before its first stage."""

    def stop(*_: Any) -> Path:
        raise Stopped

    monkeypatch.setattr("coa.lab.speedrun._fine_tune", stop)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(TASKS, encoding="utf-8")
    overrides = [f"sft.model=hf:{make_tiny_model(tmp_path / 'model')}", *SMALL]
    started = Finished(tmp_path / "run", recipe, overrides, {})
    with pytest.raises(Stopped):
        started.again([])
    return started


def test_a_run_is_not_continued_with_other_tasks(
    begun: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, make = contents(begun.root), TaskPart.make
    monkeypatch.setattr(
        TaskPart, "make", lambda part: [replace(task, answers=("?",)) for task in make(part)]
    )
    with pytest.raises(
        ConfigError, match=r"started with input tasks-train\.jsonl '\w+', and it is"
    ):
        begun.again([])
    assert contents(begun.root) == before


def test_a_run_is_not_continued_with_other_weights(begun: Finished, tmp_path: Path) -> None:
    before = contents(begun.root)
    make_tiny_model(tmp_path / "model", seed=1)
    with pytest.raises(ConfigError, match=r"started with input base '\w+', and it is '\w+' here"):
        begun.again([])
    assert contents(begun.root) == before


def test_an_interrupted_run_writes_the_task_files_that_are_missing(begun: Finished) -> None:
    whole = contents(begun.root)
    (begun.root / "tasks-web.jsonl").unlink()
    with pytest.raises(Stopped):
        begun.again([])
    assert contents(begun.root) == whole


def test_a_run_from_before_inputs_were_kept_goes_on(begun: Finished) -> None:
    path = begun.root / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"inputs": {}}))
    with pytest.raises(Stopped):
        begun.again([])


# -- minutes ----------------------------------------------------------------------------------


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "coa", "speedrun", "--json", "--out", "run", *words],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def reached(root: Path) -> Iterator[tuple[Path, int]]:
    """Moments to be killed at: a file, and how many lines it has by then."""
    yield root / "sft" / "metrics.jsonl", 1
    yield root / "rl" / "metrics.jsonl", 2
    yield root / "eval-rl-held-out-entities" / "trajectories.jsonl", 1


def kill_at(child: subprocess.Popen[bytes], path: Path, lines: int) -> bool:
    """Kill a process when a file has so many lines; False when it came to its end before."""
    for _ in range(60_000):
        if child.poll() is not None:
            return False
        if path.is_file() and path.read_bytes().count(b"\n") >= lines:
            child.send_signal(signal.SIGKILL)
            child.wait()
            return True
        time.sleep(0.005)
    raise AssertionError(f"{path} does not come")


@pytest.mark.slow
def test_a_second_run_that_is_killed_in_every_stage_writes_the_same_files(
    tiny_model: Path, tmp_path: Path
) -> None:
    results: list[Any] = []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "recipe.toml").write_text(TASKS, encoding="utf-8")
        words = ["--recipe", "recipe.toml", f"sft.model=hf:{tiny_model}", *SMALL]
        if name == "killed":
            kills = [kill_at(start(folder, *words), *at) for at in reached(folder / "run")]
            assert sum(kills) >= 2, kills
        child = start(folder, *words)
        results.append(json.loads(child.communicate(timeout=1800)[0]))
        assert child.returncode == 0
    whole, killed = (contents(tmp_path / name / "run") for name in ("whole", "killed"))
    assert results[0] == results[1] and killed.keys() == whole.keys()
    assert [name for name in whole if killed[name] != whole[name]] == []


@pytest.mark.slow
def test_the_three_sets_of_the_full_recipe_go_the_whole_way(
    tiny_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("reasoning_gym")
    held = tomllib.loads(resources.files("coa").joinpath("recipes/full.toml").read_text("utf-8"))
    few = {"tasks": 6, "rl_tasks": 6, "check_tasks": 2, "measure": 2}
    parts = [(name, i, part) for name in few for i, part in enumerate(held[name])]
    sizes = [f"{name}.{i}.n={few[name]}" for name, i, _ in parts]
    several = [(name, i) for name, i, part in parts if len(part.get("worlds", ())) > 1]
    sizes += [f"{name}.{i}.worlds=[0]" for name, i in several]
    sizes.append("select.samples=0")  # a random model solves no task that could be chosen
    overrides = [f"sft.model=hf:{tiny_model}", *SMALL, *sizes, "sft.skip_too_long=true"]
    result = run_speedrun(tmp_path / "run", None, overrides, lambda note: None, full=True)
    manifest = json.loads((tmp_path / "run" / "rl" / "adapter" / "manifest.json").read_text())
    assert manifest["grammar"] == ["code", "mhqa", "web"]
    assert len(result["rows"]) == 31
    team = {row["on"]: row["accuracy"] for row in result["rows"] if row["who"] == "team"}
    assert len(team) == 7 and min(team.values()) >= 0.5
