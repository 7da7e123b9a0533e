"""The live view: a picture on any terminal, lines in a pipe, a sane terminal at the end."""

from __future__ import annotations

import io
import math
import os
import pty
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from coa.train import live_view
from coa.train.live_view import CURVES, LiveView, Sparkline

RECORD: dict[str, Any] = {
    "reward": 0.5,
    "pass_rate": 0.4,
    "groups": 24,
    "groups_flat": 13,
    "groups_solved": 9,
    "refills": 2,
    "rollouts": 192,
    "length_mean": 310.4,
    "length_max": 901,
    "turns": 3.12,
    "tool_calls": 2.2,
    "answered_rate": 0.96,
    "malformed_rate": 0.021,
    "truncated_rate": 0.05,
    "entropy": 0.31,
    "kl_old": 0.0012,
    "clip_low": 0.001,
    "clip_high": 0.004,
    "ratio_max": 1.91,
    "sampler_gap": 0.011,
    "ess": 0.98,
    "grad_norm": 0.41,
    "lr": 2e-4,
    "loss": 0.0123,
    "rows": 61,
    "tokens": 22100,
    "trained_tokens": 15234,
    "left_out": {"environment": 1, "void": 2, "truncated": 0},
    "agents": {"think": 0.5, "plan": 0.3, "answer": 0.2},
}
TIMING = {"seconds": 80.0, "rollout_s": 61.2, "train_s": 19.7, "load_s": 0.1}
TIMING |= {"tokens_per_s": 1121.4, "sampled_per_s": 973.0}


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    """A clock that stands still until a test moves it."""
    Clock.now = 0.0
    monkeypatch.setattr(live_view, "monotonic", lambda: Clock.now)
    return Clock


def drawn(view: LiveView, width: int = 80, height: int = 30, ascii_only: bool = False) -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), "ascii" if ascii_only else "utf-8")
    console = Console(file=file, width=width, height=height, record=True)
    console.print(view)
    return console.export_text().removesuffix("\n").split("\n")


def shown_run(updates: int = 3) -> LiveView:
    view = LiveView(100, mode="silent")
    with view:
        for update in range(1, updates + 1):
            Clock.now += 90
            view.update({"update": update, **RECORD, "reward": update / 10}, TIMING)
    view.phase("rollout", 37, 64)
    return view


def test_the_picture_says_how_far_how_long_and_what_now() -> None:
    first, second, *_ = drawn(shown_run())
    assert "rl update 3/100" in first and "1m30s each, 2h25m left" in first
    assert "rolling out 37/64" in second


def test_the_picture_has_curves_figures_agents_and_a_rollout() -> None:
    view = shown_run()
    view.recall({"update": 3, "eval_accuracy": 0.5, "eval_low": 0.41, "eval_high": 0.59})
    view.rollout("What is the capital of Peru?", "Lima", 1.0)
    text = "\n".join(drawn(view))
    for line in (
        "0.1 to 0.3",
        "evaluation 50.0%",
        "[41.0%, 59.0%] at 3",
        "24 drawn, 13 flat, 9 solved, 2 refills",
        "192: 96% answered, 2% malformed, 5% cut",
        "310 tokens (most 901), 3.1 turns, 2.2 calls",
        "61 rows, 15,234 of 22,100 tokens; without 1 environment, 2 void",
        "KL 0.0012, clipped 0.1% low 0.4% high, ratio to 1.91",
        "loss 0.0123, gradient 0.41, lr 0.0002, ess 98%",
        "rollout 1m01s, train 20s",
        "973 sampled, 1,121 trained",
        "think 50%  plan 30%  answer 20%",
        "1  Lima  to: What is the capital of Peru?",
    ):
        assert line in text, line


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (120, 20), (60, 14), (40, 10)])
def test_the_picture_fits_its_terminal(width: int, height: int) -> None:
    view = shown_run(80)
    view.rollout("Why? " * 100, "Because. " * 100, None)
    lines = drawn(view, width, height)
    assert len(lines) < height and max(map(len, lines)) <= width


def test_a_low_and_wide_terminal_shows_curves_beside_figures() -> None:
    assert any("reward" in line and "24 drawn" in line for line in drawn(shown_run(), 120, 20))
    assert not any("reward" in line and "24 drawn" in line for line in drawn(shown_run(), 120, 40))


def test_what_matters_most_is_left_on_a_low_terminal() -> None:
    text = "\n".join(drawn(shown_run(), 80, 10))
    assert "rl update" in text and "sampler gap" in text and "24 drawn" not in text


def test_a_resumed_run_shows_its_earlier_curve_and_takes_only_its_own_speed() -> None:
    view = LiveView(100, mode="silent")
    for update in range(1, 51):
        view.recall({"update": update, **RECORD, "reward": update / 100})
    with view:
        assert "left" not in drawn(view)[0]
        Clock.now += 60
        view.update({"update": 51, **RECORD}, TIMING)
    assert "51/100" in drawn(view)[0] and "1m00s each, 49m00s left" in drawn(view)[0]
    assert "0.01 to 0.5" in "\n".join(drawn(view))


