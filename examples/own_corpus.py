"""An agent over a folder of your own: `coa corpus build FOLDER`, then `coa ask --corpus ...`."""

import asyncio
import tempfile
from pathlib import Path

from coa import ScriptedEngine, Task, load_environment
from coa.corpus.build import build_corpus

TURNS = [
    "<think>One look-up.</think><plan>1. how to reset it</plan><think>I search.</think>"
    "<wiki_search>reset the pump</wiki_search>",
    "<think>It says so.</think><answer>hold the blue button</answer>",
]


async def answer(folder: Path) -> None:
    (folder / "manual").mkdir()
    (folder / "manual" / "pump.md").write_text("# Pump\n\nHold the blue button to reset the pump.")
    build_corpus(folder / "manual", folder / "corpus", progress="silent")
    env = load_environment("search", corpus=str(folder / "corpus"))
    task = Task("How do I reset the pump?")
    async with env.open([task]) as opened:
        print((await opened.play(task, ScriptedEngine(TURNS))).text)


with tempfile.TemporaryDirectory() as name:
    asyncio.run(answer(Path(name)))
