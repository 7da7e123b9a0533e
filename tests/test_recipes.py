"""Every recipe loads with its schema, and every setting is documented once, with its default.

What the recipes for GPUs do there is not tested: nobody has run them, and their heads say so.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coa import api
from coa.distillation.dataset import DistillSettings
from coa.environment import ToolSettings
from coa.errors import CoaError, ConfigError
from coa.grammar import load_grammar
from coa.io.settings import find_recipe, load_recipe
from coa.lab.speedrun_recipe import read_speedrun_recipe
from coa.recording.budget import PriceTable
from coa.tools.live import WebSettings
from coa.tools.sources import web_settings
from coa.train.rl_stage import read_improve_recipe, read_rl_recipe
from coa.train.settings import ImproveSettings, RlRecipe, SftRecipe

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted((ROOT / "src" / "coa" / "recipes").glob("*.toml"))
RECIPES = [*sorted((ROOT / "recipes").glob("*.toml")), *SHIPPED]
LAUNCH = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
PAPER = [
    (stage, kind, size)
    for stage in ("sft", "rl")
    for kind in ("web", "mhqa", "code")
    for size in ("3b", "7b")
]
SCHEMAS: dict[str, Callable[[Path], Any]] = {
    "full": lambda path: read_speedrun_recipe(None, [], full=True),
    "distill": lambda path: load_recipe(path, [], DistillSettings),
    "improve": lambda path: read_improve_recipe(path, []),
    "prices": lambda path: load_recipe(path, [], PriceTable),
    "rl": lambda path: read_rl_recipe(path, []),
    "sft": lambda path: load_recipe(path, [], SftRecipe),
    "speedrun": lambda path: read_speedrun_recipe(path, []),
    "web": lambda path: load_recipe(path, [], WebSettings),
}
"""What a recipe's name begins with -> how it is read."""


def recipe_path(name: str) -> Path:
    return ROOT / "recipes" / f"{name}.toml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_with_its_schema(path: Path) -> None:
    SCHEMAS[path.stem.partition("-")[0]](path)


def test_a_recipe_with_a_misspelt_setting_does_not(tmp_path: Path) -> None:
    for name, wrong in (("rl-135m", "[rl.loss]\nclip_hihg = 0.3"), ("sft-135m", "[sft]\nlrr = 1")):
        path = tmp_path / f"{name}.toml"
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"is not a setting\. Did you mean"):
            SCHEMAS[name.partition("-")[0]](path)


def test_the_preset_is_what_the_loss_says_nothing_about() -> None:
    web = read_rl_recipe(recipe_path("rl-web-7b"), []).rl.loss
    assert (web.clip_high, web.dual_clip, web.overlong_buffer, web.kl) == (0.28, 10.0, 0.0, 0.0)
    mhqa = read_rl_recipe(recipe_path("rl-mhqa-7b"), []).rl.loss
    assert (mhqa.baseline, mhqa.lam, mhqa.kl, mhqa.clip_high) == ("value", 1.0, 0.001, 0.2)
    other = read_rl_recipe(recipe_path("rl-web-7b"), ["rl.preset=gspo"]).rl.loss
    assert (other.ratio, other.dual_clip) == ("sequence", 10.0)


# -- by name ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_found_by_its_name_in_any_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (path.stem, path.name, f"recipes/{path.name}", Path("recipes", path.name)):
        assert find_recipe(given).samefile(path), given
    (tmp_path / path.stem).mkdir()  # a folder of that name is no recipe
    assert find_recipe(path.stem).samefile(path)


def test_a_file_of_ones_own_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web.toml").write_text("seconds = 3.0\n")
    assert find_recipe("web.toml") == Path("web.toml")
    assert find_recipe(tmp_path / "web.toml") == tmp_path / "web.toml"
    assert web_settings.__wrapped__("web.toml").seconds == 3.0
    assert find_recipe(tmp_path) == tmp_path  # whoever reads it says that it is a folder


def test_a_name_that_is_no_recipe_is_one_line_with_those_that_are(tmp_path: Path) -> None:
    known = ", ".join(path.stem for path in SHIPPED)
    for given, meant in (("sft-136m", " Did you mean 'sft-135m'?"), ("mine/zzzz.toml", "")):
        with pytest.raises(ConfigError) as error:
            find_recipe(given)
        assert str(error.value) == f"{given}: no such recipe file.{meant} Shipped: {known}."
    with pytest.raises(ConfigError, match="Did you mean 'prices'"):  # a folder is not guessed
        find_recipe(tmp_path / "prices.toml")


