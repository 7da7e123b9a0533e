"""Studies: pooled differences, settings and plans, what arms have in common, the command."""

from __future__ import annotations

import json
import random
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from coa.cli import app
from coa.engines.scripted import ByteCodec
from coa.environments import make_tasks
from coa.errors import CoaError, ConfigError, RecordError, UsageError
from coa.grammar import load_grammar
from coa.io.runs import Json, dumps
from coa.io.settings import to_json, without_speed
from coa.lab.speedrun_recipe import read_speedrun_recipe
from coa.lab.studies import (
    STUDIES,
    as_overrides,
    find_study,
    plan_study,
    run_study,
    study_plan_lines,
)
from coa.lab.study_arms import (
    Tables,
    first,
    held_out,
    lines,
    measure,
    pooled,
    train,
    verdict,
    with_tokens,
)
from coa.lab.study_training import judge, within
from coa.models.bases import BASE
from coa.models.references import OURS
from coa.models.weights import MANIFEST
from coa.statistics import wilson
from coa.tasks import TaskSet
from coa.train.rows import build_row
from coa.train.settings import SftSettings
from coa.trajectory import Author, Segment, Trajectory

FEW = 400

# -- pooled over seeds -----------------------------------------------------------------------


def test_a_difference_that_every_task_and_seed_shows_has_no_width() -> None:
    assert pooled([[0.25] * 30] * 3, FEW)[:3] == (0.25, 0.25, 0.25)


def test_what_seeds_change_is_in_the_interval() -> None:
    """Three seeds that disagree are less certain than three that agree on the same tasks."""
    alike = pooled([[0.0] * 100 + [1.0] * 100] * 3, FEW)
    apart = pooled([[0.0] * 200, [0.5] * 200, [1.0] * 200], FEW)
    assert alike.value == apart.value == 0.5
    assert apart.high - apart.low > 2 * (alike.high - alike.low)
    assert (apart.low, apart.high) == (0.0, 1.0)  # as if one seed were drawn three times


def test_one_seed_gives_the_usual_interval_over_tasks() -> None:
    values = [float(i % 10) for i in range(400)]
    found = pooled([values], 4000)
    mean = sum(values) / 400
    error = (sum((x - mean) ** 2 for x in values) / 400 / 400) ** 0.5
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.03)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.03)


def test_the_interval_holds_what_it_should_about_as_often_as_it_says() -> None:
    """Seeds and tasks drawn anew 150 times: with ten seeds the true mean is inside nearly 95%."""
    rng, inside = random.Random(3), 0
    for _ in range(150):
        tasks = [rng.gauss(0, 1) for _ in range(40)]
        table = [[t + s + rng.gauss(0, 0.5) for t in tasks] for s in _draws(rng, 10)]
        found = pooled(table, 200)
        inside += found.low <= 0 <= found.high
    assert 0.85 <= inside / 150 <= 0.99, inside


def _draws(rng: random.Random, count: int) -> list[float]:
    return [rng.gauss(0, 0.3) for _ in range(count)]


