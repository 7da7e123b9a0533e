"""The scripted engine behaves at its borders like a real one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from coa.engines import Engine, Sampling, load_engine
from coa.engines.scripted import ByteCodec, ScriptedEngine
from coa.errors import EngineError, RecordError
from coa.models.codec import Codec
from tiny_model import TEMPLATE, make_tokenizer


def ask(engine: ScriptedEngine, ids: list[int], **sampling: object) -> tuple[str, str]:
    done = asyncio.run(engine.generate(ids, Sampling(**sampling)))  # type: ignore[arg-type]
    assert len(done.logprobs) == len(done.ids)
    return engine.decode(done.ids), done.finish


def test_it_is_an_engine() -> None:
    assert isinstance(ScriptedEngine([]), Engine)


def test_turns_are_cut_at_stop_strings_and_at_the_limit() -> None:
    engine = ScriptedEngine(["<a>x</a> and more"])
    prompt = engine.encode_prompt("s", "q")
    assert ask(engine, prompt, stop=("</a>",)) == ("<a>x</a>", "stop")
    assert ask(engine, prompt, max_tokens=5) == ("<a>x<", "length")
    assert ask(engine, prompt) == ("<a>x</a> and more", "eos")


def test_the_completing_token_is_kept_whole() -> None:
    codec = Codec(make_tokenizer(), TEMPLATE, {})
    engine = ScriptedEngine(["<think>no</think><plan>go</plan>"], codec)
    text, finish = ask(engine, engine.encode_prompt("s", "q"), stop=("</think",))
    assert finish == "stop" and text.startswith("<think>no</think")


def test_turns_follow_the_prompt_not_the_order_of_calls() -> None:
    engine = ScriptedEngine({"Who?": ["w1", "w2"], "Why?": ["y1", "y2", "y3"]})
    who, why = (engine.encode_prompt("Answer.", f"Question: {q}") for q in ("Who?", "Why?"))
    assert ask(engine, why)[0] == "y1"
    assert ask(engine, who)[0] == "w1"
    why_2 = [*why, *engine.encode("y1"), *engine.encode("<observation>o</observation>")]
    assert ask(engine, why_2)[0] == "y2"
    assert ask(engine, why)[0] == "y1"
    assert ask(engine, [*why_2, *engine.encode("cut differently")])[0] == "y3"
    assert ask(engine, [*who, *engine.encode("w1!")])[0] == "w2"
    assert ask(engine, [*who, *engine.encode("w1!w2!")]) == ("", "eos")
    assert [call.turn for call in engine.calls] == [0, 0, 1, 0, 2, 1, 2]


def test_many_rollouts_at_once() -> None:
    engine = ScriptedEngine(lambda prompt, turn: f"{prompt[-2:]}:{turn}")

    async def roll(name: str) -> list[str]:
        ids, said = engine.encode_prompt("s", name), []
        for _ in range(3):
            done = await engine.generate(ids, Sampling())
            said.append(engine.decode(done.ids))
            ids = [*ids, *done.ids]
        return said

    async def run() -> list[list[str]]:
        return await asyncio.gather(*(roll(f"{i:02d}") for i in range(40)))

    for index, said in enumerate(asyncio.run(run())):
        assert [part.rsplit(":", 1)[1] for part in said] == ["0", "1", "2"]
        assert said[0] == f"{index:02d}:0"


def test_bytes_round_trip_with_offsets() -> None:
    codec = ByteCodec()
    ids, spans = codec.encode_with_offsets("n\u00e9\U0001f642")
    assert codec.decode(ids) == "n\u00e9\U0001f642"
    assert spans == [(0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (2, 3), (2, 3)]
    assert max(codec.encode_prompt("<s>", "u")) == ByteCodec.BORDER


def test_a_script_file(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(
        json.dumps({"question": "Who?", "turns": ["me"]}) + "\n" + json.dumps({"turns": ["any"]}),
        encoding="utf-8",
    )
    engine = load_engine(f"scripted:{path}")
    assert isinstance(engine, ScriptedEngine)
    assert ask(engine, engine.encode_prompt("", "Who?")) == ("me", "eos")
    assert ask(engine, engine.encode_prompt("", "What?")) == ("any", "eos")
    path.write_text('{"question": "Who?", "turns": "me"}\n', encoding="utf-8")
    with pytest.raises(RecordError, match=r"script.jsonl:1: found turns 'me'"):
        load_engine(f"scripted:{path}")


def test_an_unknown_question_is_an_engine_error() -> None:
    engine = ScriptedEngine({"Who?": ["me"]})
    with pytest.raises(EngineError, match="no question of the script"):
        ask(engine, engine.encode_prompt("", "Where?"))
