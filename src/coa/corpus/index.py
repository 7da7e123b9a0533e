"""SearchIndex: full-text search over passages, on tantivy.

The order of hits depends on the passages and the query only: the index has one segment, written by
one thread, so equal scores keep the order in which the passages were given. A query is a bag of
words and never query syntax, so any string is safe.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tantivy

from coa.corpus.page import Passage
from coa.errors import CoaError, RecordError, UsageError

INDEX_VERSION = 2
"""Goes up when the same passages would be found differently, so that corpora are built again."""
MAX_QUERY_LETTERS = 20_000
MAX_QUERY_WORDS = 48
MAX_TITLE_WORDS = 6
TITLE_BOOST = 2.0
NAME_BONUS = 10.0
_WRITER_BYTES, _BYTES_PER_PASSAGE, _MOST_WRITER_BYTES = 64_000_000, 8_000, 3_000_000_000
"""Memory for writing. A writer that runs out of it begins a second segment, so it gets plenty; what
is not needed is not taken."""
STOP_WORDS = frozenset(
    "a an and are as at by for from in is it of on or the to was were with".split()
)
QUESTION_WORDS = frozenset(
    "be can did do does has have how i if my not that there this we what when where which who whom "
    "whose why will would you your".split()
)
"""Left out of queries as well where pages are not written for such queries; titles such as 'How do
I ...?' would win every question."""
_WORD = re.compile(r"[^\W_]+")
_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
"""Runs of kana, Chinese characters and Hangul."""
_WORD_OR_WIDE = re.compile(rf"{_WIDE.pattern}|[^\W_{_WIDE.pattern[1:-2]}]+")


@dataclass(frozen=True, slots=True)
class Hit(Passage):
    score: float = 0.0


class SearchIndex:
    """Passages that can be searched. Make one with `build` or `open`."""

    def __init__(
        self,
        index: tantivy.Index,
        stop_words: frozenset[str] = STOP_WORDS,
        directory: Path | None = None,
    ) -> None:
        self._index, self._stop_words, self._directory = index, stop_words, directory
        self._searcher = index.searcher()

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        directory: Path | None = None,
        expected: int = 0,
        *,
        titles_are_names: bool = False,
    ) -> SearchIndex:
        """Index the passages in memory, or in a directory when one is given.

        `expected` is about how many there are, when there are many. `titles_are_names`: what is
        derived from a title ('Korean' on the page 'Korea') speaks of its page, as in an
        encyclopedia.
        """
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        index = tantivy.Index(_schema(), path=None if directory is None else str(directory))
        _register_analyzers(index)
        memory = min(max(_WRITER_BYTES, expected * _BYTES_PER_PASSAGE), _MOST_WRITER_BYTES)
        writer = index.writer(memory, num_threads=1)
        writer.delete_all_documents()
        for passage in passages:
            document = tantivy.Document()
            document.add_text("title", passage.title)
            pairs = [word for word in _words(passage.heading, None) if _WIDE.match(word)]
            if passage.section or pairs:  # a second value of the field: searched alike, shown apart
                document.add_text("title", passage.section)
            if pairs:  # a third one, which is not shown: tantivy takes a run of these for one word
                document.add_text("title", " ".join(pairs))
            for name in (" ".join(_words(each)) for each in (passage.title, *passage.names)):
                if len(name) > 1 and name not in STOP_WORDS:  # a page may well be called 'A'
                    document.add_text("name", name)
            document.add_text("words", _without(passage.title, passage.text, titles_are_names))
            document.add_bytes("text", passage.text.encode())
            document.add_bytes("url", passage.url.encode())
            writer.add_document(document)
        writer.commit()
        writer.wait_merging_threads()
        index.reload()
        return cls(index)

    @classmethod
    def open(cls, directory: Path, stop_words: frozenset[str] = STOP_WORDS) -> SearchIndex:
        """Open an index that `build` wrote to a directory."""
        if not directory.is_dir() or not tantivy.Index.exists(str(directory)):
            raise UsageError(
                f"{directory}: holds no search index. Build one with: coa corpus build"
            )
        with _in_one_line(directory):
            index = tantivy.Index.open(str(directory))
            _register_analyzers(index)
            return cls(index, stop_words, directory)

    def __len__(self) -> int:
        return int(self._searcher.num_docs)

    def search(self, query: str, k: int) -> list[Hit]:
        """The k best passages for the words of the query, best first; none for no words."""
        words = _words(query[:MAX_QUERY_LETTERS])
        if not words or k < 1:
            return []
        with _in_one_line(self._directory):
            return self._found(words, k)

    def _found(self, words: list[str], k: int) -> list[Hit]:
        telling = [word for word in dict.fromkeys(words) if word not in self._stop_words]
        telling = telling or words
        bag = self._index.parse_query(
            " ".join(telling), ["title", "words"], field_boosts={"title": TITLE_BOOST}
        )
        parsed = tantivy.Query.boolean_query(
            [(tantivy.Occur.Should, query) for query in (bag, *self._named_by(words))]
        )
        hits = []
        for score, address in self._searcher.search(parsed, limit=k, count=False).hits:
            found = self._searcher.doc(address)
            url, text = (b"".join(found.get_all(name)).decode() for name in ("url", "text"))
            title, section = [*found.get_all("title"), ""][:2]
            hits.append(Hit(title, url, text, section, score=round(float(score), 6)))
        return hits

    def _named_by(self, words: list[str]) -> Iterator[tantivy.Query]:
        """A bonus for pages whose whole title occurs in the query; the longer, the larger."""
        for start in range(len(words)):
            for end in range(start + 1, min(start + MAX_TITLE_WORDS, len(words)) + 1):
                name = " ".join(words[start:end])
                if not self._searcher.doc_freq("name", name):  # most are no names; asking is cheap
                    continue
                exact = tantivy.Query.term_query(self._index.schema, "name", name)
                yield tantivy.Query.const_score_query(exact, NAME_BONUS * (end - start))


