"""The fine-tuning stage: from trajectories to an adapter that says what it was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_worker import tiny_settings

torch = pytest.importorskip("torch")

from coa.engines.codec import Codec  # noqa: E402
from coa.engines.store import trained_on  # noqa: E402
from coa.errors import RecordError  # noqa: E402
from coa.train.stage import protocol_of, train_on  # noqa: E402
from coa.trajectory import Author, Segment, Trajectory  # noqa: E402

TURNS = ("<think>Rome?</think><wiki_search>Rome</wiki_search>", "<answer>Italy</answer>")


def trajectory(index: int, **changes: str) -> Trajectory:
    segments = [
        Segment(Author.PROMPT, "You are an agent."),
        Segment(Author.MODEL, TURNS[0]),
        Segment(Author.ENV, "<observation>Rome is in Italy.</observation>"),
        Segment(Author.MODEL, TURNS[1]),
    ]
    return Trajectory(f"t{index}", "Where is Rome?", "mhqa", segments, **changes)  # type: ignore[arg-type]


def test_an_adapter_remembers_its_protocol_and_cut_rows_are_said(
    tiny_model: Path, tmp_path: Path
) -> None:
    codec = Codec.from_folder(tiny_model)
    made = [trajectory(i) for i in range(3)]
    made[0].segments[3].text = "<answer>" + "a long answer " * 90 + "</answer>"
    sampled = made[1]  # as a rollout writes it: ids everywhere, an end of sequence at the end
    sampled.segments[0].ids = codec.encode_prompt("You are an agent.", "Where is Rome?")
    for segment in sampled.segments[1:]:
        segment.ids = codec.encode(segment.text)
    end = codec.token_id("<|im_end|>")
    assert end is not None and sampled.segments[3].ids is not None
    sampled.segments[3].ids.append(end)
    settings, said = tiny_settings(tiny_model, epochs=1, max_length=256), list[str]()
    adapter = train_on(made, settings, tmp_path / "sft", said.append)
    assert said[1:] == ["1 row lost its end: longer than sft.max_length 256"]
    assert trained_on(f"hf:{tiny_model}+{adapter}") == {"grammar": "mhqa", "prompt": "compact"}
    manifest = json.loads((adapter / "manifest.json").read_text())
    assert (manifest["stage"], manifest["updates"]) == ("sft", 1)
    assert train_on(made, settings, tmp_path / "sft", said.append) == adapter
    assert said[-1] == f"{adapter} is finished already"


def test_several_protocols_are_a_list() -> None:
    mixed = [trajectory(0), trajectory(1, prompt="full")]
    assert protocol_of(mixed) == {"grammar": "mhqa", "prompt": ["compact", "full"]}


def test_what_cannot_be_trained_on_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    headless, strange = trajectory(0), trajectory(1)
    del headless.segments[0]
    strange.segments[1].ids = [5, 6, 7]
    for wrong, message in ((headless, "does not begin with"), (strange, "another tokenizer")):
        with pytest.raises(RecordError, match=message):
            train_on([wrong], tiny_settings(tiny_model), tmp_path / "sft", lambda line: None)
    assert not (tmp_path / "sft").exists()
