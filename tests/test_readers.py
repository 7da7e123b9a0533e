"""Files of strangers -> documents and passages."""

from __future__ import annotations

import gzip
from pathlib import PurePath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pypdf.errors import DependencyError

from coa.corpus import readers as charset
from coa.corpus.page import Document, DocumentBlock, Passage, passages_of
from coa.corpus.readers import READERS, decode, read_document
from coa.errors import MissingExtra, RecordError
from pdf_files import locked_pdf, pdf

URL = "https://x.example/p.html"
REFERENCE = """<!DOCTYPE html><html><head><title>shelf - Site</title>
<style>p {}</style></head><body>
<nav><a href="/">Home</a> Everything</nav>
<div class="body" role="main"><section id="module-shelf">
<h1>shelf &mdash; keep books<a class="headerlink" href="#module-shelf">&para;</a></h1>
<p>The shelf keeps <em>books</em>; see <a href="other.html#top">the other page</a>.</p>
<section id="taking"><h2>Taking books<a class="headerlink" href="#taking">&para;</a></h2>
<dl class="py function"><dt class="sig" id="shelf.take">
<span>shelf.</span><span>take</span>(<em>book</em>)
<a class="headerlink" href="#shelf.take">&para;</a></dt>
<dd><p>Take a book.</p><pre>&gt;&gt;&gt; take(1)
    2</pre><div class="versionadded"><p>New in version 3.9.</p></div></dd></dl>
<dl class="py class"><dt id="shelf.Shelf">class shelf.Shelf</dt><dd><p>A shelf.</p>
<dl class="py method"><dt id="shelf.Shelf.add">add(<em>book</em>)</dt>
<dt id="shelf.Shelf.append">append(<em>book</em>)</dt>
<dd><p>Add a book.</p></dd></dl>
<p>New in version 3.2.</p></dd></dl>
<dl><dt>book</dt><dd>bound paper</dd></dl>
</section>
<table><tr><th>kind</th><th>size</th></tr><tr><td>large</td><td>40 cm</td></tr></table>
<ul><li>one</li><li>two<script>alert()</script></li></ul>
</section></div><footer>Copyright</footer></body></html>"""


def read(name: str, content: str | bytes) -> Document:
    return read_document(PurePath(name), content.encode() if isinstance(content, str) else content)


def cut(name: str, content: str | bytes, max_chars: int = 1000) -> tuple[Passage, ...]:
    return passages_of(read(name, content), URL, max_chars)


def named(passages: tuple[Passage, ...], name: str) -> Passage:
    (found,) = (passage for passage in passages if name in passage.names)
    return found


def test_a_definition_is_one_passage_with_its_signature_and_its_version() -> None:
    take = named(cut("p.html", REFERENCE), "shelf.take")
    assert take.text == "shelf.take(book)\nTake a book.\n>>> take(1)\n    2\nNew in version 3.9."
    assert take.heading == "shelf \u2014 keep books > Taking books"
    assert take.url == f"{URL}#shelf.take" and take.anchors == ("taking", "shelf.take")


def test_what_follows_a_nested_definition_belongs_to_the_outer_one() -> None:
    passages = cut("p.html", REFERENCE)
    outer = [each.text for each in passages if each.names == ("shelf.Shelf",)]
    assert outer == ["class shelf.Shelf\nA shelf.", "class shelf.Shelf\nNew in version 3.2."]
    add = named(passages, "shelf.Shelf.append")
    assert add.names == ("shelf.Shelf.add", "shelf.Shelf.append")
    assert add.text == "add(book)\nappend(book)\nAdd a book."


def test_only_the_main_content_of_a_web_page_is_read() -> None:
    document = read("p.html", REFERENCE)
    text = "\n".join(block.text for block in document.blocks)
    assert document.title == "shelf \u2014 keep books"
    assert document.links == ("other.html#top",)
    for absent in ("Home", "Copyright", "alert", "\xb6", "p {}"):
        assert absent not in text
    assert "kind | size\nlarge | 40 cm" in text and "- one\n- two" in text
    assert "book: bound paper" in text
    assert "The shelf keeps books; see the other page." in text


