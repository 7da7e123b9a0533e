"""A small OpenAI-compatible server on loopback: a script instead of a model.

It stands in for what a real server cannot be made to do on demand: refuse with 429, fail and then
recover, hang, cut the connection, answer with garbage. Its turns come from the ScriptedEngine, so
ids, stop strings and limits are as exact as there. Of adapters it keeps only the names.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from coa.engines import Engine, load_engine
from coa.engines.base import Completion, Sampling
from coa.engines.openai import OpenAIEngine
from coa.engines.scripted import Script, ScriptedEngine
from coa.loop import Budget, Decoding, run
from coa.models.codec import Codec
from coa.trajectory import Trajectory
from playing import ANSWER, MHQA, SEARCH, TASK, box
from tiny_model import TEMPLATE, make_tokenizer

Body = dict[str, Any]
STOPS = ("</a>", "</b>")


class Loopback:
    """What the server does, and what it was asked."""

    def __init__(self, codec: Codec, script: Script, offers: str = "tokens") -> None:
        self.codec, self.offers = codec, offers
        self.engine = ScriptedEngine(script, codec)
        self.faults: deque[Any] = deque()
        """Done instead of the next answers: a status, (status, headers), bytes, 'cut', a pause."""
        self.models: list[Body] = [{"id": "tiny", "max_model_len": 4096}]
        self.asked: list[tuple[str, Body]] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.slow_s = 0.0
        self.processed = True
        self.strict = self.repeats = False
        self.forced: str | None = None
        """Said to a probe with a grammar; None ignores grammars."""
        self.adapters: dict[str, str] | None = None
        """Name -> folder; None cannot load any."""
        self.most_stops = 100
        self.words = "no,"
        """What it says when it refuses."""
        self.split: tuple[int, ...] = ()
        """Ids that end inside a letter: a native stream does not show them."""
        self.url = ""

    @property
    def ref(self) -> str:
        return f"openai:tiny@{self.url}/v1"

    def completions(self, path: str) -> list[Body]:
        """Bodies sent to a path, the probes left out."""
        return [body for asked, body in self.asked if asked == path and not is_probe(body)]

    def answer(self, path: str, body: Body) -> Body | list[Body] | bytes | int:
        if path.endswith("load_lora_adapter"):
            return self._adapter(path, body)
        if body.get("model") not in ("tiny", None, *(self.adapters or ())):
            return 404
        if len(body.get("stop") or ()) > self.most_stops:
            return 400
        if path == "/v1/completions" and self.offers in ("tokens", "text", "native"):
            if isinstance(body["prompt"], list) and self.offers == "text":
                return 400
            return self._completion(body)
        if path == "/v1/chat/completions" and self.offers == "chat":
            if self.strict and "include_stop_str_in_output" in body:
                return 400
            text = "".join(message["content"] for message in body["messages"])
            done = self._generate(self.codec.encode(text), body)
            content, finish, _ = self._cut(done, body)
            if self.repeats and body["messages"][-1]["role"] == "assistant":
                content = body["messages"][-1]["content"] + content
            message = {"role": "assistant", "content": content}
            return {"choices": [{"message": message, "finish_reason": finish}]}
        if path == "/completion" and self.offers == "native":
            return self._native(body)
        return 404

    def _adapter(self, path: str, body: Body) -> bytes | int:
        name = body["lora_name"]
        if self.adapters is None:
            return 404
        if path == "/v1/load_lora_adapter":
            if name in self.adapters:
                return 400
            self.adapters[name] = body["lora_path"]
            return b"Success: added"
        return b"Success: removed" if self.adapters.pop(name, None) else 404

    def _generate(self, prompt: list[int], body: Body) -> Completion:
        sampling = Sampling(max_tokens=_limit(body), stop=tuple(body.get("stop") or ()))
        return asyncio.run(self.engine.generate(prompt, sampling))

    def _cut(self, done: Completion, body: Body) -> tuple[str, str, str | None]:
        """Text, finish reason and stop reason, the stop string cut off unless it is asked for."""
        text, stop = self.codec.decode(done.ids), None
        if done.finish == "stop":
            stop = next(s for s in body["stop"] if s in text)
            if not body.get("include_stop_str_in_output") or self.strict:
                text = text[: text.rfind(stop)]
        return text, "length" if done.finish == "length" else "stop", stop

    def _completion(self, body: Body) -> Body:
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else self.codec.encode(prompt)
        done = self._generate(ids, body)
        text, finish, stop = self._cut(done, body)
        if self.forced is not None and is_probe(body) and "structured_outputs" in body:
            text = self.forced
        choice: Body = {"index": 0, "text": text, "finish_reason": finish}
        if self.offers == "tokens":
            best = -0.5 if self.processed and body["temperature"] == 2.0 else -1.0
            logprobs = {
                "token_logprobs": [-0.25] * len(done.ids),
                "top_logprobs": [{"x": best}] * len(done.ids),
            }
            choice |= {"stop_reason": stop, "token_ids": done.ids, "prompt_token_ids": ids}
            choice["logprobs"] = logprobs
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(done.ids)}
        return {"choices": [choice], "usage": usage}

    def _native(self, body: Body) -> Body | list[Body]:
        done = self._generate(body["prompt"], body)
        entries = [{"id": i, "logprob": -0.25} for i in done.ids]
        reason = {"stop": "word", "eos": "eos", "length": "limit"}[done.finish]
        counts = {"tokens_evaluated": len(body["prompt"]), "tokens_predicted": len(done.ids)}
        shown = self.codec.decode(body["prompt"])  # the last event repeats it, as llama.cpp's does
        last = {"stop": True, "stop_type": reason, "prompt": shown, **counts}
        if body["n_probs"] > 1:  # the distribution alone is wanted: two tokens, equally likely
            tops = [{"id": token, "logprob": math.log(0.5)} for token in self.split]
            return {"completion_probabilities": [{"top_logprobs": tops}]}
        if not body["stream"]:
            return {"tokens": done.ids, "completion_probabilities": entries, **last}
        parts = [
            {
                "content": self.codec.decode([entry["id"]]),
                "completion_probabilities": [entry],
                "tokens_predicted": position,
            }
            for position, entry in enumerate(entries, start=1)
            if entry["id"] not in self.split
        ]
        return [*parts, {"content": "", **last}]


def is_probe(body: Body) -> bool:
    return _limit(body) in (1, 16)


def _limit(body: Body) -> int:
    return int(body.get("max_tokens") or body.get("n_predict") or 0)


@contextmanager
def serving(server: Loopback) -> Iterator[Loopback]:
    """Listen on a free port of 127.0.0.1 until the block ends."""

    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.keys.append(self.headers.get("Authorization"))
            if not self._fail():
                found = {"data": server.models} if self.path == "/v1/models" else 404
                self._send(found)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append((self.path, body))
            server.keys.append(self.headers.get("Authorization"))
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            time.sleep(server.slow_s)
            try:
                if not self._fail(body):
                    self._send(server.answer(self.path, body))
            finally:
                server.at_once -= 1

        def _fail(self, body: Body | None = None) -> bool:
            if not server.faults:
                return False
            fault = server.faults.popleft()
            if isinstance(fault, float):
                time.sleep(fault)
                return False
            if fault in ("cut", "obey and cut"):
                if fault == "obey and cut":
                    server.answer(self.path, body or {})
                self.close_connection = True
                self.connection.close()
            elif fault == "cut late":
                found = server.answer(self.path, body or {})
                assert isinstance(found, list)
                self._stream(found[:2])
            elif isinstance(fault, bytes):
                self._write(200, fault, {})
            else:
                status, headers = fault if isinstance(fault, tuple) else (fault, {})
                self._send(status, headers)
            return True

        def _send(self, found: Any, headers: dict[str, str] | None = None) -> None:
            if isinstance(found, list):
                self._stream(found)
            elif isinstance(found, bytes):
                self._write(200, found, {})
            elif isinstance(found, int):
                words = {
                    "error": {"message": f"{server.words}\nnot {self.headers.get('Authorization')}"}
                }
                self._write(found, json.dumps(words).encode(), headers or {})
            else:
                self._write(200, json.dumps(found).encode(), {})

        def _stream(self, events: list[Body]) -> None:
            """Events in chunks; without the last event it ends as a cut connection does."""
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in events:
                chunk = f"data: {json.dumps(event)}\n\n".encode()
                self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            if events and events[-1].get("stop"):
                self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            else:
                self.close_connection = True

        def _write(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    class Listening(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Quiet: a caller that gave up is part of the tests."""

    listening = Listening(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{listening.server_address[1]}"
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


# -- an engine on it -----------------------------------------------------------------------------


def write_tokenizer(path: Path) -> Path:
    """A tokenizer with its chat template."""
    make_tokenizer().save(str(path / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return path


def script(prompt: str, turn: int) -> str:
    if "Where is it" in prompt:
        return ANSWER if "About" in prompt else SEARCH.format("France")
    return "<a>x</a> and more"


class Loaded:
    """An engine, and the lines it noted."""

    def __init__(self, server: Loopback, folder: Path, **options: Any) -> None:
        self.notes: list[str] = []
        options = {"backoff_s": 0.01, "tokenizer": str(folder), **options}
        engine = load_engine(server.ref, note=self.notes.append, **options)
        assert isinstance(engine, OpenAIEngine) and isinstance(engine, Engine)
        self.engine = engine

    def ask(self, text: str = "q", **sampling: Any) -> tuple[str, str]:
        sampling = {"stop": STOPS, "max_tokens": 50, **sampling}
        shown: list[str] = []

        async def once() -> tuple[str, str]:
            prompt = self.engine.encode_prompt("s", text)
            done = await self.engine.generate(prompt, Sampling(**sampling), shown.append)
            assert len(done.logprobs) == len(done.ids)
            assert "".join(shown) == self.engine.decode(done.ids)
            return self.engine.decode(done.ids), done.finish

        return asyncio.run(once())

    def roll_out(self) -> Trajectory:
        async def once() -> Trajectory:
            decoding, budget = Decoding(temperature=1.0, seed=3), Budget(seconds=20)
            toolbox = box("mhqa")
            return await run(TASK, self.engine, MHQA, toolbox, budget=budget, decoding=decoding)

        return asyncio.run(once())


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)
