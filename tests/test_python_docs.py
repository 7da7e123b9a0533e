"""Python's own documentation as a corpus: 530 real pages, and an agent that reads them.

The documentation is what Debian packages (python3-doc): installed, or unpacked by `make
python-docs`; COA_TEST_PYTHON_DOCS names another folder. What is right comes from the HTML source,
found by regular expressions and not by our readers.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from coa.corpus.build import BuildReport, build_corpus
from coa.corpus.site import Corpus
from coa.engines.scripted import ScriptedEngine
from coa.grammar import load_grammar
from coa.loop import run
from coa.tasks import Task
from coa.tools import Toolbox
from coa.tools.web import CorpusSource, crawl_page, web_search

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
FEWEST, ENOUGH = 50, 0.98
ADDED = re.compile(r'versionmodified added">New in version (\d[\d.]*\d)\.</span></p>')
DEFINITION = re.compile(
    r'<dl class="py (?:function|method)">\s*<dt [^>]*id="([\w.]+)">(?:(?!<dt ).)*?</dt>\s*'
    r"<dd>(.*?)</dd></dl>",
    re.DOTALL,
)


def _documentation() -> Path | None:
    if named := os.environ.get("COA_TEST_PYTHON_DOCS"):
        return Path(named)
    places = [Path("/usr/share/doc"), ROOT / ".cache" / "python-docs" / "usr" / "share" / "doc"]
    found = [path for place in places for path in sorted(place.glob("python3.*/html"))]
    return next((path for path in found if (path / "library" / "json.html").is_file()), None)


Built = tuple[Path, Corpus, BuildReport]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = _documentation()
    if folder is None:
        pytest.skip("no python3-doc here; unpack it with: make python-docs")
    target = tmp_path_factory.mktemp("python") / "corpus"
    report = build_corpus(folder, target, name="docs", progress="silent")
    return folder, Corpus.open(target), report


def functions(folder: Path) -> dict[str, str]:
    """Functions and methods whose documentation says once in which version they were added."""
    found: dict[str, str] = {}
    for path in sorted((folder / "library").glob("*.html")):
        for name, body in DEFINITION.findall(path.read_text(encoding="utf-8")):
            versions = ADDED.findall(body)
            if len(versions) == body.count("New in version") == 1 and "<dl" not in body:
                found[name] = versions[0]
    assert len(found) >= FEWEST
    return found


def test_every_page_is_read(built: Built) -> None:
    folder, corpus, report = built
    assert report.pages == len([p for p in folder.rglob("*.html") if "_static" not in p.parts])
    assert report.skipped == {} and report.passages == len(corpus) > 20_000
    longest = max(corpus.passages(), key=lambda passage: len(passage.text))
    assert len(longest.text) <= 1000


def test_a_function_and_its_version_share_a_passage(built: Built) -> None:
    folder, corpus, _ = built
    texts = defaultdict(list)
    for passage in corpus.passages():
        for name in passage.names:
            texts[name].append(passage.text)
    for name, version in functions(folder).items():
        last, added = name.rpartition(".")[2], f"New in version {version}."
        assert any(last in text and added in text for text in texts[name]), name


def scripted_agent(prompt: str, turn: int) -> str:
    """Search, read the results one by one until one defines the function, answer."""
    name = re.findall(r"was ([\w.]+) added", prompt)[-1]
    if turn == 0:
        return (
            "<think>Search for it.</think><plan>1. Search. 2. Read.</plan><think>Now.</think>"
            f"<web_search>{name} new in version</web_search>"
        )
    observations = re.findall(r"<observation>(.*?)</observation>", prompt, re.DOTALL)
    version = added_in(observations[-1], name) if turn > 1 else ""
    if version:
        return (
            f"<think>Found.</think><suggested_answer>{version}</suggested_answer><think>Check."
            "</think><double_check>The page says so. Score: 4</double_check><think>Done.</think>"
            f"<answer>{version}</answer>"
        )
    addresses = re.findall(r"^\[\d+\] .* - (https://\S+)$", observations[0], re.MULTILINE)
    if turn > len(addresses):
        return (
            "<think>Lost.</think><suggested_answer>unknown</suggested_answer><think>Check.</think>"
            "<double_check>Score: 3</double_check><think>x</think><answer>unknown</answer>"
        )
    return f"<think>Read.</think><crawl_page>{addresses[turn - 1]}</crawl_page>"


def added_in(text: str, name: str) -> str:
    """The version that stands below the signature of the function."""
    last = re.escape(name.rpartition(".")[2])
    found = re.search(rf"(?<!\w){last}\b.*?New in version (\d[\d.]*\d)", text, re.DOTALL)
    return found[1] if found else ""


async def test_an_agent_answers_by_search_and_crawl(
    built: Built, record_property: Callable[[str, object], None]
) -> None:
    folder, corpus, _ = built
    source = CorpusSource(corpus)
    wrong, asked = [], functions(folder)
    for name, version in asked.items():
        question = f"In which version of Python was {name} added?"
        toolbox = Toolbox([web_search(source), crawl_page(source, question)])
        engine = ScriptedEngine(scripted_agent)
        done = await run(Task(question, (version,)), engine, load_grammar("web"), toolbox)
        if done.answer != version:
            wrong.append(f"{name}: found {done.answer!r} ({done.stop}), expected {version}")
    right = len(asked) - len(wrong)
    record_property("accuracy", f"{right}/{len(asked)}")
    print(f"{right} of {len(asked)} right", *wrong, sep="\n")
    assert right >= ENOUGH * len(asked), "\n".join(wrong)