@contextmanager
def _in_one_line(directory: Path | None) -> Iterator[None]:
    """What tantivy makes of a file that it cannot read becomes a line that says what to do."""
    try:
        yield
    except (ValueError, OSError) as error:
        if directory is None or isinstance(error, CoaError):
            raise
        raise RecordError(
            f"{directory}: the search index is damaged ({' '.join(str(error).split())[:160]}). "
            "Delete the corpus and build it again."
        ) from error


def _words(text: str, limit: int | None = MAX_QUERY_WORDS) -> list[str]:
    """Words, folded; of scripts without spaces, pairs of neighbouring letters."""
    if text.isascii():
        return _WORD.findall(text.lower())[:limit]
    text = unicodedata.normalize("NFKD", text)
    marks = {ord(letter): None for letter in set(text) if unicodedata.combining(letter)}
    text = unicodedata.normalize("NFC", text.translate(marks))
    found: list[str] = []
    for word in _WORD_OR_WIDE.findall(text.lower()):
        wide = len(word) > 2 and _WIDE.match(word)
        found += [word[i : i + 2] for i in range(len(word) - 1)] if wide else [word]
    return found[:limit]


def _without(title: str, text: str, and_derivatives: bool) -> str:
    """The text less the words of its title, and their derivatives if these are of names.

    The title has its own field, and how often a passage repeats its subject says nothing about
    which of the subject's passages answers a query. Five common letters make a derivative of a
    name, but not of any word: 'interest' would be lost below 'International'.
    """
    names = tuple(_words(title))
    stems = tuple(name[:5] for name in names if and_derivatives and len(name) > 3)
    kept = (
        word
        for word in _words(text, limit=None)
        if word not in names and not word.startswith(stems)
    )
    return " ".join(kept)


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("title", stored=True, tokenizer_name="names")
    builder.add_text_field("name", tokenizer_name="raw")
    builder.add_text_field("words", tokenizer_name="english")
    # As bytes, because text fields are always indexed, and these are only shown.
    builder.add_bytes_field("text", stored=True)
    builder.add_bytes_field("url", stored=True)
    return builder.build()


def _register_analyzers(index: tantivy.Index) -> None:
    """Names are folded but not stemmed, so that two names never become one."""
    filters = [tantivy.Filter.remove_long(60), tantivy.Filter.lowercase()]
    filters.append(tantivy.Filter.ascii_fold())
    for name, more in (("names", []), ("english", [tantivy.Filter.stemmer("english")])):
        analyzer = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
        for each in (*filters, *more):
            analyzer = analyzer.filter(each)
        index.register_tokenizer(name, analyzer.build())
