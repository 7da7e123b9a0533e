"""`coa rl`: recipes and their presets, what is refused before it costs anything, the command."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from coa.cli import app  # noqa: E402
from coa.engines.scripted import ScriptedEngine  # noqa: E402
from coa.environment import Environment, open_environments  # noqa: E402
from coa.environments import make_tasks  # noqa: E402
from coa.errors import CoaError, ConfigError, TrainingError, UsageError  # noqa: E402
from coa.io.settings import find_recipe, to_json  # noqa: E402
from coa.loop import Budget, Decoding  # noqa: E402
from coa.tasks import Task, TaskSet  # noqa: E402
from coa.train.policy import Policy  # noqa: E402
from coa.train.processes import Processes  # noqa: E402
from coa.train.rl_stage import (  # noqa: E402
    _make_sampler,
    evaluate_policy,
    load_sampler,
    load_tasks,
    nothing_learnt,
    read_rl_recipe,
    run_rl,
)
from coa.train.settings import PRESETS, RlSettings, advice, ignored, preset  # noqa: E402
from rl_parts import Failed, Told, make_sampler, opened, questions  # noqa: E402
from rl_worker import TINY, settings, tiny_tasks  # noqa: E402
from test_rl import lines, train  # noqa: E402


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_gives_the_loss_and_the_recipe_changes_it(tmp_path: Path, name: str) -> None:
    text = f'[rl]\npreset = "{name}"\n[rl.loss]\nclip_low = 0.1\n'
    found = read_rl_recipe(written(tmp_path / "a.toml", text), ["rl.loss.std_epsilon=0.5"]).rl.loss
    expected = to_json(preset(name)) | {"clip_low": 0.1, "std_epsilon": 0.5}
    if name == "dr_grpo":
        expected["constant_length"] = 2048
    assert to_json(found) == expected


def test_a_preset_by_override_wins_over_the_recipes(tmp_path: Path) -> None:
    recipe = written(tmp_path / "a.toml", '[rl]\npreset = "grpo"\n')
    for text in ("rl.preset=gspo", 'rl.preset="gspo"', "rl.preset = gspo"):
        assert read_rl_recipe(recipe, [text]).rl.loss == preset("gspo")
    assert read_rl_recipe(None, []).rl.loss == preset("dapo")


def test_dr_grpo_divides_by_the_most_tokens_of_a_rollout_unless_told_otherwise() -> None:
    chosen = ["rl.preset=dr_grpo", "rollout.tokens=300"]
    assert read_rl_recipe(None, chosen).rl.loss.constant_length == 300
    more = [*chosen, "rl.loss.constant_length=7"]
    assert read_rl_recipe(None, more).rl.loss.constant_length == 7


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rl.preset=grop"], r"rl\.preset: found 'grop', expected one of .*grpo"),
        (["rl.group_size=1"], r"rl\.group_size: found 1 with baseline 'group'"),
        (["rl.preset=rloo", "rl.group_size=1"], r"found 1 with baseline 'leave_one_out'"),
        (["rollout.temperature=0"], r"rollout\.temperature: found 0.* more than 0"),
        (["rl.updates=0"], r"rl\.updates: found 0, expected at least 1"),
        (["rl.loss.clip_hihg=1"], r"rl\.loss\.clip_hihg is not a setting.*clip_high"),
        (["rl.lr=nan"], r"rl\.lr: found nan, expected more than 0"),
        (["rl=3"], r"rl"),
        (["rl.refills=-1"], r"rl\.refills: found -1, expected 0 or more"),
        (["rl.alpha=0"], r"rl\.alpha: found 0.*, expected more than 0"),
        (["rl.threads=0"], r"rl\.threads: found 0, expected more than 0"),
        (["rl.warmup=2"], r"rl\.warmup: found 2.*, expected between 0 and 1"),
        (["rl.grad_clip=0"], r"rl\.grad_clip: found 0.*, expected more than 0"),
        (["rl.weight_decay=nan"], r"rl\.weight_decay: found nan, expected 0 or more"),
        (["rollout.seconds=0"], r"rollout\.seconds: found 0.*, expected more than 0"),
        (["rollout.malformed=-1"], r"rollout\.malformed: found -1, expected 0 or more"),
        (["check.every=0"], r"check\.every: found 0, expected at least 1"),
        (["check.samples=0"], r"check\.samples: found 0, expected at least 1"),
        (["check.temperature=-1"], r"check\.temperature: found -1.*, expected 0"),
        (["rollout.engine=openai:m@u", "rl.deterministic=true"], r"rl\.deterministic: a server"),
        (["rollout.engine=openai:m@u", "rl.full=true"], r"rl\.full: a server takes new weights"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        read_rl_recipe(None, overrides)
    assert "\n" not in str(raised.value)


def test_a_run_that_took_no_step_does_not_end_like_one_that_did(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"update": 1, "rows": 0}\n{"update": 2, "rows": 0}\n')
    assert "in none of 2 updates was there a row to learn from" in nothing_learnt(tmp_path)
    metrics.write_text(metrics.read_text() + '{"update": 3, "rows": 4, "loss": 0.1}\n')
    assert nothing_learnt(tmp_path) == ""


def test_a_recipe_whose_rl_is_no_table_is_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.toml"):
        read_rl_recipe(written(tmp_path / "a.toml", "rl = 3\n"), [])


def test_one_rollout_of_a_task_is_enough_where_nothing_is_compared() -> None:
    assert RlSettings(loss=preset("ppo"), group_size=1).group_size == 1
    assert not RlSettings(loss=preset("ppo")).compares
    with pytest.raises(ConfigError, match="scale 'group'"):
        RlSettings(loss=preset("dapo", baseline="none"), group_size=1)


class Text(ScriptedEngine):
    """A server that speaks text: its ids are not those that were sampled."""

    exact = False


def text_server(reference: str, **options: Any) -> Text:
    return Text([])


def test_a_server_whose_ids_are_not_the_sampled_ones_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import coa.train.rl_stage as stage

    monkeypatch.setattr(stage, "load_engine", text_server)
    recipe = read_rl_recipe(None, ["rollout.engine=openai:m@http://127.0.0.1:9/v1"])
    with pytest.raises(ConfigError, match=r"rollout\.engine: .*does not exchange token ids"):
        load_sampler(recipe, None)  # type: ignore[arg-type]


def raw_server(reference: str, **options: Any) -> Raw:
    return Raw([])


class Raw(ScriptedEngine):
    """A server whose logprobs are those before temperature."""

    exact, tempered = True, False

    async def load(self, adapter: Any, version: str) -> None: ...


def test_logprobs_before_temperature_are_those_sampled_from_only_at_temperature_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import coa.train.rl_stage as stage

    monkeypatch.setattr(stage, "load_engine", raw_server)
    asked = ["rollout.engine=openai:m@http://127.0.0.1:9/v1"]
    load_sampler(read_rl_recipe(None, asked), None)  # type: ignore[arg-type]
    warm = read_rl_recipe(None, [*asked, "rollout.temperature=0.8"])
    with pytest.raises(
        ConfigError, match=r"rollout\.temperature: found 0\.8, .*before temperature"
    ):
        load_sampler(warm, None)  # type: ignore[arg-type]


def test_the_processes_of_a_machine_share_it_when_they_sample(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch's threads each has its part, and of the memory for keys and values."""
    import coa.engines.local as local
    import coa.io.machine as machine

    each = 2 * 2 * 2 * 64 * 4 * 512 / 1e9  # K and V, layers, heads, padded dimension, bytes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(machine, "cores", lambda: 9)
    monkeypatch.setattr(local, "memory_gb_of_machine", lambda: 4 * 3 * 5.5 * each)
    recipe = read_rl_recipe(None, ["rl.dtype=float32", "rollout.context=512"])
    before = torch.get_num_threads()
    try:
        engine: Any = load_sampler(recipe, SimpleNamespace(base=f"hf:{tiny_model}"))  # type: ignore[arg-type]
        assert (torch.get_num_threads(), engine.slots) == (3, 5)
        asyncio.run(engine.close())
    finally:
        torch.set_num_threads(before)


