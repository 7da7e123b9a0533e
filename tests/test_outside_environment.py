"""An environment of somebody's own goes through every stage, without a line beyond its files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from coa.cli import app  # noqa: E402
from outside_shop import write_shop  # noqa: E402

SFT = "sft.rank=4 sft.epochs=1 sft.batch_size=4 sft.deterministic=true sft.threads=1".split()
RL = (
    "rl.rank=4 rl.updates=2 rl.tasks_per_update=2 rl.group_size=3 rl.lr=1e-2 "
    "rl.deterministic=true rl.threads=1 rl.void_turns=keep rollout.turns=2 rollout.turn_tokens=12 "
    "rollout.tokens=24 rollout.context=480 check.split=test check.every=2"
).split()


def coa(*arguments: object, fails: bool = False) -> str:
    """What a command prints; one that is expected to fail gives its line of complaint."""
    found = CliRunner().invoke(app, [str(each) for each in arguments])
    if fails:
        assert found.exit_code and found.exception is not None, found.output
        return f"{found.output}{found.exception}"
    assert found.exit_code == 0, f"{found.output}{found.exception!r}"
    return found.output


def alone(*arguments: object, **more: Any) -> str:
    """The same in a process of its own, as a person would start it."""
    command = [sys.executable, "-m", "coa", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("elsewhere") / "shop")


@pytest.fixture(scope="module")
def made(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes and a dataset, recorded and distilled with two processes."""
    place = tmp_path_factory.mktemp("made")
    alone("record", "--env", shop, "--out", place / "episodes.jsonl", "--workers", 2)
    where = ("--episodes", place / "episodes.jsonl", "--env", shop)
    alone("distill", *where, "--out", place / "dataset", "--workers", 2)
    return place


@pytest.fixture(scope="module")
def student(made: Path) -> str:
    """A model that answers as the team does: a script made of the distilled chains."""
    chains = records(made / "dataset" / "trajectories.jsonl")
    turns = {
        chain["question"]: [s["text"] for s in chain["segments"] if s["author"] == "model"]
        for chain in chains
    }
    lines = [{"question": question, "turns": own} for question, own in turns.items()]
    path = made / "student.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return f"scripted:{path}"


def test_record_and_distil_with_two_processes(shop: Path, made: Path) -> None:
    episodes = records(made / "episodes.jsonl")
    chains = records(made / "dataset" / "trajectories.jsonl")
    assert 12 <= len(episodes) == len(chains) <= 19
    assert [tool["name"] for tool in episodes[0]["tools"]] == ["price", "add", "total"]
    assert {chain["tools"][1] for chain in chains} == {"add"}
    assert all(chain["scored"]["score"] == 1 for chain in chains), "the state was not judged"
    prompts = {chain["segments"][0]["text"] for chain in chains}
    assert len(prompts) == 1 and "<add>" in prompts.pop()
    stored = json.loads((made / "dataset" / "grammars.json").read_text())
    assert set(stored) == {chain["grammar_id"] for chain in chains}


def test_episodes_of_an_environment_of_ones_own_are_not_distilled_elsewhere(
    made: Path, tmp_path: Path
) -> None:
    words = ("distill", "--episodes", made / "episodes.jsonl", "--out", tmp_path / "d")
    said = coa(*words, fails=True)
    assert "the episodes are of the environment 'basket', which is not shipped here" in said
    coa(*words, "tools=recorded", "grammar=react")
    chains = records(tmp_path / "d" / "trajectories.jsonl")
    assert {tuple(chain["tools"]) for chain in chains} == {("add", "price", "total")}


