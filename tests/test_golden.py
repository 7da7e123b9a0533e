"""Golden hashes: nothing that a model sees has changed, and nothing that it learns from.

All goes through the command line, so that modules may be moved and renamed beneath it, and only
chosen fields are hashed, so that files may gain others. `golden.json` holds for every key how many
records there are and the beginning of the SHA-256 of their canonical JSON.

`python tests/test_golden.py [KEY ...]` rewrites it, or only the keys that begin so. That is allowed
only when a string that a model sees, a task or a number of training changes on purpose, and the
CHANGELOG says so. It needs everything: the gym, a full sandbox, and `coa model pull`.

Bits of a trained adapter are compared only on the kind of machine that they were written on.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coa.cli import app

GOLDEN = Path(__file__).with_name("golden.json")
Records = list[Any]
Found = Iterator[tuple[str, Records]]

ATLAS_SPLITS = ("train", "heldout_entity", "heldout_family")
SPLITS = {
    "atlas-mhqa": ATLAS_SPLITS,
    "atlas-reworded": ATLAS_SPLITS[:2],
    "atlas-wide": ATLAS_SPLITS[:2],
    "atlas-web": ATLAS_SPLITS,
    "atlas-code": ATLAS_SPLITS,
    "gym-code": ("train", "heldout_seed", "heldout_generator"),
}
INVENTED = 23
"""The seed of the world that is not the real one."""
WORKED = {
    "atlas-mhqa": ("atlas-mhqa", 0, 100),
    "atlas-web": ("atlas-web", 0, 100),
    "gym-code": ("gym-code", 0, 100),
    "atlas-code": ("atlas-code", 0, 30),
    f"atlas-mhqa-{INVENTED}": ("atlas-mhqa", INVENTED, 30),
}
"""What the experts work on: name -> set, world, tasks."""
PRESETS = ("mhqa", "web", "code", "afm", "react", "search_r1")
MEASURED = {
    "mhqa": ("atlas-mhqa", "heldout_entity", 40),
    "web": ("atlas-web", "heldout_entity", 30),
    "code": ("gym-code", "heldout_seed", 30),
}
"""What the shipped model is asked, by the grammar it answers in: set, split, tasks."""

EPISODE = ("task_id", "question", "answer", "agents")
EVENT = "kind agent to text thought facts erred branch tool argument result".split()
FIGURES = "rows tokens trained cut lengths updates authors agents".split()
METRICS = (
    "update reward pass_rate groups groups_used groups_flat groups_solved rollouts length_mean "
    "length_max turns tool_calls answered_rate malformed_rate truncated_rate rows tokens "
    "trained_tokens grad_norm lr clip_low clip_high ratio_mean kl_reference entropy"
).split()
"""Without those that are only noise of rounding: the loss of a first pass, the sampler's gap."""
PROGRAMS = ("```py\nprint(6 * 7)\n```", "```py\nprint(1 / 0)\n```")
PAGES = "https://atlas.example/country/"
RL = (
    "grammar=mhqa prompt=compact reward.expression=test_golden:letters rl.rank=4 rl.updates=2 "
    "rl.tasks_per_update=3 rl.group_size=4 rl.lr=1e-2 rl.deterministic=true rl.threads=1 "
    "rl.void_turns=keep rollout.turns=2 rollout.turn_tokens=12 rollout.tokens=24 "
    "rollout.context=384 rollout.concurrency=8 rollout.temperature=2.0"
).split()


def letters(task: Any, trajectory: Any) -> float:
    """The reward of the RL run: any text earns a share of it, different texts different ones."""
    text = "".join(segment.text for segment in trajectory.segments)
    return sum(text.count(letter) for letter in "aeiou") / len(text)


def coa(*given: object) -> str:
    """What a command prints; it runs in this process."""
    done = CliRunner().invoke(app, [str(each) for each in given])
    said = f"{done.output}\n{done.exception or ''}"
    if "tier FULL is required" in said:
        pytest.skip("this machine has no full sandbox")
    assert done.exit_code == 0, f"coa {' '.join(map(str, given))}\n{said}"
    return done.stdout


