"""The stages `coa record` and `coa distill`: files, processes, dry runs, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coa.cli import app
from coa.distillation.dataset import (
    Distilling,
    DistillSettings,
    rehearse_distillation,
    run_distillation,
)
from coa.distillation.filters import FilterSettings
from coa.environments import make_tasks
from coa.errors import CoaError, ConfigError, RecordError, UsageError
from coa.io.collect import spread_out
from coa.io.runs import dumps
from coa.recording import read_options
from coa.recording.episode import AgentSpec, Episode, Message, ToolUse, load_episodes
from coa.recording.record import Recorded, Recording, rehearse_recording, run_recording
from coa.tasks import Task, TaskSet
from coa.tools import Toolbox
from coa.trajectory import load_trajectories

ERRING = {"error_rate": 0.4}


def of(tasks: Path, teacher: str = "experts", **how: Any) -> Recording:
    return Recording(tasks=tasks, teacher=teacher, **how)


def mixed(n: int = 12) -> list[Task]:
    return [
        task for name in ("atlas-mhqa", "atlas-web") for task in make_tasks(name, "train", n, 3)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of two sets, and what the experts recorded of them."""
    path = tmp_path_factory.mktemp("recorded")
    TaskSet(tuple(mixed())).save(path / "tasks.jsonl")
    run_recording(of(path / "tasks.jsonl", options=ERRING, workers=1), path / "e.jsonl")
    return path


def files_of(directory: Path) -> dict[str, bytes]:
    apart = ("timings.jsonl", ".lock")
    return {f.name: f.read_bytes() for f in directory.iterdir() if not f.name.endswith(apart)}


def distil(folder: Path, out: Path, **options: object) -> dict[str, bytes]:
    run_distillation(Distilling(folder / "e.jsonl", folder / "tasks.jsonl", **options), out)  # type: ignore[arg-type]
    return files_of(out)


# -- recording -------------------------------------------------------------------------------


def test_one_process_or_two_record_and_distil_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    run_recording(of(folder / "tasks.jsonl", options=ERRING, workers=2), tmp_path / "e.jsonl")
    assert (tmp_path / "e.jsonl").read_bytes() == (folder / "e.jsonl").read_bytes()
    assert distil(folder, tmp_path / "1", workers=1) == distil(folder, tmp_path / "2", workers=2)


def test_timings_stand_apart_one_for_each_task(folder: Path) -> None:
    lines = (folder / "e.jsonl.timings.jsonl").read_text().splitlines()
    assert len(lines) == 24 and all(json.loads(line)["total"] > 0 for line in lines)
    assert not any(episode.seconds for episode in load_episodes(folder / "e.jsonl"))


def test_a_recording_says_how_experts_and_critics_did(folder: Path) -> None:
    done = run_recording(of(folder / "tasks.jsonl", options=ERRING), folder / "e.jsonl")
    assert isinstance(done, Recorded) and done.episodes == 24
    answered = sum(e.answer is not None for e in load_episodes(folder / "e.jsonl"))
    first, mistakes, critics = done.lines()
    assert f"24 episodes in {folder}/e.jsonl, {answered} with an answer" == first
    assert "careless queries" in mistakes and critics.startswith("critics: alarms ")


def test_a_file_is_not_recorded_by_two_at_once(folder: Path, tmp_path: Path) -> None:
    from coa.io.files import lock

    out = tmp_path / "e.jsonl"
    held = lock(tmp_path / ".e.jsonl.lock", lambda holder: None)
    with pytest.raises(UsageError, match=r"e\.jsonl: in use by another process \(pid \d+\)"):
        run_recording(of(folder / "tasks.jsonl"), out)
    held.close()
    assert run_recording(of(folder / "tasks.jsonl"), out).episodes == 24