def test_fine_tune_improve_evaluate_and_compare(
    shop: Path, made: Path, student: str, tiny_model: Path, tmp_path: Path
) -> None:
    sft, rl = tmp_path / "sft", tmp_path / "rl"
    (tmp_path / "sft.toml").touch()
    (tmp_path / "rl.toml").touch()
    model = f"sft.model=hf:{tiny_model}"
    coa("sft", tmp_path / "sft.toml", model, f"trajectories={made / 'dataset'}", f"out={sft}", *SFT)
    manifest = json.loads((sft / "adapter" / "manifest.json").read_text())
    assert manifest["environments"] == ["basket"] and manifest["grammar"] == "react"
    start = f"hf:{tiny_model}+{sft / 'adapter'}"
    coa("rl", tmp_path / "rl.toml", f"env={shop}", f"rl.model={start}", f"out={rl}", *RL)
    updates = [line["update"] for line in records(rl / "metrics.jsonl")]
    assert updates[-1] == 2
    rollout = records(next((rl / "rollouts").glob("*.jsonl")))[0]
    assert "bought" in rollout["scored"]["parts"]
    limits = ("--turn-tokens", 12, "--turns", 3, "--context", 480)
    trained = f"hf:{tiny_model}+{rl / 'adapter'}"
    coa("eval", "--env", shop, "--model", trained, "--out", tmp_path / "tiny", *limits)
    found = coa("eval", "--env", shop, "--split", "train", "--model", student, "--json", "--out",
                tmp_path / "script")  # fmt: skip
    summary = json.loads(found)
    assert summary["accuracy"] == 1 and summary["reward"] == "bought"
    assert set(summary["by_item"]) == {"apple", "bread", "cheese", "honey"}
    assert "differ in" in coa("compare", tmp_path / "tiny", tmp_path / "script", fails=True)
    coa("eval", "--env", shop, "--split", "train", "--model", trained, "--out",
        tmp_path / "weak", *limits)  # fmt: skip
    compared = json.loads(coa("compare", tmp_path / "weak", tmp_path / "script", "--json"))
    assert compared["runs"][1]["accuracy"] > compared["runs"][0]["accuracy"]
    asked = coa("ask", "What do 2 apple cost?", "--env", shop, "--model", trained)
    assert "model" in asked
    refused = coa("ask", "What do 2 apple cost?", "--model", trained, fails=True)
    assert "was trained for the environment 'basket', which is not shipped here" in refused


def test_serve_to_the_official_client(shop: Path, student: str, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    command = [sys.executable, "-m", "coa", "serve", "--env", shop, "--model", student, "--port", 0]
    server = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if " on http" in line)
        url = line.split(" on ")[1].strip()
        client = openai.OpenAI(base_url=url, api_key="none")
        questions = [each["question"] for each in records(Path(student.removeprefix("scripted:")))]
        for question in questions[:3]:
            reply = client.chat.completions.create(
                model=client.models.list().data[0].id,
                messages=[{"role": "user", "content": question}],
            )
            quantity = float(question.split()[2])
            assert float(reply.choices[0].message.content or 0) % quantity == 0
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)


def test_kill_9_in_the_middle_of_an_evaluation_loses_no_more_than_what_is_in_flight(
    shop: Path, student: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = ["eval", "--env", shop, "--split", "train", "--model", student, "--out", out]
    command += ["--concurrency", 2]
    slow = {**os.environ, "SHOP_DELAY": "0.5"}
    process = subprocess.Popen([sys.executable, "-m", "coa", *map(str, command)], env=slow)
    written = out / "trajectories.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if written.is_file() and written.read_bytes().count(b"\n") >= 3:
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    before = records(written)
    assert 3 <= len(before) < 16, len(before)
    alone(*command)
    after = {each["task_id"]: each for each in records(written)}
    assert len(after) == json.loads((out / "summary.json").read_text())["n"] > len(before)
    assert all(after[each["task_id"]] == each for each in before), "a finished rollout was redone"


def test_the_same_by_python(shop: Path, student: str, tiny_model: Path, tmp_path: Path) -> None:
    from coa import api

    env = api_environment(shop)
    made = api.record(env, tmp_path / "episodes.jsonl")
    assert made.episodes == 16 == made.answered
    dataset = api.distill(tmp_path / "episodes.jsonl", env, out=tmp_path / "dataset")
    assert len(dataset.kept) == 16
    small: dict[str, Any] = {"rank": 4, "threads": 1, "deterministic": True}
    tuned = api.sft(tmp_path / "dataset", out=tmp_path / "sft", model=f"hf:{tiny_model}",
                    epochs=1, batch_size=8, **small)  # fmt: skip
    better = api.rl(env, out=tmp_path / "rl", model=tuned.model, updates=2, tasks_per_update=2,
                    group_size=3, lr=1e-2, void_turns="keep", rollout__turns=2,
                    rollout__turn_tokens=12, rollout__tokens=24, rollout__context=480,
                    **small)  # fmt: skip
    assert better.model == f"hf:{tiny_model}+{tmp_path / 'rl' / 'adapter'}"
    limits: dict[str, Any] = {"turns": 2, "turn_tokens": 12, "context": 480, "split": "train"}
    weak = api.evaluate(env, model=better.model, out=tmp_path / "weak", **limits)
    right = api.evaluate(env, model=student, out=tmp_path / "right", split="train")
    assert right.accuracy == 1 and right.ci95[1] == 1 and len(right.trajectories) == 16
    assert api.compare(weak, right)["runs"][1]["accuracy"] == 1
    answered = api.ask("What do 2 apple cost?", env, student)
    assert answered.answer == "4" and answered.usage.tool_calls == 3


def api_environment(shop: Path) -> Any:
    """The environment as a value that no other process can load."""
    from dataclasses import replace

    from coa import load_environment

    return replace(load_environment(shop), reference="", files=())
