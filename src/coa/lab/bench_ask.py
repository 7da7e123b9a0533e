"""`coa bench ask`: one question at a time, with full weights and with weights of 8 bits.

Goes in: how many questions and chains. Comes out: sampled tokens per second of the engine as
`coa ask` uses it, one question in a fresh engine, free and constrained; and on how many tokens the
two kinds of weights agree. For that both are led along the same chains, which full weights wrote in
a large batch, and each says what it would have chosen in every place: teacher-forced.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any

from coa.engines import Engine, load_engine
from coa.environment import open_environments
from coa.environments import make_tasks
from coa.errors import ConfigError, MissingExtra
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

    def __post_init__(self) -> None:
        for name, least in {"questions": 1, "chains": 0, "threads": 0, "concurrency": 1}.items():
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
    result = {"unit": "tokens/s", "speed": medians, "ratio": ratio, "runs": speeds}
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
    return load_engine(setup.model, slots=slots, context=CONTEXT, threads=threads, weights=weights)


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
    yield f"{setup['model']}, one question at a time, median of {setup['questions']}"
    if found := result.get("agreement"):
        yield (
            f"the same token: int8 and full {found['int8']:.2%}, full alone and in a batch "
            f"{found['batched']:.2%}, of {found['tokens']} in {found['chains']} chains; "
            f"mean difference of a logprob {found['logprob_gap']}"
        )