def test_an_update_without_some_figure_leaves_a_gap_in_its_curve() -> None:
    view = LiveView(9, mode="silent")
    for entropy in (0.0, None, 0.7):
        view.recall({"update": 1, "reward": 0.5, "sampler_gap": 3e-7, "entropy": entropy})
    view.recall({"update": 1, "eval_accuracy": 0.5})
    entropy_line, _, gap_line = (
        line
        for line in drawn(view, ascii_only=True)
        if line[:11].strip() in ("entropy", "length", "sampler gap")
    )
    assert "_ #" in entropy_line and "<1e-4" in gap_line


def test_texts_of_the_model_cannot_drive_the_terminal() -> None:
    view = shown_run()
    view.rollout("\x1b[2Jquestion\nsecond [bold]line[/bold]", "\x1b]0;title\x07 answer\r", 0.0)
    view.phase("\x1b[31mphase", 1, 2)
    console = Console(file=io.StringIO(), width=100, height=30, force_terminal=True)
    console.print(view)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" not in text and "\x1b]0" not in text and "[bold]line[/bold]" in text


def test_a_terminal_without_unicode_gets_ascii() -> None:
    assert all(line.isascii() for line in drawn(shown_run(), ascii_only=True))


def test_in_a_pipe_there_is_one_line_per_update() -> None:
    stream = io.StringIO()
    with LiveView(100, stream=stream) as view:
        view.recall({"update": 0, "eval_accuracy": 0.25, "eval_low": 0.2, "eval_high": 0.3})
        for update in (1, 2):
            view.phase("rollout", 1, 64)
            Clock.now += 90
            view.update({"update": update, **RECORD}, TIMING)
        view.evaluated({"update": 2, "eval_accuracy": 0.5, "eval_low": 0.41, "eval_high": 0.59})
    assert stream.getvalue().splitlines() == [
        "rl 1/100  2h28m left  reward 0.5  pass 40%  flat 13 of 24  length 310  malformed 2%  "
        "entropy 0.31  gap 0.011  gradient 0.41  rollout 1m01s, train 20s",
        "rl 2/100  2h27m left  reward 0.5  pass 40%  flat 13 of 24  length 310  malformed 2%  "
        "entropy 0.31  gap 0.011  gradient 0.41  rollout 1m01s, train 20s",
        "rl evaluation  50.0% [41.0%, 59.0%] at 2",
    ]


def test_a_terminal_that_cannot_redraw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    with LiveView(100, stream=stream) as view:
        view.update({"update": 1, **RECORD}, TIMING)
    assert stream.getvalue().startswith("rl 1/100  ") and "\x1b" not in stream.getvalue()


def test_silent_writes_nothing() -> None:
    stream = io.StringIO()
    with LiveView(2, mode="silent", stream=stream) as view:
        view.update({"update": 1, **RECORD}, TIMING)
        view.evaluated({"update": 1, "eval_accuracy": 0.5})
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 9, ""),
        ([1.0, 1.0], 9, "++"),
        ([0.0, 1.0, 2.0, 3.0], 9, "_-*#"),
        ([0.0, math.nan, 7.0], 9, "_ #"),
        ([0.0, 0.0, 7.0, 7.0], 2, "_#"),
        ([-1e308, 1e308], 2, "_#"),
    ],
)
def test_sparklines(values: list[float], width: int, line: str) -> None:
    assert Sparkline(values).line(width, ascii_only=True) == line


strange = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
keys = st.sampled_from([*RECORD, *(row[0] for row in CURVES), "update", "eval_low"])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.dictionaries(keys, strange, max_size=9), max_size=6),
    st.integers(1, 200),
    st.integers(1, 60),
    st.dictionaries(st.sampled_from([*TIMING, "x_s"]), strange),
    st.text(),
)
def test_no_record_and_no_terminal_breaks_it(
    found: list[dict[str, Any]], width: int, height: int, timing: dict[str, Any], text: str
) -> None:
    view = LiveView(7, mode="silent")
    view.phase(text, len(text), 3)
    view.rollout(text, text, None)
    for record in found:
        view.update(record, timing)
    lines = drawn(view, width, height)
    assert len(lines) <= max(2, height)
    assert "\n" not in view.line()


PROGRAM = """
import sys, time
from coa.train.live_view import LiveView
with LiveView(100) as view:
    view.phase("rollout", 3, 64)
    print("a note from elsewhere", flush=True)
    sys.stderr.write("ready\\n"); sys.stderr.flush()
    time.sleep(60)
"""


def test_ctrl_c_leaves_a_sane_terminal() -> None:
    """In a real terminal, as a process of its own."""
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
        start_new_session=True,
    )
    os.close(theirs)
    text, sent, deadline = b"", False, time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end was closed
            break
        text += part
        if b"ready" in text and not sent:
            program.send_signal(signal.SIGINT)
            sent = True
        if not part:
            break
    program.wait(timeout=30)
    os.close(ours)
    assert sent and b"KeyboardInterrupt" in text
    hidden, visible = text.rfind(b"\x1b[?25l"), text.rfind(b"\x1b[?25h")
    assert 0 <= hidden < visible, "the cursor was hidden and given back"
    assert b"rolling out" in text and b"stopped" in text and b"a note from elsewhere" in text
    assert b"\x1b[?1049h" not in text, "no alternate screen: the picture stays in the history"
