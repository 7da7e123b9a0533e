"""House rules, read from the source: layers, sizes, names, ASCII, and what `import coa` loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "coa"

LAYERS = (
    *("errors", "io", "statistics", "grammar", "trajectory", "models", "engines", "tasks"),
    *("corpus", "sandbox", "tools", "rewards", "loop", "environment", "rollouts"),
    *("view.terminal", "view.plots", "recording", "distillation", "train"),
    *("distillation.exports", "models.export", "evaluation", "view"),
    *("asking", "serving", "checking", "doctor", "api", "environments", "lab", "cli"),
)
"""A module imports only from those before it."""

FUNCTION_AIM, FUNCTION_LIMIT = 60, 100

BANNED = {"util", "helper", "manager", "handler", "processor", "data", "info", "misc", "wrapper"}
GIVEN_NAMES = {
    "handle_data": "html.parser.HTMLParser calls it",
    "data_received": "asyncio.Protocol has it",
}
"""Names that another library chose -> who did."""

MACHINE_PATH = re.compile(r"(?<![\w./$}])/(?:work|root|home)(?![\w-])")
PATHS_ALLOWED = {"tests/test_house.py": "the rule itself"}
"""Path -> why it may name such a directory."""

NOT_ASCII = {"dev/build_atlas_facts.py": "a table of the letters it transliterates"}
"""Path -> why it needs other letters."""


def tracked(*suffixes: str) -> list[Path]:
    """Files that are, or would be, in the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.splitlines()]
    else:
        paths = [p for p in ROOT.rglob("*") if ".venv" not in p.parts and ".git" not in p.parts]
    return sorted(p for p in paths if p.is_file() and (not suffixes or p.suffix in suffixes))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer(module: str) -> str:
    """'coa.grammar.parse' -> 'grammar'; the package itself is ''. A module of a package may stand
    in another place than the rest of it."""
    parts = module.split(".")
    own = ".".join(parts[1:3])
    if len(parts) == 1:
        return ""
    return own if own in LAYERS else {"__main__": "cli"}.get(parts[1], parts[1])


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module of ours) for every import, inside functions too."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"coa.{a.name}" for a in node.names] if module == "coa" else [module]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "coa")


def violations(path: Path) -> Iterator[str]:
    own = layer(module_name(path))
    if not own:
        return
    if own not in LAYERS:
        yield f"{named(path)}: {own!r} has no place in LAYERS; put it where it belongs."
        return
    for line, module in imported(path):
        target = layer(module)
        if target == own:
            continue
        if target not in LAYERS:
            yield f"{named(path)}:{line}: imports {module}; import from the module that defines it."
        elif LAYERS.index(target) > LAYERS.index(own):
            yield f"{named(path)}:{line}: {own} imports {module}, which is below it."


def test_a_module_imports_only_from_those_above_it() -> None:
    found = [text for path in sorted(PACKAGE.rglob("*.py")) for text in violations(path)]
    assert not found, "\n".join(found)


def test_the_layer_rule_sees_every_kind_of_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "ROOT", tmp_path)
    monkeypatch.setattr(here, "PACKAGE", tmp_path / "coa")
    path = tmp_path / "coa" / "tasks" / "made.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import json, coa.errors\n"
        "from coa.io.runs import Json\n"
        "from .task import Task\n"
        "from coa import train\n"
        "from coa import Task\n"
        "def late():\n"
        "    from ..loop import base\n"
        "    import coa.cli\n"
    )
    assert sorted(violations(path)) == [
        "coa/tasks/made.py:4: tasks imports coa.train, which is below it.",
        "coa/tasks/made.py:5: imports coa.Task; import from the module that defines it.",
        "coa/tasks/made.py:7: tasks imports coa.loop, which is below it.",
        "coa/tasks/made.py:8: tasks imports coa.cli, which is below it.",
    ]
    stray = tmp_path / "coa" / "stray.py"
    stray.write_text("")
    assert list(violations(stray)) == [
        "coa/stray.py: 'stray' has no place in LAYERS; put it where it belongs."
    ]


def python_files() -> list[Path]:
    return tracked(".py")


def test_functions_stay_short() -> None:
    too_long = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            place = f"{named(path)}:{node.lineno}: {node.name} has {lines} lines"
            if lines > FUNCTION_LIMIT:
                too_long.append(f"{place}, expected at most {FUNCTION_LIMIT}.")
            elif lines > FUNCTION_AIM:
                warnings.warn(f"{place}, aim at {FUNCTION_AIM}.", stacklevel=1)
    assert not too_long, "\n".join(too_long)


