"""ScriptedEngine: turns written beforehand, cut exactly as a real engine would cut them.

For tests, documentation and users' own tests: no torch, no weights. One `generate` call emits one
turn. Which turn is due follows from the prompt alone: a prompt that extends an earlier prompt of
this engine gets the turn after it, the same prompt again gets the same turn. So any number of
rollouts can run at once, in any order, and a retry repeats itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from coa.engines.base import (
    CodecEngine,
    Completion,
    Finish,
    OnText,
    Sampling,
    TextCodec,
    completes_stop,
    most_tokens,
)
from coa.errors import EngineError
from coa.io.runs import Json, read_records

Script = Sequence[str] | Mapping[str, Sequence[str]] | Callable[[str, int], str]


class ByteCodec:
    """One id per UTF-8 byte; two ids more mark where a prompt and its parts end."""

    START, BORDER = 256, 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        spans = [(i, i + 1) for i, char in enumerate(text) for _ in char.encode()]
        return self.encode(text), spans

    def encode_prompt(self, system: str, user: str) -> list[int]:
        head = [self.START, *self.encode(system), self.BORDER]
        return [*head, *self.encode(user), self.BORDER]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < self.START).decode(errors="replace")


class ScriptedCall(NamedTuple):
    """One recorded `generate` call."""

    prompt: str
    turn: int
    sampling: Sampling


class ScriptedEngine(CodecEngine):
    """The Engine protocol over a script.

    `script` is a list of turns used for every prompt, a mapping from question to turns (the longest
    question found in the prompt counts), or a callable (prompt text, turn index) -> turn. When the
    turns are used up, the engine emits an end of sequence.
    """

    weights = "scripted"

    def __init__(
        self,
        script: Script,
        codec: TextCodec | None = None,
        *,
        name: str = "scripted",
        context: int = 1 << 20,
    ) -> None:
        self.name, self.context = name, context
        self.calls: list[ScriptedCall] = []
        self.codec = codec or ByteCodec()
        self._script = script
        self._turns: dict[tuple[int, ...], int] = {}
        self._lengths: set[int] = set()

    @classmethod
    def from_file(cls, path: Path) -> ScriptedEngine:
        """Read JSON lines {"question": ..., "turns": [...]}; no question means any question."""
        entries = dict(read_records(path, _entry))
        return cls(entries, name=f"scripted:{path}")

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        await asyncio.sleep(0)
        limit = most_tokens(prompt_ids, sampling, self.context, "load the engine")
        turn, prompt = self._turn_index(tuple(prompt_ids)), self.decode(prompt_ids)
        self.calls.append(ScriptedCall(prompt, turn, sampling))
        ids, finish = self._cut(self.encode(self._turn_text(prompt, turn)), sampling, limit)
        if on_text is not None and (text := self.decode(ids)):
            on_text(text)
        return Completion(ids, [0.0] * len(ids), finish)

    async def close(self) -> None:
        """Nothing is held."""

    def _turn_index(self, prompt: tuple[int, ...]) -> int:
        if prompt not in self._turns:
            shorter = sorted((n for n in self._lengths if n < len(prompt)), reverse=True)
            before = next((prompt[:n] for n in shorter if prompt[:n] in self._turns), None)
            self._turns[prompt] = 0 if before is None else self._turns[before] + 1
            self._lengths.add(len(prompt))
        return self._turns[prompt]

    def _turn_text(self, prompt: str, turn: int) -> str:
        if callable(self._script):
            return self._script(prompt, turn)
        turns = self._script
        if isinstance(turns, Mapping):
            asked = max((q for q in turns if q in prompt), key=len, default=None)
            if asked is None:
                raise EngineError(f"{self.name}: no question of the script is in this prompt.")
            turns = turns[asked]
        return turns[turn] if turn < len(turns) else ""

    def _cut(self, ids: list[int], sampling: Sampling, limit: int) -> tuple[list[int], Finish]:
        for end in range(1, len(ids) + 1):
            if completes_stop(self.decode, ids[:end], sampling.stop):
                return ids[:end], "stop"
            if end == limit:
                return ids[:end], "length"
        return ids, "eos"


def _entry(record: Json) -> tuple[str, list[str]]:
    question, turns = record.get("question") or "", record["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise TypeError(f"found turns {turns!r}, expected a list of strings.")
    return question, turns
