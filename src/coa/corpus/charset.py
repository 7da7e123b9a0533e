"""Bytes of strangers -> text, whatever charset they are in and whatever they say of it.

A byte order mark counts first, then what a file or its server declares, then UTF-8, then a guess.
Only charsets that texts are written in can be declared: Python's codecs hold others
('unicode_escape', 'utf-7', 'idna') that are slow or build text which is not there.
"""

from __future__ import annotations

import codecs
import re

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_DECLARED = re.compile(
    rb"""<(?:meta\b[^>]*?\bcharset|\?xml\b[^>]*?\bencoding)\s*=\s*["']?\s*([\w.:-]{2,40})""",
    re.IGNORECASE,
)
_DECLARED_WITHIN = 4096
_CODECS = re.compile(
    r"utf-(?:8|(?:16|32)(?:-[lb]e)?)|iso8859-\d+|koi8-[rtu]|mac-\w+|gb18030|big5\w*|euc_\w+|"
    r"iso2022_\w+|shift_jis\w+|johab|hz|cp(?:437|7[237]\d|8[56]\d|874|932|949|950|125\d)"
)
_EXTENDED = {
    **dict.fromkeys(("ascii", "iso8859-1"), "cp1252"),
    **dict.fromkeys(("gb2312", "gbk"), "gb18030"),
    **dict.fromkeys(("iso8859-11", "tis-620"), "cp874"),
    **{"iso8859-9": "cp1254", "shift_jis": "cp932", "euc_kr": "cp949"},
}
"""Charsets whose name pages give though they are written in an extension of it."""
_WITH_ZEROS = ("utf-16", "utf-32")
_LAST_RESORT = "cp1252"
_SAMPLE = 65536
_ENOUGH = 16
"""Bytes beyond ASCII that a guess takes; with fewer, every charset is as likely."""
_BEYOND_ASCII = bytes(range(128, 256))
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\f\x1b"))
_CONTROL_SHARE = 0.02
"""More control characters than that, and a file is no text."""


def decode(content: bytes, label: str = "", *, markup: bool = True) -> tuple[str, str]:
    """The text, and a remark when the charset is not the declared one or had to be guessed.

    `label` is what a server says of it. What cannot be read becomes replacement characters. Only
    `markup` declares its charset: plain text that holds a <meta> quotes one.
    """
    for mark, codec in _BOMS:
        if content.startswith(mark):
            return content[len(mark) :].decode(codec, "replace"), ""
    found = _DECLARED.search(content, 0, _DECLARED_WITHIN) if markup else None
    declared = [
        each for each in (label, found[1].decode("ascii", "replace") if found else "") if each
    ]
    known = [codec for each in declared if (codec := codec_of(each))]
    if b"\0" not in content[:512]:  # markup in these has zeros, whatever the label says
        known = [codec for codec in known if not codec.startswith(_WITH_ZEROS)]
    said = declared[0].lower() if declared else ""
    for codec in dict.fromkeys((*known, "utf-8")):
        try:
            text = content.decode(codec)
        except ValueError:
            continue
        wrong = said and codec not in known
        return text, f"declared as {said} but is {codec}" if wrong else ""
    others = [codec for codec in known if codec != "utf-8"]
    codec = others[0] if others else _guessed(content)
    trouble = f"declared as {said} but is not" if said else "not UTF-8"
    remark = "not all of it is UTF-8" if codec == "utf-8" else f"{trouble}; read as {codec}"
    return content.decode(codec, "replace"), remark


def codec_of(label: str) -> str:
    """The codec for the name of a charset; '' for a name that no text is written in."""
    try:
        name = codecs.lookup(label).name
    except (LookupError, ValueError):
        return ""
    name = _EXTENDED.get(name, name)
    return name if _CODECS.fullmatch(name) else ""


def is_binary(content: bytes) -> bool:
    """Whether this is no text: zeros without a byte order mark, or many control characters."""
    if any(content.startswith(mark) for mark, _ in _BOMS):
        return False
    sample = content[:_SAMPLE]
    share = 1 - len(sample.translate(None, _CONTROL)) / max(1, len(sample))
    return b"\0" in content or share > _CONTROL_SHARE


def _guessed(content: bytes) -> str:
    sample = content[:_SAMPLE]
    text = sample.decode("utf-8", "replace")
    wrong = text.count("\ufffd")
    if len(text) - len(text.encode("ascii", "ignore")) > 2 * wrong:
        return "utf-8"  # most of it is, so that another charset would spoil more than it mends
    letters = len(sample) - len(sample.translate(None, _BEYOND_ASCII))
    if is_binary(content) or letters < _ENOUGH:
        return _LAST_RESORT
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return _LAST_RESORT
    best = from_bytes(sample).best()
    return (codec_of(best.encoding) if best is not None else "") or _LAST_RESORT
