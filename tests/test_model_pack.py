"""Packing: what is shipped is small, whole, says where it comes from, and replaces safely."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trained_runs import make_base, make_evaluation, make_run

torch = pytest.importorskip("torch")

from coa.cli import app  # noqa: E402
from coa.errors import ModelError, UsageError  # noqa: E402
from coa.models import references as store  # noqa: E402
from coa.models.export import (  # noqa: E402
    model_card,
    pack,
    stages_of,
)
from coa.models.references import trained_on  # noqa: E402
from coa.models.weights import adapter_hash, base_hash, load_tensors, read_adapter  # noqa: E402

WEIGHTS = "adapter_model.safetensors"
REAL_BASE = "144c4f6518e28433a9993f00051d7758725abb4934905beaa3006046436e0ce5"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COA_CACHE", str(tmp_path / "cache"))
    make_base(tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", "smollm2-135m")


def test_a_packed_adapter_has_half_the_bytes_and_what_it_stands_for(
    adapter: Path, tmp_path: Path
) -> None:
    report = pack(adapter, tmp_path / "out" / "afm-135m")
    packed = tmp_path / "out" / "afm-135m"
    before, after = load_tensors(adapter / WEIGHTS), load_tensors(packed / WEIGHTS)
    assert before.keys() == after.keys() and {t.dtype for t in after.values()} == {torch.float16}
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.half())
    assert report["adapter_sha256"] == adapter_hash(packed)
    assert report["bytes"] == sum(path.stat().st_size for path in packed.iterdir())
    manifest = json.loads((packed / "manifest.json").read_text())
    assert manifest["name"] == "afm-135m" and manifest["base"] == "smollm2-135m"
    assert manifest["base_sha256"] == base_hash(store.base_folder())
    assert trained_on(f"smollm2-135m+{packed}")["grammar"] == ["mhqa", "web"]
    assert read_adapter(packed, manifest["base_sha256"]).scale == 2.0
    assert [path.name for path in tmp_path.glob("out/.*")] == []


def test_who_may_read_a_packed_adapter_is_left_to_the_umask(adapter: Path, tmp_path: Path) -> None:
    out, before = tmp_path / "out", os.umask(0o077)
    try:
        pack(adapter, out)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o600}


def test_the_history_goes_back_to_the_base(adapter: Path, tmp_path: Path) -> None:
    second = make_run(tmp_path / "rl", f"smollm2-135m+{adapter}", stage="rl", seed=1)
    first, last = stages_of(second)
    assert (first["stage"], last["stage"]) == ("sft", "rl")
    assert first["inputs"] == {"rows": "6062cd771ff9879c"} and first["updates"] == 3
    assert last["inputs"]["adapter"] == adapter_hash(adapter)
    assert str(tmp_path) not in json.dumps([first, last])
    pack(adapter, tmp_path / "packed")
    third = make_run(tmp_path / "on", f"smollm2-135m+{tmp_path / 'packed'}", stage="rl", seed=2)
    assert [stage["seed"] for stage in stages_of(third)] == [0, 2]


def test_a_history_that_is_not_known_is_refused(adapter: Path, tmp_path: Path) -> None:
    second = make_run(tmp_path / "rl", f"smollm2-135m+{adapter}", stage="rl")
    moved = adapter.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=r"started from 'smollm2-135m\+.*' *, which is not here"):
        stages_of(second)
    with pytest.raises(ModelError, match="no run directory around it"):
        pack(moved, tmp_path / "out")
    make_run(tmp_path / "run", "smollm2-135m", seed=5)
    with pytest.raises(ModelError, match=r"hash '\w{12}', and .* has changed since"):
        stages_of(second)
    with pytest.raises(ModelError, match=r"manifest.json: cannot read it \(No such file"):
        pack(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_card_says_what_the_files_beside_it_say(adapter: Path, tmp_path: Path) -> None:
    out, about, recipe = tmp_path / "afm-135m", tmp_path / "about.md", tmp_path / "recipe.toml"
    about.write_text("## Limits\n\nIt knows one encyclopedia.\n")
    recipe.write_text("[sft]\nrank = 4\n")
    packed = pack(adapter, out, about=about, recipe=recipe)["adapter_sha256"]
    base = json.loads((adapter / "manifest.json").read_text())["base_sha256"]
    measured = {
        "held-out entities": make_evaluation(tmp_path / "e1", packed),
        "before rounding": make_evaluation(tmp_path / "e2", adapter_hash(adapter)),
        "base": make_evaluation(tmp_path / "e3", None, base, model="smollm2-135m", accuracy=0.01),
        "another": make_evaluation(tmp_path / "e4", "feed"),
        "another base": make_evaluation(tmp_path / "e5", None, base="feed"),
    }
    again = pack(adapter, out, evaluations=measured)  # text and recipe that are there are kept
    card = (out / "README.md").read_text()
    assert again["adapter_sha256"] == packed and card == model_card(out)
    assert card.endswith("## Limits\n\nIt knows one encyclopedia.\n")
    row = "| held-out entities | these | heldout.jsonl | 200 | 79.5% | 73.4% to 84.5% | 312.5 |  |"
    assert row in card
    assert (
        "| held-out entities: phrasings never trained on | these | heldout.jsonl | 46 | 50.0%"
        in card
    )
    assert "| before rounding | these, before rounding |" in card
    assert "| base | base alone |" in card and "| another | other weights |" in card
    assert "| another base | other weights |" in card
    command = "--tasks heldout.jsonl --out DIR --turns 8 --context 1536 --deterministic\n"
    assert f"    coa eval --model afm-135m {command}" in card
    assert f"    coa eval --model smollm2-135m {command}" in card
    assert "| sft | `smollm2-135m` | 3 | 0.001 | 0 | rows `6062cd771ff9` | 0123abcd |" in card
    assert base_hash(store.base_folder()) in card and "grammar-web" in card
    assert tomllib.loads((out / "recipe.toml").read_text()) == {"sft": {"rank": 4}}
    (out / "results.json").write_text('{"rows": []}')
    assert model_card(out) != card


def test_what_cannot_be_packed_is_one_line(adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"nowhere.md: no such file\."):
        pack(adapter, out, about=tmp_path / "nowhere.md")
    with pytest.raises(
        ModelError, match=r"summary.json: cannot read it .* finished run of coa eval"
    ):
        pack(adapter, out, evaluations={"x": tmp_path})
    assert not out.exists() and not list(tmp_path.glob(".out*"))
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"holds 'thesis.tex', expected a new or a packed folder"):
        pack(adapter, out)
    tensors = load_tensors(adapter / WEIGHTS)
    name = min(tensors)
    tensors[name][0, 0] = 1e6
    from safetensors.torch import save_file

    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(ModelError, match=r"has the value 1e\+06, which float16 cannot hold"):
        pack(adapter, tmp_path / "new")
    manifest = adapter / "manifest.json"
    manifest.write_text(manifest.read_text().replace("{", '{"full": true,', 1))
    with pytest.raises(ModelError, match=r"all weights were trained\. Use: coa model export hf:"):
        pack(adapter, tmp_path / "new")


def test_only_what_was_packed_is_replaced(adapter: Path, tmp_path: Path) -> None:
    def contents(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    other, out = make_run(tmp_path / "other", "smollm2-135m", seed=4), tmp_path / "out"
    before = contents(other)
    with pytest.raises(UsageError, match=r"other/adapter: was not packed, expected a new or a p"):
        pack(adapter, other)
    (tmp_path / "link").symlink_to(other)
    for same in (other, tmp_path / "link", tmp_path / "run" / ".." / "other" / "adapter"):
        with pytest.raises(UsageError, match=r"is the adapter to be packed\. Give another folder"):
            pack(other, same)
    assert contents(other) == before
    out.mkdir()
    (out / "about.md").write_text("mine")
    with pytest.raises(ModelError, match=r"manifest.json: cannot read it .* packed folder's manif"):
        pack(adapter, out)
    assert contents(out) == {"about.md": b"mine"}
    pack(adapter, tmp_path / "packed")
    pack(other, tmp_path / "packed")
    assert adapter_hash(tmp_path / "packed") == pack(other, tmp_path / "new")["adapter_sha256"]


def test_texts_are_kept_also_when_a_pack_was_killed_between_its_renames(
    adapter: Path, tmp_path: Path
) -> None:
    out, part = tmp_path / "out", tmp_path / ".out.part"
    (tmp_path / "about.md").write_text("## Limits")
    pack(adapter, out, about=tmp_path / "about.md")
    part.mkdir()
    out.rename(part / "out.replaced")
    pack(adapter, out)
    assert (out / "about.md").read_text() == "## Limits" and not part.exists()
    part.mkdir()
    out.rename(part / "out.replaced")
    (part / "out.replaced" / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"holds 'thesis.tex', expected a new or a packed folder"):
        pack(adapter, out)
    assert (out / "thesis.tex").exists() and not part.exists()


def test_the_command_packs_and_refuses(adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    run = make_evaluation(tmp_path / "e", None)
    call = ["model", "pack", str(adapter), "--out", str(out)]
    done = CliRunner().invoke(app, [*call, "--eval", f"base={run}", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["name"] == "packed"
    wrong = CliRunner().invoke(app, [*call, "--eval", "no-directory"])
    assert str(wrong.exception) == "--eval 'no-directory': expected NAME=DIR."


def test_the_shipped_folder_is_small_complete_and_says_what_it_is() -> None:
    folder = store.SHIPPED
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 12e6
    assert (folder / "README.md").read_text(encoding="utf-8") == model_card(folder)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["name"] == "afm-135m" and manifest["base_sha256"] == REAL_BASE
    assert manifest["adapter_sha256"] == adapter_hash(folder) and manifest["rank"] == 16
    assert manifest["stages"] and manifest["grammar"]
    rows = json.loads((folder / "results.json").read_text(encoding="utf-8"))["rows"]
    assert any(row["weights"].startswith("these") for row in rows)
    assert tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
