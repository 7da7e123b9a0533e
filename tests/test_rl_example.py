"""examples/rl_loop.py is short, stands alone, and learns."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

LOOP = Path(__file__).resolve().parent.parent / "examples" / "rl_loop.py"


def test_the_loop_is_short_and_needs_nothing_of_ours() -> None:
    text = LOOP.read_text(encoding="utf-8")
    assert text.count("\n") < 150
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert not [node.module for node in imports if str(node.module).startswith("coa")]


@pytest.mark.slow
def test_the_loop_learns_to_call_two_tools_in_turn() -> None:
    command = [sys.executable, str(LOOP)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    rewards = [float(found) for found in re.findall(r"mean reward ([\d.]+)", done.stdout)]
    assert len(rewards) == 40
    assert sum(rewards[:3]) / 3 < 0.4 and sum(rewards[-5:]) / 5 > 0.85, rewards