async def test_an_evaluation_in_which_the_world_fails_is_no_zero(tmp_path: Path) -> None:
    """A few failures count as failed, and are said; many end the run, and are made again."""
    tasks = questions(12)
    dead = {tasks[0].question, tasks[5].question}
    engine = Told([t.question for t in tasks], lambda q, draw: "fail" if q in dead else "1")
    sampler = make_sampler(tasks, engine, tmp_path / "rollouts")
    held_out = TaskSet(tuple(tasks), "held out")
    check = partial(evaluate_policy, read_rl_recipe(None, []), held_out, sampler)
    with pytest.raises(TrainingError, match=r"ended 2 of 12 rollouts, the first by: .*out of mem"):
        await check(tmp_path / "checks")
    dead.remove(tasks[5].question)
    found = await check(tmp_path / "checks")
    assert (found["eval_n"], found["eval_environment"]) == (12, round(1 / 12, 4))
    assert found["eval_accuracy"] == round(11 / 12, 4)
    assert len(engine.keys) == 12 + 2, "what had ended is not made again"


IDLE = [
    (["rl.value_lr=0.1"], "rl.value_lr = 0.1 is ignored: rl.loss.baseline is 'group', so there"),
    (["rl.loss.lam=0.9"], "rl.loss.lam = 0.9 is ignored: rl.loss.baseline is 'group'"),
    (["rl.preset=ppo", "rl.refills=5"], "rl.refills = 5 is ignored: the loss compares no groups"),
    (["rl.full=true", "rl.rank=8"], "rl.rank = 8 is ignored: rl.full trains all weights"),
    (
        ["rl.model=a+b", "rl.rank=8"],
        "rl.rank = 8 is ignored: the adapter of rl.model keeps its own",
    ),
    (["rl.loss.kl_estimator=k2"], 'rl.loss.kl_estimator = "k2" is ignored: rl.loss.kl is 0'),
    (
        ["rl.loss.kl=0.1", "rl.loss.kl_place=reward", "rl.loss.kl_reweighted=true"],
        "rl.loss.kl_reweighted = true is ignored: there is no KL in the loss",
    ),
    (["rl.loss.correction_cap=3"], "rl.loss.correction_cap = 3.0 is ignored: rl.loss.correction"),
    (["rl.loss.constant_length=9"], "rl.loss.constant_length = 9 is ignored: rl.loss.normalise"),
    (["rl.loss.scale=none", "rl.loss.std_epsilon=1"], "rl.loss.std_epsilon = 1.0 is ignored: no"),
    (
        ["rl.loss.overlong_buffer=0", "rl.loss.overlong_penalty=2"],
        "rl.loss.overlong_penalty = 2.0 is ignored: rl.loss.overlong_buffer is 0",
    ),
    (["select.least=0.1"], "select.least = 0.1 is ignored: select.samples is 0"),
    (["select.no_tool_most=0.1"], "select.no_tool_most = 0.1 is ignored: select.no_tool_samples"),
    (["check.every=3"], "check.every = 3 is ignored: check.tasks is not set"),
    (
        ["rollout.engine=openai:m@u", "rollout.memory_gb=3"],
        "rollout.memory_gb = 3.0 is ignored: rollout.engine is a server",
    ),
    (["rollout.seeded=true"], "rollout.seeded = true is ignored: the engine in this process"),
]


