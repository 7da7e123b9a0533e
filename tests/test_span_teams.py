"""The teams of tests/span_teams, run anew: real frameworks, real instrumentations, real exporters.

COA_TEST_FRAMEWORKS names a folder with the environments `spans` and `spans-old` (their packages are
in tests/span_teams/captures.py). What comes is read as what was kept in tests/span_captures is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from coa.recording.calls import read_sessions
from test_span_files import CAPTURES, HERE, read

sys.path.append(str(HERE / "span_teams"))

from captures import OLD, TEAMS, capture

FOLDER = Path(os.environ.get("COA_TEST_FRAMEWORKS", "nowhere")).resolve()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TEAMS, *OLD])
def test_a_team_is_recorded_as_it_was_before(tmp_path: Path, name: str) -> None:
    python = FOLDER / ("spans" if name in TEAMS else "spans-old") / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not there")
    out = tmp_path / f"{name}.jsonl"
    said = capture(python, {**TEAMS, **OLD}[name], out)
    assert said in ("Ada owes 108.0 euros.", "Ada owes 120 dollars.")
    forms = [out, *tmp_path.glob("*.traces.jsonl")]
    for path in forms:
        (now,), (before,) = read(path), read(CAPTURES / f"{path.name}.gz")
        for one, other in zip(now.calls, before.calls, strict=True):
            assert (one.agent, one.exchange.model) == (other.agent, other.exchange.model)
            assert one.exchange.reply == other.exchange.reply
            assert one.exchange.messages == other.exchange.messages
            assert [tool.name for tool in one.exchange.tools] == [
                tool.name for tool in other.exchange.tools
            ]
            assert [(each.name, each.arguments) for each in one.used] == [
                (each.name, each.arguments) for each in other.used
            ]
        assert [each.text for each in now.results.values()] == [
            each.text for each in before.results.values()
        ]
        assert (now.about, now.end) == (before.about, before.end)
    (logged,) = (each for each in read_sessions(tmp_path / f"{name}.log") if each.calls)
    assert logged.calls == [
        type(call)(**{**_fields(call), "session": logged.name}) for call in read(out)[0].calls
    ]


def _fields(call: object) -> dict[str, object]:
    return {name: getattr(call, name) for name in type(call).__slots__}  # type: ignore[attr-defined]
