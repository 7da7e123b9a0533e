"""Recipes in, settings out; and the texts of what can go wrong."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from coa.errors import ConfigError
from coa.io.plugins import load_object
from coa.io.settings import load_recipe, to_json


class Kind(enum.StrEnum):
    GRPO = "grpo"
    RLOO = "rloo"


@dataclass(frozen=True)
class Lora:
    rank: int = 16
    targets: tuple[str, ...] = ("q_proj",)


@dataclass(frozen=True)
class Sft:
    learning_rate: float = 1e-4
    epochs: int = 1
    shuffle: bool = True
    lora: Lora | None = field(default_factory=Lora)
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}, expected 1 or more")


@dataclass(frozen=True)
class Source:
    path: Path
    weight: float = 1.0


@dataclass(frozen=True)
class Recipe:
    name: str
    precision: Literal["fp32", "bf16"] = "bf16"
    kind: Kind = Kind.GRPO
    clip: tuple[float, float] = (0.2, 0.28)
    sft: Sft = field(default_factory=Sft)
    sources: tuple[Source, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    note: str | None = None


def recipe_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.toml"
    path.write_text(text)
    return path


def message(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides, Recipe)
    text = str(caught.value)
    assert "\n" not in text
    return text.replace(str(path), "x.toml")


def test_the_last_of_defaults_recipe_and_overrides_wins(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, 'name = "a"\n[sft]\nepochs = 3  # passes over the rows\n')
    defaults = {"sft": {"epochs": 2, "learning_rate": 0.5, "shuffle": False}}
    recipe = load_recipe(path, ["sft.shuffle=true", "kind=rloo"], Recipe, defaults)
    assert recipe.sft == Sft(learning_rate=0.5, epochs=3, shuffle=True)
    assert recipe.kind is Kind.RLOO
    assert defaults == {"sft": {"epochs": 2, "learning_rate": 0.5, "shuffle": False}}


def test_an_int_is_fine_where_a_float_is_expected() -> None:
    recipe = load_recipe(None, ["name=a", "sft.learning_rate=1"], Recipe)
    assert recipe.sft.learning_rate == 1.0


def test_overrides_are_toml_values_or_plain_text() -> None:
    overrides = ["name=hf:some/name", "clip=[0.1, 0.3]", "sft={epochs=4}", "note=7", "sft.limit=9"]
    recipe = load_recipe(None, [*overrides, "sft.lora.rank=8", "sampling.top_p=0.9"], Recipe)
    assert recipe.name == "hf:some/name"
    assert recipe.clip == (0.1, 0.3)
    assert (recipe.sft.epochs, recipe.sft.limit) == (4, 9)
    assert recipe.note == "7"
    assert recipe.sft.lora == Lora(rank=8)
    assert recipe.sampling == {"top_p": 0.9}


def test_none_unsets_an_optional_and_an_empty_value_is_empty_text() -> None:
    recipe = load_recipe(None, ["name=", "sft.lora=none", "sft.limit=none"], Recipe)
    assert (recipe.name, recipe.sft.lora, recipe.sft.limit) == ("", None, None)
    assert load_recipe(None, ["name=none"], Recipe).name == "none"


def test_a_value_cannot_bring_more_keys() -> None:
    assert load_recipe(None, ['name="a"\nnote="b"'], Recipe).note is None


def test_tables_in_a_list_become_settings(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, 'name="a"\n[[sources]]\npath="t.jsonl"\nweight=2\n')
    assert load_recipe(path, [], Recipe).sources == (Source(Path("t.jsonl"), 2.0),)


TWO = 'name="a"\n[[sources]]\npath="t"\n[[sources]]\npath="u"\n'


def test_an_override_changes_one_table_of_a_list(tmp_path: Path) -> None:
    path, defaults = recipe_file(tmp_path, TWO), {"sources": [{"path": "given"}]}
    recipe = load_recipe(path, ["sources.1.weight=3", "sources.0.path=7"], Recipe)
    assert recipe.sources == (Source(Path("7")), Source(Path("u"), 3.0))
    recipe = load_recipe(None, ["name=a", "sources.0.weight=2"], Recipe, defaults)
    assert recipe.sources == (Source(Path("given"), 2.0),)
    assert defaults == {"sources": [{"path": "given"}]}, "what was given is left alone"
    recipe = load_recipe(path, ["sources.0={path='v'}", "clip=[1, 2]", "clip.1=3"], Recipe)
    assert (recipe.sources[0], recipe.clip) == (Source(Path("v")), (1.0, 3.0))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sources.2.path=v", "sources is a list, found '2', expected 0 to 1."),
        ("sources.first.path=v", "sources is a list, found 'first', expected 0 to 1."),
        ("sources.1.weight=x", "sources.1.weight is 'x', expected a number."),
        ("sources.1.weigth=2", "sources.1.weigth is not a setting. Did you mean 'weight'?"),
        ("sources.1=2", "sources.1 is 2, expected a table."),
    ],
)
def test_what_is_wrong_with_one_table_of_a_list_says_which(
    tmp_path: Path, override: str, expected: str
) -> None:
    assert message(recipe_file(tmp_path, TWO), override) == f"override {override!r}: {expected}"


def test_an_item_of_an_empty_list_cannot_be_changed() -> None:
    expected = "sources is a list, found '0', expected no number: it is empty."
    assert message(None, "name=a", "sources=[]", "sources.0.path=t").endswith(expected)


def test_a_misspelt_setting_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, 'name = "a"\n[sft]\nlearnin_rate = 1e-4\n')
    expected = "x.toml: sft.learnin_rate is not a setting. Did you mean 'learning_rate'?"
    assert message(path) == expected


def test_an_unknown_setting_lists_what_is_known(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, 'name = "a"\n[[sources]]\npath="t"\nzzz=1\n')
    assert message(path) == "x.toml: sources.0.zzz is not a setting. Known: path, weight."


def test_an_error_in_an_override_names_the_override() -> None:
    expected = "override 'sft.epoch=2': sft.epoch is not a setting. Did you mean 'epochs'?"
    assert message(None, "name=a", "sft.epoch=2") == expected
    expected = "override 'sft.epochs=two': sft.epochs is 'two', expected an integer."
    assert message(None, "name=a", "sft.epochs=two") == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('sft.epochs = "2"', "sft.epochs is '2', expected an integer."),
        ("sft.epochs = true", "sft.epochs is True, expected an integer."),
        ("sft.epochs = 1.5", "sft.epochs is 1.5, expected an integer."),
        ('sft.learning_rate = "fast"', "sft.learning_rate is 'fast', expected a number."),
        ("sft.shuffle = 1", "sft.shuffle is 1, expected true or false."),
        ('sft.limit = "x"', "sft.limit is 'x', expected an integer or nothing."),
        ('precision = "fp8"', "precision is 'fp8', expected one of 'fp32', 'bf16'."),
        ('kind = "sarsa"', "kind is 'sarsa', expected one of 'grpo', 'rloo'."),
        ("clip = [0.2]", "clip is [0.2], expected a list of 2 (a number, a number)."),
        ("clip = 1", "clip is 1, expected a list of 2 (a number, a number)."),
        ("sft = 3", "sft is 3, expected a table."),
        ("sft.lora.targets = [1]", "sft.lora.targets is [1], expected a list (a string each)."),
        ("sft.lora.rank = 'x'", "sft.lora.rank is 'x', expected an integer."),
        ("sft.epochs = 0", "sft: epochs is 0, expected 1 or more."),
    ],
)
def test_a_wrong_value_is_one_line(tmp_path: Path, line: str, expected: str) -> None:
    path = recipe_file(tmp_path, f'name = "a"\n{line}\n')
    assert message(path) == f"x.toml: {expected}"


def test_a_setting_without_default_has_to_be_set(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, "[sft]\nepochs = 2\n")
    expected = "x.toml: name is not set, and has no default; expected a string."
    assert message(path) == expected
    path = recipe_file(tmp_path, 'name = "a"\n[[sources]]\nweight = 2.0\n')
    expected = "x.toml: sources.0.path is not set, and has no default; expected a path in quotes."
    assert message(path) == expected


@pytest.mark.parametrize(
    ("text", "line"), [('a = 1\nname = "a\nb = 2', 2), ("a = 1\na = 2\n", 2), ("a = [1,", 1)]
)
def test_bad_toml_is_reported_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    assert message(recipe_file(tmp_path, text)).startswith(f"x.toml:{line}: not TOML: ")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    assert message(tmp_path / "none.toml") == "x.toml: no such recipe file."
    assert message(tmp_path) == "x.toml: cannot be read: Is a directory."
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'\n")
    assert message(tmp_path / "latin.toml").startswith("x.toml: not a text file in UTF-8")


@pytest.mark.parametrize("override", ["sft.epochs", "=2", "sft..epochs=2", ""])
def test_an_override_without_key_and_value_is_refused(override: str) -> None:
    expected = f"override {override!r}: expected key=value, such as sft.epochs=2."
    assert message(None, override) == expected


def test_resolved_settings_are_plain_json() -> None:
    recipe = load_recipe(None, ["name=a", "sources=[{path='t'}]"], Recipe)
    assert to_json(recipe) == {
        "name": "a",
        "precision": "bf16",
        "kind": "grpo",
        "clip": [0.2, 0.28],
        "sft": {
            "learning_rate": 1e-4,
            "epochs": 1,
            "shuffle": True,
            "lora": {"rank": 16, "targets": ["q_proj"]},
            "limit": None,
        },
        "sources": [{"path": "t", "weight": 1.0}],
        "sampling": {},
        "note": None,
    }


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_an_object_in_the_current_directory_is_found(plugins: Path) -> None:
    (plugins / "my_tasks.py").write_text("class Own:\n    limit = 3\n")
    assert load_object("my_tasks:Own.limit") == 3
    assert load_object("collections:Counter") is __import__("collections").Counter


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("my_reward", "expected module:attribute, such as 'my_tasks:load'."),
        ("own_module:", "expected module:attribute, such as 'my_tasks:load'."),
        (
            "nowhere_at_all:f",
            "no module named 'nowhere_at_all'. "
            "Looked in the current directory and in what is installed.",
        ),
        (
            "needs_more:f",
            "no module named 'not_installed_xyz'. "
            "Module 'needs_more' was found; install what it needs.",
        ),
        ("fails:f", "importing 'fails' failed: ZeroDivisionError: division by zero"),
        ("broken:f", "importing 'broken' failed: SyntaxError: "),
        ("own_module:rewrd", "own_module has no 'rewrd'. Did you mean 'reward'?"),
    ],
)
def test_an_object_that_cannot_be_loaded_is_one_line(
    plugins: Path, reference: str, expected: str
) -> None:
    (plugins / "own_module.py").write_text("def reward(): ...\n")
    (plugins / "needs_more.py").write_text("import not_installed_xyz\n")
    (plugins / "fails.py").write_text("1 / 0\n")
    (plugins / "broken.py").write_text("def f(:\n")
    with pytest.raises(ConfigError) as caught:
        load_object(reference, "reward")
    assert str(caught.value).startswith(f"reward {reference!r}: {expected}")
    assert "\n" not in str(caught.value)
