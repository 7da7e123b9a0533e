"""Read PDF: the bytes of a document -> its title and the text of its pages."""

from __future__ import annotations

import io
import logging
from itertools import islice

from coa.errors import MissingExtra, RecordError


def pdf_pages(content: bytes, most: int | None = None) -> tuple[str, list[str]]:
    """The title, or '', and the text of each page, of the first `most` only where that is given.

    A document that is locked without a password is opened. `RecordError` has the reason alone.
    """
    try:
        import pypdf
    except ImportError:
        raise MissingExtra("Reading PDF", "tools") from None
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # its warnings are not about our work
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise RecordError("the PDF needs a password")
        title = str((reader.metadata and reader.metadata.title) or "").strip()
        return title, [page.extract_text() for page in islice(reader.pages, most)]
    except (RecordError, MemoryError, TimeoutError):
        raise
    except pypdf.errors.DependencyError:  # AES, which most locked documents use
        raise MissingExtra("Reading an encrypted PDF", "tools") from None
    except Exception as exc:  # pypdf raises what it stumbles over, of any type
        reason = " ".join(str(exc).split())[:160]
        raise RecordError(f"not a PDF that can be read ({type(exc).__name__}: {reason})") from None
