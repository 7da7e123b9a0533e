"""`coa bench rollout`: sampled tokens per second of whole rollouts, ours beside peers.

Goes in: how many rollouts at once. Comes out: the median of three runs of every engine, prefill
included, loading and a warm-up not. All get the same weights, type of numbers, threads and work.
One engine computes at a time. A peer that cannot run is reported with its reason.

Beside them stands the most that this machine's own peaks allow for the same work.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from random import Random
from typing import Any, NamedTuple

from coa.engines.base import Sampling, TextCodec, common_prefix
from coa.environments.atlas.pages import atlas_passages
from coa.errors import EngineError, MissingExtra
from coa.grammar import load_grammar, system_prompt
from coa.io.machine import cores, native_bfloat16
from coa.io.runs import Json
from coa.lab import peer_vllm as vllm_rollout
from coa.lab.bench import Note, Peers, beside, missing_lines, over, peer_python, run_script
from coa.models.bases import BASE
from coa.models.codec import Codec
from coa.models.references import model_folder, resolve

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a rollout: prompt, sampled, (observation, sampled)..."""

    prompt: int = 200
    sampled: int = 64
    observation: int = 150
    turns: int = 3

    @property
    def total(self) -> int:
        return self.prompt + self.turns * self.sampled + (self.turns - 1) * self.observation


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """Rollouts to be done at once, by one engine, in one run."""

    prompts: list[Ids]
    observations: list[list[Ids]]
    """Of each rollout, one after each turn but the last."""
    lengths: Lengths

    @property
    def tokens(self) -> int:
        """How many are sampled in all."""
        return len(self.prompts) * self.lengths.turns * self.lengths.sampled

    @property
    def shared(self) -> int:
        """Leading tokens that all prompts have in common, and that need computing only once."""
        return min(common_prefix(self.prompts[0], prompt) for prompt in self.prompts)


class Texts:
    """An endless supply of pieces of text of a given number of tokens."""

    def __init__(self, codec: TextCodec, seed: int = 0) -> None:
        self._codec = codec
        passages = list(atlas_passages())
        Random(seed).shuffle(passages)
        self._passages = itertools.cycle(passages)
        self._system = system_prompt(load_grammar("mhqa"), "compact")
        self._around = len(codec.encode_prompt(self._system, ""))

    def work(self, rollouts: int, lengths: Lengths) -> RolloutWork:
        made = [self._rollout(lengths) for _ in range(rollouts)]
        return RolloutWork([prompt for prompt, _ in made], [seen for _, seen in made], lengths)

    def _rollout(self, lengths: Lengths) -> tuple[Ids, list[Ids]]:
        pieces = (self._piece(lengths.observation) for _ in range(lengths.turns - 1))
        return self._prompt(lengths.prompt), list(pieces)

    def _prompt(self, size: int) -> Ids:
        """A cut text does not always encode to as many tokens again; then the next one is tried."""
        assert size > self._around, (size, self._around)
        while True:
            text = self._codec.decode(self._piece(size - self._around))
            ids = self._codec.encode_prompt(self._system, text)
            if len(ids) == size:
                return ids

    def _piece(self, size: int) -> Ids:
        text = ""
        for passage in self._passages:
            text += passage.text + " "
            if len(text) >= size:  # a token has at least one character
                ids = self._codec.encode(text)
                if len(ids) >= size:
                    return ids[:size]
        raise AssertionError("the passages never end")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a work needs at the least: every token computed once, every weight read once a step."""

    prefill_flops: float
    decode_flops: float
    decode_bytes: float

    def seconds(self, flops: float, bandwidth: float) -> float:
        """The shortest time on a machine of these peaks, each per second.

        Prefill has many tokens per weight, so that only arithmetic counts there.
        """
        decode = max(self.decode_flops / flops, self.decode_bytes / bandwidth)
        return self.prefill_flops / flops + decode


def cost(work: RolloutWork, config: dict[str, Any], bytes_each: int) -> Cost:
    """Of a llama-like model; the output layer counts only where a token is sampled."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    wide, narrow = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = 2 * hidden * (wide + narrow) + 3 * hidden * config["intermediate_size"]
    output = hidden * config["vocab_size"]
    n, shared, prefill, decode, read = len(work.prompts), work.shared, 0.0, 0.0, 0.0
    for start, sampled in _passes(work.lengths):
        if sampled:
            decode += n * (2 * (layers * layer + output) + 4 * layers * wide * (start + 1))
            read += (layers * layer + output) + n * 2 * layers * narrow * (start + 1)
        else:
            times = 1 if start < shared else n
            prefill += times * (2 * layers * layer + 4 * layers * wide * (start + 1))
    prefill += n * work.lengths.turns * 2 * output  # the first token of a turn
    return Cost(prefill, decode, read * bytes_each)


def _passes(lengths: Lengths) -> Iterator[tuple[int, bool]]:
    """(position, whether it is decoded) of every token that is computed.

    The last token of a turn is computed with the observation after it, that of the last turn never.
    """
    position = 0
    for turn in range(lengths.turns):
        fresh = lengths.prompt if turn == 0 else lengths.observation + 1
        for is_decoded, count in ((False, fresh), (True, lengths.sampled - 1)):
            for _ in range(count):
                yield position, is_decoded
                position += 1