def coa_alone(*given: object) -> None:
    """A command in a process of its own, since it settles how many threads torch has."""
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(GOLDEN.parent)}
    command = [sys.executable, "-m", "coa", *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | fixed)
    if "tier FULL is required" in done.stderr:
        pytest.skip("this machine has no full sandbox")
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def chosen(record: dict[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    return {name: record.get(name) for name in fields}


def digest(records: Records) -> dict[str, Any]:
    text = json.dumps(records, sort_keys=True, separators=(",", ":"))
    return {"n": len(records), "sha256": hashlib.sha256(text.encode()).hexdigest()[:16]}


def machine() -> str:
    """What decides the bits of arithmetic: torch, and the features of the processor."""
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text(encoding="utf-8") if cpu.is_file() else ""
    flags = next((each for each in text.splitlines() if each.startswith(("flags", "Feat"))), "")
    return digest([importlib.metadata.version("torch"), sorted(flags.split())])["sha256"]


def make_tasks(place: Path, name: str, split: str, world: int, n: int, seed: int = 7) -> Path:
    path = place / f"{name}.{split}.{world}.{n}.{seed}.jsonl"
    if not path.exists():
        more = ("--world-seed", world) if world else ()
        asked = ("--set", name, "--split", split, "--n", n, "--seed", seed)
        coa("tasks", "make", *asked, *more, "--out", path)
    return path


def team(place: Path, name: str) -> tuple[Path, Path]:
    """The experts at work on tasks, and what is distilled from it: episodes, dataset."""
    of_set, world, n = WORKED[name]
    episodes, dataset = place / f"{name}.episodes.jsonl", place / f"{name}.dataset"
    tasks = make_tasks(place, of_set, "train", world, n)
    if not (dataset / "trajectories.jsonl").exists():
        how = ("--teacher", "experts", "error_rate=0.2", "--workers", 1)
        coa("record", "--tasks", tasks, "--out", episodes, *how)
        given = ("--episodes", episodes, "--tasks", tasks, "--workers", 1)
        coa("distill", *given, "--out", dataset)
    return episodes, dataset


def trajectories(path: Path) -> Records:
    """What models wrote and saw, in an order that does not depend on who finished first."""
    return [
        {
            **chosen(record, ("task_id", "stop", "answer")),
            "segments": [chosen(each, ("author", "text", "ids")) for each in record["segments"]],
        }
        for record in sorted(lines(path), key=lambda one: (one["task_id"], one.get("sample") or 0))
    ]


def task_keys(place: Path, name: str) -> Found:
    for split in SPLITS[name]:
        for world in (0,) if name == "gym-code" else (0, INVENTED):
            path = make_tasks(place, name, split, world, 100)
            fields = ("id", "question", "answers")
            yield f"{split}/{world}", [[one[field] for field in fields] for one in lines(path)]


def prompt_keys(place: Path, preset: str) -> Found:
    for kind in ("full", "compact"):
        yield kind, [coa("grammar", "show", preset, "--prompt", kind)]


def team_keys(place: Path, name: str) -> Found:
    episodes, dataset = team(place, name)
    yield (
        "episodes",
        [
            {**chosen(one, EPISODE), "events": [chosen(event, EVENT) for event in one["events"]]}
            for one in lines(episodes)
        ],
    )
    path, dropped = dataset / "trajectories.jsonl", dataset / "rejected.jsonl"
    yield "chains", trajectories(path)
    yield "prompts", [one["segments"][0]["text"] for one in lines(path)]
    yield "rejected", [chosen(one, ("task_id", "reason")) for one in lines(dropped)]


def row_keys(place: Path, name: str) -> Found:
    """Labels are the ids where the weight is 1 and -100 where it is 0; others are not by default.

    The figures are those of `coa sft` itself, after it has chosen, cut and weighed its rows.
    """
    _, dataset = team(place, name)
    out, recipe = place / f"{name}.rows", place / "sft.toml"
    recipe.touch()
    coa("export", dataset, "--to", "trl-tokens", "--model", "smollm2-135m", "--out", out)
    fields = ("task_id", "input_ids", "labels")
    yield "tokens", [chosen(one, fields) for one in lines(out / "train.jsonl")]
    given = (f"trajectories={dataset}", "sft.model=smollm2-135m", f"out={place / 'sft'}")
    report = json.loads(coa("sft", recipe, *given, "--preview", "--json"))
    yield "figures", [chosen(report, FIGURES)]


def scripted_turns(preset: str) -> list[str]:
    """Turns that find something, find nothing, break rules in several ways, and answer at last."""
    think, plan = "<think> I go on.</think>\n", "<plan> 1. look it up</plan>\n"
    again = think
    programs = [f"<code>{body}</code>" for body in (*PROGRAMS, "no fence", "")]
    pages = [f"<crawl_page>{PAGES}{name}</crawl_page>" for name in ("peru", "none", "peru|none")]
    if preset == "code":
        calls, opening, again = programs, plan + think, f"<reflection> Again.</reflection>\n{think}"
    else:
        tool = {"web": "web_search", "search_r1": "search"}.get(preset, "wiki_search")
        calls = [f"<{tool}>{query}</{tool}>" for query in ("capital of Peru", "zzzz qqqq", "")]
        calls += {"web": pages, "afm": pages + programs}.get(preset, [])
        opening = think if preset in ("react", "search_r1") else think + plan + think
    answer = "<answer> Lima</answer>"
    broken = ["no block", "", "<plan> open", "<nothing> here</nothing>", think + think + answer]
    final = answer if preset == "code" else think + answer
    if preset in ("web", "afm"):
        checked = f"<double_check> It is right. Score: 4</double_check>\n{think}{answer}"
        final = f"{think}<suggested_answer> Lima</suggested_answer>\n{think}{checked}"
    return [opening + calls[0], *(again + call for call in calls[1:]), *broken, final]


def scripted_keys(place: Path, preset: str) -> Found:
    """What tools, mistakes and controls say, to a model whose turns are written beforehand."""
    tasks = make_tasks(place, "atlas-mhqa", "train", 0, 3)
    script = place / f"{preset}.script.jsonl"
    script.write_text(json.dumps({"turns": scripted_turns(preset)}) + "\n", encoding="utf-8")
    controls = ("real", "withheld", "wrong", "closed_book") if preset == "mhqa" else ("real",)
    budget = ("--turns", 20, "--malformed", 20, "--context", 100000, "--turn-tokens", 2000)
    for control in controls:
        out = place / f"{preset}.{control}.scripted"
        model = ("--model", f"scripted:{script}", "--grammar", preset, "--prompt", "compact")
        how = ("--observations", control, "--concurrency", 1)
        coa("eval", "--tasks", tasks, *model, *budget, *how, "--out", out)
        yield control, trajectories(out / "trajectories.jsonl")


def evaluated(place: Path, tasks: Path, *budget: object) -> Records:
    out = tasks.with_suffix(".eval")
    model = ("--model", "afm-135m", "--deterministic", "--malformed", 1, "--seed", 5)
    coa_alone("eval", "--tasks", tasks, *model, *budget, "--out", out)
    return trajectories(out / "trajectories.jsonl")


def few_keys(place: Path, name: str) -> Found:
    """Two tasks in each grammar, at once, of which those of the web end after two turns."""
    text = "".join(
        make_tasks(place, of_set, split, 0, 2).read_text(encoding="utf-8")
        for of_set, split, _ in MEASURED.values()
    )
    path = place / "few.jsonl"
    path.write_text(text, encoding="utf-8")
    yield "all", evaluated(place, path, "--turns", 2, "--turn-tokens", 80, "--context", 1024)


def many_keys(place: Path, grammar: str) -> Found:
    of_set, split, n = MEASURED[grammar]
    path = make_tasks(place, of_set, split, 0, n, seed=5)
    yield "all", evaluated(place, path, "--turns", 8, "--turn-tokens", 320, "--context", 2048)


def rounded(value: Any) -> Any:
    """Four digits: more would be those of one processor."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def rl_keys(place: Path, name: str) -> Found:
    """Two updates, so that the second's rollouts are by what the first has learnt."""
    from safetensors.torch import load_file

    from tiny_model import make_tiny_model

    model, recipe, out = place / "tiny", place / "rl.toml", place / "rl"
    make_tiny_model(model)
    recipe.touch()
    tasks = make_tasks(place, "atlas-mhqa", "train", 0, 3)
    coa_alone("rl", recipe, *RL, f"rl.model=hf:{model}", f"tasks={tasks}", f"out={out}")
    files = sorted((out / "rollouts").glob("*.jsonl"))
    yield "rollouts", [one for path in files for one in trajectories(path)]
    metrics = [chosen(one, METRICS) for one in lines(out / "metrics.jsonl")]
    yield "metrics", [{name: rounded(one[name]) for name in METRICS} for one in metrics]
    tensors = sorted(load_file(out / "adapter" / "adapter_model.safetensors").items())
    described = [
        [name, list(one.shape), hashlib.sha256(one.float().numpy().tobytes()).hexdigest()]
        for name, one in tensors
    ]
    yield "adapter", described


GROUPS: dict[str, tuple[Callable[[Path, str], Found], tuple[str, ...]]] = {
    "tasks": (task_keys, tuple(SPLITS)),
    "prompts": (prompt_keys, PRESETS),
    "team": (team_keys, tuple(WORKED)),
    "rows": (row_keys, tuple(WORKED)),
    "scripted": (scripted_keys, PRESETS),
    "few": (few_keys, ("afm-135m",)),
    "many": (many_keys, tuple(MEASURED)),
    "rl": (rl_keys, ("tiny",)),
}
"""Group -> what finds its keys, and its parts; a key is GROUP/PART/NAME."""


def found(place: Path, group: str, part: str) -> dict[str, dict[str, Any]]:
    records = GROUPS[group][0](place, part)
    return {f"{group}/{part}/{name}": digest(each) for name, each in records}


def compare(place: Path, group: str, part: str) -> None:
    """Fail with every key of a part that is not as it was."""
    if "gym" in part or (group, part) == ("many", "code") or group == "few":
        pytest.importorskip("reasoning_gym")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    prefix = f"{group}/{part}/"
    expected = {key: one for key, one in golden["keys"].items() if key.startswith(prefix)}
    assert expected, f"golden.json has no key that begins with {prefix}"
    now = found(place, group, part)
    if golden["machine"] != machine():
        for here in (expected, now):
            here.pop("rl/tiny/adapter", None)
    wrong = [
        f"{key}: found {now.get(key)}, expected {expected.get(key)}"
        for key in sorted(expected | now)
        if now.get(key) != expected.get(key) or not now[key]["n"]
    ]
    assert not wrong, "what models see or learn has changed:\n" + "\n".join(wrong)


def need_model(name: str) -> None:
    if not any(line.split()[:2] == [name, "ready"] for line in coa("model", "list").splitlines()):
        pytest.skip("the embedded model is not in the cache: coa model pull")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize("name", SPLITS)
def test_tasks_are_the_same(place: Path, name: str) -> None:
    compare(place, "tasks", name)


@pytest.mark.parametrize("preset", PRESETS)
def test_prompts_are_the_same(place: Path, preset: str) -> None:
    compare(place, "prompts", preset)


@pytest.mark.parametrize("name", WORKED)
def test_episodes_of_the_experts_and_chains_of_them_are_the_same(place: Path, name: str) -> None:
    compare(place, "team", name)


@pytest.mark.parametrize("name", WORKED)
def test_rows_of_fine_tuning_are_the_same(place: Path, name: str) -> None:
    pytest.importorskip("torch")
    need_model("smollm2-135m")
    compare(place, "rows", name)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_rollout_is_told_is_the_same(place: Path, preset: str) -> None:
    compare(place, "scripted", preset)


def test_the_shipped_model_writes_the_same_tokens_on_a_few_tasks(place: Path) -> None:
    pytest.importorskip("torch")
    need_model("afm-135m")
    compare(place, "few", "afm-135m")


@pytest.mark.slow
@pytest.mark.parametrize("grammar", MEASURED)
def test_the_shipped_model_writes_the_same_tokens(place: Path, grammar: str) -> None:
    pytest.importorskip("torch")
    need_model("afm-135m")
    compare(place, "many", grammar)


def test_an_update_of_rl_is_the_same(place: Path) -> None:
    pytest.importorskip("torch")
    compare(place, "rl", "tiny")


def test_every_golden_key_is_of_a_part_that_is_tested() -> None:
    keys = json.loads(GOLDEN.read_text(encoding="utf-8"))["keys"]
    parts = {f"{group}/{part}" for group, (_, parts) in GROUPS.items() for part in parts}
    assert {"/".join(key.split("/")[:2]) for key in keys} == parts
    assert all(one["n"] > 0 for one in keys.values())


def rewrite(wanted: tuple[str, ...]) -> None:
    keys = json.loads(GOLDEN.read_text(encoding="utf-8"))["keys"] if wanted else {}
    with tempfile.TemporaryDirectory() as folder:
        for group, (_, parts) in GROUPS.items():
            for part in parts:
                prefix = f"{group}/{part}/"
                if wanted and not prefix.startswith(wanted):
                    continue
                keys = {key: one for key, one in keys.items() if not key.startswith(prefix)}
                keys |= found(Path(folder), group, part)
                print(prefix, flush=True)
    rows = ",\n".join(f'  "{key}": {json.dumps(keys[key])}' for key in sorted(keys))
    text = f'{{"machine": "{machine()}", "keys": {{\n{rows}\n}}}}\n'
    GOLDEN.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    rewrite(tuple(sys.argv[1:]))
