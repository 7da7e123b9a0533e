"""`coa bench ask`: one question at a time, with full weights and with weights of 8 bits.

Goes in: how many questions, chains and starts. Comes out: sampled tokens per second of the engine
as `coa ask` uses it, one question in a fresh engine, free and constrained; on how many tokens the
two kinds of weights agree; and when a started command says its first word. For the agreement both
are led along the same chains, which full weights wrote in a large batch, and each says what it
would have chosen in every place: teacher-forced.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any

from coa.engines import Engine, load_engine
from coa.environment import open_environments
from coa.environments import make_tasks
from coa.errors import ConfigError, EngineError, MissingExtra
from coa.io.machine import cores
from coa.io.runs import Json
from coa.io.settings import load_recipe
from coa.loop import Decoding
from coa.models.references import OURS
from coa.rollouts import choose_environments, choose_prompt
from coa.tasks import Task, TaskSet
from coa.trajectory import Author, Trajectory

if TYPE_CHECKING:
    from coa.engines.batch import Forward

WEIGHTS = ("full", "int8")
CONTEXT, PIECE = 3072, 256
QUESTION = "What is the capital of the country where Osaka is located?"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSetup:
    """The settings of `coa bench ask`."""

    model: str = OURS
    questions: int = 8
    """Answered one after the other, for speed."""
    chains: int = 200
    """Led along, for agreement; 0: only speed."""
    seed: int = 7
    threads: int = 0
    """0: all cores."""
    concurrency: int = 64
    """Of the chains, when full weights write them."""
    guess: bool = True
    """Whether tokens are guessed ahead."""
    starts: int = 0
    """How often the command is started, for the seconds to its first word."""

    def __post_init__(self) -> None:
        least_of = {"questions": 1, "chains": 0, "threads": 0, "concurrency": 1, "starts": 0}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                found = getattr(self, name)
                raise ConfigError(f"{name}: found {found}, expected at least {least}.")


def bench_ask(overrides: Sequence[str] = (), note: Callable[[str], None] = print) -> Json:
    """Speeds by kind of weights, and their agreement."""
    if find_spec("torch") is None:
        raise MissingExtra("Measuring questions", "train")
    setup = load_recipe(None, overrides, AskSetup)
    tasks = make_tasks("atlas-mhqa", "heldout_entity", setup.questions + setup.chains, setup.seed)
    asked, led = TaskSet(tasks[: setup.questions]), TaskSet(tasks[setup.questions :])
    speeds: dict[str, dict[str, list[float]]] = {"free": {}, "constrained": {}}
    for index in range(setup.questions):  # they take turns, as the machine's speed changes
        for weights in WEIGHTS:
            for mode, found in speeds.items():
                one = TaskSet((asked[index],))
                (chain,) = _play(setup, one, weights, slots=1, constrain=mode == "constrained")
                speed = chain.usage.sampled_tokens / chain.seconds["engine"]
                found.setdefault(weights, []).append(round(speed, 1))
                note(f"question {index + 1}, {weights}, {mode}: {speed:.0f} tokens/s")
    medians = {
        mode: {weights: statistics.median(each) for weights, each in found.items()}
        for mode, found in speeds.items()
    }
    ratio = {mode: round(each["int8"] / each["full"], 2) for mode, each in medians.items()}
    result: Json = {"unit": "tokens/s", "speed": medians, "ratio": ratio, "runs": speeds}
    if setup.starts:
        result["first_word_s"] = first_words(setup, note)
    if setup.chains:
        note(f"{setup.chains} chains are written and led along")
        result["agreement"] = agreement(setup, _play(setup, led, "full", slots=setup.concurrency))
    return result | {"setup": asdict(setup)}


def _play(
    setup: AskSetup, tasks: TaskSet, weights: str, slots: int, constrain: bool = False
) -> list[Trajectory]:
    """Greedy rollouts in a fresh engine, as many at once as there are slots."""

    async def play() -> list[Trajectory]:
        environments, known = choose_environments((), tasks, model=setup.model)
        decoding = Decoding(prompt=choose_prompt("auto", setup.model), constrain=constrain)
        places = asyncio.Semaphore(slots)
        async with open_environments(environments, known) as opened:
            engine = _load(setup, weights, slots)

            async def one(task: Task) -> Trajectory:
                async with places:
                    return await opened.play(task, engine, decoding=decoding)

            try:
                return await asyncio.gather(*map(one, known))
            finally:
                await engine.close()

    return asyncio.run(play())


def _load(setup: AskSetup, weights: str, slots: int) -> Engine:
    threads = setup.threads or cores()
    how: Json = {"threads": threads, "weights": weights, "guess": setup.guess}
    return load_engine(setup.model, slots=slots, context=CONTEXT, **how)


def first_words(setup: AskSetup, note: Callable[[str], None]) -> list[float]:
    """Seconds from starting the command to the first word of the model on the terminal, of each
    start; one before them warms up the file cache."""
    command = [sys.executable, "-m", "coa", "ask", "--model", setup.model, QUESTION]
    command += ["--threads", str(setup.threads)] if setup.threads else []
    found = list[float]()
    for at in range(setup.starts + 1):
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as asked:
            assert asked.stdout is not None
            said = b""
            while not _begun(said) and (piece := os.read(asked.stdout.fileno(), 4096)):
                said += piece
            seconds = time.perf_counter() - started
            asked.kill()
        if not _begun(said):
            raise EngineError(f"{' '.join(command)}: ended without a word: {said[-200:]!r}.")
        if at:
            found.append(round(seconds, 2))
            note(f"start {at}: first word after {seconds:.2f} s")
    return found


def agreement(setup: AskSetup, chains: Sequence[Trajectory]) -> Json:
    """On how many tokens of the chains the two kinds of weights choose the same.

    `batched` is the same of full weights and the chain itself, which they wrote beside others: what
    the order of additions changes, and nothing to do with weights.
    """
    chosen: dict[str, list[int]] = {"batched": []}
    logprobs: dict[str, list[float]] = {}
    for chain in chains:
        chosen["batched"] += [token for token, own in zip(*_tokens(chain), strict=True) if own]
    for weights in WEIGHTS:
        engine: Any = _load(setup, weights, slots=1)
        led = [led_along(engine._forward, *_tokens(chain)) for chain in chains]
        chosen[weights] = [token for tokens, _ in led for token in tokens]
        logprobs[weights] = [value for _, values in led for value in values]
        asyncio.run(engine.close())
    count = len(chosen["batched"])

    def same(name: str) -> float:
        pairs = zip(chosen["full"], chosen[name], strict=True)
        return round(sum(a == b for a, b in pairs) / max(count, 1), 5)

    pairs = zip(logprobs["full"], logprobs["int8"], strict=True)
    return {
        "chains": len(chains),
        "tokens": count,
        "int8": same("int8"),
        "batched": same("batched"),
        "logprob_gap": round(sum(abs(a - b) for a, b in pairs) / max(count, 1), 5),
    }


def _begun(said: bytes) -> bool:
    """Whether a word of the model stands on the terminal: below the line that names the model."""
    _, named, rest = said.partition(b" model  ")
    return bool(named and rest.partition(b"\n")[2].strip())


def _tokens(chain: Trajectory) -> tuple[list[int], list[bool]]:
    """All ids of a chain, and which the model wrote."""
    parts = [(segment.ids or [], segment.author is Author.MODEL) for segment in chain.segments]
    return [id for ids, _ in parts for id in ids], [own for ids, own in parts for _ in ids]


def led_along(
    forward: Forward, ids: Sequence[int], own: Sequence[bool]
) -> tuple[list[int], list[float]]:
    """What a forward chooses in each place that is its own, and the logprob of what stands there,
    all before being as it is in the chain.

    Others' text is computed in large pieces and its own in small ones, as when it decodes.
    """
    import torch

    from coa.engines.llama import FEW_ROWS, Chunk

    chosen, logprobs = list[int](), list[float]()
    with torch.inference_mode():
        for wanted, run in groupby(range(len(ids) - 1), key=lambda at: own[at + 1]):
            places, size = list(run), FEW_ROWS if wanted else PIECE
            for first in range(places[0], places[-1] + 1, size):
                piece = list(ids[first : min(first + size, places[-1] + 1)])
                logits = forward.step([Chunk(0, first, piece, len(piece) if wanted else 0)])
                if wanted:
                    chosen += logits.argmax(dim=-1).tolist()
                    after = torch.tensor(ids[first + 1 : first + 1 + len(piece)])
                    logs = logits.float().log_softmax(dim=-1)
                    logprobs += logs.gather(1, after[:, None])[:, 0].tolist()
    return chosen, logprobs


def ask_lines(result: Json) -> Iterator[str]:
    """The result as a small table."""
    for mode, speeds in result["speed"].items():
        for weights, speed in speeds.items():
            ratio = f"   int8 / full {result['ratio'][mode]:.2f}" if weights == "int8" else ""
            yield f"{f'{weights}, {mode}':<28} {speed:>10.1f} {result['unit']}{ratio}"
    setup = result["setup"]
    guessing = "" if setup["guess"] else ", nothing guessed"
    yield f"{setup['model']}, one question at a time, median of {setup['questions']}{guessing}"
    if words := result.get("first_word_s"):
        yield (
            f"first word after {statistics.median(words):.2f} s, median of {len(words)} "
            f"starts of the command, {min(words):.2f} to {max(words):.2f}"
        )
    if found := result.get("agreement"):
        yield (
            f"the same token: int8 and full {found['int8']:.2%}, full alone and in a batch "
            f"{found['batched']:.2%}, of {found['tokens']} in {found['chains']} chains; "
            f"mean difference of a logprob {found['logprob_gap']}"
        )