# ------------------------------------------------------------------------------------------------
# Who does the work of `coa bench rollout`: our engine, transformers, vLLM.
#
# Each takes a model, a type of numbers and works, and yields what it did, one work after the
# other; what it needs is loaded before the first. None ends a turn at the end of a sequence, so
# that all sample equally much. The settings of the peers are the fastest that we found;
# docs/performance.md has those that were tried.
# ------------------------------------------------------------------------------------------------


class PlayedRollout(NamedTuple):
    """One work, done."""

    seconds: float
    tokens: int
    """How many were sampled."""
    version: str
    """Of the package that did it."""


def _timed(package: str, work: Callable[[], int]) -> PlayedRollout:
    started = time.perf_counter()
    tokens = work()
    return PlayedRollout(time.perf_counter() - started, tokens, metadata.version(package))


Player = Callable[[str, str, Sequence[RolloutWork]], Iterator[PlayedRollout]]

VLLM_PYTHON = ".cache/vllm/bin/python"


def play_ours(model: str, dtype: str, works: Sequence[RolloutWork]) -> Iterator[PlayedRollout]:
    """One coroutine a rollout, as in training and evaluation."""
    from coa.engines.local import LocalEngine

    engine = LocalEngine(
        model,
        dtype=dtype,
        slots=max(len(work.prompts) for work in works),
        context=max(work.lengths.total for work in works),
    )
    engine._batch._eos = frozenset()  # sampling has no switch for this, because no user wants it

    async def rollout(prompt: Ids, observations: list[Ids], tokens: int, key: int) -> int:
        ids, sampled = list(prompt), 0
        for turn in range(len(observations) + 1):
            sampling = Sampling(temperature=1.0, max_tokens=tokens, key=key + turn)
            completion = await engine.generate(ids, sampling)
            sampled += len(completion.ids)
            ids += completion.ids + (observations[turn] if turn < len(observations) else [])
        return sampled

    async def play(work: RolloutWork) -> int:
        turns, tokens = work.lengths.turns, work.lengths.sampled
        pairs = zip(work.prompts, work.observations, strict=True)
        counts = (rollout(*pair, tokens, index * turns) for index, pair in enumerate(pairs))
        return sum(await asyncio.gather(*counts))

    with asyncio.Runner() as runner:
        try:
            for work in works:
                yield _timed("chain-of-agents", partial(runner.run, play(work)))
        finally:
            runner.run(engine.close())


def play_generate(model: str, dtype: str, works: Sequence[RolloutWork]) -> Iterator[PlayedRollout]:
    """transformers: all rollouts as one batch, turn by turn, the cache kept between turns."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(cores())
    folder = model_folder(resolve(model))
    network: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=True
    )
    network.eval()

    def play(work: RolloutWork) -> int:
        settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=work.lengths.sampled,
            eos_token_id=None,
            pad_token_id=0,
        )
        ids, cache = torch.tensor(work.prompts), DynamicCache(config=network.config)
        tokens = 0
        for turn in range(work.lengths.turns):
            if turn:
                seen = [observations[turn - 1] for observations in work.observations]
                ids = torch.cat([ids, torch.tensor(seen)], dim=1)
            before = ids.shape[1]
            ids = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                generation_config=settings,
            )
            tokens += ids.shape[0] * (ids.shape[1] - before)
        return tokens

    with torch.inference_mode():
        for work in works:
            yield _timed("transformers", partial(play, work))


def play_vllm(model: str, dtype: str, works: Sequence[RolloutWork]) -> Iterator[PlayedRollout]:
    """vLLM in a process of its own, from an environment of its own (COA_VLLM is its Python)."""
    python = peer_python("COA_VLLM", VLLM_PYTHON, "vLLM")
    asked = {
        "model": str(model_folder(resolve(model))),
        "dtype": dtype,
        "max_model_len": max(work.lengths.total for work in works),
        "block_size": 32,  # tokens; a smaller block of the cache is faster here than the usual 128
        "works": [dataclasses.asdict(work) for work in works],
    }
    settings = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1"}
    if hasattr(os, "sched_getaffinity"):
        settings["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    done, _ = run_script([python, "-I", vllm_rollout.__file__], asked, settings)
    return (PlayedRollout(**each) for each in done)


PEERS: Mapping[str, Player] = {"generate": play_generate, "vllm": play_vllm}
RUNS = 3
_WARM_UP_TOKENS = 8
_MATRIX, _READ, _TRIES = 4096, 1 << 28, 5


def bench_rollout(
    rollouts: Sequence[int],
    note: Note = lambda line: None,
    *,
    model: str = BASE,
    lengths: Lengths | None = None,
    peers: Mapping[str, Player] = PEERS,
    runs: int = RUNS,
) -> Json:
    """Tokens per second at each number of rollouts, ours over each peer, the machine's peaks."""
    if find_spec("torch") is None:
        raise MissingExtra("Measuring rollouts", "train")
    from coa.models.weights import read_config

    lengths = lengths or Lengths()
    dtype = "bfloat16" if native_bfloat16() else "float32"
    folder = model_folder(resolve(model))
    texts, config = Texts(Codec.from_folder(folder)), read_config(folder)
    peaks = _Peaks.measure(dtype)
    measured = _Measured(model, dtype, note)
    atop: dict[str, Json] = {}
    for n in rollouts:
        warm_up = dataclasses.replace(lengths, sampled=_WARM_UP_TOKENS, turns=2)
        works = [texts.work(n, warm_up), *(texts.work(n, lengths) for _ in range(runs))]
        ours = measured.play("ours", play_ours, works)
        for name, play in peers.items():
            measured.attempt(name, partial(measured.play, name, play, works))
        least = cost(works[-1], config, 2 if dtype == "bfloat16" else 4)
        atop[str(n)] = peaks.share(least, works[-1].tokens, ours)
    return {
        "unit": "tokens/s",
        "speed": measured.speeds,
        "ratio": {n: over(found) for n, found in measured.speeds.items()},
        "missing": measured.missing,
        "peak": peaks.to_json() | {"rollouts": atop},
        "model": model,
        "dtype": dtype,
        "threads": cores(),
        "runs": runs,
        "lengths": dataclasses.asdict(lengths),
        "versions": measured.versions,
    }


