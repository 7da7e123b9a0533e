"""Who does the work of `coa bench sft` and `coa bench rl`: we and TRL, each in a new process.

A process of its own gives each the whole machine and a clean peak of memory, which the system
counts. TRL comes from an environment of its own (`dev/peers.sh` makes it).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from coa.errors import ConfigError, EngineError, Unavailable, did_you_mean
from coa.evaluate import trl_train
from coa.evaluate.train_work import Work
from coa.runs import Json

PEERS_PYTHON = ".cache/peers/bin/python"
_TAIL_LINES = 5


@dataclass(frozen=True, slots=True)
class Trained:
    """A work, done once. Lists have a number for each update."""

    seconds: list[float]
    tokens: list[int]
    """Of the sequences that were trained on."""
    version: str
    memory_gb: float
    """The most that the process held."""
    loss: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    rollout_s: list[float] = field(default_factory=list)


Trainer = Callable[[Work], Trained]


def train_ours(work: Work) -> Trained:
    return _train([sys.executable, "-m", "coa.evaluate.our_train"], work.asked)


def train_trl(work: Work, changes: Json | None = None) -> Trained:
    """TRL as it is fastest here, or with changes to what it is asked (COA_PEERS is its Python)."""
    python = Path(os.environ.get("COA_PEERS") or PEERS_PYTHON)
    if not python.is_file():
        raise Unavailable(
            f"{python}: no such file; make it with `sh dev/peers.sh .cache/peers`, or set "
            "COA_PEERS to a Python that has TRL."
        )
    asked = {"settings": {}, **work.asked, **(changes or {})}
    return _train([str(python), "-I", trl_train.__file__], asked)


PEERS: Mapping[str, Trainer] = {
    "trl": train_trl,
    "trl-float32": partial(train_trl, changes={"dtype": "float32"}),
    "trl-no-autocast": partial(train_trl, changes={"settings": {"bf16": False}}),
    "trl-padding-free": partial(train_trl, changes={"settings": {"padding_free": True}}),
}
"""TRL, and other ways to run it, to see that the first is the fastest."""


def trainers_named(peers: Sequence[str]) -> dict[str, Trainer]:
    """Ours and these peers."""
    for name in peers:
        if name not in PEERS:
            raise ConfigError(f"peers: {name!r} is none.{did_you_mean(name, PEERS)}")
    return {"ours": train_ours, **{name: PEERS[name] for name in peers}}


def _train(command: Sequence[str], asked: Json) -> Trained:
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(asked["threads"])}
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=log,
            env=os.environ | settings,
            text=True,
        )
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                json.dump(asked, stdin)  # who ends without reading it says why below
            memory_gb = _wait(process)
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
        if process.returncode:
            raise EngineError(f"ended with code {process.returncode}: {_tail(log)}")
        said.seek(0)
        return Trained(**json.load(said), memory_gb=memory_gb)


def _wait(process: subprocess.Popen[str]) -> float:
    """Wait for its end, as `Popen.wait` does; the most memory it held, in GB.

    What a process held before it became another program counts, too, so this one has to be small.
    """
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024
    return usage.ru_maxrss * unit / 1e9


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return " | ".join([line.strip() for line in log if line.strip()][-_TAIL_LINES:])
