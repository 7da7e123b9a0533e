"""A small manual in a folder, its corpus, and all that a reader can see of one."""

from __future__ import annotations

from pathlib import Path

from coa.corpus.build import BuildReport, CorpusSettings, build_corpus
from coa.corpus.site import Corpus
from pdf_files import pdf

INDEX = """<title>Manual</title><main><h1>Manual</h1><p>Welcome to the device manual.
<a href="guide/">Guide</a> <a href="guide/reset.html#full">Reset</a> <a href="/gone.html">x</a>
<a href="https://manual.example/notes.md">Notes</a> <a href="https://else.example/">y</a>
<a href="my%20file.txt">file</a> <a href="mailto:a@b.example">mail</a></p></main>"""
RESET = """<main><h1>Resetting</h1><p>Hold the button.</p><h2 id="full">Full reset</h2>
<p>Hold the button for ten seconds until the lamp turns green.</p>
<h3 id="after">After it</h3><p>All settings are lost.</p>
<h2 id="soft">Soft reset</h2><p>Press the button once. <a href="../notes.md">Notes</a></p></main>"""


def make_manual(root: Path) -> Path:
    """Six pages of four kinds, and a picture."""
    (root / "guide").mkdir(parents=True)
    (root / "index.html").write_text(INDEX)
    (root / "guide" / "index.html").write_text("<main><h1>Guide</h1><p>How to use it.</p></main>")
    (root / "guide" / "reset.html").write_text(RESET)
    (root / "notes.md").write_text("# Notes\nThe green lamp uses 3 watts.\n")
    (root / "my file.txt").write_text("A file with a space in its name, about penguins.\n")
    (root / "paper.pdf").write_bytes(pdf(["Whales are large animals."]))
    (root / "picture.png").write_bytes(b"\x89PNG")
    return root


def build(folder: Path, target: Path, how: CorpusSettings | None = None) -> BuildReport:
    return build_corpus(folder, target, how, workers=1, progress="silent")


def content(target: Path) -> list[object]:
    """Everything a reader can see of a corpus."""
    corpus = Corpus.open(target)
    words = ("button", "lamp", "green lamp reset", "penguins whales", "the")
    return [*corpus.passages(), *(corpus.search(word, 20) for word in words)]
