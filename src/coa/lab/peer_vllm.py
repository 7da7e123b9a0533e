"""The work of `coa bench rollout` done by vLLM. Runs as a script inside vLLM's own environment.

On stdin one JSON object: model (a folder), dtype, works, and more options of vLLM. On stdout a JSON
list: seconds, tokens and version of each work. It imports nothing of ours, because that
environment does not have it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any


def main() -> None:
    # vLLM and what it starts write to stdout as well; the result gets a copy of it to itself.
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    vllm = import_module("vllm")
    works = asked.pop("works")
    most = max(len(work["prompts"]) for work in works)
    model = vllm.LLM(max_num_seqs=most, enable_prefix_caching=True, **asked)
    done = []
    for work in works:
        started = time.perf_counter()
        tokens = play(vllm, model, work)
        seconds = time.perf_counter() - started
        done.append({"seconds": seconds, "tokens": tokens, "version": vllm.__version__})
    print(json.dumps(done), file=result, flush=True)


def play(vllm: Any, model: Any, work: dict[str, Any]) -> int:
    """All rollouts turn by turn: they have equal lengths, so that none waits for another."""
    lengths = work["lengths"]
    sampling = vllm.SamplingParams(
        temperature=1.0, max_tokens=lengths["sampled"], ignore_eos=True, detokenize=False
    )
    held = [list(prompt) for prompt in work["prompts"]]
    tokens = 0
    for turn in range(lengths["turns"]):
        if turn:
            for ids, observations in zip(held, work["observations"], strict=True):
                ids.extend(observations[turn - 1])
        prompts = [{"prompt_token_ids": ids} for ids in held]
        for ids, output in zip(
            held, model.generate(prompts, sampling, use_tqdm=False), strict=True
        ):
            sampled = list(output.outputs[0].token_ids)
            tokens += len(sampled)
            ids.extend(sampled)
    return tokens


if __name__ == "__main__":  # vLLM's processes import this file again
    main()
