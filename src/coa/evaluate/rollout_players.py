"""Who does the work of `coa bench rollout`: our engine, transformers, vLLM.

Each takes a model, a type of numbers and works, and yields what it did, one work after the
other; what it needs is loaded before the first. None ends a turn at the end of a
sequence, so that all sample equally much. The settings of the peers are the fastest that we found;
docs/performance.md has those that were tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

from coa.engines.base import Sampling
from coa.engines.store import model_folder, resolve
from coa.errors import EngineError, Unavailable
from coa.evaluate import vllm_rollout
from coa.evaluate.rollout_work import Ids, Work
from coa.machine import cores


class Played(NamedTuple):
    """One work, done."""

    seconds: float
    tokens: int
    """How many were sampled."""
    version: str
    """Of the package that did it."""


Player = Callable[[str, str, Sequence[Work]], Iterator[Played]]

VLLM_PYTHON = ".cache/vllm/bin/python"
_TAIL_LINES = 5


def play_ours(model: str, dtype: str, works: Sequence[Work]) -> Iterator[Played]:
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

    async def play(work: Work) -> int:
        turns, tokens = work.lengths.turns, work.lengths.sampled
        pairs = zip(work.prompts, work.observations, strict=True)
        counts = (rollout(*pair, tokens, index * turns) for index, pair in enumerate(pairs))
        return sum(await asyncio.gather(*counts))

    with asyncio.Runner() as runner:
        try:
            for work in works:
                started = time.perf_counter()
                tokens = runner.run(play(work))
                seconds = time.perf_counter() - started
                yield Played(seconds, tokens, metadata.version("chain-of-agents"))
        finally:
            runner.run(engine.close())


def play_generate(model: str, dtype: str, works: Sequence[Work]) -> Iterator[Played]:
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

    def play(work: Work) -> int:
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
            started = time.perf_counter()
            tokens = play(work)
            seconds = time.perf_counter() - started
            yield Played(seconds, tokens, metadata.version("transformers"))


def play_vllm(model: str, dtype: str, works: Sequence[Work]) -> Iterator[Played]:
    """vLLM in a process of its own, from an environment of its own (COA_VLLM is its Python)."""
    python = Path(os.environ.get("COA_VLLM") or VLLM_PYTHON)
    if not python.is_file():
        raise Unavailable(f"{python}: no such file; set COA_VLLM to a Python that has vLLM.")
    asked = {
        "model": str(model_folder(resolve(model))),
        "dtype": dtype,
        "max_model_len": max(work.lengths.total for work in works),
        "block_size": 32,  # tokens; a smaller block of the cache is faster here than the usual 128
        "works": [dataclasses.asdict(work) for work in works],
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [python, "-I", vllm_rollout.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | _vllm_settings(),
            text=True,
            start_new_session=True,  # so that the processes it starts can be ended with it
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin as stdin:
                json.dump(asked, stdin)
            for _ in works:
                line = process.stdout.readline()
                if not line:
                    raise EngineError(f"ended with code {process.wait()}: {_tail(log)}")
                yield Played(**json.loads(line))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return " | ".join([line.strip() for line in log if line.strip()][-_TAIL_LINES:])


def _vllm_settings() -> dict[str, str]:
    found = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if hasattr(os, "sched_getaffinity"):
        found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return found
