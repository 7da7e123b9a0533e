"""50 streaming clients at once against `coa serve`: who is lost, how long the others wait.

    python benchmarks/serve_clients.py [MODEL] [CLIENTS] [ROUNDS]

The server is a process of its own, as users start it; the clients are the official one, all in
this process, each asking another held-out question of the Atlas as soon as its last is answered.
Seconds are counted from the call of the client: to the first step of the chain, and to the answer
(for a chain that ends without one, to its end). Lost is a request whose stream breaks off, ends
without a reason, or brings an error. The accuracy says that what was streamed is real.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from coa.environments import make_tasks
from coa.rewards.answers import exact_match
from coa.tasks import Task

SEED = 4242


@dataclass
class Seen:
    """What one client saw of one request."""

    first_s: float = 0.0
    answer_s: float = 0.0
    tokens: int = 0
    right: float = 0.0
    stop: str = "lost"
    error: str = ""


async def ask(client: AsyncOpenAI, model: str, task: Task) -> Seen:
    seen, started, answer = Seen(), time.perf_counter(), ""
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": task.question}],
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            if chunk.usage is not None:
                seen.tokens = chunk.usage.completion_tokens
                continue
            step: dict[str, Any] = getattr(chunk, "coa", None) or {}
            if "role" in step and not seen.first_s:
                seen.first_s = time.perf_counter() - started
            if chunk.choices[0].delta.content:
                answer += chunk.choices[0].delta.content
            if chunk.choices[0].finish_reason is not None:
                seen.answer_s, seen.stop = time.perf_counter() - started, step["stop"]
    except Exception as error:
        seen.stop, seen.error = "lost", f"{type(error).__name__}: {error}"
    seen.right = exact_match(answer, task.answers) if answer else 0.0
    return seen


async def load(url: str, model: str, clients: int, rounds: int) -> tuple[list[Seen], float]:
    tasks = list(make_tasks("atlas-mhqa", "heldout_entity", clients * rounds, SEED))
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600.0)

    async def one_after_the_other(own: list[Task]) -> list[Seen]:
        return [await ask(client, model, task) for task in own]

    started = time.perf_counter()
    shares = (one_after_the_other(tasks[n::clients]) for n in range(clients))
    seen = [each for share in await asyncio.gather(*shares) for each in share]
    took = time.perf_counter() - started
    await client.close()
    return seen, took


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        f"p{share}": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 2)
        for share in (50, 90, 95, 99)
    }


@dataclass
class Started:
    """The server, and where it is."""

    process: subprocess.Popen[str]
    url: str = ""
    names: list[str] = field(default_factory=list)


def start(model: str, clients: int) -> Started:
    options = ["--port", "0", "--grammar", "mhqa", "--rollouts", str(clients)]
    command = [sys.executable, "-m", "coa", "serve", "--model", model, *options]
    made = Started(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    assert made.process.stderr is not None
    for line in made.process.stderr:
        print(line, end="", file=sys.stderr)
        if line.startswith("serving "):
            made.url = line.split()[-1]
            made.names = line.removeprefix("serving ").partition(" on ")[0].split(", ")
            # The log goes on, and a full pipe would stop the server.
            threading.Thread(target=made.process.stderr.read, daemon=True).start()
            return made
    raise SystemExit(f"the server did not start: {made.process.wait()}")


def main() -> None:
    arguments = sys.argv[1:]
    model = arguments[0] if arguments else "afm-135m"
    clients, rounds = (int(each) for each in (*arguments[1:3], *("50", "2")[len(arguments[1:3]) :]))
    server = start(model, clients)
    try:
        asyncio.run(load(server.url, server.names[0], 1, 1))  # the first pays for what is lazy
        seen, took = asyncio.run(load(server.url, server.names[0], clients, rounds))
    finally:
        server.process.terminate()
        server.process.wait()
    whole = [each for each in seen if each.stop != "lost"]
    report = {
        "model": model,
        "clients": clients,
        "requests": len(seen),
        "lost": len(seen) - len(whole),
        "errors": dict(Counter(each.error for each in seen if each.error)),
        "first_step_s": percentiles([each.first_s for each in whole]),
        "answer_s": percentiles([each.answer_s for each in whole]),
        "tokens_per_s": round(sum(each.tokens for each in whole) / took, 1),
        "requests_per_s": round(len(whole) / took, 2),
        "accuracy": round(sum(each.right for each in whole) / max(1, len(whole)), 3),
        "stop_reasons": dict(Counter(each.stop for each in seen)),
        "server_exit": server.process.returncode,
        "server_cpu_s": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, 1),
        "clients_cpu_s": round(resource.getrusage(resource.RUSAGE_SELF).ru_utime, 1),
        "seconds": round(took, 1),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