def test_a_page_without_marks_of_its_main_content_loses_only_its_navigation() -> None:
    links = "".join(f'<li><a href="{n}.html">Chapter number {n}</a></li>' for n in range(40))
    page = (
        f'<title>Old</title><body><div id="menu">Menu</div><ul>{links}</ul>'
        '<section id="menu-design"><h2>Menus</h2><p>On menus.<br>And more.</p></section>'
        "<center>Plain <b>text</b></center><aside>Buy</aside>"
    )
    document = read("old.htm", page)
    assert [block.text for block in document.blocks] == [
        *("Menus", "On menus. And more.", "Plain text"),
    ]
    assert document.title == "Old" and len(document.links) == 40


def test_markdown_has_sections_anchors_tables_code_and_links() -> None:
    text = (
        "---\ntitle: 'Front'\n---\n# Guide\nHello [there](b.md).\n\n## Set up it!\n"
        "```sh\nmake  all\n```\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    )
    document = read("guide.md", text)
    hello, rest = passages_of(document, URL, 1000)
    assert (document.title, document.links) == ("Guide", ("b.md",))
    assert hello.text == "Hello there." and hello.url == URL
    assert rest.text == "make  all\na | b\n1 | 2" and rest.url == f"{URL}#set-up-it"
    assert read("x.md", "---\ntitle: Front\n---\nonly text").title == "Front"


def test_a_sharp_belongs_to_a_heading_unless_it_is_its_permalink() -> None:
    page = (
        '<h1>C#</h1><h2>F#<a id="f" href="#f-sharp"> #</a></h2><p>One.</p>'
        '<h2 id="g">G<a href="p.html#g"><b>#</b></a> major</h2><p>Two.</p>'
        '<dl><dt id="d">D#<a href="#d">\xb6</a></dt><dd>Three.</dd></dl>'
    )
    document = read("p.html", page)
    one, two, three = passages_of(document, URL, 1000)
    assert document.title == "C#"
    assert (one.section, one.url) == ("F#", f"{URL}#f")
    assert (two.section, two.url) == ("G major", f"{URL}#g")
    assert three.text.startswith("D#\nThree.")
    assert read("c.md", "# C#\n## F#\nText.").title == "C#"
    assert cut("c.md", "# C#\n## F#\nText.")[0].section == "F#"


def test_text_has_paragraphs_and_underlined_headings() -> None:
    first, second = cut(
        "notes.txt", "Notes\n=====\n\nOne line\nand another.\n\nPart\n----\nThe end.\n"
    )
    assert (first.title, first.text) == ("Notes", "One line\nand another.")
    assert (second.section, second.text) == ("Part", "The end.")
    assert read("raw.txt", "x" * 300).title == "raw"


def test_pdf_is_read_page_by_page() -> None:
    content = pdf(["The first page\nends with a hy-\nphen", "Page two", ""])
    document = read("a.pdf", content)
    passages = passages_of(document, URL, 1000)
    assert [each.text for each in passages] == ["The first page ends with a hyphen", "Page two"]
    assert passages[1].url == f"{URL}#page=2" and document.title == "a"
    assert document.remark == "1 of 3 pages hold no text"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.html", b"", "the file is empty"),
        ("a.txt", b" \n\t ", "the file is empty"),
        ("a.html", gzip.compress(b"<p>text</p>" * 50, mtime=0), "binary content, expected text"),
        ("a.txt", b"\x7fELF\x01\x01\x01\x00\x00", "binary content, expected text"),
        ("a.md", bytes(range(1, 32)) * 30, "binary content, expected text"),
        ("a.pdf", b"no pdf at all", r"not a PDF that can be read \(\w+: "),
        ("a.pdf", pdf(["x"])[:120], r"not a PDF that can be read \(\w+: "),
        ("a.pdf", pdf(["", ""]), "the PDF holds no text, only images perhaps; it needs OCR first"),
        ("a.pdf", locked_pdf(["secret"], "key"), "the PDF needs a password"),
    ],
)
def test_what_cannot_be_read_says_why(name: str, content: bytes, reason: str) -> None:
    with pytest.raises(RecordError, match=f"^{reason}"):
        read(name, content)