@pytest.mark.parametrize(("overrides", "said"), IDLE)
def test_a_setting_that_does_nothing_is_said_to(overrides: list[str], said: str) -> None:
    (line,) = ignored(read_rl_recipe(None, overrides))
    assert line.startswith(said)


class Seeds(Told):
    """Notes whether a server would have been told the seed."""

    seen: frozenset[bool] = frozenset()

    async def generate(self, prompt_ids: Any, sampling: Any, on_text: Any = None) -> Any:
        self.seen |= {sampling.seeded}
        return await super().generate(prompt_ids, sampling, on_text)


async def test_an_evaluation_is_seeded_and_what_the_clock_ended_scores_0(tmp_path: Path) -> None:
    tasks = TaskSet(tuple(questions(12)), "asked")
    slow = tasks[3].question
    engine = Seeds([t.question for t in tasks], lambda asked, _: "hang" if asked == slow else "1")
    how: dict[str, Any] = {"budget": Budget(seconds=1), "opened": opened(Failed())}
    how["decoding"] = Decoding(temperature=1.0, seed=3, seeded=False)
    sampler = make_sampler(tasks, engine, tmp_path, **how)
    found = await evaluate_policy(read_rl_recipe(None, []), tasks, sampler, tmp_path / "check")
    assert found["eval_accuracy"] == pytest.approx(11 / 12, abs=1e-4)
    assert found["eval_environment"] == pytest.approx(1 / 12, abs=1e-4)
    assert engine.seen == {True}
    await sampler.draw(1, 0, 1, refills=0)
    assert engine.seen == {True, False}, "and the rollouts of RL are not"


