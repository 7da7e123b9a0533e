"""Teams of real frameworks are recorded as they are, and what was recorded is what the frameworks'
own objects say: agents, jobs and reports, tool uses with arguments and results, final answers.

It needs the environments of dev/frameworks.sh: COA_TEST_FRAMEWORKS names their folder (make
test-frameworks). Every model is the script of examples/office/model.py; it knows no answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from coa.io.runs import Json
from coa.recording.episode import Episode, load_episodes

ROOT = Path(__file__).resolve().parent.parent
OFFICE = ROOT / "examples" / "office"
sys.path += [str(OFFICE), str(ROOT / "tests" / "teams")]

from comparing import differences  # noqa: E402
from model import Model, Served  # noqa: E402
from questions import SHARES, questions  # noqa: E402

FRAMEWORKS = os.environ.get("COA_TEST_FRAMEWORKS", "")
TASKS = int(os.environ.get("COA_TEST_TASKS", "20"))
"""For each team; of every kind of question at least one."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FRAMEWORKS, reason="COA_TEST_FRAMEWORKS names no environments"),
]


@dataclass(frozen=True)
class Team:
    """A program and the environment that it runs in."""

    program: Path
    environment: str = "teams"

    @property
    def name(self) -> str:
        return self.program.stem.removesuffix("_team")

    @property
    def python(self) -> str:
        return str(Path(FRAMEWORKS).resolve() / self.environment / "bin" / "python")


TEAMS = (
    Team(OFFICE / "smolagents_team.py"),
    Team(OFFICE / "langgraph_team.py"),
    Team(OFFICE / "agents_sdk_team.py"),
    Team(ROOT / "tests" / "teams" / "smolagents_code_team.py"),
    Team(ROOT / "tests" / "teams" / "pydantic_ai_team.py"),
    Team(ROOT / "tests" / "teams" / "crewai_team.py", "crewai"),
)
WITNESS, TRACED = (ROOT / "tests" / "teams" / name for name in ("witness.py", "traced.py"))
SPEAKING = ("smolagents", "agents_sdk", "pydantic_ai")
"""Teams that are recorded by their spans, too."""
SILENT = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What keeps frameworks from telling anybody what they do."""


@dataclass(frozen=True)
class Recorded:
    """A team's episodes, and what the witness says of the same runs."""

    team: Team
    folder: Path
    episodes: list[Episode]
    truths: dict[str, Json]
    """By question."""


@contextmanager
def serving() -> Iterator[str]:
    """The address of a provider that makes mistakes of each kind; a new one makes the same."""
    with Served(Model(seed=3, slips=0.15, wrong=0.1), faults=0.03) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


def chosen(count: int) -> list[Json]:
    """So many questions, of all kinds."""
    asked = questions(400, False, 7)
    by_kind = [[each for each in asked if each["meta"]["kind"] == kind] for kind in SHARES]
    rounds = [each[at] for at in range(5) for each in by_kind if len(each) > at]
    return rounds[:count]


def coa(folder: Path, *words: str, url: str = "") -> str:
    """Run a command as a user would; what it printed."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
        **SILENT,
        "PYTHONPATH": f"{ROOT / 'src'}:{OFFICE}",
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "a key that nobody checks",
    }
    command = [sys.executable, "-m", "coa", *words]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=3600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def record(team: Team, folder: Path, tasks: list[Json], *before: str) -> list[Episode]:
    """Episodes of a team's program, behind the command `before`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in tasks))
    words = ["record", "--env", str(OFFICE), "--tasks", "tasks.jsonl", "--out", "episodes.jsonl"]
    words += ["--otel"] if str(TRACED) in before else []
    program = (team.python, *before, str(team.program), "{question}")
    with serving() as url:
        said = coa(folder, *words, "--", *program, url=url)
    episodes = load_episodes(folder / "episodes.jsonl")
    assert len(episodes) == len(tasks), said
    return episodes


def witnessed(team: Team, folder: Path, *before: str) -> Recorded:
    """A team's work on all questions, recorded and witnessed."""
    truths = folder / "truths"
    truths.mkdir()
    episodes = record(team, folder, chosen(TASKS), *before, str(WITNESS), str(truths))
    read = [json.loads(path.read_text()) for path in truths.iterdir()]
    return Recorded(team, folder, episodes, {each["question"]: each for each in read})


def wrongly(recorded: Recorded) -> str:
    """What was recorded otherwise than it was, by question; empty: nothing."""
    wrong = {
        episode.question: found
        for episode in recorded.episodes
        if (found := differences(recorded.truths[episode.question], episode))
    }
    return json.dumps(wrong, indent=1) if wrong else ""


@pytest.fixture(scope="module", params=TEAMS, ids=lambda team: team.name)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return witnessed(request.param, tmp_path_factory.mktemp(request.param.name))


def test_a_recording_says_what_the_frameworks_own_objects_say(recorded: Recorded) -> None:
    assert wrongly(recorded) == ""


@pytest.mark.parametrize(
    "team", [team for team in TEAMS if team.name in SPEAKING], ids=lambda team: team.name
)
def test_spans_say_what_the_frameworks_own_objects_say(team: Team, tmp_path: Path) -> None:
    assert wrongly(witnessed(team, tmp_path, str(TRACED), team.name)) == ""


def test_most_answers_are_right_and_every_mistake_is_seen(recorded: Recorded) -> None:
    """The team is no better than its model, and its recording tells by how much."""
    successes = Counter(episode.meta["success"] for episode in recorded.episodes)
    assert set(successes) <= {0.0, 1.0}
    assert successes[1.0] >= 0.7 * len(recorded.episodes)


def test_a_program_is_recorded_alike_without_a_witness(recorded: Recorded, tmp_path: Path) -> None:
    again = record(recorded.team, tmp_path, chosen(TASKS)[:2])
    known = {episode.task_id: episode for episode in recorded.episodes}
    for episode in again:
        assert episode.to_json() == known[episode.task_id].to_json()


def test_successful_episodes_become_legal_chains(recorded: Recorded) -> None:
    folder = recorded.folder
    coa(folder, "grammar", "derive", "episodes.jsonl", "--out", "team.toml")
    (folder / "environment.toml").write_text(
        'name = "team"\ngrammar = "team.toml"\ntools = ["office:tools"]\nreward = "exact"\n'
        'tasks = {train = "tasks.jsonl"}\n'
    )
    coa(folder, "distill", "--episodes", "episodes.jsonl", "--env", ".", "--out", "dataset")
    good = [episode for episode in recorded.episodes if episode.meta["success"] == 1.0]
    kept = (folder / "dataset" / "trajectories.jsonl").read_text().splitlines()
    print(f"{recorded.team.name}: {len(kept)} of {len(good)} right episodes become chains")
    assert len(kept) >= 0.95 * len(good), (len(kept), len(good))