@pytest.mark.parametrize("name", ["q.csv", "q.jsonl"])
def test_episodes_are_not_recorded_into_the_task_file(tmp_path: Path, name: str) -> None:
    text = "question,answer\nWhere is Lima?,Peru" if name == "q.csv" else '{"question": "Where?"}'
    tasks, link = tmp_path / name, tmp_path / "link"
    tasks.write_text(text)
    link.symlink_to(tasks)
    for record in (run_recording, rehearse_recording):
        for out in (tasks, link, tmp_path / "nowhere" / ".." / name):
            with pytest.raises(UsageError, match=r"holds the tasks\. Name another file for the ep"):
                record(of(tasks), out)
    assert tasks.read_text() == text and set(tmp_path.iterdir()) == {tasks, link}


def test_a_file_of_somebody_else_gets_no_episodes(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "notes.csv"
    mine.write_text("a,b\n1,2")
    for record in (run_recording, rehearse_recording):
        with pytest.raises(
            UsageError, match=r"notes\.csv: is not a file of JSON lines; name anoth"
        ):
            record(of(folder / "tasks.jsonl"), mine)
    assert mine.read_text() == "a,b\n1,2" and list(tmp_path.iterdir()) == [mine]


def test_episodes_are_not_recorded_into_a_directory(folder: Path, tmp_path: Path) -> None:
    for record in (run_recording, rehearse_recording):
        with pytest.raises(UsageError, match="is a directory, expected a file"):
            record(of(folder / "tasks.jsonl"), tmp_path)
    assert not list(tmp_path.iterdir()) and not list(tmp_path.parent.glob(f"*{tmp_path.name}.*"))


# -- distilling ------------------------------------------------------------------------------


def test_each_task_gets_the_grammar_of_its_set(folder: Path, tmp_path: Path) -> None:
    distil(folder, tmp_path / "d")
    kept = load_trajectories(tmp_path / "d")
    assert {t.grammar for t in kept if t.meta.get("set") == "atlas-web"} == {"web"}
    assert {t.grammar for t in kept if t.meta.get("set") != "atlas-web"} == {"mhqa"}


def test_a_dataset_belongs_to_one_recipe_and_one_input(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "d"
    whole = distil(folder, out)
    assert distil(folder, out) == whole
    strict = DistillSettings(filter=FilterSettings(min_tool_calls=2))
    with pytest.raises(
        ConfigError, match=r"was started with filter\.min_tool_calls 1, and it is 2"
    ):
        distil(folder, out, recipe=strict)
    with pytest.raises(ConfigError, match="was started with input tasks"):
        run_distillation(Distilling(folder / "e.jsonl"), out)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_dataset_is_as_private_as_its_episodes(folder: Path, tmp_path: Path, mode: int) -> None:
    episodes = tmp_path / "e.jsonl"
    episodes.write_bytes((folder / "e.jsonl").read_bytes())
    episodes.chmod(mode)
    run_distillation(Distilling(episodes, folder / "tasks.jsonl", workers=1), tmp_path / "d")
    (tmp_path / "new").touch()
    expected = mode if mode == 0o600 else (tmp_path / "new").stat().st_mode & 0o777
    for name in ("converted.jsonl", "trajectories.jsonl", "rejected.jsonl", "README.md"):
        assert (tmp_path / "d" / name).stat().st_mode & 0o777 == expected, name


def test_the_card_and_the_funnel_tell_what_was_dropped(folder: Path, tmp_path: Path) -> None:
    TaskSet(tuple(mixed()[:3])).save(tmp_path / "heldout.jsonl")
    out = tmp_path / "d"
    distil(folder, out, against=[tmp_path / "heldout.jsonl"])
    funnel = json.loads((out / "funnel.json").read_text())
    stages = {stage["stage"]: stage for stage in funnel["stages"]}
    assert stages["contamination"]["dropped"] >= 2
    assert funnel["right"] == funnel["right_converted"] > 15
    card = (out / "README.md").read_text()
    assert (
        "coa distill --episodes e.jsonl --out DIR --tasks tasks.jsonl --against heldout.jsonl"
        in card
    )
    assert "heldout.jsonl" in card and str(tmp_path) not in card


def test_evaluation_files_of_the_same_name_are_all_kept_out(folder: Path, tmp_path: Path) -> None:
    paths = [tmp_path / name / "h.jsonl" for name in "ab"]
    for path, task in zip(paths, (mixed()[0], mixed()[1]), strict=True):
        TaskSet((task,)).save(path)
    distil(folder, tmp_path / "d", against=paths)
    ids = {trajectory.task_id for trajectory in load_trajectories(tmp_path / "d")}
    assert not ids & {mixed()[0].id, mixed()[1].id}


Spoil = Callable[[list[dict[str, object]]], None]


def second_question(records: list[dict[str, object]]) -> None:
    events = records[0]["events"]
    assert isinstance(events, list)
    events.append({"kind": "say", "agent": "user", "to": "reader", "text": "What else?"})


def no_call(records: list[dict[str, object]]) -> None:
    events = records[0]["events"]
    assert isinstance(events, list)
    events.append({"kind": "use", "agent": "searcher", "result": "page"})


def no_field(records: list[dict[str, object]]) -> None:
    del records[0]["question"]


def twice(records: list[dict[str, object]]) -> None:
    records.append(records[0])


@pytest.mark.parametrize(
    ("spoil", "key", "reason"),
    [
        (second_question, "", "the agents disagree on the question"),
        (no_call, "line 1", "not an episode"),
        (no_field, "line 1", "not an episode"),
        (twice, "", "near-duplicate"),
    ],
)
def test_one_bad_record_has_its_reason_and_the_rest_goes_on(
    spoil: Spoil, key: str, reason: str, folder: Path, tmp_path: Path
) -> None:
    records = [json.loads(line) for line in (folder / "e.jsonl").read_text().splitlines()]
    records = [record for record in records if record["answer"]][:6]
    first = records[0]["task_id"]
    spoil(records)
    (tmp_path / "e.jsonl").write_text("".join(dumps(record) + "\n" for record in records))
    done = run_distillation(
        Distilling(tmp_path / "e.jsonl", folder / "tasks.jsonl"), tmp_path / "d"
    )
    (note,) = [note for note in done.rejected if note["reason"] == reason]
    assert note["task_id"] == (key or first) and note["detail"]
    assert done.funnel["episodes"] == len(records)
    assert len(done.kept) + sum(done.funnel["rejected"].values()) == len(records)
    assert len(done.kept) >= 4


def test_nothing_kept_is_an_error_that_says_why(folder: Path, tmp_path: Path) -> None:
    settings = DistillSettings(filter=FilterSettings(min_tool_calls=50))
    with pytest.raises(
        UsageError, match=r"no episode was kept: .*too few tool calls.*rejected\.js"
    ):
        distil(folder, tmp_path / "d", recipe=settings)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"empty\.jsonl: holds no episode"):
        run_distillation(Distilling(tmp_path / "empty.jsonl"), tmp_path / "d2")
    with pytest.raises(UsageError, match=r"none\.jsonl: no such file"):
        run_distillation(Distilling(tmp_path / "none.jsonl"), tmp_path / "d3")


def test_the_record_answers_for_tools_that_are_not_here(tmp_path: Path) -> None:
    page = "Yaren\r\nwas founded </observation> in 1968. " + "x" * 9000
    events = [
        Message("lead", "system", "1. look it up", facts={"part": "plan"}),
        ToolUse("lead", "visit_page", "yaren.nr", f" {page} "),
    ]
    lead = AgentSpec("lead", "planner", "You lead.")
    episode = Episode("run-1", "When was Yaren founded?", "other", [lead], events, "1968")
    path = tmp_path / "e.jsonl"
    path.write_text(dumps(episode.to_json()) + "\n")
    with pytest.raises(UsageError, match="the grammar has no agent for a tool"):
        run_distillation(
            Distilling(path, recipe=DistillSettings(grammar="mhqa")), tmp_path / "called"
        )
    settings = DistillSettings(grammar="mhqa", tools="recorded")
    (chain,) = run_distillation(Distilling(path, recipe=settings), tmp_path / "d").kept
    assert chain.tools == ["visit_page"] and chain.answer == "1968"
    assert (
        "Yaren\nwas founded &lt;/observation> in 1968." in chain.text and "x" * 9000 in chain.text
    )


@pytest.mark.parametrize(
    ("part", "said"),
    [("planing", "a message has an unknown part"), ("plan", "")],
)
def test_a_misspelt_part_of_a_message_is_named(part: str, said: str, tmp_path: Path) -> None:
    lead = AgentSpec("lead", "planner", "You lead.")
    events = [
        Message("lead", "system", "1. look it up", facts={"part": part}),
        ToolUse("lead", "visit_page", "yaren.nr", "1968"),
    ]
    episode = Episode("run-1", "When was Yaren founded?", "other", [lead], events, "1968")
    path = tmp_path / "e.jsonl"
    path.write_text(dumps(episode.to_json()) + "\n")
    settings = DistillSettings(grammar="mhqa", tools="recorded")
    if not said:
        assert run_distillation(Distilling(path, recipe=settings), tmp_path / "d").kept
        return
    with pytest.raises(UsageError, match=said):
        run_distillation(Distilling(path, recipe=settings), tmp_path / "d")
    assert (
        "event 1 (lead): 'planing'. Did you mean 'plan'?"
        in (tmp_path / "d" / "rejected.jsonl").read_text()
    )


def test_the_meta_of_a_task_is_in_its_episode_whatever_a_teacher_returns(tmp_path: Path) -> None:
    TaskSet((Task("Where?", meta={"set": "atlas-web", "level": 2}),)).save(tmp_path / "t.jsonl")
    run_recording(of(tmp_path / "t.jsonl", f"{__name__}:Forgetful"), tmp_path / "e.jsonl")
    (episode,) = load_episodes(tmp_path / "e.jsonl")
    assert episode.meta == {"set": "atlas-web", "level": 2, "mood": "good"}


class Forgetful:
    async def record(self, task: Task, toolbox: object, seed: int = 0) -> Episode:
        agents = [AgentSpec("lead", "planner", "You lead.")]
        return Episode(task.id, task.question, "mine", agents, meta={"mood": "good"})


# -- dry runs --------------------------------------------------------------------------------


def test_a_dry_run_writes_nothing_and_says_what_is_left(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "e.jsonl").read_text().splitlines(keepends=True)
    part = tmp_path / "part.jsonl"
    part.write_text("".join(whole[:10]))
    recording = rehearse_recording(of(folder / "tasks.jsonl", options=ERRING), part)
    said = recording.to_json()
    assert (said["items"], said["done"], said["tried"]) == (24, 10, 14)
    assert "24 tasks, 10 of them done, 14 to do" in recording.lines()
    distilling = rehearse_distillation(
        Distilling(folder / "e.jsonl", folder / "tasks.jsonl"), tmp_path / "d"
    )
    assert distilling.tried == 24 and 15 < distilling.good <= 24
    assert [path.name for path in tmp_path.iterdir()] == ["part.jsonl"]


def test_a_dry_run_of_what_was_killed_says_what_is_left(folder: Path, tmp_path: Path) -> None:
    tasks, whole = folder / "tasks.jsonl", (folder / "e.jsonl").read_bytes()
    torn, out = tmp_path / "e.jsonl", tmp_path / "d"
    torn.write_bytes(whole[:-9])
    assert rehearse_recording(of(tasks, options=ERRING), torn).done == 23
    distil(folder, out)
    journal = out / "converted.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])
    rehearsed = rehearse_distillation(Distilling(folder / "e.jsonl", tasks), out)
    assert (rehearsed.items, rehearsed.done, rehearsed.tried) == (24, 23, 1)
    with pytest.raises(UsageError, match=r"held\.jsonl: no such file"):
        rehearse_distillation(
            Distilling(folder / "e.jsonl", tasks, against=[tmp_path / "held.jsonl"]), out
        )


@pytest.mark.parametrize("count", [0, 1, 2, 23, 24, 25, 47, 1000])
def test_a_rehearsal_tries_items_from_the_first_to_the_last(count: int) -> None:
    tried = spread_out(range(count), most=24)
    assert len(set(tried)) == len(tried) == min(count, 24) and tried == sorted(tried)
    assert tried[:1] == list(range(count))[:1] and tried[-1:] == list(range(count))[-1:]


def test_a_grammar_of_ones_own_that_has_changed_is_another_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    preset = resources.files("coa.grammar").joinpath("presets/mhqa.toml").read_text("utf-8")
    Path("own.toml").write_text(preset.replace('name = "mhqa"', 'name = "own"'))
    settings = DistillSettings(grammar="own.toml")
    distil(folder, tmp_path / "d", recipe=settings)
    distil(folder, tmp_path / "d", recipe=settings)
    Path("own.toml").write_text(preset.replace("by searching", "by asking"))
    with pytest.raises(ConfigError, match=r"started with input grammar '.*', and it is '.*' here"):
        distil(folder, tmp_path / "d", recipe=settings)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "'atlas-mhqa' has no setting 'pasages'. Did you mean 'passages'"),
        (3, "'atlas-mhqa' has no setting 'pasages'. Did you mean 'passages'"),
        (24, "none of atlas-mhqa, atlas-web has a setting 'pasages'"),
    ],
)
def test_a_setting_that_no_environment_has_is_refused(
    count: int, said: str, folder: Path, tmp_path: Path
) -> None:
    lines = (folder / "e.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "e.jsonl").write_text("".join(lines[:count]))
    with pytest.raises(ConfigError, match=said):
        run_distillation(Distilling(tmp_path / "e.jsonl", settings={"pasages": 3}), tmp_path / "d")
    assert not (tmp_path / "d").exists()


# -- what others wrote -----------------------------------------------------------------------


def test_what_another_version_has_converted_is_converted_again(
    folder: Path, tmp_path: Path
) -> None:
    whole = distil(folder, tmp_path / "d")
    journal = tmp_path / "d" / "converted.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    del lines[0]["key"]
    lines[1]["verdict"] = 1
    lines[2]["trajectory"]["schema"] = 0
    journal.write_text("".join(dumps(line) + "\n" for line in lines))
    assert distil(folder, tmp_path / "d") == whole


def test_a_file_of_something_else_is_not_continued_as_episodes(
    folder: Path, tmp_path: Path
) -> None:
    distil(folder, tmp_path / "d")
    chains = tmp_path / "d" / "trajectories.jsonl"
    for other in (chains, folder / "tasks.jsonl"):
        held = tmp_path / "other.jsonl"
        held.write_bytes(other.read_bytes())
        for record in (run_recording, rehearse_recording):
            with pytest.raises(RecordError, match=r"other\.jsonl:1: this is no episode"):
                record(of(folder / "tasks.jsonl"), held)
        assert held.read_bytes() == other.read_bytes()
    with pytest.raises(UsageError, match=r"holds no episode\. Line 1: the episode has no field"):
        run_distillation(Distilling(chains), tmp_path / "d2")
    assert not (tmp_path / "d2").exists()


class Stranger:
    """A teacher that does not do what is asked for."""

    returned: object = None

    async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> object:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ({"answer": "x"}, "a dict"),
        (Episode("t2", "q?", "s", []), "the episode of task 't2'"),
    ],
)
def test_what_a_teacher_returns_is_checked(
    returned: object, found: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stranger, "returned", returned)
    out = tmp_path / "e.jsonl"
    with pytest.raises(UsageError, match=rf"on task \w+, returned {found}, expected its Episode"):
        run_recording(of(folder / "tasks.jsonl", f"{__name__}:Stranger"), out)
    assert out.read_bytes() == b""


