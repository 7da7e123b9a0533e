"""Evaluation: intervals by hand, a fixed denominator, resuming after a kill, controls, compare."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pytest

from coa.engines.scripted import ScriptedEngine
from coa.environment import Environment, ToolSettings, load_environment, open_environments
from coa.environments import make_tasks
from coa.environments.atlas.pages import read
from coa.errors import ConfigError, RecordError, UsageError
from coa.evaluation.compare import compare
from coa.evaluation.run import EvalSettings, run_eval, save_summary, summarise
from coa.loop import Budget, Decoding
from coa.rewards import Scored, exact
from coa.rollouts import choose_environments, choose_prompt, default_environments, roll_out_all
from coa.statistics import wilson
from coa.tasks import Task, TaskSet
from coa.tools.base import Tool
from coa.trajectory import StopReason, Trajectory, Usage, load_trajectories
from playing import AGAIN, ANSWER, MHQA, SEARCH, FailingEngine, box
from scripts import write_script

OURS = Environment("ours", tools=[*box("mhqa").values()], grammar=MHQA, groups=("family", "hops"))
CLOSED = "<think>t</think><plan>p</plan><think>u</think><answer>{}</answer>"


# -- the denominator -------------------------------------------------------------------------


async def test_every_task_counts_whatever_became_of_it(tmp_path: Path) -> None:
    scripts: dict[str, list[str]] = {
        "right?": [SEARCH.format("x"), ANSWER],
        "wrong?": [CLOSED.format("Rome")],
        "undecided?": [CLOSED.format("Paris | Rome")],
        "broken?": ["x", "y", "z"],
        "endless?": [SEARCH.format("a"), *(AGAIN.format(n) for n in range(20))],
        "long?": ["<think>" + "x" * 600],
        "silent?": ["", "", ""],
        "failing?": ["fail"],
        "hanging?": ["hang"],
    }
    tasks = [Task(question, ("Paris",), meta={"family": "f"}) for question in scripts]
    async with OURS.open() as opened:
        trajectories = await roll_out_all(
            tasks,
            FailingEngine(scripts),
            opened,
            tmp_path,
            budget=Budget(seconds=1.0, turns=4),
        )
        summary, records = summarise(
            tasks, trajectories, by_exact(tasks, trajectories), groups_of=opened.groups_of
        )
    assert [record["score"] for record in records] == [1.0] + [0.0] * 8
    assert summary["n"] == summary["by_family"]["f"]["n"] == 9
    assert summary["accuracy"] == round(1 / 9, 4)
    assert summary["ci95"] == [round(x, 4) for x in wilson(1, 9)[1:3]]
    assert summary["stop_reasons"] == {
        "answered": 3,
        "engine_failed": 1,
        "malformed": 2,
        "time": 1,
        "tokens": 1,
        "turns": 1,
    }
    assert (summary["truncated"], summary["malformed"]) == (3, 2)
    tokens = sum(t.usage.total_tokens for t in trajectories)
    assert summary["tokens_per_task"] == round(tokens / 9, 1)
    assert summary["tokens_per_solved"] == round(tokens, 1)


def by_exact(tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> list[Scored]:
    by_id = {task.id: task for task in tasks}
    return [Scored(exact(by_id[each.task_id], each)) for each in trajectories]


def attempt(task: Task, sample: int, answer: str | None, tokens: int) -> Trajectory:
    stop = StopReason.ANSWERED if answer else StopReason.TURNS
    usage = Usage(prompt_tokens=tokens, sampled_tokens=tokens, tool_calls=sample)
    return Trajectory(
        task.id, task.question, "mhqa", stop=stop, answer=answer, usage=usage, sample=sample
    )


def hops_of(task: Task) -> dict[str, str]:
    return {"hops": str(task.meta["hops"])}


def test_with_several_samples_a_task_counts_its_mean() -> None:
    one, two, none = (Task(f"{n}?", ("a",), meta={"hops": n}) for n in (1, 2, 3))
    made = [
        attempt(one, 0, "a", 10),
        attempt(one, 1, "a", 20),
        attempt(two, 0, "a", 30),
        attempt(two, 1, None, 40),
    ]
    summary, records = summarise([one, two], made, by_exact([one, two], made), groups_of=hops_of)
    assert (summary["n"], summary["k"], summary["accuracy"]) == (2, 2, 0.75)
    assert summary["tokens_per_task"] == 2 * (10 + 20 + 30 + 40) / 4
    assert summary["tokens_per_solved"] == round(200 / 3, 1)
    assert summary["tool_calls_per_task"] == 0.5
    assert summary["by_hops"]["2"]["accuracy"] == 0.5
    assert [(r["sample"], r["score"]) for r in records] == [(0, 1), (1, 1), (0, 1), (1, 0)]
    with_none, _ = summarise([one, two, none], made, by_exact([one, two], made))
    assert (with_none["n"], with_none["accuracy"]) == (3, 0.5)
    failed = [attempt(two, 0, None, 5)]
    unsolved, _ = summarise([two], failed, by_exact([two], failed))
    assert unsolved["tokens_per_solved"] is None


def test_a_task_without_gold_cannot_be_evaluated() -> None:
    task = Task("q?", id="t-1")
    with pytest.raises(RecordError, match="task t-1: the reward cannot judge it"):
        summarise([task], [attempt(task, 0, "a", 1)], [Scored(None)])


def test_without_gold_answers_there_is_no_f1_and_it_dilutes_none() -> None:
    tested, asked = Task("Write.", gold={"tests": {}}), Task("Where?", ("Lima",))
    made = [attempt(tested, 0, "print()", 1), attempt(asked, 0, "Lima", 1)]
    summary, _ = summarise([tested, asked], made, [Scored(1.0), Scored(1.0)])
    assert summary["f1"] == 1.0
    summary, _ = summarise([tested], made[:1], [Scored(1.0)])
    assert "f1" not in summary


def test_a_rollout_may_write_as_much_as_its_context_holds() -> None:
    assert EvalSettings(turn_tokens=8192, context=32768).budget().tokens == 32768
    assert EvalSettings(tokens=100).budget().tokens == 100
    with pytest.raises(ConfigError, match="tokens: found -1, expected 0 or more"):
        EvalSettings(tokens=-1)


async def test_samples_differ_in_their_key_and_stand_in_order(tmp_path: Path) -> None:
    tasks = [Task(f"{n}?", ("Paris",)) for n in range(4)]
    engine = ScriptedEngine([SEARCH.format("x"), ANSWER])
    async with OURS.open() as opened:
        trajectories = await roll_out_all(
            tasks, engine, opened, tmp_path, k=3, decoding=Decoding(seed=5)
        )
    order = [(task.id, sample) for task in tasks for sample in range(3)]
    assert [(t.task_id, t.sample) for t in trajectories] == order
    assert load_trajectories(tmp_path / "trajectories.jsonl") == trajectories
    assert len({call.sampling.key for call in engine.calls}) == len(engine.calls) == 24
    timings = (tmp_path / "timings.jsonl").read_text().splitlines()
    assert len(timings) == 12 and all("total" in json.loads(line) for line in timings)


async def test_a_rollout_that_was_interrupted_is_done_again_and_a_failed_one_is_not(
    tmp_path: Path,
) -> None:
    tasks = [Task("a?", ("Paris",)), Task("b?", ("Paris",))]
    path = tmp_path / "trajectories.jsonl"
    cut = attempt(tasks[0], 0, None, 1)
    cut.stop = StopReason.CANCELLED
    failed = attempt(tasks[1], 0, None, 1)
    failed.stop = StopReason.ENGINE_FAILED
    path.write_text("".join(json.dumps(t.to_json()) + "\n" for t in (cut, failed)))
    engine = ScriptedEngine([SEARCH.format("x"), ANSWER])
    async with OURS.open() as opened:
        done = await roll_out_all(tasks, engine, opened, tmp_path)
    assert [t.stop for t in done] == [StopReason.ANSWERED, StopReason.ENGINE_FAILED]


async def test_tools_are_chosen_without_gold(tmp_path: Path) -> None:
    seen: list[Task] = []

    def tools(task: Task) -> list[Tool]:
        seen.append(task)
        return [*box("mhqa").values()]

    def setup(task: Task) -> None:
        seen.append(task)

    task = Task("q?", ("Paris",), gold={"hops": ["France"]})
    env = Environment("ours", tools=tools, grammar=MHQA, setup=setup)
    async with env.open([task]) as opened:
        await roll_out_all([task], ScriptedEngine([ANSWER]), opened, tmp_path)
    assert len(seen) >= 2 and all(each == task.public() for each in seen)


# -- the stage -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task file and a scripted model that answers it."""
    path = tmp_path_factory.mktemp("evaluate")
    families = ["country_capital", "city_currency", "more_populous_country"]
    tasks = make_tasks("atlas-mhqa", "heldout_entity", 24, seed=2, families=families)
    tasks.save(path / "tasks.jsonl")
    write_script(path / "model.jsonl", tasks)
    return path