def test_a_pdf_locked_with_an_empty_password_is_read() -> None:
    assert cut("a.pdf", locked_pdf(["open"], ""))[0].text == "open"


@pytest.mark.parametrize("how", ["AES-128", "AES-256"])
def test_a_pdf_locked_by_aes_is_read(how: str) -> None:
    pytest.importorskip("cryptography")
    assert cut("a.pdf", locked_pdf(["open"], "", how))[0].text == "open"
    with pytest.raises(RecordError, match=r"^the PDF needs a password"):
        read("a.pdf", locked_pdf(["secret"], "key", how))


def test_a_pdf_locked_by_what_cannot_be_undone_here_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def undo(*_: object) -> None:
        raise DependencyError("cryptography>=3.1 is required for AES algorithm")

    monkeypatch.setattr("pypdf.PdfReader.decrypt", undo)
    with pytest.raises(MissingExtra, match=r"^Reading an encrypted PDF needs .*\[tools\]"):
        read("a.pdf", locked_pdf(["open"], ""))


WORDS = "Gr\xfc\xdfe aus K\xf6ln und Z\xfcrich, sagte die Stra\xdfenb\xe4ckerin fr\xf6hlich. " * 9


@pytest.mark.parametrize(
    ("content", "remark"),
    [
        (WORDS.encode(), ""),
        (WORDS.encode("utf-8-sig"), ""),
        (WORDS.encode("utf-16"), ""),
        (b"charset=utf-16 is what this text is about. " + WORDS.encode(), ""),
        (b'<?xml version="1.0" encoding="cp1252"?>' + WORDS.encode("cp1252"), ""),
        (b'<meta charset="ISO-8859-1">' + WORDS.encode("cp1252"), ""),
        (b'<meta charset="utf-16">' + WORDS.encode(), "declared as utf-16 but is utf-8"),
        (b'<meta charset="no-such">' + WORDS.encode(), "declared as no-such but is utf-8"),
        *(
            (f'<meta charset="{name}">{WORDS}'.encode(), f"declared as {name} but is utf-8")
            for name in ("punycode", "unicode-escape", "utf7", "raw_unicode_escape", "rot13")
        ),
        (b'<meta charset="gb2312">\xa8\xbf' + WORDS.encode("gb18030"), ""),
    ],
)
def test_charsets_are_found(content: bytes, remark: str) -> None:
    text, found = decode(content)
    assert WORDS in text and found == remark


@pytest.mark.parametrize("name", ["a.md", "a.markdown", "a.txt", "a.text", "a.rst"])
def test_a_charset_that_a_text_quotes_is_not_its_own(name: str) -> None:
    for quoted in ('<meta charset="iso-8859-1">', '<?xml version="1.0" encoding="koi8-r"?>'):
        document = read(name, f"```\n{quoted}\n```\n\n{WORDS}")
        assert WORDS.strip() in " ".join(block.text for block in document.blocks)
        assert document.remark == ""


def test_a_charset_that_had_to_be_guessed_is_said() -> None:
    text, remark = decode(WORDS.encode("cp1252"))
    assert "K\xf6ln" in text and remark.startswith("not UTF-8; read as ")
    text, remark = decode(b'<meta charset="utf-8">' + WORDS.encode("cp1252"))
    assert "K\xf6ln" in text and remark.startswith("declared as utf-8 but is not; read as ")
    assert decode(b"a caf\xe9 here") == ("a caf\xe9 here", "not UTF-8; read as cp1252")
    text, remark = decode(WORDS.encode() + b"\xe9")
    assert text == f"{WORDS}\ufffd" and remark == "not all of it is UTF-8"