def test_the_commands_take_a_name_outside_a_clone(tmp_path: Path) -> None:
    def said(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "coa", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 2 and done.stdout == "", done.stderr
        return done.stderr

    episodes = ["--episodes", "none.jsonl", "--out", "out"]
    for words in (
        ["sft", "sft-135m", "trajectories=none.jsonl"],
        ["sft", "recipes/sft-135m.toml", "trajectories=none.jsonl"],
        ["rl", "rl-135m", "tasks=none.jsonl"],
        ["distill", *episodes, "--recipe", "distill-paper"],
    ):
        assert said(*words).startswith("coa: none.jsonl: "), words
    for words in (["sft", "none"], ["rl", "none"], ["distill", *episodes, "--recipe", "none"]):
        assert said(*words).startswith("coa: none: no such recipe file. Shipped: "), words


def test_python_takes_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CoaError, match=r"^none\.jsonl: "):
        api.sft("none.jsonl", recipe="sft-135m", out="out")
    with pytest.raises(ConfigError, match="Did you mean 'rl-135m'"):
        api.rl(recipe="rl-135", out="out")


def test_the_web_of_a_name_counts_by_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = ToolSettings(corpus="web.toml").identity()
    assert found == ToolSettings(corpus=str(find_recipe("web"))).identity() and found["web"]


# -- the paper's -----------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "kind", "size"), PAPER)
def test_a_recipe_of_the_paper_says_what_was_checked_and_how_it_is_launched(
    stage: str, kind: str, size: str
) -> None:
    name = f"{stage}-{kind}-{size}"
    text = recipe_path(name).read_text(encoding="utf-8")
    head, plain = text.partition("\n\n")[0], " ".join(text.replace("\n#", " ").split())
    assert text.startswith("# Not run on a GPU by us; written for 8 GPUs of 80 GB")
    assert all(line.startswith("#") for line in head.splitlines())
    assert "Checked: it loads and validates, and accelerate accepts its launch file" in plain
    assert re.search(r"Memory of each GPU.*, computed: .* = [\d.]+ GB\.", plain)
    launched = re.search(r"--config_file (\S+) -m coa (\w+) (\S+)", plain)
    assert launched is not None
    assert ROOT / launched[1] in LAUNCH
    assert (launched[2], launched[3]) == (stage, f"recipes/{name}.toml")
    if stage == "rl" and read_rl_recipe(recipe_path(name), []).rl.loss.baseline == "value":
        assert launched[1].endswith("ddp.yaml"), "a value head is refused beside spread weights"


@pytest.mark.parametrize(("kind", "size"), [case[1:] for case in PAPER if case[0] == "rl"])
def test_rl_starts_where_fine_tuning_ended_under_the_grammar_of_its_kind(
    kind: str, size: str
) -> None:
    sft = load_recipe(recipe_path(f"sft-{kind}-{size}"), [], SftRecipe)
    rl = read_rl_recipe(recipe_path(f"rl-{kind}-{size}"), [])
    assert rl.rl.model == f"hf:{sft.out}/adapter"
    assert rl.grammar == load_grammar(kind).name == kind
    assert rl.rollout.tokens < rl.rollout.context
    if rl.rollout.engine:
        assert not rl.rl.full, "a server takes new weights only as an adapter"


def test_no_two_recipes_write_into_the_same_directory() -> None:
    outs = Counter(
        SCHEMAS[path.stem.partition("-")[0]](path).out
        for path in RECIPES
        if path.stem.startswith(("sft", "rl", "improve"))
    )
    assert set(outs.values()) == {1}, outs


def test_the_values_that_the_paper_prints() -> None:
    web, code = (read_rl_recipe(recipe_path(f"rl-{kind}-7b"), []) for kind in ("web", "code"))
    assert (web.rl.tasks_per_update, web.rl.group_size, web.rollout.turns) == (64, 8, 24)
    assert (web.rollout.context, web.reward.expression) == (32768, "judge")
    assert (web.select.no_tool_samples, web.select.no_tool_most) == (32, 0.3)
    assert (code.rl.tasks_per_update, code.rl.minibatches, code.rl.updates) == (256, 8, 150)
    assert (code.rl.loss.overlong_buffer, code.select.samples, code.select.most) == (0.125, 8, 1.0)
    found = {
        (kind, size): load_recipe(recipe_path(f"sft-{kind}-{size}"), [], SftRecipe).sft
        for kind, size in (("web", "7b"), ("code", "7b"), ("mhqa", "3b"))
    }
    assert {key: (sft.lr, sft.batch_size) for key, sft in found.items()} == {
        ("web", "7b"): (1.4e-5, 256),
        ("code", "7b"): (3e-5, 32),
        ("mhqa", "3b"): (1e-5, 128),
    }


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: path.stem)
def test_accelerate_accepts_a_launch_file(path: Path) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    command = ["--config_file", str(path), "-m", "coa", "rl", "recipes/rl-web-7b.toml"]
    arguments = launch.launch_command_parser().parse_args(command)
    arguments, _, _ = launch._validate_launch_command(arguments)
    assert arguments.module and arguments.training_script == "coa"
    assert arguments.num_processes > 1 and not arguments.cpu
    kind = path.stem.partition("-")[0]
    launchers = (arguments.multi_gpu, arguments.use_fsdp, arguments.use_deepspeed)
    assert launchers == (kind == "ddp", kind == "fsdp", False)
    assert arguments.use_cpu == (path.stem == "ddp-cpu")


