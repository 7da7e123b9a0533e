"""Fine-tuning in rounds: a budget ends a run, and another goes on from its adapter alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft_worker import tiny_rows, tiny_settings

torch = pytest.importorskip("torch")

from coa.errors import ConfigError  # noqa: E402
from coa.models.export import pack, stages_of  # noqa: E402
from coa.models.weights import read_manifest  # noqa: E402
from coa.train import sft  # noqa: E402
from coa.train.sft import run_sft  # noqa: E402


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(model: Path, out: Path, start: Path | None = None, **changes: object) -> sft.SftResult:
    if start is not None:
        changes |= {"model": f"hf:{model}+{start}", "continues": True}
    return run_sft(replace(tiny_settings(model), **changes), tiny_rows(), out)


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rounds") / "whole"
    train(tiny_model, out)
    return out


@pytest.fixture(scope="module")
def first(tiny_model: Path, whole: Path) -> Path:
    out = whole.parent / "first"
    made = train(tiny_model, out, tokens=sum(line["tokens"] for line in metrics(whole)[:10]) - 1)
    assert (made.updates, made.planned, made.trained) == (10, 36, True)
    return out


def test_a_budget_ends_a_run_with_the_update_that_spends_it(
    tiny_model: Path, whole: Path, first: Path
) -> None:
    assert metrics(first) == metrics(whole)[:10]
    again = train(tiny_model, first, tokens=sum(line["tokens"] for line in metrics(first)) - 1)
    assert (again.updates, again.planned, again.trained) == (10, 36, False)


@pytest.mark.parametrize("packed", [False, True])
def test_the_next_round_takes_the_next_rows_at_their_learning_rate(
    packed: bool, tiny_model: Path, whole: Path, first: Path, tmp_path: Path
) -> None:
    start = first / "adapter"
    if packed:
        start = tmp_path / "packed"
        pack(first / "adapter", start)
    second = train(tiny_model, tmp_path / "second", start, tokens=500)
    last = train(tiny_model, tmp_path / "last", second.adapter)
    assert 10 < second.updates < last.updates == last.planned == 36
    found = metrics(tmp_path / "second") + metrics(tmp_path / "last")
    for name in ("update", "epoch", "tokens", "trained_tokens"):
        assert [line[name] for line in found] == [line[name] for line in metrics(whole)[10:]]
    rise = round(36 * 0.05)
    for place, (line, wanted) in enumerate(zip(found, metrics(whole)[10:], strict=True)):
        since = place if place < second.updates - 10 else place - (second.updates - 10)
        scale = min(1.0, (since + 1) / rise)
        assert line["lr"] == pytest.approx(wanted["lr"] * scale)
    assert last.loss < metrics(whole)[0]["loss"] / 4
    assert [stage["updates"] for stage in stages_of(last.adapter)] == [10, second.updates, 36]


def test_a_round_that_was_stopped_goes_on_in_its_folder(
    tiny_model: Path, first: Path, tmp_path: Path
) -> None:
    def stop(at: sft.UpdateReport) -> None:
        if at.update == 15:
            raise MemoryError

    changes = {"model": f"hf:{tiny_model}+{first / 'adapter'}", "continues": True, "tokens": 500}
    settings = replace(tiny_settings(tiny_model), **changes)
    with pytest.raises(MemoryError):
        run_sft(settings, tiny_rows(), tmp_path / "torn", on_update=stop)
    for out in ("torn", "straight"):
        run_sft(settings, tiny_rows(), tmp_path / out)
    for name in ("metrics.jsonl", "adapter/adapter_model.safetensors"):
        torn, straight = (tmp_path / out / name for out in ("torn", "straight"))
        assert torn.read_bytes() == straight.read_bytes()


def test_minutes_end_a_run_after_the_update_they_end_in(tiny_model: Path, tmp_path: Path) -> None:
    made = train(tiny_model, tmp_path / "run", minutes=1e-9)
    assert (made.updates, made.planned) == (1, 36)
    assert read_manifest(made.adapter)["updates"] == 1
    again = train(tiny_model, tmp_path / "run", minutes=2)  # the clock is not part of the recipe
    assert not again.trained


Change = Callable[[Path, Path], dict[str, object]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model, run: {"batch_size": 4}, r"sft\.batch_size: found 4, and .* trained with 3"),
        (lambda model, run: {"seed": 1}, r"sft\.seed: found 1, and .*order of rows"),
        (
            lambda model, run: {"model": f"hf:{model}"},
            r"sft\.continues: found sft\.model 'hf:.*', expected BASE\+ADAPTER_DIR",
        ),
    ],
)
def test_what_is_no_earlier_round_is_one_line(
    change: Change, message: str, tiny_model: Path, first: Path, tmp_path: Path
) -> None:
    start = {"model": f"hf:{tiny_model}+{first / 'adapter'}", "continues": True}
    settings = replace(tiny_settings(tiny_model), **(start | change(tiny_model, first)))
    with pytest.raises(ConfigError, match=message) as wrong:
        run_sft(settings, tiny_rows(), tmp_path)
    assert "\n" not in str(wrong.value)


def test_other_rows_and_a_finished_training_are_refused(
    tiny_model: Path, whole: Path, first: Path, tmp_path: Path
) -> None:
    start = {"model": f"hf:{tiny_model}+{first / 'adapter'}", "continues": True}
    with pytest.raises(ConfigError, match=r"was trained on other rows"):
        run_sft(replace(tiny_settings(tiny_model), **start), tiny_rows(9), tmp_path / "rows")
    with pytest.raises(ConfigError, match=r"has all 36 updates behind it"):
        train(tiny_model, tmp_path / "more", whole / "adapter")