class _Measured(Peers):
    """What came out so far, by number of rollouts and name."""

    def __init__(self, model: str, dtype: str, note: Note) -> None:
        super().__init__(note)
        self._model, self._dtype = model, dtype
        self.speeds: dict[str, dict[str, float]] = {}
        self.versions: dict[str, str] = {}

    def play(self, name: str, play: Player, works: Sequence[RolloutWork]) -> float:
        """Tokens per second: the median of all works but the first, which warms up."""
        n, found = len(works[0].prompts), list[float]()
        for index, done in enumerate(play(self._model, self._dtype, works)):
            if done.tokens != works[index].tokens:
                raise EngineError(f"sampled {done.tokens} tokens, expected {works[index].tokens}.")
            self.versions[name] = done.version
            speed = done.tokens / done.seconds
            if index:
                found.append(speed)
                self.note(f"{name}, {n} rollouts, run {index}: {speed:.0f} tokens/s")
        median = round(statistics.median(found), 1)
        self.speeds.setdefault(str(n), {})[name] = median
        return median


@dataclasses.dataclass(frozen=True, slots=True)
class _Peaks:
    """The most that torch reaches on this machine, on all threads."""

    flops: float
    """Per second, in a large product of matrices of the type in use."""
    bandwidth: float
    """Bytes read per second, far beyond the caches."""

    @staticmethod
    def measure(dtype: str) -> _Peaks:
        import torch

        torch.set_num_threads(cores())
        square = torch.randn(_MATRIX, _MATRIX).to(getattr(torch, dtype))
        long = torch.ones(_READ, dtype=torch.float32)
        with torch.inference_mode():
            product = _shortest(lambda: torch.mm(square, square))
            reading = _shortest(lambda: long.sum())
        return _Peaks(2 * _MATRIX**3 / product, 4 * _READ / reading)

    def share(self, least: Cost, tokens: int, speed: float) -> Json:
        """How a speed stands to the peaks, for a work of so many sampled tokens."""
        seconds = tokens / speed
        flops = (least.prefill_flops + least.decode_flops) / seconds
        limit = tokens / least.seconds(self.flops, self.bandwidth)
        return {
            "gflops_per_s": round(flops / 1e9, 1),
            "of_peak_flops": round(flops / self.flops, 3),
            "limit": round(limit, 1),
            "of_limit": round(speed / limit, 3),
        }

    def to_json(self) -> Json:
        return {
            "gflops_per_s": round(self.flops / 1e9, 1),
            "gb_per_s": round(self.bandwidth / 1e9, 1),
        }


def _shortest(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


def rollout_lines(result: Json) -> Iterator[str]:
    """The result as a small table."""
    unit = result["unit"]
    for n, speeds in result["speed"].items():
        for name, speed in speeds.items():
            ratio = beside(result["ratio"][n].get(name))
            yield f"{f'{name}, {n} rollouts':<28} {speed:>10.1f} {unit}{ratio}"
    yield from missing_lines(result)
    peak = result["peak"]
    yield (
        f"{result['model']}, {result['dtype']}, {result['threads']} threads, median of "
        f"{result['runs']} runs; peaks of the machine: {peak['gflops_per_s']:.0f} GFLOP/s, "
        f"{peak['gb_per_s']:.1f} GB/s"
    )
    for n, share in peak["rollouts"].items():
        yield (
            f"ours, {n} rollouts: {share['gflops_per_s']:.0f} GFLOP/s, "
            f"{share['of_peak_flops']:.0%} of the peak; {share['of_limit']:.0%} of the "
            f"{share['limit']:.0f} {unit} that both peaks allow"
        )