def words(name: str) -> set[str]:
    """'TaskDataUtils' and 'task_data_utils' -> {task, data, utils}, and the singular of each."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    lower = {part.lower() for part in parts}
    return lower | {word.removesuffix("s") for word in lower}


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def test_no_name_says_nothing() -> None:
    found = []
    for path in python_files():
        if words(path.stem) & BANNED:
            found.append(f"{named(path)}: the file's name")
        for line, name in defined_names(ast.parse(path.read_text(encoding="utf-8"))):
            if words(name) & BANNED and name not in GIVEN_NAMES:
                found.append(f"{named(path)}:{line}: {name}")
    assert not found, "banned in names: " + ", ".join(sorted(BANNED)) + "\n" + "\n".join(found)


def test_words_are_found_in_both_ways_of_writing_names() -> None:
    assert words("HTTPDataWrapper") >= {"http", "data", "wrapper"}
    assert words("load_utils_2") >= {"load", "util"}
    assert not words("metadata_handle") & BANNED


def test_source_is_ascii() -> None:
    found = []
    for path in tracked(".py", ".toml", ".sh"):
        if named(path) in NOT_ASCII:
            continue
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if not line.isascii():
                found.append(f"{named(path)}:{number}: {line.decode(errors='replace').strip()}")
    assert not found, "\n".join(found)


def test_no_file_names_a_directory_of_one_machine() -> None:
    found = []
    for path in tracked():
        if named(path) in PATHS_ALLOWED:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line):
                found.append(f"{named(path)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def test_importing_coa_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "pydantic", "peft", "tantivy", "tokenizers", "rich", "httpx")
    code = f"import sys, coa; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_module_loads_and_no_module_hides_a_public_name() -> None:
    """Each in the order of its name, which is not the order of layers: a cycle of imports shows."""
    pytest.importorskip("torch")
    alone = ("sandbox.inside", "lab.peer_", "__main__")
    names = [module_name(path) for path in sorted(PACKAGE.rglob("*.py"))]
    names = [name for name in names if not any(f"coa.{each}" in name for each in alone)]
    code = (
        "import importlib, types, coa\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "hidden = [n for n in coa.__all__ if isinstance(getattr(coa, n), types.ModuleType)]\n"
        "assert not hidden, hidden\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_class_has_a_name_of_its_own() -> None:
    """Two classes of one name in two modules are two ideas under one word."""
    homes: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module_name(path))
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert not twice, twice


CONTENT = re.compile(r"atlas|(?<!_)\bgym\b|phrasing_heldout|counterfactual", re.IGNORECASE)
MAY_NAME = {
    "cli": "help texts name what is shipped",
    "doctor.py": "it lists the packages of extras",
}
"""Part of the core -> why it may speak of shipped content."""


def test_the_core_does_not_know_what_is_shipped_with_it() -> None:
    """Neither by importing it nor by its names: environments are content."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] in ("environments", "lab", *MAY_NAME):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if CONTENT.search(line) or re.search(r"^\s*(?:from|import) coa\.environments", line):
                found.append(f"{inside}:{number}: {line.strip()[:90]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["errors", "io.runs", "io.settings", "io.progress", "trajectory"])
def test_the_base_modules_load_nothing_heavy(name: str) -> None:
    code = f"import sys, coa.{name}; print('torch' in sys.modules or 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["environment", "api", "cli", "evaluation.run", "train.settings"])
def test_what_a_command_reads_first_needs_no_torch(name: str) -> None:
    code = f"import sys, coa.{name}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    "command", ["--help", "grammar show mhqa", "model list", "corpus build --help"]
)
def test_a_light_command_imports_no_other_command(command: str) -> None:
    """Settings stand beside the work they are for; only a command that takes them imports them."""
    heavy = ("torch", "numpy", "transformers", "tokenizers", "tantivy", "httpx", "coa.environment")
    heavy += ("coa.rewards", "coa.sandbox", "coa.rollouts", "coa.engines", "coa.corpus")
    code = (
        "import sys\nfrom coa.cli import main\n"
        f"sys.argv = ['coa', *{command.split()!r}]\n"
        "try: main()\n"
        f"finally: print('heavy', [m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout and done.stderr.strip() == "heavy []"


def test_the_network_is_off_in_tests() -> None:
    import socket

    with (
        socket.socket() as free,
        pytest.raises(OSError, match="the network is off in tests"),
    ):
        free.connect(("192.0.2.1", 80))