def test_without_a_gpu_there_are_really_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "where.py"
    script.write_text(
        "import os\nopen(os.environ['RANK'] + ' of ' + os.environ['WORLD_SIZE'], 'w')"
    )
    config = str(ROOT / "recipes" / "accelerate" / "ddp-cpu.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    done = subprocess.run(
        [*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert sorted(path.name for path in tmp_path.glob("* of *")) == ["0 of 2", "1 of 2"], (
        done.stderr
    )


# -- the documentation -----------------------------------------------------------------------


def settings_of(settings: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting under its full name, with its default."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        name = f"{at}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{name}.")
        else:
            yield name, value


def documented(page: str, heading: str) -> list[tuple[str, str]]:
    """The rows of the page's tables whose first column has that heading: name and next cell."""
    found, inside = [], False
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == heading:
            inside = True
        elif inside and (name := re.fullmatch(r"`([\w.]+)`", cells[0])):
            found.append((name[1], cells[1]))
    return found


def read_default(cell: str) -> Any:
    """A default as the tables write it: a TOML value, none, or nothing to be said."""
    text = cell.strip("`")
    if text in ("none", "-", "ours"):
        return {"none": None}.get(text, "")
    return tomllib.loads(f"value = {text}")["value"]


def check_documented(page: str, settings: dict[str, Any]) -> None:
    rows = documented(page, "setting")
    settings = {name: [*v] if isinstance(v, tuple) else v for name, v in settings.items()}
    twice = [name for name, count in Counter(name for name, _ in rows).items() if count > 1]
    assert not twice, f"docs/{page}: documented twice: {twice}"
    assert {name for name, _ in rows} == settings.keys(), f"docs/{page}"
    wrong = {
        name: (cell, settings[name])
        for name, cell in rows
        if read_default(cell) != settings[name]
        or isinstance(read_default(cell), bool) != isinstance(settings[name], bool)
    }
    assert not wrong, f"docs/{page}: another default: {wrong}"


def test_every_setting_of_sft_is_documented_once_with_its_default() -> None:
    check_documented("training.md", dict(settings_of(SftRecipe())))


def test_every_setting_of_rl_is_documented_once_with_its_default() -> None:
    everything = dict(settings_of(RlRecipe()))
    rewards = {name: value for name, value in everything.items() if name.startswith("reward.")}
    check_documented("rl.md", {k: v for k, v in everything.items() if k not in rewards})
    del rewards["reward.expression"]  # which that page is about
    check_documented("rewards.md", {k.removeprefix("reward."): v for k, v in rewards.items()})


def test_every_setting_and_metric_of_improve_is_documented_once() -> None:
    check_documented("improve.md", dict(settings_of(ImproveSettings(), "improve.")))
    metrics = [name for name, _ in documented("improve.md", "metric")]
    assert len(metrics) == len(set(metrics)) and "sampled_tokens" in metrics


def test_a_default_that_the_page_has_wrong_is_found() -> None:
    settings = dict(settings_of(SftRecipe()))
    with pytest.raises(AssertionError, match=r"another default: .*sft\.lr"):
        check_documented("training.md", settings | {"sft.lr": 2e-3})
    with pytest.raises(AssertionError, match=r"another default: .*sft\.full"):
        check_documented("training.md", settings | {"sft.full": 0})
    with pytest.raises(AssertionError, match=re.escape("docs/training.md")):
        check_documented("training.md", settings | {"sft.new": 1})


def test_every_metric_of_rl_is_documented_once() -> None:
    import torch

    from coa.train.experience import Experience
    from coa.train.groups import Drawn
    from coa.train.losses import PolicyTokens, policy_loss
    from coa.train.optimizer import OptimizerStep
    from coa.train.rl import learning_record, rollout_record
    from coa.train.settings import RlLossSettings

    one = torch.ones(1)
    metrics = policy_loss(-one, PolicyTokens(one, one, one), RlLossSettings()).metrics
    learnt = learning_record(
        Experience([]), [OptimizerStep(0.0, 0.0, 0.0, extra_norm=0.0)], [metrics]
    )
    made = {*rollout_record(Drawn(0)), *learnt, "update", "parts"}
    made |= {"eval_accuracy", "eval_low", "eval_high", "eval_n", "eval_environment"}
    rows = [name for name, _ in documented("rl.md", "metric")]
    assert sorted(rows) == sorted(made)
