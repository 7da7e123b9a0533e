"""What a speedrun may be told, and what it says to what it cannot do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.environments import SETS
from coa.errors import CoaError, ConfigError, UsageError
from coa.io.runs import Json
from coa.io.settings import to_json, without_speed
from coa.lab.speedrun import TASKS, _make_tasks, run_speedrun
from coa.lab.speedrun_recipe import MeasuredPart, TaskPart, read_speedrun_recipe
from coa.tasks import Task
from coa.train.rl_stage import among
from coa.train.settings import PRESETS


def message(*overrides: str) -> str:
    with pytest.raises(CoaError) as caught:
        read_speedrun_recipe(None, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_full_recipe_is_over_three_sets_and_measures_every_split() -> None:
    recipe = read_speedrun_recipe(None, [], full=True)
    three = {"atlas-mhqa", "atlas-web", "gym-code"}
    assert {part.set for part in recipe.tasks} == {*three, "atlas-wide", "atlas-reworded"}
    for parts in (recipe.rl_tasks, recipe.check_tasks):
        assert {part.set for part in parts} == three
    measured = {(part.set, part.split) for part in recipe.measure if len(part.models) == 4}
    assert measured == {
        ("atlas-mhqa", "heldout_entity"),
        ("atlas-mhqa", "heldout_family"),
        ("atlas-web", "heldout_entity"),
        ("gym-code", "heldout_seed"),
        ("gym-code", "heldout_generator"),
    }
    assert {part.observations for part in recipe.measure} == {"real", "closed_book", "wrong"}


@pytest.mark.parametrize("full", [False, True])
def test_nothing_is_measured_in_a_world_that_was_trained_in_but_the_real_one(full: bool) -> None:
    recipe = read_speedrun_recipe(None, [], full=full)
    learnt = {w for parts in (recipe.tasks, recipe.rl_tasks) for p in parts for w in p.worlds}
    chosen = {world for part in recipe.check_tasks for world in part.worlds}
    measured = {world for part in recipe.measure for world in part.worlds}
    assert measured & (learnt | chosen) == {0} and len(measured) > 1
    assert {p.seed for p in recipe.tasks}.isdisjoint(p.seed for p in recipe.rl_tasks)


def test_deterministic_is_one_word_for_every_stage() -> None:
    recipe = read_speedrun_recipe(None, ["deterministic=true"])
    assert recipe.sft.deterministic and recipe.rl.deterministic and recipe.eval.deterministic
    recipe = read_speedrun_recipe(None, [])
    assert not (recipe.sft.deterministic or recipe.rl.deterministic or recipe.eval.deterministic)


def test_the_loss_is_that_of_its_preset_with_what_the_recipe_changes() -> None:
    loss = read_speedrun_recipe(None, []).rl.loss
    assert to_json(loss) == to_json(PRESETS["dapo"]) | {"old": "sampler"}
    loss = read_speedrun_recipe(None, ["rl.preset=grpo", "rl.loss.kl=0.5"]).rl.loss
    assert (loss.normalise, loss.kl, loss.old) == ("sequence", 0.5, "sampler")
    recipe = read_speedrun_recipe(None, ["rl.preset=dr_grpo"])
    assert recipe.rl.loss.constant_length == recipe.rollout.tokens


def test_what_goes_with_one_preset_only_is_judged_by_that_preset(tmp_path: Path) -> None:
    alone = "rl.group_size=1"  # nothing to compare with: right for PPO, and for no other
    path = tmp_path / "mine.toml"
    path.write_text("[rl]\npreset = 'ppo'\n")
    assert read_speedrun_recipe(None, ["rl.preset=ppo", alone]).rl.loss.baseline == "value"
    assert read_speedrun_recipe(path, [alone]).rl.loss.baseline == "value"
    assert "which compare the rollouts of a task" in message(alone)
    assert "rl.preset: found 'pop', expected one of grpo" in message("rl.preset=pop")


def test_a_stage_without_tasks_is_left_out_and_so_are_its_rows() -> None:
    recipe = read_speedrun_recipe(None, ["rl_tasks=[]"])
    assert recipe.trained == ("sft",)
    first, second, *_ = recipe.measure
    assert recipe.measured(first) == ("team", "base", "sft")
    assert recipe.measured(second) == ("sft",), "the one that comes out at the end"
    assert read_speedrun_recipe(None, ["tasks=[]"]).trained == ("rl",)
    assert not any("RL" in line for line in recipe.plan())


def test_a_recipe_of_ones_own_replaces_tables_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[tasks]]\nset = "gym-code"\nn = 7\n[rl]\nupdates = 9\n')
    recipe = read_speedrun_recipe(path, ["tasks.0.seed=4"])
    assert recipe.tasks == (TaskPart("gym-code", n=7, seed=4),)
    assert recipe.rl.updates == 9 and recipe.rl.tasks_per_update == 12


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["sft.learning_rate=1"], "sft.learning_rate is not a setting."),
        (["tasks.0.set=atlas"], "tasks.0: set is 'atlas'."),
        (["tasks.0.worlds=[]"], "tasks.0: worlds is [], expected one or more, all different."),
        (["tasks.0.worlds=[1, 1]"], "worlds is [1, 1], expected one or more, all different."),
        (["tasks.0.n=1"], "tasks.0: n is 1, expected a task for each world at least."),
        (["tasks.0.n=many"], "tasks.0.n is 'many', expected an integer."),
        (["tasks.1.n=3"], "tasks is a list, found '1', expected 0 to 0."),
        (["measure.0.split=train"], "measure.0: split is 'train', expected one that is held out."),
        (["measure.0.models=['me']"], "measure.0.models is ['me'], expected a list"),
        (["measure.0.name=!"], "measure.0: name is '!', expected one with letters or digits."),
        (
            ["measure.0.name=RL"],
            "measure.0: name is 'RL', expected another than train, rl, check, all.",
        ),
        (["measure.0.observations=lost"], "'lost'"),
        (["measure.1.name=Wrong Passages"], "two of them have the name 'Wrong Passages'."),
        (["tasks=[]", "rl_tasks=[]"], "there is nothing to learn from."),
        (["sft.full=true"], "a speedrun makes an adapter; expected false."),
        (["rl.model=hf:me/mine"], "rl.model is 'hf:me/mine', but RL starts where fine-tuning"),
        (["check.tasks=a.jsonl"], "check.tasks: expected tables [[check_tasks]] instead."),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(overrides: list[str], expected: str) -> None:
    assert expected in message(*overrides)


def test_a_family_of_another_split_is_refused_before_anything_is_trained(
    tiny_model: Path, tmp_path: Path
) -> None:
    overrides = [f"sft.model=hf:{tiny_model}", "measure.0.families=['smallest_neighbour']"]
    with pytest.raises(UsageError, match="does not belong to split 'heldout_entity'"):
        run_speedrun(tmp_path / "run", None, overrides, lambda note: None)
    assert not (tmp_path / "run").exists(), "so that the recipe can be mended"


def test_weights_are_not_chosen_by_tasks_that_are_trained_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    same = "[{families=['country_capital'], n=4, seed=9}]"
    overrides = [f"sft.model=hf:{tiny_model}", f"rl_tasks={same}", f"check_tasks={same}"]
    with pytest.raises(ConfigError, match="check_tasks: RL trains on every one of them"):
        run_speedrun(tmp_path / "run", None, overrides, lambda note: None)


def test_nothing_is_measured_that_would_be_trained_on() -> None:
    same = ["tasks.0.split=heldout_entity", "tasks.0.worlds=[0]", "tasks.0.seed=5"]
    with pytest.raises(ConfigError) as caught:
        _make_tasks(read_speedrun_recipe(None, same))
    assert re.match(
        r"measure 'held-out entities': \d+ of its 200 tasks would be trained on, the first is "
        r"\S+\. Choose another split or seed\.$",
        str(caught.value),
    )


def test_a_task_that_two_parts_ask_for_is_trained_on_once() -> None:
    few, more = (f"{{families=['country_capital'], n={n}, seed=9}}" for n in (4, 6))
    parts = (_make_tasks(read_speedrun_recipe(None, [f"tasks=[{p}]"])) for p in (more, few))
    whole, part = ([task.id for task in made[TASKS]] for made in parts)
    recipe = read_speedrun_recipe(None, [f"tasks=[{few}, {more}]"])
    both = [task.id for task in _make_tasks(recipe)[TASKS]]
    assert {*both} == {*part, *whole} and len(both) == len({*both}) < len(part) + len(whole)


def test_another_spelling_of_the_answer_makes_no_other_task() -> None:
    trained = [Task("Capital of Peru?", ("Lima",)), Task("Open?")]
    same = [Task("Capital of Peru?", ("City of Lima", "Lima")), Task("Open?")]
    other = [Task("Capital of Peru?", ("Quito",)), Task("Capital of Chile?", ("Lima",))]
    assert among([*same, *other], trained) == same


def test_a_model_on_a_server_is_refused_before_there_is_a_directory(tmp_path: Path) -> None:
    served = "sft.model=openai:m@http://localhost/v1"
    with pytest.raises(ConfigError, match="expected one whose weights are here"):
        run_speedrun(tmp_path / "run", None, [served], lambda note: None)
    assert not (tmp_path / "run").exists()


def test_a_run_may_go_on_with_other_threads_and_without_an_alarm_but_not_otherwise() -> None:
    def counts(*overrides: str) -> Json:
        return without_speed(to_json(read_speedrun_recipe(None, overrides)))

    free = ["alarms.reward_drop=0", "rl.threads=1", "eval.concurrency=8", "rollout.seconds=9"]
    for same in (*free, "rl.micro_tokens=99", "sft.checkpointing=true", "sft.checkpoint_every=3"):
        assert counts(same) == counts()
    for other in ("rl.updates=7", "rollout.turns=7", "eval.turns=7", "teacher.seed=1"):
        assert counts(other) != counts()


@settings(deadline=None, max_examples=20)
@given(
    name=st.sampled_from(["atlas-mhqa", "atlas-web"]),
    worlds=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
    more=st.integers(0, 20),
)
def test_tasks_are_spread_evenly_over_worlds_and_all_are_there(
    name: str, worlds: list[int], more: int
) -> None:
    part = TaskPart(name, n=len(worlds) + more, worlds=tuple(worlds))
    made = part.make()
    counts = [sum(task.meta.get("world", 0) == world for task in made) for world in worlds]
    assert sum(counts) == len(made) == part.n
    assert max(counts) - min(counts) <= 1
    assert len({task.id for task in made}) == part.n


@settings(deadline=None)
@given(st.text())
def test_a_measurement_of_any_name_has_a_safe_file_name_or_is_refused(name: str) -> None:
    try:
        slug = MeasuredPart(name=name).slug
    except ConfigError as wrong:
        assert str(wrong).startswith(f"name is {name!r}, expected ")
    else:
        assert slug and set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_every_set_has_a_cost_to_estimate_by() -> None:
    for name in SETS:
        recipe = read_speedrun_recipe(None, [f"tasks.0={{set='{name}', n=8}}"])
        *_, last = recipe.plan()
        assert "about" in last and "on two cores" in last
