"""Refuse a file over 500 kB: a repository never forgets one. Called by pre-commit with names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

LIMIT = 500_000
ALLOWED = {
    "src/coa/models/afm-135m/adapter_model.safetensors": "the model that the package ships",
}
"""Path -> why it has to be in the repository."""


def main(names: Sequence[str]) -> int:
    large = [
        (name, size)
        for name in names
        if name not in ALLOWED and Path(name).is_file()
        if (size := Path(name).stat().st_size) > LIMIT
    ]
    for name, size in large:
        print(f"{name}: {size // 1000} kB, expected at most {LIMIT // 1000} kB.")
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
