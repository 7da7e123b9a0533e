"""From a program of a framework to a served student, by the commands of dev/full_way.sh.

As small as it can be: a few questions, a random model of two layers. What is shown is that each
command takes what the one before has made; what a student can do is in docs/results.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = os.environ.get("COA_TEST_FRAMEWORKS", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FRAMEWORKS, reason="COA_TEST_FRAMEWORKS names no environments"),
]


@pytest.mark.parametrize("team", ["smolagents", "langgraph", "agents_sdk"])
def test_a_program_becomes_a_served_student(team: str, tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path / "tiny", max_position_embeddings=4096)
    coa = tmp_path / "coa"
    coa.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m coa "$@"\n')
    coa.chmod(0o755)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "COA": str(coa),
        "PYTHON": str(Path(FRAMEWORKS).resolve() / "teams" / "bin" / "python"),
        "TEAM": f"{team}_team.py",
        "BASE": f"hf:{tiny}",
        "EPISODES": "30",  # by then each tool was called
        "TESTS": "3",
        "SFT": "sft.epochs=1 sft.dtype=float32 sft.rank=4",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "DO_NOT_TRACK": "1",
    }
    steps = "record init distill sft eval compare serve".split()
    command = ["sh", str(ROOT / "dev" / "full_way.sh"), str(tmp_path / "made"), *steps]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=3600, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    served = json.loads(done.stdout.strip().splitlines()[-1])
    assert served["choices"][0]["message"]["role"] == "assistant"