def test_a_page_nested_too_deeply_is_read_as_plain_text() -> None:
    for depth in (1500, 5000):
        page = "<body>" + "<div>" * depth + "inside" + "</div>" * depth
        assert "inside" in " ".join(block.text for block in read("deep.html", page).blocks)


def test_later_parts_of_a_long_definition_begin_with_its_signature() -> None:
    body = "".join(f"<p>{'word ' * 60}</p>" for _ in range(6))
    page = f'<dl><dt id="m.f">m.f(a, b)</dt><dd>{body}<p>New in version 3.7.</p></dd></dl>'
    passages = cut("p.html", page, 600)
    assert len(passages) > 2
    assert all(each.text.startswith("m.f(a, b)\n") for each in passages)
    assert passages[-1].text.endswith("New in version 3.7.")
    assert max(len(each.text) for each in passages) <= 600


def test_a_page_cannot_make_every_passage_repeat_its_long_names() -> None:
    long = "x" * 100_000
    page = f'<h1>{long}</h1><h2 id="{long}">{long}</h2><dl><dt id="{long}">{long}(</dt><dd>y'
    for each in cut("p.html", page):
        assert len(each.heading) + len(each.url) + sum(map(len, each.names + each.anchors)) < 1500


words = st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=30)
texts = st.lists(words, min_size=1, max_size=120).map(" ".join)
blocks = st.one_of(
    st.builds(DocumentBlock, st.just("text"), texts),
    st.builds(DocumentBlock, st.just("heading"), texts, st.integers(1, 6)),
    st.builds(DocumentBlock, st.just("term"), texts, st.integers(7, 9), st.just(("m.f",))),
    st.builds(DocumentBlock, st.just("close"), st.just(""), st.integers(1, 9)),
)


@given(st.lists(blocks, max_size=12), st.integers(200, 1200))
def test_passages_keep_every_word_in_order_and_their_size(
    parts: list[DocumentBlock], size: int
) -> None:
    passages = passages_of(Document("t", tuple(parts)), URL, size)
    assert all(0 < len(each.text) <= size for each in passages)
    told = [word for part in parts if part.kind in ("text", "term") for word in part.text.split()]
    shown = iter([word for each in passages for word in each.text.split()])
    assert all(word in shown for word in told), "a word is lost, cut or out of order"


tags = st.sampled_from("p div li ul dl dt dd table tr td h1 h2 pre a span main nav br".split())
pieces = st.one_of(
    texts,
    tags.map("<{}>".format),
    tags.map("</{}>".format),
    st.just('<dt id="x.y">'),
    st.just("&lt;"),
)


@settings(max_examples=150)
@given(st.lists(pieces, max_size=40).map("".join))
def test_any_tangle_of_tags_is_read(page: str) -> None:
    if page.strip():
        for each in cut("p.html", page):
            assert each.text.strip() and len(each.text) <= 1000


@settings(max_examples=150)
@given(st.sampled_from([*READERS]), st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(suffix: str, content: bytes) -> None:
    try:
        read(f"a{suffix}", content)
    except RecordError as refused:
        assert "\n" not in str(refused)


@settings(deadline=None)  # Python looks for a module of that name
@given(st.text(max_size=40))
def test_no_name_of_a_charset_is_a_codec_that_no_text_is_written_in(name: str) -> None:
    assert charset.codec_of(name) not in ("utf-7", "idna", "punycode", "unicode_escape")


def test_lists_nested_deeply_are_read_and_the_links_among_them_kept() -> None:
    page = "<body>" + "".join(f'<ul><li><a href="{n}.html">Chapter {n}</a>' for n in range(900))
    document = read("deep.html", page)
    assert len(document.links) == 900 and document.blocks == ()