def test_halves_of_characters_are_recorded_and_come_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task, *_) = mixed()
    odd = Episode(
        task.id, task.question, "s", [], [Message("user", "system", "half \ud83d, \u00e9")]
    )
    monkeypatch.setattr(Stranger, "returned", odd)
    TaskSet((task,)).save(tmp_path / "tasks.jsonl")
    run_recording(of(tmp_path / "tasks.jsonl", f"{__name__}:Stranger"), tmp_path / "e.jsonl")
    assert load_episodes(tmp_path / "e.jsonl") == [odd]


# -- the command line ------------------------------------------------------------------------


def coa(*words: str | Path) -> str:
    done = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_whole_way_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    episodes, dataset, tasks = tmp_path / "e.jsonl", tmp_path / "d", folder / "tasks.jsonl"
    recording = ("record", "--tasks", tasks, "--out", episodes, "error_rate=0.4")
    assert "nothing was written" in coa(*recording, "--dry-run")
    assert json.loads(coa(*recording, "--json").splitlines()[-1])["episodes"] == 24
    assert episodes.read_bytes() == (folder / "e.jsonl").read_bytes()
    distilling = ("distill", "--episodes", episodes, "--tasks", tasks, "--out", dataset)
    table = coa(*distilling, "filter.copies_of_corrected=2")
    assert "episodes are right, 100.0% of them converted" in table
    assert "put right" in table and " of them copies" in table
    page = tmp_path / "page.html"
    coa("view", dataset, "--html", page)
    assert "<html" in page.read_text()[:200]
    printed = coa("export", dataset, "--to", "alpaca,trl", "--grammar", "web")
    assert printed.count(" rows in ") == 2
    rows = tmp_path / "back.jsonl"
    coa("import", "afm-sft", dataset / "exports" / "alpaca-web" / "alpaca.json", "--out", rows)
    assert {t.grammar for t in load_trajectories(rows)} == {"web"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["record", "--tasks", "T", "--out", "o", "eror_rate=1"],
            "eror_rate is not a setting. Did",
        ),
        (["record", "--tasks", "T", "--out", "o", "error_rate=9"], "a rate of the experts is 9"),
        (
            ["record", "--tasks", "T", "--out", "o", "--teacher", "llm"],
            "llm needs a model: model=op",
        ),
        (
            ["record", "--tasks", "T", "--out", "o", "--teacher", "gpt"],
            "expected experts, llm or mod",
        ),
        (
            ["record", "--tasks", "T", "--out", "o", "--teacher", "json:loads", "x=1"],
            "is no class, so it takes no settings; found 'x'",
        ),
        (["distill", "--episodes", "E", "--out", "o", "--prompt", "long"], "expected full or comp"),
        (
            ["distill", "--episodes", "E", "--out", "o", "filter.seeds=1"],
            "filter.seeds is not a set",
        ),
        (["distill", "--episodes", "E", "--out", "o", "--grammar", "webb"], "Did you mean 'web'"),
        (["import", "afm", "E", "--out", "o"], "expected one file or folder"),
        (["export", "D", "--to", "parquet"], "'parquet' is not an export format"),
        (["study", "costs"], "'costs' is not a study; expected cost"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    words: Sequence[str], said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distil(folder, tmp_path / "D")
    monkeypatch.chdir(tmp_path)
    places = {"T": str(folder / "tasks.jsonl"), "E": str(folder / "e.jsonl"), "D": "D"}
    done = CliRunner().invoke(app, [places.get(word, word) for word in words])
    assert isinstance(done.exception, CoaError), done.output
    assert said in str(done.exception) and "\n" not in str(done.exception)
    assert not (tmp_path / "o").exists()


def test_settings_of_a_teacher_are_checked_and_only_the_given_ones_are_named() -> None:
    assert read_options("experts", ["error_rate=0.3"]) == {"error_rate": 0.3}
    assert read_options("experts", []) == {}
    assert read_options("llm", ["temperature=0.5"]) == {"temperature": 0.5}
    with pytest.raises(ConfigError, match="error_rate"):
        read_options("experts", ["error_rate=often"])
    assert read_options("my:Team", ["rate=0.5", "name=mine"]) == {"rate": 0.5, "name": "mine"}