@pytest.mark.parametrize(
    ("overrides", "seeded"),
    [([], True), (["rollout.engine=openai:m@u"], False),
     (["rollout.engine=openai:m@u", "rollout.seeded=true"], True)],
)  # fmt: skip
def test_a_server_gets_seeds_only_if_asked(overrides: list[str], seeded: bool) -> None:
    engine: Any = Told([], lambda *_: "1")
    recipe, tasks = read_rl_recipe(None, overrides), TaskSet(tuple(questions(1)), "asked")
    sampler = _make_sampler(recipe, tasks, engine, opened(), "compact", Processes())
    assert sampler.decoding.seeded == seeded


def test_a_server_without_a_correction_is_spoken_of() -> None:
    server = "rollout.engine=openai:m@u"
    (line,) = advice(read_rl_recipe(None, [server]))
    assert line.startswith("rl.loss.correction is 'none', and a server computes other")
    for overrides in ([], [server, "rl.loss.correction=token"]):
        assert list(advice(read_rl_recipe(None, overrides))) == []


CLONE = sorted((Path(__file__).parents[1] / "recipes").glob("rl-*.toml"))


@pytest.mark.parametrize("recipe", [find_recipe("rl-135m"), *CLONE], ids=lambda path: path.stem)
def test_every_setting_of_a_shipped_recipe_does_something(recipe: Path) -> None:
    read = read_rl_recipe(recipe, [])
    assert list(ignored(read)) == [] and list(advice(read)) == []


def test_a_preset_alone_sets_nothing_that_is_idle() -> None:
    for name in PRESETS:
        assert list(ignored(read_rl_recipe(None, [f"rl.preset={name}"]))) == []
    changed = ["rl.preset=ppo", "rl.loss.baseline=group"]
    assert list(ignored(read_rl_recipe(None, changed))) == []


def test_what_is_ignored_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    heard: list[str] = []
    tasks = tiny_tasks(tmp_path / "tasks.jsonl")
    recipe = read_rl_recipe(None, [f"tasks={tasks}", "rl.model=hf:none", "rl.loss.lam=0.5"])
    with pytest.raises(CoaError, match="none"):
        run_rl(recipe, note=heard.append, quiet=True)
    assert heard == list(ignored(recipe)) and len(heard) == 1


def test_tasks_without_gold_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    TaskSet((Task("Who knows?", id="open"),), "open").save(path)
    recipe = read_rl_recipe(None, [f"tasks={path}", "reward.expression=exact", "rl.model=hf:none"])
    with pytest.raises(UsageError, match=r"task open has no gold answer.*'exact' cannot judge it"):
        run_rl(recipe, quiet=True)
    path.write_text("")
    with pytest.raises(CoaError, match="holds no task"):
        run_rl(recipe, quiet=True)


