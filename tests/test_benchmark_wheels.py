"""Files inside a wheel: fetched by pip, checked by hash, unpacked once. The index is a folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from coa.errors import RecordError, Unavailable
from coa.io.download import wheel_member

FILE = "coa_made_up-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip is told to take for the index."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / FILE, "w") as wheel:
        wheel.writestr("made_up/rows/a.jsonl", '{"a": 1}\n')
        wheel.writestr("made_up/__init__.py", "raise SystemExit('never run')")
        about = "coa_made_up-1.0.dist-info"
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: coa-made-up\nVersion: 1.0\n"
        )
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def fetched(cache: Path, digest: str, requirement: str = "coa-made-up==1.0") -> Path:
    return wheel_member(requirement, FILE, digest, "made_up/rows", cache, lambda line: None)


@pytest.mark.slow
def test_only_the_wanted_member_is_unpacked_and_it_is_fetched_once(
    index: Path, tmp_path: Path
) -> None:
    digest = hashlib.sha256((index / FILE).read_bytes()).hexdigest()
    member = fetched(tmp_path / "cache", digest)
    assert (member / "a.jsonl").read_text() == '{"a": 1}\n'
    assert not (member.parent / "__init__.py").exists()
    (index / FILE).unlink()
    assert fetched(tmp_path / "cache", digest) == member


@pytest.mark.slow
def test_a_wheel_with_another_hash_is_deleted(index: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"found sha256 .*, expected 0000.*it was deleted"):
        fetched(tmp_path / "cache", "0" * 64)
    assert not [each for each in (tmp_path / "cache").rglob("*") if FILE in each.name]


@pytest.mark.slow
def test_what_the_index_does_not_have_is_one_line(index: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"Could not download coa-not-there==1.0 .* file itself"):
        fetched(tmp_path / "cache", "0" * 64, "coa-not-there==1.0")


def test_what_is_unpacked_already_needs_no_index(tmp_path: Path) -> None:
    member = tmp_path / "wheels" / FILE.removesuffix(".whl") / "made_up" / "rows"
    member.mkdir(parents=True)
    assert fetched(tmp_path, "0" * 64) == member
