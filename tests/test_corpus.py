"""A folder of strange files -> a corpus that can be searched and visited."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.corpus.build import CorpusSettings, default_target
from coa.corpus.index import INDEX_VERSION
from coa.corpus.site import Corpus, PageStore
from coa.environments.atlas.pages import SITE, any_corpus, atlas_corpus, atlas_passages, pages
from coa.environments.atlas.world import load_world
from coa.errors import ConfigError, RecordError, UsageError
from coa.io.files import lock
from manual import build, content, make_manual
from pdf_files import locked_pdf, pdf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_manual(tmp_path / "Manual")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "manual.corpus"


def test_a_folder_becomes_a_corpus(folder: Path, target: Path) -> None:
    report = build(folder, target)
    corpus = Corpus.open(target)
    assert (report.pages, report.read, report.site) == (6, 6, "https://manual.example")
    assert report.passages == len(corpus) == len(list(corpus.passages()))
    assert report.others == {".png": 1} and report.skipped == report.remarks == {}
    best = corpus.search("until the lamp turns green", 1)[0]
    assert best.heading == "Resetting > Full reset" and best.title == "Resetting"
    assert best.url == "https://manual.example/guide/reset.html#full"
    assert "ten seconds" in best.text and best.score > 0
    assert corpus.search("whales", 1)[0].url == "https://manual.example/paper.pdf#page=1"
    assert corpus.search("xylophone", 3) == [] and corpus.search("", 3) == []
    manifest = json.loads((target / "manifest.json").read_text())
    assert manifest["schema"] == 1 and manifest["source"] == str(folder.resolve())
    assert manifest["counts"] == {"pages": 6, "passages": len(corpus), "skipped": 0}
    assert manifest["settings"]["passage_chars"] == 1000
    assert list(report.lines())[-1].startswith(f"{target}: 6 pages, {len(corpus)} passages at")


def test_a_page_is_found_by_every_way_to_write_its_address(folder: Path, target: Path) -> None:
    build(folder, target)
    corpus = Corpus.open(target)
    site = "https://manual.example"
    for address in (
        *(f"{site}/guide/index.html", f"{site}/guide/", f"{site}/guide", "guide", "/guide/index"),
        *("manual.example/guide/", "http://www.manual.example/guide//?q=1", f" <{site}/guide> "),
        *(f"{site}/guide/#no-such-part", "./guide/"),
    ):
        page = corpus.page(address)
        assert page is not None and page.url == f"{site}/guide/index.html", address
    for address in ("", "/", site, f"{site}/", "manual.example"):
        found = corpus.page(address)
        assert found is not None and found.title == "Manual", address
    spaced = corpus.page("my file.txt")
    assert spaced == corpus.page(f"{site}/my%20file.txt") is not None
    for address in (
        *("https://else.example/guide/", "nothing.html", "ftp://manual.example/guide/"),
        *("http://[", "file:///etc/passwd", "../../etc/passwd", "//else.example/guide"),
    ):
        assert corpus.page(address) is None, address


def test_links_lead_to_pages_of_the_corpus(folder: Path, target: Path) -> None:
    build(folder, target)
    corpus = Corpus.open(target)
    page = corpus.page("/")
    assert page is not None
    assert [link.removeprefix("https://manual.example/") for link in page.links] == [
        *("guide/index.html", "guide/reset.html", "notes.md", "my%20file.txt"),
    ]
    assert all(corpus.page(link) for link in page.links)


def test_a_fragment_gives_its_section(folder: Path, target: Path) -> None:
    build(folder, target)
    corpus = Corpus.open(target)
    whole, full = corpus.page("guide/reset.html"), corpus.page("guide/reset.html#full")
    assert whole is not None and full is not None
    assert full.text == (
        "## Full reset\n\nHold the button for ten seconds until the lamp turns green.\n\n"
        "## Full reset > After it\n\nAll settings are lost."
    )
    assert full.links[0] == whole.url and full.url == f"{whole.url}#full"
    assert corpus.page("guide/reset.html#other") == whole


def test_a_page_called_by_a_common_word_does_not_win_every_search(
    folder: Path, target: Path
) -> None:
    (folder / "list.txt").write_text("a\nv\nse\n")
    build(folder, target)
    hits = Corpus.open(target).search("how do I press a button", 3)
    assert hits[0].section == "Soft reset" and not any(hit.title == "a" for hit in hits)


def test_a_search_for_pages_shows_each_page_once(folder: Path, target: Path) -> None:
    build(folder, target)
    corpus = Corpus.open(target)
    hits = corpus.search_pages("the button and the green lamp", 3)
    assert [hit.title for hit in hits][:2] in (["Resetting", "Notes"], ["Notes", "Resetting"])
    pages = [hit.url.partition("#")[0] for hit in corpus.search_pages("button lamp reset", 9)]
    assert len(set(pages)) == len(pages)
    assert corpus.search_pages("button", 0) == []


def test_a_document_that_is_there_twice_is_found_once(folder: Path, target: Path) -> None:
    build(folder, target)
    queries = ("green lamp", "the button", "reset")
    alone = Corpus.open(target)
    before = [(alone.search(query, 3), alone.search_pages(query, 3)) for query in queries]
    (folder / "zz.md").write_bytes((folder / "notes.md").read_bytes())
    build(folder, target)
    corpus = Corpus.open(target)
    for query, found in zip(queries, before, strict=True):
        for old, new in zip(
            found, (corpus.search(query, 3), corpus.search_pages(query, 3)), strict=True
        ):
            assert {hit.url for hit in new} == {hit.url for hit in old}
    assert len(corpus) > len(alone) and corpus.page("zz.md") is not None


def test_the_atlas_is_a_corpus_too() -> None:
    corpus = atlas_corpus(7)
    assert len(corpus) == len(atlas_passages(7)) == len(list(corpus.passages()))
    hit = corpus.search_pages("country", 4)[0]
    page = corpus.page(hit.url)
    assert page is not None and page.title == hit.title
    linked = corpus.page(page.links[0] + "/")
    assert linked is not None and linked.url == page.links[0]
    assert corpus.page(SITE + "/nowhere") is None and corpus.page("") is None
    assert any_corpus("atlas:7") is corpus
    with pytest.raises(UsageError, match=r"corpus 'atlas:x': expected atlas, atlas:K"):
        any_corpus("atlas:x")


def test_an_atlas_that_says_something_else_has_another_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *others = pages(load_world(7))
    said = dataclasses.replace(first.passages[0], text="Something else.")
    changed = [dataclasses.replace(first, passages=(said, *first.passages[1:])), *others]
    make = atlas_corpus.__wrapped__  # without what this process remembers
    assert make(7).fingerprint == atlas_corpus(7).fingerprint != atlas_corpus(0).fingerprint
    monkeypatch.setattr("coa.environments.atlas.pages.pages", lambda world: changed)
    assert make(7).fingerprint != atlas_corpus(7).fingerprint


def test_a_second_build_reads_what_has_changed(folder: Path, target: Path) -> None:
    build(folder, target)
    before = (target / "manifest.json").read_bytes()
    again = build(folder, target)
    assert (again.read, again.unchanged, again.removed) == (0, 6, 0)
    assert (target / "manifest.json").read_bytes() == before
    (folder / "notes.md").write_text("# Notes\nThe violet lamp uses 3 watts.\n")
    (folder / "my file.txt").unlink()
    (folder / "new.txt").write_text("About otters.\n")
    os.utime(folder / "index.html")  # touched, not changed
    third = build(folder, target)
    assert (third.read, third.unchanged, third.removed, third.pages) == (2, 4, 1, 6)
    corpus = Corpus.open(target)
    assert corpus.search("violet", 1) and corpus.search("otters", 1)
    assert not corpus.search("penguins", 1) and corpus.page("my file.txt") is None
    page = corpus.page("/")
    assert page is not None and not any("my%20file" in link for link in page.links)
    assert [path.name for path in target.glob("v*")] == ["v2"]


def test_changes_in_any_order_give_the_corpus_of_a_fresh_build(
    folder: Path, target: Path, tmp_path: Path
) -> None:
    for step in range(4):
        (folder / f"page {step % 3}.txt").write_text(f"the lamp number {step} is green\n")
        build(folder, target)
    build(folder, tmp_path / "fresh")
    assert content(target) == content(tmp_path / "fresh")
    fresh = Corpus.open(tmp_path / "fresh").fingerprint
    assert Corpus.open(target).fingerprint == fresh
    (folder / "page 0.txt").write_text("the lamp is green\n")
    build(folder, target)
    assert Corpus.open(target).fingerprint != fresh


def test_a_touched_file_is_looked_at_once(folder: Path, target: Path) -> None:
    build(folder, target)
    os.utime(folder / "notes.md", ns=(1, 1))
    assert build(folder, target).read == 0
    assert [path.name for path in target.glob("v*")] == ["v1"], "nothing new was to be published"
    with PageStore.open(target / "v1" / "pages.sqlite", "") as store:
        assert store.stamps()["notes.md"].mtime == 1


def test_other_settings_read_everything_again(folder: Path, target: Path) -> None:
    (folder / "long.txt").write_text("A sentence about the sea. " * 60)
    build(folder, target)
    report = build(folder, target, CorpusSettings(passage_chars=200))
    assert report.read == 7
    assert max(len(each.text) for each in Corpus.open(target).passages()) <= 200


def test_a_corpus_with_an_index_of_an_older_version_is_built_anew(
    folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr("coa.corpus.build.INDEX_VERSION", INDEX_VERSION - 1)
        build(folder, target)
    old = Corpus.open(target).fingerprint
    assert build(folder, target).read == 6 and Corpus.open(target).fingerprint != old
    assert [path.name for path in target.glob("v*")] == ["v2"]


def test_strange_files_are_named_and_skipped(folder: Path, target: Path) -> None:
    (folder / "empty.html").write_bytes(b"")
    (folder / "silent.html").write_text("<script>1</script>")
    (folder / "program.txt").write_bytes(b"\x7fELF\x00\x01")
    (folder / "latin.txt").write_bytes(
        "Gr\xfc\xdfe aus K\xf6ln an alle dort. ".encode("cp1252") * 9
    )
    (folder / "secret.pdf").write_bytes(locked_pdf(["secret"], "key"))
    (folder / "scan.pdf").write_bytes(pdf([""]))
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 oh no")
    (folder / "huge.txt").write_text("long " * 50_000)
    (folder / "loop").symlink_to(folder)
    (folder / "nowhere.txt").symlink_to(folder / "absent.txt")
    (folder / "self.txt").symlink_to(folder / "self.txt")
    (folder / "link.md").symlink_to(folder / "notes.md")
    os.mkfifo(folder / "pipe.txt")
    os.mkfifo(os.fsencode(folder) + b"/odd\xff\n.txt")
    (folder / ".hidden.txt").write_text("hidden")
    report = build(folder, target, CorpusSettings(max_megabytes=0.1))
    assert report.pages == 8  # six, the Latin one, and the linked one under its other name
    reasons = {
        "empty.html": "the file is empty",
        "silent.html": "no text was found in it",
        "program.txt": "binary content, expected text",
        "secret.pdf": "the PDF needs a password",
        "scan.pdf": "the PDF holds no text, only images perhaps; it needs OCR first",
        "huge.txt": "0.2 MB, more than the limit of 0.1 MB",
        "loop": "leads to ., which is read already",
        "nowhere.txt": "no such file or directory",
        "pipe.txt": "not a regular file",
        "odd\ufffd\ufffd.txt": "not a regular file",
    }
    assert {path: report.skipped[path] for path in reasons} == reasons
    assert report.skipped["broken.pdf"].startswith("not a PDF that can be read (")
    assert "symbolic links" in report.skipped["self.txt"]
    assert len(report.skipped) == len(reasons) + 2
    assert report.remarks.keys() == {"latin.txt"}
    assert all("\n" not in line for line in report.lines())
    again = build(folder, target, CorpusSettings(max_megabytes=0.1))
    assert again.skipped == report.skipped and again.pages == 8
    assert Corpus.open(target).search("Gr\xfc\xdfe", 1)


def test_a_file_that_may_not_be_read_is_skipped(folder: Path, target: Path) -> None:
    (folder / "notes.md").chmod(0)
    if os.access(folder / "notes.md", os.R_OK):
        pytest.skip("whoever runs this may read everything")
    assert build(folder, target).skipped == {"notes.md": "permission denied"}


def test_what_cannot_be_built_says_why(folder: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere: no such folder\."):
        build(tmp_path / "nowhere", target)
    note = folder / "notes.md"
    with pytest.raises(UsageError, match=r"is a file, expected a folder; give '.*Manual', which"):
        build(note, target)
    with pytest.raises(UsageError, match="is the source itself"):
        build(folder, folder)
    with pytest.raises(UsageError, match="is a file, expected a directory"):
        build(folder, note)
    with pytest.raises(ConfigError, match="is not empty and not a corpus"):
        build(folder, folder / "guide")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.png").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"holds no file of a kind that can be read .* \.png\."):
        build(empty, target)
    (empty / "a.txt").write_bytes(b"")
    with pytest.raises(UsageError, match=r"none of its 1 files .* a\.txt: the file is empty\."):
        build(empty, tmp_path / "none.corpus")
    build(folder, target)
    with pytest.raises(ConfigError, match=r"was made from .*Manual, and it is .*empty here"):
        build(empty, target)
    held = lock(target / ".lock", lambda holder: None)
    with pytest.raises(UsageError, match=rf"another process \(pid {os.getpid()}\)"):
        build(folder, target)
    held.close()
    with pytest.raises(ConfigError, match=r"passage_chars \(--passage\) is 20, expected 200 or"):
        CorpusSettings(passage_chars=20)
    with pytest.raises(ConfigError, match=r"max_megabytes \(--megabytes\) is 0, expected more"):
        CorpusSettings(max_megabytes=0)


def test_a_source_that_is_refused_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    empty, present = tmp_path / "empty", tmp_path / "present"
    empty.mkdir()
    present.mkdir()
    for files in ((), ("a.txt",)):  # the second can be read, and is found to hold nothing
        for name in files:
            (empty / name).touch()
        for target in (tmp_path / "new.corpus", tmp_path / "far" / "off" / "c", present):
            with pytest.raises(UsageError, match=r"empty: "):
                build(empty, target)
        assert sorted(tmp_path.iterdir()) == [folder, empty, present] and not [*present.iterdir()]
    built = build(folder, present)
    for file in folder.rglob("*.*"):
        file.unlink()
    with pytest.raises(UsageError, match="holds no file of a kind"):
        build(folder, present)
    assert len(Corpus.open(present)) == built.passages


def test_a_corpus_within_its_folder_is_not_read(folder: Path) -> None:
    for _ in range(2):
        assert build(folder, folder / "made.corpus").pages == 6
    assert default_target(folder) == Path("Manual.corpus")


def test_a_corpus_can_be_read_where_nobody_may_write(folder: Path, target: Path) -> None:
    build(folder, target)
    places = [target, *(path for path in target.rglob("*") if path.is_dir())]
    for place in places:
        place.chmod(0o555)
    try:
        assert Corpus.open(target).search("lamp", 1)
    finally:
        for place in places:
            place.chmod(0o755)


def test_what_is_no_corpus_is_not_opened(folder: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no corpus\. Make one of a folder with: coa"):
        Corpus.open(tmp_path)
    with pytest.raises(UsageError, match="Make one of a folder with"):
        Corpus.open(tmp_path / "nowhere")
    build(folder, target)
    manifest = json.loads((target / "manifest.json").read_text())
    for text, reason in (
        ("{", "not JSON"),
        ("[]", "found a list, expected an object"),
        ("{}", "not the manifest of a corpus"),
        (json.dumps(manifest | {"schema": 9}), "found corpus schema 9, expected 1"),
        (
            json.dumps(manifest | {"version": "v7"}),
            "pages.sqlite: no such file; the corpus is damaged",
        ),
    ):
        (target / "manifest.json").write_text(text)
        with pytest.raises((RecordError, UsageError), match=reason):
            Corpus.open(target)


@settings(deadline=None)
@given(st.text(max_size=60), st.sampled_from(["", "https://atlas.example/", "http://", "//", "#"]))
def test_any_string_is_a_safe_address(text: str, before: str) -> None:
    page = atlas_corpus(0).page(before + text)
    assert page is None or page.url.startswith(SITE)


def test_reports_are_plain_json(folder: Path, target: Path) -> None:
    report = build(folder, target)
    assert json.loads(json.dumps(report.to_json())) == dataclasses.asdict(report)


def test_a_link_out_of_the_folder_is_not_followed(
    folder: Path, target: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("The key is under the mat.\n")
    (folder / "secret.txt").symlink_to(outside / "secret.txt")
    (folder / "more").symlink_to(outside)
    (folder / "picture2.png").symlink_to(outside / "nothing.png")
    report = build(folder, target)
    refused = "a link that leaves the folder"
    assert report.skipped == {"more": refused, "secret.txt": refused}
    assert report.pages == 6 and not Corpus.open(target).search("mat", 1)


def test_scripts_without_spaces_are_searched_by_pairs_of_letters(
    folder: Path, target: Path
) -> None:
    tower = "\u6771\u4eac\u5854"
    (folder / "tower.txt").write_text(
        f"{tower}\n\n{tower}\u306f1958\u5e74\u306b\u5efa\u3066\u305f\u3002\n"
    )
    (folder / "old.md").write_text(
        "# \u4eac\u90fd\n\n## \u6b74\u53f2\n\n\u53e4\u3044\u90fd\u5e02\u3067\u3059\u3002\n"
    )
    build(folder, target)
    corpus = Corpus.open(target)
    for query, found in (
        (f"{tower}\u306f\u4f55\u5e74", "tower.txt"),
        ("\u53e4\u3044\u90fd", "old.md#\u6b74\u53f2"),
        ("\u6b74\u53f2", "old.md#\u6b74\u53f2"),
    ):
        best = corpus.search(query, 1)[0]
        assert unquote(best.url) == f"https://manual.example/{found}"
    assert corpus.search("\u6b74\u53f2", 1)[0].heading == "\u4eac\u90fd > \u6b74\u53f2"
    assert corpus.search(tower, 1)[0].section == ""


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _spoil(path: Path) -> None:
    path.write_bytes(b"Dear diary, this is something else.\n" * 300)


@pytest.mark.parametrize("damage", [_cut, _spoil])
@pytest.mark.parametrize("name", ["pages.sqlite", "index/meta.json", "index/*.store"])
def test_a_damaged_corpus_is_one_line(
    folder: Path, target: Path, name: str, damage: Callable[[Path], None]
) -> None:
    build(folder, target)
    (path,) = (target / "v1").glob(name)
    damage(path)
    with pytest.raises(RecordError, match=r"Delete the corpus and build it again\.$") as caught:
        Corpus.open(target).page("notes.md")
    assert str(target) in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_stopped_build_left_behind_is_replaced_when_it_is_worthless(
    folder: Path, target: Path
) -> None:
    build(folder, target)
    (folder / "notes.md").write_text("# Notes\nThe violet lamp.\n")
    (target / "v2").mkdir()
    _spoil(target / "v2" / "pages.sqlite")
    assert build(folder, target).pages == 6
    assert Corpus.open(target).search("violet", 1)


FULL_DISK = """
import resource, sys
from pathlib import Path
from coa.corpus.build import build_corpus
from coa.errors import RecordError

resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
try:
    build_corpus(Path(sys.argv[1]), Path(sys.argv[2]), workers=1, progress="silent")
except RecordError as error:
    print(error)
"""


def test_a_disk_that_is_full_is_one_line_and_nothing_is_deleted(folder: Path, target: Path) -> None:
    (folder / "long.txt").write_text("A sentence about the sea. " * 6000)
    command = [sys.executable, "-c", FULL_DISK, str(folder), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line, rest = done.stdout.split("\n")
    assert line.startswith(f"{target}/v1/pages.sqlite: cannot be written (") and rest == ""
    assert (target / "v1" / "pages.sqlite").exists()
    with pytest.raises(RecordError, match=r"cannot be written \(unable to open database file\)\.$"):
        PageStore.create(target / "nowhere" / "pages.sqlite", "", "")
    assert build(folder, target).pages == 7
