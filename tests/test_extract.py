"""What is read out of pages: charsets, titles, main text, links; and summaries for a question."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.corpus.readers import decoded
from coa.corpus.web_page import Link, read_html, read_page
from coa.errors import ToolError, ToolMistake
from coa.tools.web import GAP, sentences, summarise, terms
from pdf_files import locked_pdf

# -- extraction ----------------------------------------------------------------------------------

ARTICLE = """<!doctype html><html><head><title>The &amp; Tower</title>
<base href="https://b.example/dir/"><style>p {color: red}</style></head><body>
<nav><a href="/start">Home</a></nav><article><h1>Tower</h1>
<p>The tower stands on a hill above the harbour, and everybody who arrives by sea sees it first. It
was built in 1887 and has been white ever since that day.</p>
<p>It was designed by <a href="quill.html#life">Ada Quill</a>, who also built the <a
href='https://c.example/pier'>long pier</a> and a number of bridges further up the river.</p>
<p><a href="javascript:void(0)">Menu</a><a href="quill.html">Again</a><a href="http://[bad">Bad</a>
<script>document.write("<a href='/evil'>evil</a>")</script><!-- <a href="/no">no</a> --></p>
</article></body></html>"""


def test_a_page_has_title_text_and_links() -> None:
    page = read_html("https://a.example/tower", ARTICLE)
    assert page.title == "The & Tower"
    assert "It was built in 1887" in " ".join(page.text.split())
    assert "document.write" not in page.text and "color" not in page.text
    assert page.links == (
        Link("Home", "https://b.example/start"),
        Link("Ada Quill", "https://b.example/dir/quill.html"),
        Link("long pier", "https://c.example/pier"),
    )


def test_the_main_part_of_a_page_is_told_from_its_menus() -> None:
    menu = "".join(f"<li><a href='/{n}'>Menu {n}</a></li>" for n in range(30))
    page = read_html("https://a.example/tower", ARTICLE.replace("<nav>", f"<nav><ul>{menu}</ul>"))
    assert "It was built in 1887" in page.text
    assert not re.search(r"Menu \d|Home", page.text) and len(page.links) == 33


def test_where_the_main_part_says_little_the_whole_page_is_its_text() -> None:
    menu = "".join(f"<li><a href='/{n}'>Chapter {n}</a></li>" for n in range(30))
    page = read_html("https://a.example/", f"<nav><ul>{menu}</ul></nav><main>Start.</main>")
    assert page.text.startswith("- Chapter 0\n- Chapter 1\n") and page.text.endswith("Start.")
    long = f"<nav>{menu}</nav><main>{'A sentence about the tower. ' * 20}</main>"
    assert "Chapter" not in read_html("https://a.example/", long).text


def test_without_the_package_that_reads_html_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lxml.etree", None)
    with pytest.raises(ToolError, match=r"the page is HTML; to read it: pip install .*\[tools\]"):
        read_page("https://a.example/", "text/html", "", b"<p>text")


def test_line_ends_count_in_preformatted_text_only() -> None:
    page = read_html("https://a.example/", "<p>one\ntwo</p><pre>three\nfour</pre>five\nsix<pre>x")
    assert page.text == "one two\nthree\nfour\nfive six\nx"


def pdf(*lines: str) -> bytes:
    """A PDF of one page."""
    shown = "".join(
        f"BT /F1 12 Tf 20 {700 - 20 * n} Td ({line}) Tj ET\n" for n, line in enumerate(lines)
    )
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents 4 0 R /Resources "
        "<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        f"<< /Length {len(shown)} >>\nstream\n{shown}\nendstream",
    ]
    body, offsets = "%PDF-1.4\n", list[int]()
    for number, each in enumerate(objects, start=1):
        offsets.append(len(body))
        body += f"{number} 0 obj\n{each}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    end = f"trailer << /Root 1 0 R /Size {len(objects) + 1} >>\nstartxref\n{len(body)}\n%%EOF"
    return f"{body}{table}{end}".encode()


def test_a_pdf_is_read_whatever_its_type_says() -> None:
    for kind in ("application/pdf", "text/html", ""):
        page = read_page(
            "https://a.example/x.pdf", kind, "", pdf("The tower", "was built in 1887.")
        )
        assert page.text == "The tower\nwas built in 1887."
    with pytest.raises(ToolMistake, match=r"a\.example: the page has no text\."):
        read_page("https://a.example/x.pdf", "application/pdf", "", pdf())


def test_a_pdf_that_is_locked_is_read_if_its_password_is_empty() -> None:
    page = read_page("https://a.example/x.pdf", "", "", locked_pdf(["open"], ""))
    assert page.text == "open"
    with pytest.raises(ToolMistake, match=r"^a\.example: the PDF needs a password\.$"):
        read_page("https://a.example/x.pdf", "", "", locked_pdf(["secret"], "key"))


@pytest.mark.parametrize("charset", ["", "utf-8", "latin-1", "utf-16", "shift_jis", "idna", "hex"])
@given(body=st.binary(max_size=300))
def test_any_bytes_are_decoded(charset: str, body: bytes) -> None:
    assert isinstance(decoded(body, charset)[0], str)


CHARSETS = {
    "windows-1251": "\u043c\u0430\u044f\u043a",
    "shift_jis": "\u706f\u53f0",
    "gb2312": "\u706f\u5854",
    "iso-8859-2": "lu\u010d",
    "utf-16-le": "maj\u00e1k",
}


@pytest.mark.parametrize("name", CHARSETS)
def test_charsets_are_read_from_the_label_and_from_the_page(name: str) -> None:
    word = CHARSETS[name]
    assert decoded(word.encode(name), name)[0] == word
    if name != "utf-16-le":
        page = f"<meta charset='{name}'>{word}".encode(name)
        assert decoded(page)[0].endswith(word)


def test_a_charset_that_plain_text_quotes_is_not_its_own() -> None:
    body = "Write <meta charset='iso-8859-1'> for a maj\u00e1k.".encode()
    for kind in ("text/plain", "text/markdown"):
        assert read_page("https://a.example/x", kind, "", body).text == body.decode()


PIECES = [
    *("<", ">", "<!--", "-->", "<![", "<!", "</", "<a href=", "'", '"', "</a>", "<title>", "&#x;"),
    *(
        "<script>",
        "</script>",
        "<svg",
        "<p>",
        "&amp",
        "\x00",
        "\ud800",
        "\u202e",
        "text ",
        "<table>",
    ),
    *("<td>", "<base href='", "http://[", "//x.example/", "<?xml version='1.0' encoding='x'?>"),
]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_any_markup_is_a_page(markup: str) -> None:
    page = read_html("https://a.example/", markup)
    assert "\x00" not in page.text
    assert all(link.url.startswith("http") for link in page.links)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["text/html", "", "text/plain", "application/pdf", "application/json"]),
    st.one_of(st.binary(max_size=300), st.binary(max_size=80).map(lambda b: b"%PDF-1.4\n" + b)),
)
def test_any_bytes_are_a_page_or_a_mistake(kind: str, body: bytes) -> None:
    try:
        assert read_page("https://a.example/", kind, "", body).text
    except ToolMistake as mistake:
        assert "a.example" in str(mistake)


# -- focus ---------------------------------------------------------------------------------------

FILLER = "The weather was mild that season and nothing of note took place. "
LONG = (
    "The tower is a landmark of the coast.\n"
    + FILLER * 30
    + "\nIt was designed by Ada Quill.\n"
    + FILLER * 30
    + "\nmath.prod(iterable)\nMultiplies all of them.\nNew in version 3.8.\n"
    + FILLER * 30
    + "\nmath.dist(p, q)\nThe distance of two points.\nNew in version 3.7.\n"
    + FILLER * 10
)


def test_a_text_that_fits_is_left_as_it_is() -> None:
    assert summarise("a\n\nb", "q", 4) == "a\n\nb"


def test_a_summary_holds_what_the_question_is_about_in_order_with_gaps_marked() -> None:
    summary = summarise(LONG, "Who designed the tower?", 500)
    assert len(summary) <= 500
    assert summary.startswith("The tower is a landmark of the coast.")
    assert "It was designed by Ada Quill." in summary and GAP in summary


def test_a_sentence_belongs_to_what_is_named_before_it() -> None:
    first = summarise(LONG, "In which version was math.prod added?", 130)
    assert "New in version 3.8." in first and "3.7" not in first
    second = summarise(LONG, "In which version was math.dist added?", 130)
    assert "New in version 3.7." in second and "3.8" not in second


def test_without_a_focus_a_summary_is_the_beginning() -> None:
    assert summarise(LONG, "", 200).startswith("The tower is a landmark of the coast.\nThe weather")
    assert summarise(LONG, "zebra", 200) == summarise(LONG, "", 200)


def test_words_are_compared_without_accents_case_and_endings() -> None:
    assert terms("Caf\u00e9s DESIGNED by cities") == terms("The cafe designs, city")
    assert terms("\u4e1c\u4eac\u5854") == ["\u4e1c\u4eac", "\u4eac\u5854"]


def test_a_text_without_full_stops_is_cut_all_the_same() -> None:
    parts = sentences("word " * 1000)
    assert max(len(part) for part, _ in parts) <= 400
    assert len(summarise("x" * 100_000, "x", 1000)) <= 1000


@settings(deadline=None)
@given(st.text(max_size=2000), st.text(max_size=50), st.integers(50, 500))
def test_a_summary_is_never_too_long_and_always_the_same(text: str, focus: str, room: int) -> None:
    summary = summarise(text, focus, room)
    assert len(summary) <= max(room, 0)
    assert summary == summarise(text, focus, room)
