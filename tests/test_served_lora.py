"""Adapters that the openai engine loads into a server while it runs.

The real server is in `test_vllm_server.py`. Here the scripted server on loopback stands in: it has
the names of what it was told to load, and refuses when asked to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coa.engines import Sampling, load_engine
from coa.engines.openai import OpenAIEngine
from coa.errors import ConfigError, EngineError
from coa.models.codec import Codec
from loopback_server import (
    STOPS,
    Loaded,
    Loopback,
    is_probe,
    one_line,
    script,
    serving,
    write_tokenizer,
)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("COA_API_KEY", "OPENAI_API_KEY", "COA_TOKENIZER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def server(folder: Path) -> Iterator[Loopback]:
    with serving(Loopback(Codec.from_folder(folder), script)) as listening:
        yield listening


@pytest.fixture
def adapter() -> Any:
    torch = pytest.importorskip("torch")
    from coa.models.weights import Adapter

    pair = (torch.randn(24, 6), torch.randn(5, 24))
    return Adapter(0.5, {"model.layers.0.mlp.up_proj": pair})


def test_every_version_of_an_adapter_has_a_name_of_its_own(
    server: Loopback, folder: Path, adapter: Any
) -> None:
    server.adapters = {}
    loaded = Loaded(server, folder)
    names = []

    async def load(version: str, source: Any = adapter) -> None:
        await loaded.engine.load(source, version)
        assert loaded.engine.weights == version

    for version in ("one", "two", "two"):
        asyncio.run(load(version))
        loaded.ask()
        names.append(server.completions("/v1/completions")[-1]["model"])
        assert list(server.adapters) == [names[-1]]
    assert len(set(names)) == 3 and all(name.startswith("tiny-") for name in names)
    assert loaded.roll_out().weights == "two"
    asyncio.run(load("none", None))
    loaded.ask()
    assert server.adapters == {} and server.completions("/v1/completions")[-1]["model"] == "tiny"


def test_rl_refuses_a_server_that_takes_no_weights(
    server: Loopback, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp exchanges token ids, but its weights stay as they are."""
    pytest.importorskip("torch")
    from coa.train.rl_stage import load_sampler, read_rl_recipe

    monkeypatch.setenv("COA_TOKENIZER", str(folder))
    recipe = read_rl_recipe(None, [f"rollout.engine={server.ref}", "rollout.context=512"])
    assert load_sampler(recipe, None).name == server.ref  # type: ignore[arg-type]
    server.offers = "native"
    with pytest.raises(ConfigError, match=r"^rollout\.engine: .* takes no new weights while it ru"):
        load_sampler(recipe, None)  # type: ignore[arg-type]


def test_an_order_whose_answer_was_lost_was_obeyed(
    server: Loopback, folder: Path, adapter: Any
) -> None:
    server.adapters, loaded = {}, Loaded(server, folder)
    server.words = "The lora adapter 'tiny-one' has already been loaded."
    server.faults.append("obey and cut")
    asyncio.run(loaded.engine.load(adapter, "one"))
    loaded.ask()
    used = server.completions("/v1/completions")[-1]["model"]
    assert list(server.adapters) == [used] and used.startswith("tiny-one-")


def test_an_adapter_in_memory_is_written_for_the_server(server: Loopback, folder: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from coa.models.weights import Adapter, pair_up

    server.adapters = {}
    loaded = Loaded(server, folder)
    pair = (torch.randn(2, 6), torch.randn(5, 2))

    async def once() -> Path:
        await loaded.engine.load(Adapter(0.5, {"model.layers.0.mlp.up_proj": pair}), "one")
        assert server.adapters
        (path,) = map(Path, server.adapters.values())
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        assert (config["r"], config["lora_alpha"]) == (2, 1.0)
        assert config["target_modules"] == ["up_proj"]
        read = pair_up(load_file(path / "adapter_model.safetensors"))
        down, up = read["model.layers.0.mlp.up_proj"]
        assert torch.equal(down, pair[0]) and torch.equal(up, pair[1])
        await loaded.engine.close()
        return path

    assert not asyncio.run(once()).exists() and server.adapters == {}


def test_a_request_under_way_keeps_its_adapter(
    server: Loopback, folder: Path, adapter: Any
) -> None:
    server.adapters = {}
    loaded = Loaded(server, folder)

    async def overlapping() -> None:
        engine = loaded.engine
        await engine.load(adapter, "one")
        prompt = engine.encode_prompt("s", "q")
        server.slow_s = 0.2
        slow = asyncio.create_task(engine.generate(prompt, Sampling(stop=STOPS)))
        await asyncio.sleep(0.05)
        await engine.load(adapter, "two")
        assert slow.done() and len(server.adapters or ()) == 1
        assert (await slow).finish == "stop"

    asyncio.run(overlapping())
    order = [path.rpartition("/")[2] for path, body in server.asked if not is_probe(body)]
    load, unload = "load_lora_adapter", "unload_lora_adapter"
    assert order[-4:] == [load, "completions", load, unload]


@pytest.mark.parametrize("fault", [404, 500])
def test_a_server_that_loads_no_adapters_is_one_line(
    server: Loopback, folder: Path, adapter: Any, fault: int
) -> None:
    loaded = Loaded(server, folder)
    server.faults.append(fault)
    with pytest.raises(EngineError, match=f"{fault}.*no, not None") as caught:
        asyncio.run(loaded.engine.load(adapter, "one"))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in one_line(caught.value)
    assert "--enable-lora --max-lora-rank 32." in one_line(caught.value)
    assert loaded.engine.weights == "tiny"
    assert [path for path, _ in server.asked].count("/v1/load_lora_adapter") == 1
    server.offers = "native"
    with pytest.raises(EngineError, match="takes no adapters while it runs; expected vLLM"):
        asyncio.run(Loaded(server, folder).engine.load(adapter, "one"))


def test_an_adapter_that_is_served_by_name_is_described_by_its_base(
    server: Loopback, folder: Path
) -> None:
    server.adapters = {"mine": "somewhere"}
    server.models[0]["root"] = str(folder)
    server.models.append({"id": "mine", "root": "somewhere", "parent": "tiny"})
    engine = load_engine(server.ref.replace("tiny", "mine"))
    assert isinstance(engine, OpenAIEngine) and engine.exact
    assert engine.context == 4096 and engine.weights == "mine"
