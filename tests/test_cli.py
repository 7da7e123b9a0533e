"""The command line: one line and exit 2 for a mistake, one object for --json, the whole chain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from coa.asking import ask_once
from coa.cli import main
from coa.environments import make_tasks
from coa.rollouts import AgentSettings
from coa.tasks import TaskSet
from coa.trajectory import (
    Author,
    Segment,
    StopReason,
    Trajectory,
    load_trajectories,
    save_trajectories,
)
from scripts import write_script

QUESTION = "What is the capital of Peru?"
SEARCH = (
    "<think>I need the capital of Peru.</think><plan>1. look</plan><think>Go.</think>"
    "<wiki_search>capital of Peru</wiki_search>"
)
TURNS = [SEARCH, "<think>It is Lima.</think><answer>Lima</answer>"]
BROKEN_GRAMMAR = """name = "mine"
start = ["plan"]
[roles.plan]
kind = "plan"
next = ["anwser"]
[roles.answer]
kind = "answer"
"""


class Done(NamedTuple):
    code: int | str | None
    out: str
    err: str

    @property
    def record(self) -> Any:
        """The one JSON object on stdout."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1 and self.out.endswith("\n")
        return json.loads(self.out)


Coa = Callable[..., Done]


@pytest.fixture
def coa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Coa:
    """Run the command in an empty folder that holds `model.jsonl`, a scripted model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "model.jsonl").write_text(json.dumps({"turns": TURNS}) + "\n")

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["coa", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code, *capsys.readouterr())

    return call


ASK = ("ask", QUESTION, "--model", "scripted:model.jsonl")


# -- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("view", "cut.jsonl"), "cut.jsonl:2: the line is cut in the middle. Delete that line"),
        (("view", "cut.jsonl", "--mask"), "cut.jsonl:2: the line is cut in the middle."),
        (("view", "empty.jsonl"), "empty.jsonl: nothing to show."),
        (("view", "whole.jsonl", "--task", "x"), "nothing to show for task 'x'."),
        (("view", "tasks.jsonl"), "tasks.jsonl:1: this is a task, expected a trajectory"),
        (("view", "none.jsonl"), "none.jsonl: no such file."),
        (("ask", QUESTION, "--model", "smolm2-135m"), "Did you mean 'smollm2-135m'?"),
        (("ask", QUESTION, "--model", "scripted:none"), "'none' is not a file."),
        (("ask", QUESTION, "--model", "gpt"), "Unknown model 'gpt'. Forms: afm-135m, smollm2-135m"),
        (("ask", "  "), "the question is empty. Example: coa ask"),
        (("ask", "\udcff?", *ASK[2:]), "is not text in UTF-8."),
        ((*ASK, "--grammar", "mhqaa"), "is not a grammar. Did you mean 'mhqa'?"),
        ((*ASK, "--grammar", "mine.toml"), "roles.plan.next names 'anwser', which is not a role."),
        ((*ASK, "--grammar", "none.toml"), "none.toml: no such grammar file."),
        ((*ASK, "--corpus", "wiki"), "corpus 'wiki': expected atlas, atlas:K for world K, or the"),
        (
            (*ASK, "--corpus", "."),
            ".: holds no corpus. Make one of a folder with: coa corpus build",
        ),
        ((*ASK, "--prompt", "long"), "prompt 'long': expected full, compact or auto."),
        ((*ASK, "--out", "."), ": "),
        (("grammar", "show", "mine.toml"), "Did you mean 'answer'?"),
        (("grammar", "show", "mhqa", "--prompt", "long"), "--prompt 'long': expected full or"),
        (("grammar", "show", "mhqa", "--prompt", "full", "--json"), "print different things: ch"),
        (("tasks", "make", "--out", "t", "--split", "tran"), "unknown split 'tran'. Did you mean"),
        (("tasks", "make", "--out", "t", "--families", "capitals"), "unknown family 'capitals'."),
        (("tasks", "make", "--out", "t", "--set", "atlas"), "'atlas' is not a task set."),
        (("tasks", "make", "--out", "t", "--n", "0"), "n = 0: expected a positive number"),
        (("record", "--tasks", "none", "--out", "e"), "none: no such file."),
        (("record", "--tasks", "bad.csv", "--out", "e"), "found columns 'q', 'answer', expected"),
        (
            ("record", "--tasks", "tasks.jsonl", "--out", "e", "--teacher", "gpt"),
            "'gpt' is not a teacher; expected experts, llm or module:attribute.",
        ),
        (
            ("record", "--tasks", "tasks.jsonl", "--out", "e", "--teacher", "odd:Broken"),
            "failed: ZeroDivisionError: division by zero",
        ),
        (
            ("record", "--tasks", "tasks.jsonl", "--out", "e", "--error-rate", "2"),
            "a rate of the experts is 2.0, expected 0 to 1.",
        ),
        (("distill", "--episodes", "none", "--out", "d"), "none: no such file."),
        (
            ("distill", "--episodes", "tasks.jsonl", "--out", "d", "--prompt", "auto"),
            "--prompt 'auto': expected full or compact.",
        ),
        (("eval", "--tasks", "none", "--out", "r"), "none: no such file."),
        (("eval", "--out", "r", *ASK[2:]), "give --env, or --tasks with a task file."),
        (("record", "--out", "e"), "give --env, or --tasks with a task file."),
        (("eval", "--tasks", "empty.jsonl", "--out", "r"), "empty.jsonl: holds no task."),
        (
            ("eval", "--tasks", "tasks.jsonl", "--out", "r", "--k", "0"),
            "k: found 0, expected at least",
        ),
        (
            ("eval", "--tasks", "tasks.jsonl", "--out", "r", *ASK[2:], "--reward", "odd:broken"),
            "failed: ZeroDivisionError: division by zero",
        ),
        (("corpus", "build", "none"), "none: no such folder."),
        (("cache", "stats", "none"), "none: no such file."),
        (("cache", "clear", "none"), "none: no such file."),
        (
            ("eval", "--tasks", "tasks.jsonl", "--out", "r", "--tool-mode", "replay"),
            "record and replay need the file of a cache",
        ),
        (
            ("record", "--tasks", "tasks.jsonl", "--out", "e", "--tool-mode", "replai"),
            "cache mode 'replai' is not a choice. Did you mean 'replay'?",
        ),
        (("compare", "a"), "compare needs at least two run directories, or episodes and one."),
        (("compare", "a", "b"), "a: no scores.jsonl; is it the --out of a finished `coa eval`?"),
        (("bench", "parsing"), "'parsing' is not a measurement. Did you mean 'parse'?"),
        (("model", "pull", "gpt"), "gpt"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_2(
    coa: Coa, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert coa(*ASK, "--json", "--out", "whole.jsonl").code == 0
    line = (tmp_path / "whole.jsonl").read_text()
    (tmp_path / "cut.jsonl").write_text(line + line[:300])
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "tasks.jsonl").write_text('{"schema":1,"question":"Where?","answers":["x"]}\n')
    (tmp_path / "bad.csv").write_text("q,answer\nWhere?,here\n")
    (tmp_path / "mine.toml").write_text(BROKEN_GRAMMAR)
    (tmp_path / "odd.py").write_text(
        "class Broken:\n    async def record(self, task, toolbox, seed=0):\n        1 / 0\n\n"
        "def broken(task, trajectory):\n    return 1 / 0\n"
    )
    done = coa(*arguments)
    assert done.code == 2
    *progress, last = done.err.splitlines()
    assert last.startswith("coa: ")
    assert all(line.startswith(("evaluate ", "loading ", "opening ")) for line in progress)
    assert says in last and "Traceback" not in done.err
    assert done.out == "" or arguments[-1] == "."


def test_a_recipe_with_a_typo_is_named_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("coa.train.sft")
    (tmp_path / "typo.toml").write_text('trajectories = "x.jsonl"\n[sft]\nepoch = 2\n')
    (tmp_path / "unset.toml").write_text("[sft]\nepochs = 2\n")
    (tmp_path / "wrong.toml").write_text('[sft]\nepochs = "two"\n')
    for recipe, says in (
        ("typo.toml", "typo.toml: sft.epoch is not a setting. Did you mean 'epochs'?"),
        ("unset.toml", "unset.toml: trajectories is not set; give the file to train on."),
        ("wrong.toml", "wrong.toml: sft.epochs is 'two', expected"),
        ("none.toml", "none.toml: no such recipe file."),
    ):
        done = start("sft", recipe, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith(f"coa: {says}") and done.stderr.count("\n") == 1
        assert done.stdout == ""


def test_the_version_is_that_of_the_package(coa: Coa) -> None:
    done = coa("--version")
    assert (done.code, done.out) == (0, f"coa {version('chain-of-agents')}\n")


def test_an_unknown_command_or_option_is_explained(coa: Coa) -> None:
    for arguments, says in (
        (("asks", "x"), "No such command 'asks'"),
        (("ask", QUESTION, "--modle", "x"), "--modle"),
        (("eval",), "--out"),
        (("view", "t.jsonl", "--grammar", "web"), "--grammar"),
    ):
        done = coa(*arguments)
        assert done.code == 2 and says in done.err and "Traceback" not in done.err


# -- the process -----------------------------------------------------------------------------


def start(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coa", *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_exit_codes_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "model.jsonl").write_text(json.dumps({"turns": TURNS}) + "\n")
    done = start(*ASK, "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["answer"] == "Lima"
    failed = start("compare", "a", cwd=tmp_path)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert (
        failed.stderr == "coa: compare needs at least two run directories, or episodes and one.\n"
    )


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1", "TERM": "xterm-256color"}])
def test_a_pipe_gets_no_escape_codes_not_even_from_a_page(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    red = "\x1b[31m"
    turns = [TURNS[0].replace("Go.", f"{red}Go.\x07"), TURNS[1].replace("Lima<", f"{red}Lima<")]
    (tmp_path / "model.jsonl").write_text(json.dumps({"turns": turns}) + "\n")
    done = start(*ASK, "--out", "t.jsonl", cwd=tmp_path, **environment)
    shown = start("view", "t.jsonl", cwd=tmp_path, **environment)
    mask = start("view", "t.jsonl", "--mask", cwd=tmp_path, **environment)
    for each in (done, shown, mask):
        assert each.returncode == 0 and "Lima" in each.stdout
        assert "\x1b" not in each.stdout + each.stderr and "\x07" not in each.stdout


HANGING = """
import asyncio

