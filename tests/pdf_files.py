"""Small PDF files, written by hand: pages of text, pages without any."""

from __future__ import annotations

import io
from collections.abc import Sequence


def pdf(pages: Sequence[str]) -> bytes:
    """A PDF with one page for each text; lines become lines, an empty text an empty page."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for n, text in enumerate(pages):
        lines = "".join(f"({line}) Tj 0 -14 Td " for line in text.split("\n") if line)
        stream = f"BT /F1 12 Tf 72 720 Td {lines}ET" if lines else ""
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * n} 0 R >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    return _file(objects)


def locked_pdf(pages: Sequence[str], password: str, how: str = "RC4-128") -> bytes:
    """Other ways than RC4 need the package cryptography."""
    import pypdf

    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf(pages)))
    writer.encrypt(password, algorithm=how)
    held = io.BytesIO()
    writer.write(held)
    return held.getvalue()


def _file(objects: Sequence[str]) -> bytes:
    out = "%PDF-1.4\n"
    places = []
    for number, body in enumerate(objects, start=1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n"
    out += "".join(f"{place:010d} 00000 n \n" for place in places)
    out += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n"
    return out.encode()
