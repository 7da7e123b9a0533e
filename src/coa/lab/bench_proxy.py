"""`coa bench proxy`: what the recording proxy adds to a call of a model.

Goes in: nothing. Comes out: milliseconds of a call made directly and through the proxy, for replies
at once and as streams, small and with a long conversation. A provider of constant replies, the
recorder (`coa record`) and the client are processes of their own, as they are in use. The client
makes direct and recorded calls in turn, so that both see the same machine; what is compared are the
medians, and the ninetieth percentiles beside them.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from coa.errors import EngineError
from coa.io.runs import Json

CALLS = 300
"""Of each kind, direct and recorded."""
_WARM = 20
_LONG = 100_000
"""Characters of the long conversation."""
_EVENTS = 50
_DIRECT = "COA_BENCH_DIRECT"


def bench_proxy(note: Callable[[str], None] = lambda line: None, calls: int = CALLS) -> Json:
    """Medians in milliseconds by kind of call, and what the proxy adds to each."""
    provider = subprocess.Popen(
        [sys.executable, "-m", __name__, "provider"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert provider.stdout is not None
        url = provider.stdout.readline().strip()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "coa", "record", "--upstream", url]
            command += ["--json", "--out", str(Path(folder, "episodes.jsonl")), "--"]
            command += [sys.executable, "-m", __name__, "client", str(calls)]
            done = subprocess.run(
                command,
                env={**os.environ, _DIRECT: f"{url}/v1"},
                capture_output=True,
                text=True,
                check=False,
            )
            # With --json the program's own output is on stderr.
            lines = [line for line in done.stderr.splitlines() if line.startswith('{"bench"')]
            if not lines:
                raise EngineError(f"the recorded client failed: {done.stderr.strip()[-300:]}")
            seconds = json.loads(lines[0])["bench"]
    finally:
        provider.kill()
        provider.wait()
    kinds = {kind: _compared(*both) for kind, both in seconds.items()}
    result: Json = {"unit": "ms", "calls": calls, "kinds": kinds}
    for line in proxy_lines(result):
        note(line)
    return result


def _compared(direct: list[float], recorded: list[float]) -> Json:
    def figures(seconds: list[float]) -> Json:
        p90 = statistics.quantiles(seconds, n=10)[-1]
        return {"median": round(1000 * statistics.median(seconds), 3), "p90": round(1000 * p90, 3)}

    ours, theirs = figures(recorded), figures(direct)
    added = round(ours["median"] - theirs["median"], 3)
    ratio = round(ours["median"] / theirs["median"], 2)
    return {"direct": theirs, "recorded": ours, "added": added, "ratio": ratio}


def proxy_lines(result: Json) -> Iterator[str]:
    yield f"{'ms a call':22} {'direct':>8} {'recorded':>9} {'added':>7} {'ratio':>6}  (medians)"
    for kind, found in result["kinds"].items():
        direct, recorded = found["direct"]["median"], found["recorded"]["median"]
        yield f"{kind:22} {direct:8.2f} {recorded:9.2f} {found['added']:7.2f} {found['ratio']:6.2f}"


# -- the client, which is recorded ---------------------------------------------------------------


def _client(calls: int) -> None:
    bases = os.environ[_DIRECT], os.environ["OPENAI_BASE_URL"]
    connections = [http.client.HTTPConnection(urlsplit(base).netloc) for base in bases]

    def timed(which: int, body: bytes) -> float:
        path = f"{urlsplit(bases[which]).path}/chat/completions"
        begun = time.perf_counter()
        connections[which].request("POST", path, body, {"Content-Type": "application/json"})
        answer = connections[which].getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        return time.perf_counter() - begun

    seconds: dict[str, list[list[float]]] = {}
    for stream in (False, True):
        for length in (0, _LONG):
            name = f"{'stream' if stream else 'at once'}, {'long' if length else 'short'}"
            seconds[name] = [[], []]
            for at in range(_WARM + calls):
                messages = [{"role": "user", "content": f"{at} {'word ' * (length // 5)}"}]
                body = json.dumps({"model": "m", "stream": stream, "messages": messages}).encode()
                for which in ((0, 1), (1, 0))[at % 2]:
                    found = timed(which, body)
                    if at >= _WARM:
                        seconds[name][which].append(found)
    print(json.dumps({"bench": seconds}), flush=True)


# -- the provider --------------------------------------------------------------------------------


def _replies() -> tuple[bytes, bytes]:
    """An answer at once, and one as a stream, with their heads."""
    said = {"role": "assistant", "content": "word " * _EVENTS}
    usage = {"prompt_tokens": 9, "completion_tokens": _EVENTS}
    made = {"id": "r", "choices": [{"message": said, "finish_reason": "stop"}], "usage": usage}
    body = json.dumps(made).encode()
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    chunks = [{"id": "r", "choices": [{"delta": {"content": "word "}}]}] * _EVENTS
    chunks.append({"id": "r", "choices": [{"delta": {}, "finish_reason": "stop"}]})
    events = [f"data: {json.dumps(each)}\n\n".encode() for each in chunks] + [b"data: [DONE]\n\n"]
    sent = b"".join(f"{len(each):x}\r\n".encode() + each + b"\r\n" for each in events)
    kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
    return head.encode() + body, b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n\r\n" + sent + b"0\r\n\r\n"


async def _provide() -> None:
    """Say where it listens, and answer until it is killed."""
    at_once, as_stream = _replies()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                body = await reader.readexactly(size)
                writer.write(as_stream if b'"stream": true' in body[:200] else at_once)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 20)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "client":
        _client(int(sys.argv[2]))
    else:
        asyncio.run(_provide())