class Hanging:
    async def record(self, task, toolbox, seed=0):
        print("hanging", flush=True)
        await asyncio.Event().wait()
"""


GO_ON = "everything up to there is in e; give the same command again to go on.\n"


def stopped(
    folder: Path,
    teacher: str,
    number: signal.Signals,
    before: Callable[[], object] | None = None,
    first: signal.Signals | None = None,
) -> tuple[int, str]:
    """Exit code and last line of a `coa record` that gets a signal once its teacher has spoken.
    `before` is called in the new process, and `first` is a signal that must not end it."""
    arguments = ["record", "--tasks", "tasks.jsonl", "--out", "e", "--workers", "1", "--teacher"]
    command = [sys.executable, "-m", "coa", *arguments, teacher]
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "hanging\n"
        try:
            if first is not None:
                process.send_signal(first)
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
            for _ in range(9):  # one that arrives just before the loop falls asleep waits for more
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5)
                    break
        finally:
            process.kill()
        _, errors = process.communicate()
    return process.returncode, errors


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_stops_a_command_is_told_what_is_kept(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "own_teacher.py").write_text(HANGING)
    make_tasks("atlas-mhqa", "train", 2, 0).save(tmp_path / "tasks.jsonl")
    why = {130: "Ctrl-C", 143: "SIGTERM"}[code]
    found = stopped(tmp_path, "own_teacher:Hanging", number)
    assert found == (code, f"coa: stopped ({why}); {GO_ON}")


def test_a_job_of_the_background_ignores_ctrl_c_and_heeds_sigterm(tmp_path: Path) -> None:
    """As `coa record ... &` in a script, where the shell has SIGINT ignored."""
    (tmp_path / "own_teacher.py").write_text(HANGING)
    make_tasks("atlas-mhqa", "train", 2, 0).save(tmp_path / "tasks.jsonl")
    code, errors = stopped(
        tmp_path,
        "own_teacher:Hanging",
        signal.SIGTERM,
        before=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        first=signal.SIGINT,
    )
    assert (code, errors) == (143, f"coa: stopped (SIGTERM); {GO_ON}")


def test_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    """Also where the first one finds work that does not let go."""
    stubborn = HANGING.replace("await asyncio.Event().wait()", "import time\n        STUBBORN")
    loop = "while True:\n            try: time.sleep(60)\n            except BaseException: pass"
    (tmp_path / "own_teacher.py").write_text(stubborn.replace("STUBBORN", loop))
    make_tasks("atlas-mhqa", "train", 2, 0).save(tmp_path / "tasks.jsonl")
    code, _ = stopped(tmp_path, "own_teacher:Hanging", signal.SIGTERM)
    assert code == -signal.SIGTERM


# -- ask -------------------------------------------------------------------------------------


def test_ask_streams_labelled_lines_and_closes_with_answer_and_cost(coa: Coa) -> None:
    done = coa(*ASK)
    lines = [line.split(maxsplit=1) for line in done.out.splitlines()]
    assert (done.code, done.err) == (0, "")
    labels = "model think plan think wiki_search observation think answer ="
    assert [line[0] for line in lines] == labels.split()
    assert lines[0][1] == "scripted:model.jsonl" and lines[7][1] == "Lima"
    assert "Lima" in lines[5][1]
    closing = lines[8][1].split(" | ")
    assert closing[0] == "answer: Lima" and "tokens sampled" in closing[1]
    assert closing[2] == "1 tool call" and closing[3].endswith(" s")


def test_ask_appends_to_its_file_and_a_world_can_be_chosen(coa: Coa, tmp_path: Path) -> None:
    assert coa(*ASK, "--out", "t.jsonl").code == 0
    assert coa(*ASK, "--out", "t.jsonl", "--corpus", "atlas:7", "--grammar", "mhqa").code == 0
    real, other = load_trajectories(tmp_path / "t.jsonl")
    assert real.text != other.text and real.answer == other.answer == "Lima"


def test_a_failed_engine_is_told_in_the_closing_line(coa: Coa, tmp_path: Path) -> None:
    (tmp_path / "model.jsonl").write_text('{"question": "Who?", "turns": []}\n')
    done = coa(*ASK)
    assert "no answer" in done.out and "ended: engine_failed" in done.out
    assert "no question of the script is in this prompt" in done.out


@pytest.mark.parametrize(("yields", "turns"), [(1, 0), (2, 1)])
async def test_a_cancelled_question_leaves_a_valid_partial_trajectory(
    tmp_path: Path, yields: int, turns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.jsonl").write_text(json.dumps({"turns": TURNS}) + "\n")
    asking = asyncio.create_task(
        ask_once(
            QUESTION,
            AgentSettings(model=f"scripted:{tmp_path / 'model.jsonl'}", grammar="mhqa"),
            out_path=tmp_path / "t.jsonl",
            quiet=False,
        )
    )
    for _ in range(yields):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    (trajectory,) = load_trajectories(tmp_path / "t.jsonl")
    assert (trajectory.stop, trajectory.answer) == (StopReason.CANCELLED, None)
    assert [step.model.text for step in trajectory.steps] == TURNS[:turns]
    assert all(step.observation for step in trajectory.steps)
    assert trajectory.ids
    assert "no answer" in capsys.readouterr().out.splitlines()[-1]


# -- one object ------------------------------------------------------------------------------


def test_json_prints_one_object_and_nothing_else(coa: Coa) -> None:
    assert coa(*ASK, "--json").record["stop"] == "answered"
    findings = coa("doctor", "--json").record
    assert {"ok", "checks"} == findings.keys()
    assert all(check["ok"] or check["fix"] for check in findings["checks"])
    grammar = coa("grammar", "show", "web", "--json").record
    assert grammar["name"] == "web" and "</answer>" in grammar["stop_strings"]
    assert {"ref", "state", "about"} == coa("model", "list", "--json").record["models"][0].keys()
    bench = coa("bench", "parse", "--json").record
    assert set(bench["ratio"]) == set(bench) - {"ours", "unit", "ratio"}


def test_what_is_shown_to_people(coa: Coa) -> None:
    assert "</answer>" in coa("grammar", "show", "mhqa").out
    assert coa("grammar", "show", "mhqa", "--mermaid").out.startswith("stateDiagram-v2")
    assert "<wiki_search>" in coa("grammar", "show", "mhqa", "--prompt", "compact").out
    assert "python" in coa("doctor").out and "scripted:FILE" in coa("model", "list").out
    assert "regex" in coa("bench", "parse").out


# -- the whole chain -------------------------------------------------------------------------


def test_tasks_record_distill_show_inspect_eval_compare(coa: Coa, tmp_path: Path) -> None:
    made = coa("tasks", "make", "--split", "heldout_entity", "--n", "6", "--out", "tasks.jsonl",
               "--families", "country_capital, city_country")  # fmt: skip
    assert (made.code, made.out, made.err) == (0, "", "6 tasks in tasks.jsonl\n")
    tasks = TaskSet.load(tmp_path / "tasks.jsonl")
    recorded = coa("record", "--tasks", "tasks.jsonl", "--out", "e.jsonl", "--error-rate", "0")
    assert recorded.code == 0 and recorded.err.endswith("6 episodes in e.jsonl, 6 with an answer\n")
    distilling = ("distill", "--episodes", "e.jsonl", "--out", "d", "--tasks", "tasks.jsonl")
    assert coa(*distilling, "--json").record["kept"] == 6
    assert "6 trajectories of 6 episodes" in coa(*distilling).out
    unjudged = coa("distill", "--episodes", "e.jsonl", "--out", "u", "--grammar", "react")
    assert "no --tasks: answers were not judged" in unjudged.err
    shown = coa("view", "d/trajectories.jsonl", "--n", "2").out
    assert shown.count("question  ") == shown.count("answer: ") == 2
    one = coa("view", "d/trajectories.jsonl", "--task", tasks[3].id).out
    assert tasks[3].question in one and one.count("question  ") == 1
    mask = coa("view", "d/trajectories.jsonl", "--mask").out
    assert "[[" in mask and "characters: trained" in mask
    write_script(tmp_path / "model.jsonl", tasks)
    common = ("eval", "--model", "scripted:model.jsonl", "--tasks", "tasks.jsonl")
    common += ("--turn-tokens", "999")
    summary = coa(*common, "--out", "run", "--json").record
    for key in ("n", "accuracy", "ci95", "tokens_per_task", "tokens_per_solved"):
        assert key in summary
    assert (summary["n"], summary["accuracy"], summary["k"]) == (6, 1.0, 1)
    assert summary["stop_reasons"] == {"answered": 6} and summary["tool_calls_per_task"] == 1
    again = coa(*common, "--out", "run")
    assert "accuracy 100.0%" in again.out and "country_capital" in again.out
    refused = coa(*common, "--out", "run", "--turns", "3")
    assert refused.code == 2 and "this was started with turns 12, and it is 3 here" in refused.err
    for control in ("withheld", "wrong"):
        found = coa(*common, "--out", control, "--observations", control, "--json").record
        assert found["accuracy"] == 1.0, "a script does not read, and so does not mind"
        (tmp_path / control / "trajectories.jsonl").read_text().index("observation")
    result = coa("compare", "run", "withheld", "wrong", "--json").record
    assert [row["run"] for row in result["runs"]] == ["run", "withheld", "wrong"]
    assert result["runs"][1]["difference"] == 0.0
    assert "wins 0 losses 0" in coa("compare", "run", "wrong").out


def test_a_chain_under_a_grammar_of_ones_own_can_be_shown(coa: Coa, tmp_path: Path) -> None:
    text = BROKEN_GRAMMAR.replace("anwser", "answer")
    (tmp_path / "mine.toml").write_text(text)
    turns = ["<plan>p</plan><answer>Lima</answer>"]
    (tmp_path / "model.jsonl").write_text(json.dumps({"turns": turns}) + "\n")
    assert "answer: Lima" in coa(*ASK, "--grammar", "mine.toml", "--out", "t.jsonl").out
    (tmp_path / "mine.toml").unlink()
    assert "answer: Lima" in coa("view", "t.jsonl").out
    (tmp_path / "grammars.json").unlink()
    alone = coa("view", "t.jsonl")
    assert alone.code == 2 and "is not stored beside the file (grammars.json)" in alone.err


def test_a_chain_with_a_tool_of_ones_own_is_shown_as_it_was(coa: Coa, tmp_path: Path) -> None:
    chain = Trajectory("t", "How much?", "react", tools=["calculator"], answer="42")
    turn = "<think>Multiply.</think>\n<calculator>6 * 7</calculator>"
    chain.segments = [Segment(Author.PROMPT, "p"), Segment(Author.MODEL, turn)]
    save_trajectories(tmp_path / "own.jsonl", [chain])
    shown = coa("view", "own.jsonl").out
    assert "calculator  6 * 7" in shown and "malformed" not in shown


def test_a_directory_of_trajectories_can_be_shown(coa: Coa, tmp_path: Path) -> None:
    chain = Trajectory("t", "How much?", "react", answer="42")
    chain.segments = [Segment(Author.PROMPT, "p"), Segment(Author.MODEL, "<answer>42</answer>")]
    save_trajectories(tmp_path / "run" / "trajectories.jsonl", [chain])
    assert "How much?" in coa("view", "run").out
    assert coa("view", "run", "--n", "-3").code == 2


def test_runs_of_different_rewards_are_not_compared(coa: Coa, tmp_path: Path) -> None:
    for name in ("exact", "f1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.jsonl").write_text('{"task_id": "t", "score": 1.0}\n')
        (tmp_path / name / "summary.json").write_text(json.dumps({"reward": name}))
    refused = coa("compare", "exact", "f1")
    assert refused.code == 2 and "different rewards: exact (exact), f1 (f1)" in refused.err


def test_a_distillation_that_keeps_nothing_says_why(coa: Coa) -> None:
    coa("tasks", "make", "--n", "2", "--out", "t.jsonl")
    coa("record", "--tasks", "t.jsonl", "--out", "e.jsonl")
    done = coa("distill", "--episodes", "e.jsonl", "--grammar", "web", "--out", "d")
    assert done.code == 2 and "no episode was kept: " in done.err


def test_what_cannot_be_written_is_found_before_the_work(coa: Coa, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    done = coa("ask", QUESTION, "--model", "scripted:model.jsonl", "--out", "folder")
    assert done.code == 2 and "folder: Is a directory" in done.err and not done.out


def test_a_question_that_fills_the_context_is_explained(coa: Coa) -> None:
    model = ("--model", "scripted:model.jsonl")
    done = coa("ask", QUESTION + " really?" * 150_000, *model)
    assert "the question and its prompt alone have" in done.out