@given(
    st.lists(
        st.lists(st.floats(-1, 1), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    )
)
def test_an_interval_is_in_order_and_within_the_values(table: list[list[float]]) -> None:
    found = pooled(table, 20)
    least, most = min(map(min, table)), max(map(max, table))
    assert least - 1e-9 <= found.low <= found.high <= most + 1e-9


def arm(*rows: str) -> dict[int, dict[str, float]]:
    return {seed: {f"t{i}": float(x) for i, x in enumerate(row)} for seed, row in enumerate(rows)}


def test_differences_are_paired_by_task_and_every_seed_is_told() -> None:
    found = measure({"a": arm("1100", "1110"), "b": arm("0100", "1101")}, "b", FEW)
    assert found["arms"]["a"]["by_seed"] == [0.5, 0.75]
    difference = found["differences"]["a"]
    assert difference["value"] == 0.125 and difference["by_seed"] == [0.25, 0.0]
    assert (difference["above"], difference["below"]) == (2, 1)
    assert "b" not in found["differences"] and found["arms"]["b"]["n"] == 4


def test_pairing_takes_out_what_both_arms_share() -> None:
    rng = random.Random(1)
    hard = [float(rng.random() < 0.5) for _ in range(200)]
    text = "".join(str(int(x)) for x in hard)
    better = "1" * 10 + text[10:]
    found = measure({"a": arm(better, better), "b": arm(text, text)}, "b", FEW)
    difference, alone = found["differences"]["a"]["ci95"], found["arms"]["b"]["ci95"]
    assert difference[1] - difference[0] < 0.5 * (alone[1] - alone[0])


def test_seeds_that_only_made_the_tasks_are_one_sample() -> None:
    first_half, second = arm("1100")[0], {"u0": 1.0, "u1": 0.0}
    found = measure({"a": {0: first_half, 1: second}}, "a", FEW, rerun=False)["arms"]["a"]
    assert found["n"] == 6 and found["value"] == 0.5 and found["by_seed"] == [0.5, 0.5]


def test_that_no_task_was_solved_is_not_known_for_certain_of_all_tasks() -> None:
    """A bootstrap of zeros has no width; counts and differences are no shares and keep it."""
    arms = {"a": arm("1" * 50, "1" * 50), "b": arm("0" * 50, "0" * 50)}
    found = measure(arms, "b", FEW)
    low, high = wilson(0, 50)[1:3]
    assert found["arms"]["b"]["ci95"] == [0.0, round(high, 5)] and low == 0 < high
    assert found["arms"]["a"]["ci95"] == [round(1 - high, 5), 1.0]
    assert found["differences"]["a"]["ci95"] == [1.0, 1.0]
    assert measure(arms, "b", FEW, share=False)["arms"]["a"]["ci95"] == [1.0, 1.0]


@pytest.mark.parametrize("other", [arm("110", "1100"), arm("1100")])
def test_arms_on_other_tasks_are_refused(other: dict[int, dict[str, float]]) -> None:
    with pytest.raises(RecordError, match=r"arms 'b' and 'a' were not measured on the same tasks"):
        measure({"a": arm("1100", "1110"), "b": other}, "a")


def test_a_verdict_needs_an_interval_on_one_side_of_nothing() -> None:
    said = [verdict({"ci95": bounds}) for bounds in ([0.01, 0.2], [-0.3, -0.1], [-0.1, 0.2])]
    assert said == ["higher", "lower", "not told apart"]


def test_three_seeds_that_disagree_tell_nothing_apart_whatever_the_tasks_say() -> None:
    """All of a resample is one seed more often than one time in forty."""
    solved = {0: 24, 1: 4, 2: 6}
    tasks = [f"t{n}" for n in range(200)]
    better = {seed: {t: float(i < n) for i, t in enumerate(tasks)} for seed, n in solved.items()}
    none = {seed: dict.fromkeys(tasks, 0.0) for seed in solved}
    shown = measure({"a": better, "b": none}, "b", FEW)["differences"]["a"]
    assert shown["ci95"][0] > 0 > shown["seeds_ci95"][0]
    assert verdict(shown) == "not told apart"
    alike = {seed: {t: float(i < 20) for i, t in enumerate(tasks)} for seed in solved}
    assert verdict(measure({"a": alike, "b": none}, "b", FEW)["differences"]["a"]) == "higher"


def test_a_table_shows_arms_seeds_and_differences() -> None:
    tables = Tables()
    for name, rows in {"ours": ("1110", "1111"), "theirs": ("0000", "0010")}.items():
        for seed, scores in arm(*rows).items():
            tables.put("solved", name, seed, scores)
    shown = list(lines("solved", tables.compared("theirs")["solved"]))
    assert shown[0] == "solved, n = 4, each under 2 seeds"
    assert shown[1].split()[:2] == ["ours", "87.5%"] and shown[1].endswith("75.0%  100.0%")
    assert shown[3].startswith("  ours vs theirs") and "+75.0%" in shown[3]
    assert shown[3].endswith("higher: above in 6, below in 0")
    counted = tables.compared("theirs", counts=["solved"])["solved"]
    assert next(iter(lines("calls", counted))) == "calls, n = 4, each under 2 seeds"
    assert list(lines("calls", counted))[1].split()[1] == "0.875"


# -- settings and plans ----------------------------------------------------------------------


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_a_plan_of_hours_at_most(name: str) -> None:
    planned = plan_study(name, [])
    most = 4 * 3600 if name == "rl" else 4500  # six seeds, the others three
    assert 0 < planned["seconds"] < most
    shown = list(study_plan_lines(planned))
    assert shown[0] == f"study {name}: {planned['question']}"
    assert shown[-1].startswith("   about") and "the same command continues" in shown[-1]
    assert json.loads(json.dumps(planned)) == planned


@pytest.mark.parametrize(
    ("name", "seeds"), [("mask", 3), ("react", 3), ("rl", 6), ("unseen-tool", 3)]
)
def test_by_default_there_are_several_seeds_and_two_hundred_held_out_tasks(
    name: str, seeds: int
) -> None:
    settings = STUDIES[name].read([])
    assert len(settings.seeds) == seeds and settings.eval.n >= 200


def test_the_study_of_rl_has_the_settings_of_the_speedrun() -> None:
    study, recipe = STUDIES["rl"].read([]), read_speedrun_recipe(None, [])
    assert (study.rl, study.rollout, study.sft) == (recipe.rl, recipe.rollout, recipe.sft)
    assert study.chains.families == recipe.measure[0].families
    measured = make_tasks("atlas-mhqa", "heldout_entity", 200, 5, families=study.chains.families)
    assert (study.eval.n, study.eval.seed) == (recipe.measure[0].n, recipe.measure[0].seed)
    assert [task.id for task in measured] == [task.id for task in recipe.measure[0].make()]


def test_a_student_is_measured_on_five_hundred_tasks_and_more_work_takes_longer() -> None:
    assert STUDIES["cost"].read([]).student.n >= 500
    alone = plan_study("cost", [])["seconds"]
    assert plan_study("cost", ["student.model=smollm2-135m"])["seconds"] > alone
    assert plan_study("mask", ["seeds=[0]"])["seconds"] < plan_study("mask", [])["seconds"]


@pytest.mark.parametrize("name", ["mask", "rl"])
def test_overriding_one_setting_of_a_part_leaves_the_others(name: str) -> None:
    usual, changed = STUDIES[name].read([]), STUDIES[name].read(["sft.lr=0.5", "eval.n=9"])
    before, after = to_json(usual), to_json(changed)
    before["sft"]["lr"], before["eval"]["n"] = 0.5, 9
    assert before == after


def test_a_preset_of_rl_brings_its_loss() -> None:
    settings = STUDIES["rl"].read(["rl.preset=grpo", "rl.updates=3"])
    assert settings.rl.loss.kl > 0 and settings.rl.updates == 3
    assert STUDIES["rl"].read([]).rl.loss.kl == 0


@pytest.mark.parametrize(
    ("name", "override", "said"),
    [
        ("mask", "seeds=[1, 1]", r"seeds: found \[1, 1\], expected different numbers"),
        ("mask", "sft.observation_weight=1", r"is what this study compares"),
        ("mask", "unstopped_tokens=0", r"unstopped_tokens: found 0, expected at least 1"),
        ("mask", "eval.nn=3", r"eval\.nn is not a setting"),
        ("mask", "eval.n=0", r"eval\.n: found 0, expected at least 1"),
        ("react", "budgets=[0]", r"budgets: found \[0\], expected numbers above 0"),
        ("react", "chains.rows=0", r"chains: found rows 0"),
        ("rl", "rl.preset=x", r"rl\.preset: found 'x'"),
        ("rl", "more=0", r"more: found 0, expected at least 1"),
        ("rl", "more_worlds=[]", r"more_worlds: found \[\], expected one or more"),
        ("rl", "rl.seed=9", r"rl\.model, rl\.seed: RL starts where SFT ended"),
        ("rl", "rl.model=afm-135m", r"rl\.model, rl\.seed: RL starts where SFT ended"),
        ("rl", "alarms.barren=-1", r"alarms\.barren"),
        ("rl", "improve.tokens=9", r"improve\.tokens: .* as many tokens as RL sampled"),
        ("mask", "sft.seed=9", r"sft\.seed: every arm has the seeds of the study"),
        (
            "react",
            "eval.world_seed=2",
            r"eval\.world_seed: found 2, which is one of chains\.worlds",
        ),
        ("unseen-tool", "seeds=[]", r"seeds: found \[\], expected different numbers"),
        ("cost", 'student.sets=["atlas"]', r"student\.sets: 'atlas' is no set"),
        ("cost", "student.n=0", r"student\.n: found 0, expected at least 1"),
    ],
)
def test_a_setting_that_cannot_be_is_named_before_any_work(
    name: str, override: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        run_study(name, tmp_path / "study", [override], lambda line: None)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("name", ["mask", "rl"])
def test_a_study_may_go_on_with_what_only_changes_its_speed(name: str) -> None:
    def counts(*overrides: str) -> Json:
        return without_speed(to_json(find_study(name).read(overrides)))

    assert counts("eval.concurrency=4", "sft.threads=1") == counts()
    assert counts("eval.turns=4") != counts() != counts("sft.lr=1")
    if name == "rl":
        assert counts("rollout.memory_gb=1", "alarms.barren=0") == counts()


def test_options_stand_for_settings() -> None:
    assert as_overrides("cost", model="m", n=3, prices="", seed=None) == ["student.model=m", "n=3"]
    assert as_overrides("mask", model="m", n=3) == ["sft.model=m", "eval.n=3"]
    with pytest.raises(UsageError, match=r"--seed is not an option of the study mask"):
        as_overrides("mask", seed=3)


def test_the_command_plans_and_names_what_it_does_not_know() -> None:
    run = CliRunner()
    planned = run.invoke(app, ["study", "mask", "--dry-run", "--json", "--n", "50"])
    assert planned.exit_code == 0, planned.output
    assert any("50 held-out" in piece["what"] for piece in json.loads(planned.stdout)["pieces"])
    wrong = run.invoke(app, ["study", "masks"])
    assert isinstance(wrong.exception, CoaError)
    assert str(wrong.exception) == (
        "'masks' is not a study; expected cost, mask, react, rl, unseen-tool."
    )


# -- what arms have in common ----------------------------------------------------------------


def test_what_is_measured_with_is_held_out_and_the_same_again(tmp_path: Path) -> None:
    settings = STUDIES["mask"].read(["eval.n=12"])
    files = held_out(tmp_path, settings.eval, settings.chains.families)
    assert list(files) == ["held out", "invented world"]
    measured = {task.id for path in files.values() for task in TaskSet.load(path)}
    assert len(measured) == 24
    for world in settings.chains.worlds:
        trained = make_tasks("atlas-mhqa", "train", 200, 0, world_seed=world)
        assert measured.isdisjoint(task.id for task in trained)
    before = [path.read_bytes() for path in files.values()]
    held_out(tmp_path, settings.eval, settings.chains.families)
    assert before == [path.read_bytes() for path in files.values()]


def chain(number: int, words: int) -> Trajectory:
    prompt = Segment(Author.PROMPT, "sys")
    return Trajectory(f"t{number}", "q", "mhqa", [prompt, Segment(Author.MODEL, "a b " * words)])


def test_too_few_chains_are_an_error_not_a_smaller_arm() -> None:
    assert len(first([chain(i, 1) for i in range(5)], 3)) == 3
    with pytest.raises(UsageError, match=r"6 chains are wanted and 5 were kept of the team's work"):
        first([chain(i, 1) for i in range(5)], 6)


def test_arms_get_the_same_tokens_as_nearly_as_whole_chains_can(tiny_model: Path) -> None:
    pytest.importorskip("torch")
    sft = SftSettings(model=f"hf:{tiny_model}")
    chains = [chain(i, 3 + i % 4) for i in range(20)]
    from coa.lab.study_arms import trained_on

    each = [trained_on([one], sft)["trained_tokens"] for one in chains]
    for wanted in (each[0], sum(each) // 3, sum(each)):
        chosen = with_tokens(chains, wanted, sft, "trained_tokens")
        assert chosen == chains[: len(chosen)]
        assert abs(trained_on(chosen, sft)["trained_tokens"] - wanted) <= max(each) / 2
    with pytest.raises(UsageError, match=r"arms are to have \d+ trained tokens each, and all 20"):
        with_tokens(chains, 2 * sum(each), sft, "trained_tokens")
    assert with_tokens(cycle(chains), 2 * sum(each), sft, "trained_tokens") == [*chains, *chains]


def test_an_arm_that_starts_from_the_shipped_model_is_an_adapter_of_its_base(
    tmp_path: Path,
) -> None:
    done = tmp_path / "adapter" / MANIFEST
    done.parent.mkdir()
    done.touch()
    model = train([], SftSettings(model=OURS), 0, tmp_path, lambda line: None)
    assert model == f"{BASE}+{done.parent}"


def test_observations_count_only_when_they_are_given_a_weight() -> None:
    codec = ByteCodec()
    segments = [
        Segment(Author.PROMPT, "s"),
        Segment(Author.MODEL, "ab"),
        Segment(Author.ENV, "[o]", ids=list(b"[o]")),
        Segment(Author.MODEL, "c"),
    ]
    trajectory = Trajectory("t", "u", "mhqa", segments)
    prompt = codec.encode_prompt("s", "u")

    def weights(**more: float) -> list[float]:
        row = build_row(trajectory, codec, **more)  # type: ignore[arg-type]
        return row.weights[len(prompt) :]

    assert weights() == [1, 1, 0, 0, 0, 1]
    assert weights(observation_weight=1.0) == [1, 1, 1, 1, 1, 1]
    assert weights(observation_weight=0.5) == [1, 1, 0.5, 0.5, 0.5, 1]
    with pytest.raises(ConfigError, match=r"sft\.observation_weight: found 2, expected between"):
        SftSettings(observation_weight=2)


@pytest.mark.parametrize(
    ("text", "called", "invented"),
    [
        ("<think>t</think><plan>p</plan><think>t</think><wiki_search>q</wiki_search>", True, False),
        ("<wiki_search>q</wiki_search>\n<observation>Paris", True, True),
        ("<wiki_search>q</wiki_search> <observation>a</observation><answer>b</answer>", True, True),
        ("<observation>a</observation><wiki_search>q</wiki_search>", False, True),
        ("<wiki_search>q", False, False),
        ("", False, False),
    ],
)
def test_an_invented_observation_is_seen(text: str, called: bool, invented: bool) -> None:
    assert judge(load_grammar("mhqa"), text) == {"called": called, "invented": invented}


@given(st.text(alphabet="<>/abowiki_searchvtn ", max_size=80))
def test_any_text_is_judged(text: str) -> None:
    found = judge(load_grammar("mhqa"), text)
    assert found["invented"] <= ("<observation>" in text)


def test_a_smaller_budget_counts_what_was_solved_within_it(tmp_path: Path) -> None:
    lengths = {"a": 10, "b": 30, "c": 10}
    scores = {"a": 1.0, "b": 1.0, "c": 0.0}
    made = [
        Trajectory(name, "q", "mhqa", [Segment(Author.MODEL, "x", [1] * length)])
        for name, length in lengths.items()
    ]
    (tmp_path / "trajectories.jsonl").write_text(
        "".join(dumps(one.to_json()) + "\n" for one in made)
    )
    (tmp_path / "scores.jsonl").write_text(
        "".join(dumps({"task_id": n, "score": s}) + "\n" for n, s in scores.items())
    )
    assert within(tmp_path, 10) == {"a": 1.0, "b": 0.0, "c": 0.0}
    assert within(tmp_path, 30) == {"a": 1.0, "b": 1.0, "c": 0.0}
    assert within(tmp_path, 9) == {"a": 0.0, "b": 0.0, "c": 0.0}
