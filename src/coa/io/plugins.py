"""Users' own code: tasks, rewards, tools, teachers, engines and environments, by `module:attribute`
or by the file of a module.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coa.errors import ConfigError, did_you_mean


def load_object(reference: str, what: str = "plug-in", looked_in: str = "") -> Any:
    """Import `module:attribute`; modules in the current directory are found too. `looked_in` says
    where else it was looked for."""
    name, colon, attribute = reference.partition(":")
    if not (colon and name and attribute):
        raise ConfigError(
            f"{what} {reference!r}: expected module:attribute, such as 'my_tasks:load'."
        )
    _search(Path.cwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as exc:
        missing = exc.name or name
        if name == missing or name.startswith(missing + "."):
            advice = f"Looked in {looked_in}the current directory and in what is installed."
        else:
            advice = f"Module {name!r} was found; install what it needs."
        raise ConfigError(f"{what} {reference!r}: no module named {missing!r}. {advice}") from exc
    except Exception as exc:
        raise ConfigError(
            f"{what} {reference!r}: importing {name!r} failed: {type(exc).__name__}: {exc}"
        ) from exc
    return _attribute(module, attribute, f"{what} {reference!r}: {name}")


def load_beside(folder: Path, reference: str, what: str) -> Any:
    """`module:attribute` of a module beside a file, or of an installed one."""
    name, _, attribute = reference.partition(":")
    path = folder / f"{name.replace('.', '/')}.py"
    top = folder / name.partition(".")[0] / "__init__.py"
    if top.is_file():
        with _package(top):
            return load_object(reference, f"{what}:")
    if not path.is_file():
        return load_object(reference, f"{what}:", f"{folder}, ")
    return _attribute(load_module(path), attribute, f"{what}: {path.name}")


def _attribute(found: Any, attribute: str, where: str) -> Any:
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [known for known in dir(found) if not known.startswith("_")]
            raise ConfigError(f"{where} has no {part!r}.{did_you_mean(part, public)}")
        found = getattr(found, part)
    return found


def load_module(path: Path) -> Any:
    """A module by its file. It has its own name where no other module has it, so that modules of
    one folder can import each other; the folder is searched last."""
    path = path.resolve()
    _search(path.parent)
    name = path.stem
    if name in sys.modules and _file_of(sys.modules[name]) == path:
        return sys.modules[name]
    if name in sys.modules or _is_elsewhere(name, path):
        name = f"coa_environment_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
        if name in sys.modules:
            return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _beside(path.parent):
            spec.loader.exec_module(module)
    except BaseException as exc:
        del sys.modules[name]
        if not isinstance(exc, Exception):
            raise
        frames = [f for f in traceback.extract_tb(exc.__traceback__) if f.filename == str(path)]
        at = f", line {frames[-1].lineno}" if frames else ""
        raise ConfigError(
            f"{path.name}{at}: importing it failed: {type(exc).__name__}: {exc}"
        ) from exc
    return module


def _search(folder: Path) -> None:
    """Let modules of a folder be imported; never first, since a file there must not stand in for a
    package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


_SET_ASIDE: dict[Path, dict[str, Any]] = {}
"""Modules of packages whose names others have, by the file of the package."""


@contextmanager
def _package(file: Path) -> Iterator[None]:
    """Let a package be imported although another one has its name, which then has it again."""
    name, folder = file.parent.name, file.parent.parent
    _search(folder)
    held = sys.modules.get(name)
    if not _is_elsewhere(name, file) if held is None else _file_of(held) == file:
        yield
        return

    def taken() -> dict[str, Any]:
        names = [each for each in sys.modules if each == name or each.startswith(f"{name}.")]
        return {each: sys.modules.pop(each) for each in names}

    others = taken()
    sys.modules.update(_SET_ASIDE.get(file, {}))
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _SET_ASIDE[file] = taken()
        sys.modules.update(others)


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Let modules of one folder import each other although another folder has modules of the same
    names: these are out of the way meanwhile, and the folder is searched first."""
    siblings = {path.stem: path for path in folder.glob("*.py")}
    held = {name: sys.modules[name] for name in siblings if name in sys.modules}
    others = {name: each for name, each in held.items() if _file_of(each) != siblings[name]}
    elsewhere = (Path(place) for place in sys.path if place and Path(place) != folder)
    taken = any((place / f"{name}.py").is_file() for place in elsewhere for name in siblings)
    if not others and not taken:
        yield
        return
    for name in others:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.path.append(str(folder))
        sys.modules.update(others)


def _file_of(module: Any) -> Path | None:
    found = getattr(module, "__file__", None)
    return Path(found).resolve() if found else None


def _is_elsewhere(name: str, path: Path) -> bool:
    """Whether another module would be imported by that name."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and (spec.origin is None or Path(spec.origin).resolve() != path)