def settings(folder: Path, **changes: object) -> EvalSettings:
    model, tasks = f"scripted:{folder / 'model.jsonl'}", str(folder / "tasks.jsonl")
    limits = {"context": 100_000, "turn_tokens": 9999}
    return EvalSettings(**{"model": model, "tasks": tasks} | limits | changes)


def files_of(directory: Path) -> dict[str, bytes]:
    """What a run holds, its timings and its lock aside."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.name not in ("timings.jsonl", "latency.json", ".lock")
    }


EVALUATE_UNTIL_STUCK = """
import asyncio, sys
from pathlib import Path
from coa.engines.scripted import ScriptedEngine
from coa.evaluation.run import EvalSettings, run_eval

class Stuck(ScriptedEngine):
    async def generate(self, *arguments):
        if len(self.calls) >= 17:
            print("stuck", flush=True)
            await asyncio.Event().wait()
        return await super().generate(*arguments)

model, tasks, out = sys.argv[1:]
settings = EvalSettings(model=model, tasks=tasks, context=100_000, turn_tokens=9999, concurrency=3)
engine = Stuck.from_file(Path(model.removeprefix("scripted:")))
run_eval(settings, Path(out), engine=engine, quiet=True)
"""


def test_a_killed_evaluation_continues_and_ends_with_the_same_files(
    folder: Path, tmp_path: Path
) -> None:
    chosen = settings(folder, concurrency=3)
    summary = run_eval(chosen, tmp_path / "whole", quiet=True)
    assert (summary["n"], summary["accuracy"]) == (24, 1.0)
    killed = tmp_path / "killed"
    command = [sys.executable, "-c", EVALUATE_UNTIL_STUCK, chosen.model, chosen.tasks, str(killed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGKILL)
    path = killed / "trajectories.jsonl"
    assert 2 < path.read_bytes().count(b"\n") < 24
    assert not (killed / "summary.json").exists()
    with path.open("ab") as file:
        file.write(b'{"schema": 1, "task_id": "')
    assert run_eval(chosen, killed, quiet=True) == summary
    assert files_of(killed) == files_of(tmp_path / "whole")
    events = [json.loads(line) for line in (killed / "timings.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events if "event" in e] == ["started", "resumed", "finished"]
    assert run_eval(chosen, killed, quiet=True) == summary
    assert files_of(killed) == files_of(tmp_path / "whole")


def test_a_directory_belongs_to_one_recipe(folder: Path, tmp_path: Path) -> None:
    run_eval(settings(folder), tmp_path / "run", quiet=True)
    for changes, says in (
        ({"turns": 3}, "this was started with turns 12, and it is 3 here. Write somewhere else"),
        ({"tools": ToolSettings("wrong")}, "with observations 'real', and it is 'wrong' here"),
        ({"grammar": "react"}, "with grammar 'mhqa', and it is 'react' here"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            run_eval(settings(folder, **changes), tmp_path / "run", quiet=True)
    changed = tmp_path / "tasks.jsonl"
    changed.write_bytes((folder / "tasks.jsonl").read_bytes())
    run_eval(settings(folder, tasks=str(changed)), tmp_path / "other", quiet=True)
    TaskSet.load(changed).save(changed)
    run_eval(settings(folder, tasks=str(changed)), tmp_path / "other", quiet=True)
    TaskSet(TaskSet.load(changed)[:-1]).save(changed)
    with pytest.raises(ConfigError, match="this was started with input tasks"):
        run_eval(settings(folder, tasks=str(changed)), tmp_path / "other", quiet=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"k": 0}, "k: found 0, expected at least 1."),
        ({"concurrency": 0}, "concurrency: found 0, expected at least 1."),
        ({"turns": -1}, "turns: found -1, expected at least 1."),
        ({"temperature": -0.5}, "temperature is -0.5, expected 0 or more."),
        ({"prompt": "long"}, "prompt 'long': expected full, compact or auto."),
        ({"reward": "exacts"}, "'exacts' is not a reward. Did you mean 'exact'?"),
        ({"grammar": "mhq"}, "'mhq' is not a grammar. Did you mean 'mhqa'?"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_before_any_work(
    folder: Path, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=re.escape(says)):
        run_eval(settings(folder, **changes), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_task_of_no_world_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "Where?", "answer": "here", "meta": {"world": "Mars"}}\n')
    with pytest.raises(RecordError, match=r"world is 'Mars', expected the number of one"):
        run_eval(settings(folder, tasks=str(path)), tmp_path / "run", quiet=True)


def adapter_trained_on(folder: Path, **remembered: str | list[str]) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "manifest.json").write_text(json.dumps(remembered))
    return f"smollm2-135m+{folder}"


def test_the_grammar_and_the_prompt_fit_the_model(tmp_path: Path) -> None:
    react = adapter_trained_on(tmp_path / "a", grammar="react", prompt="compact")
    for model, grammar, kind in (
        ("smollm2-135m", "mhqa", "full"),
        (react, "react", "compact"),
        (adapter_trained_on(tmp_path / "b", grammar="web", prompt="full"), "web", "full"),
        ("scripted:x.jsonl", "mhqa", "compact"),
        ("hf:a/b", "mhqa", "full"),
    ):
        assert choose_prompt("auto", model) == kind
        assert [env.value().name for env in default_environments((), model=model)] == [grammar]
        chosen = default_environments((), model=model, grammar="code")
        assert [env.value().name for env in chosen] == ["code"]
        assert (choose_prompt("full", model), choose_prompt("compact", model)) == (
            "full",
            "compact",
        )


def test_an_adapter_of_several_grammars_answers_each_task_in_that_of_its_set(
    tmp_path: Path,
) -> None:
    both = adapter_trained_on(tmp_path / "a", grammar=["code", "mhqa"], prompt="compact")
    gym, plain = Task("2 + 2?", meta={"set": "gym-code"}), Task("Where?")

    def names(*tasks: Task, grammar: str = "auto") -> dict[str, str]:
        """Question -> the grammar that it is answered in."""
        environments, found = choose_environments((), TaskSet(tasks), grammar=grammar, model=both)
        return grammars_of(environments, found)

    assert names(plain, gym) == {plain.question: "mhqa", gym.question: "code"}
    assert names(gym) == {gym.question: "code"}
    assert set(names(gym, plain, grammar="react").values()) == {"react"}
    assert [env.value().name for env in default_environments((), model=both)] == ["mhqa"]
    with pytest.raises(ConfigError, match=r"the grammars code, mhqa, and the tasks are made for w"):
        names(Task("Who?", meta={"set": "atlas-web"}))


def test_the_tasks_of_a_run_are_those_of_their_file(tmp_path: Path) -> None:
    """So that whoever reads the run later finds them, also where they are of several sets."""
    asked, path = "What is the capital of Peru?", tmp_path / "tasks.jsonl"
    sets = ({"world": 0}, {"set": "atlas-web"}, {})
    made = [Task(asked, ("Lima",), id=f"t{n}", meta=meta) for n, meta in enumerate(sets)]
    TaskSet(tuple(made)).save(path)
    chosen = EvalSettings(model="scripted:unused", tasks=str(path), context=9999)
    engine = ScriptedEngine([CLOSED.format("Lima")] * 3)
    summary = run_eval(chosen, tmp_path / "run", engine=engine, quiet=True)
    assert set(summary["by_environment"]) == {"atlas-mhqa", "atlas-web", "search"}
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["inputs"]["tasks"] == TaskSet.load(path).fingerprint()


def grammars_of(environments: Sequence[Environment], tasks: TaskSet) -> dict[str, str]:
    """Question -> the grammar that it is answered in."""

    async def found() -> dict[str, str]:
        async with open_environments(environments, tasks, dry=True) as opened:
            return {each.question: opened.of(each).value().name for each in tasks}

    return asyncio.run(found())


async def test_tasks_may_be_made_for_a_preset_and_for_a_grammar_of_a_file(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    text = resources.files("coa.grammar").joinpath("presets/mhqa.toml").read_text("utf-8")
    own.write_text(text.replace('"mhqa"', '"mine"', 1), encoding="utf-8")
    tasks = TaskSet((Task("Where?"), Task("Where?", id="m", meta={"grammar": str(own)})))
    environments, (plain, mine) = choose_environments((), tasks, model="untrained")
    async with open_environments(environments, [plain, mine]) as opened:
        assert (opened.of(plain).value().name, opened.of(mine).value().name) == ("mhqa", "mine")
        assert opened.grammar_names == ["mhqa", "mine"]


async def test_grammars_that_are_called_the_same_are_told_apart(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    text = resources.files("coa.grammar").joinpath("presets/mhqa.toml").read_text("utf-8")
    own.write_text(text.replace('start = ["plan"]', 'start = ["plan", "answer"]'), encoding="utf-8")
    tasks = TaskSet((Task("Where?"), Task("Where?", id="m", meta={"grammar": str(own)})))
    environments, chosen = choose_environments((), tasks, model="untrained")
    engine = ScriptedEngine([ANSWER] * 3)
    async with open_environments(environments, chosen) as opened:
        made = await roll_out_all(chosen, engine, opened, tmp_path)
    assert [each.stop for each in made] == [StopReason.MALFORMED, StopReason.ANSWERED]
    read = load_trajectories(tmp_path)
    assert [(each.grammar, each.protocol.start) for each in read] == [
        ("mhqa", ("plan",)),
        ("mhqa", ("plan", "answer")),
    ]


# -- controls --------------------------------------------------------------------------------


def reading(prompt: str, turn: int) -> str:
    """A model that searches once and answers what it reads."""
    country = re.findall(r"capital of ([A-Z][\w -]*)\?", prompt)[0]
    if turn == 0:
        return SEARCH.format(f"capital of {country}")
    found = read("capital", country, re.sub(r"\[\d\] ", "", prompt.rpartition("<observation>")[2]))
    return f"<think>r</think><answer>{found[0] if found else 'unknown'}</answer>"


def test_a_model_that_reads_fails_the_controls(tmp_path: Path) -> None:
    countries = {"Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo", "Chile": "Santiago"}
    tasks = [Task(f"What is the capital of {c}?", (gold,)) for c, gold in countries.items()]
    path = tmp_path / "tasks.jsonl"
    TaskSet(tuple(tasks)).save(path)
    found = {}
    for observations in ("real", "withheld", "wrong"):
        chosen = EvalSettings(
            model="scripted:unused", tasks=str(path), tools=ToolSettings(observations), context=9999
        )
        run = tmp_path / observations
        found[observations] = run_eval(chosen, run, engine=ScriptedEngine(reading), quiet=True)
    assert [found[name]["accuracy"] for name in found] == [1.0, 0.0, 0.0]
    shown = {
        name: [
            t.steps[0].observation
            for t in load_trajectories(tmp_path / name / "trajectories.jsonl")
        ]
        for name in found
    }
    assert {o.text.strip() for o in shown["withheld"] if o} == {
        "<observation>Nothing was found.</observation>"
    }
    for task, real, wrong in zip(tasks, shown["real"], shown["wrong"], strict=True):
        assert real and wrong and task.answers[0] in real.text
        assert task.answers[0] not in wrong.text and wrong.text.count("[") == 2


# -- compare ---------------------------------------------------------------------------------


def scored(path: Path, scores: Sequence[float], names: Sequence[str] = ()) -> Path:
    names = names or [f"t{i}" for i in range(len(scores))]
    rows = [{"task_id": n, "sample": 0, "score": s} for n, s in zip(names, scores, strict=True)]
    save_summary(path, {}, rows)
    return path


def test_runs_are_compared_task_by_task(tmp_path: Path) -> None:
    names = ["t4", "t3", "t2", "t1", "t0"]
    first = scored(tmp_path / "a", [0, 0, 1, 1, 0])
    other = scored(tmp_path / "b", [1, 0, 1, 0, 1], names)  # another order, the same tasks
    result = compare([first, other])
    assert (result["n"], result["baseline"]) == (5, str(first))
    base, row = result["runs"]
    assert base == {
        "run": str(first),
        "n": 5,
        "accuracy": 0.4,
        "ci95": [round(x, 4) for x in wilson(2, 5)[1:3]],
    }
    # a: 0 0 1 1 0; b, sorted: 1 0 1 0 1
    assert (row["wins"], row["losses"], row["ties"]) == (2, 1, 2)
    assert (row["difference"], row["p_value"]) == (0.2, 1.0)
    low, high = row["difference_ci95"]
    assert -1 <= low <= 0.2 <= high <= 1
    assert [r["accuracy"] for r in compare([first, first, other])["runs"]] == [0.4, 0.4, 0.6]


def test_runs_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    first = scored(tmp_path / "a", [0, 1])
    with pytest.raises(UsageError, match=r"b and .*a differ in 3 tasks; compare runs of the same"):
        compare([first, scored(tmp_path / "b", [1, 1, 1], ["t0", "x", "y"])])
    with pytest.raises(UsageError, match=r"none: no scores\.jsonl; is it the --out of a finished"):
        compare([first, tmp_path / "none"])


def test_a_comparison_of_two_real_runs(folder: Path, tmp_path: Path) -> None:
    run_eval(settings(folder), tmp_path / "all", quiet=True)
    lines = (folder / "model.jsonl").read_text().splitlines()
    (tmp_path / "half.jsonl").write_text("\n".join(lines[:12]) + "\n")
    model = f"scripted:{tmp_path / 'half.jsonl'}"
    half = run_eval(settings(folder, model=model), tmp_path / "half", quiet=True)
    assert half["stop_reasons"] == {"answered": 12, "engine_failed": 12}
    assert (half["n"], half["accuracy"]) == (24, 0.5)
    row = compare([tmp_path / "all", tmp_path / "half"])["runs"][1]
    assert (row["wins"], row["losses"], row["ties"]) == (0, 12, 12)
    assert row["difference"] == -0.5 and row["p_value"] == round(2 / 2**12, 5)


async def test_the_tools_of_a_task_are_those_of_its_world() -> None:
    async with load_environment("search").open() as opened:
        search = (await opened.toolbox(Task("q?")))["wiki_search"]
        assert (await opened.toolbox(Task("q?", meta={"world": 0})))["wiki_search"] is search
        assert (await opened.toolbox(Task("q?", meta={"world": 7})))["wiki_search"] is not search