def test_each_task_finds_its_environment_where_it_is_measured_in_another(tmp_path: Path) -> None:
    files = {"atlas-mhqa": tmp_path / "a.jsonl", "atlas-web": tmp_path / "b.jsonl"}
    for name, path in files.items():
        make_tasks(name, "train", 2, 0).save(path)
    asked = [f"tasks={files['atlas-mhqa']}", f"check.tasks={files['atlas-web']}"]
    environments, tasks, check = load_tasks(read_rl_recipe(None, asked), (), lambda line: None)

    async def homes() -> list[str]:
        async with open_environments(environments, [*tasks, *(check or ())]) as opened:
            return [opened.of(task).name for task in (*tasks, *(check or ()))]

    assert asyncio.run(homes()) == ["atlas-mhqa"] * 2 + ["atlas-web"] * 2


def test_an_environment_trains_on_its_own_tasks_and_is_measured_with_another_split() -> None:
    first, second = questions(5)[:3], questions(5)[3:]
    env = Environment("own", tasks={"train": first, "test": second})
    recipe = read_rl_recipe(None, ["check.split=test"])
    _, tasks, check = load_tasks(recipe, env, lambda line: None)
    assert ([*tasks], [*(check or ())]) == (first, second)
    assert load_tasks(read_rl_recipe(None, []), env, lambda line: None)[2] is None
    mixed = Environment("own", tasks={"train": first, "test": [*second, first[0]]})
    with pytest.raises(ConfigError, match=r"test: task t0 is in train, too, and so are 1 of 3"):
        load_tasks(recipe, mixed, lambda line: None)


def test_the_tasks_are_selected_by_the_model_that_is_trained(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It starts from an adapter; the bare base would find other tasks worth training on."""
    train(tiny_model, tmp_path / "first", "rl.updates=3")
    adapter = tmp_path / "first" / "adapter"
    out = tmp_path / "second"
    more = [f"rl.model=hf:{tiny_model}+{adapter}", "select.samples=4", "rl.updates=1"]
    train(tiny_model, out, *more)
    rates = [line["rate"] for line in lines(out, "selection.jsonl")]
    trained = [line["reward"] for line in lines(tmp_path / "first")]
    assert min(rates) > trained[0], "these are rollouts of the start, which has learnt"


RECIPE = """
tasks = "{tasks}"
out = "{out}"
grammar = "search_r1"
prompt = "compact"
[rl]
model = "hf:{model}"
rank = 4
updates = 1
tasks_per_update = 2
group_size = 2
threads = 1
void_turns = "keep"
[reward]
expression = "rl_worker:vowels"
[rollout]
turns = 1
turn_tokens = 8
tokens = 8
context = 256
"""


def test_the_command_trains_and_prints_where_the_adapter_is(
    tiny_model: Path, tmp_path: Path
) -> None:
    tasks, out = tiny_tasks(tmp_path / "tasks.jsonl"), tmp_path / "run"
    text = RECIPE.format(tasks=tasks, out=out, model=tiny_model)
    recipe = str(written(tmp_path / "r.toml", text))
    done = CliRunner().invoke(app, ["rl", recipe], catch_exceptions=False)
    assert done.exit_code == 0 and done.stdout.strip() == str(out / "adapter")
    Policy(f"hf:{tiny_model}+{out / 'adapter'}")
    again = CliRunner().invoke(app, ["rl", recipe], catch_exceptions=False)
    assert again.exit_code == 0 and "is finished already" in again.stderr


def test_what_is_wrong_with_a_command_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from coa.cli import main

    recipe = written(tmp_path / "r.toml", '[rl]\nmodel = "smollm2-135m"\n')
    cases = {
        (): r"r\.toml: neither env nor tasks is set; name an environment, or a task file with gold",
        ("rl.group_sise=3",): r"rl\.group_sise is not a setting\. Did you mean 'group_size'",
        ("tasks=none.jsonl",): r"none\.jsonl: no such file",
    }
    for overrides, said in cases.items():
        monkeypatch.setattr("sys.argv", ["coa", "rl", str(recipe), *overrides])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr().err.strip()
        assert ended.value.code == 2 and "\n" not in told and re.search(said, told), told


def test_the_small_run_of_these_tests_is_a_valid_recipe(tiny_model: Path, tmp_path: Path) -> None:
    recipe = read_rl_recipe(None, settings(tiny_model, tmp_path / "run"))
    assert recipe.rl.deterministic and len(TINY) > 10
