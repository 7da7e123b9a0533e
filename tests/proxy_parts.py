"""What tests of the recording proxy share: programs to record, and a proxy in front of a provider.

Run as a program, `python proxy_parts.py OUT [--tasks FILE ...] -- COMMAND` records as `coa record`
does: for tests that kill the recorder.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from coa.io.runs import Json
from coa.recording.calls import CallLog, LoggedSession, read_sessions
from coa.recording.program import ProgramRecording, RecordedProgram, record_program
from coa.recording.proxy import Providers, RecordingProxy, Secrets
from scripted_provider import PATHS, ScriptedProvider

HERE = Path(__file__).resolve().parent

PROGRAM = """
import json, os, sys, urllib.request

def send(address, path, body, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    asked = urllib.request.Request(os.environ[address] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked) as answer:
        return answer.read().decode()

def ask(text, stream=False, **more):
    body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": text}], **more}
    key = "Bearer " + os.environ["OPENAI_API_KEY"]
    return send("OPENAI_BASE_URL", "/chat/completions", body, Authorization=key)

def said(text, **more):
    return json.loads(ask(text, **more))["choices"][0]["message"]["content"]
"""
"""What a program of a test begins with: a client of its own, so that it starts fast."""

TRACED = f"""
import json, os, sys, urllib.request
sys.path.append({str(HERE)!r})
from otlp_messages import model, request, span, text
TRACE = os.urandom(16).hex()

def asks(number, *said):
    told = [text(("user", "assistant")[place % 2], each) for place, each in enumerate(said)]
    return model(number, 1, (number, number + 1), told[:-1], told[-1])

def run(name="finder"):
    agent = {{"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}}
    return span(1, at=(0, 99), held=agent)

def export(*spans, **headers):
    sent = request(*({{**each, "traceId": TRACE}} for each in spans))
    headers = {{"Content-Type": "application/json", **headers}}
    url = os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] + "/v1/traces"
    asked = urllib.request.Request(url, json.dumps(sent).encode(), headers)
    with urllib.request.urlopen(asked) as answer:
        assert answer.read() == b"{{}}"
"""
"""The same for a program that is traced: `export(asks(2, "Where?", "Lima"), run())` sends the span
of a model call, and the one of the agent around it, which ends last."""


def program(folder: Path, text: str, name: str = "team.py", begins: str = PROGRAM) -> list[str]:
    """The command of a program of a test."""
    path = folder / name
    path.write_text(begins + text, encoding="utf-8")
    return [sys.executable, "-S", str(path)]


def recorded(out: Path, command: Sequence[str], **asked: Any) -> RecordedProgram:
    recording = ProgramRecording(command=tuple(command), **asked)
    return record_program(recording, out)


@asynccontextmanager
async def proxying(
    provider: ScriptedProvider, log: Path, **more: Any
) -> AsyncIterator[tuple[RecordingProxy, httpx.AsyncClient]]:
    """A proxy in front of a provider, and a client of its session `run`."""
    providers = Providers(f"{provider.url}/v1", provider.url)
    secrets = more.pop("secrets", None) or Secrets({})
    with CallLog(log, secrets) as written:
        async with RecordingProxy(providers, written, secrets, **more) as proxy:
            await proxy.begin("run")
            async with httpx.AsyncClient(base_url=proxy.address("run"), timeout=None) as client:
                yield proxy, client
            if "run" in proxy._held:
                await proxy.end("run")
            assert not proxy.failed.done(), proxy.failed.result()


def only(log: Path, name: str = "run") -> LoggedSession:
    """A session of a log, by its name."""
    return next(each for each in read_sessions(log) if each.name == name)


def body_for(dialect: str, text: str, **more: Any) -> Json:
    """A request in a dialect."""
    if dialect == "responses":
        return {"model": "m", "input": text, **more}
    made = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    return made | ({"max_tokens": 64} if dialect == "anthropic" else {})


def path_of(dialect: Any) -> str:
    return PATHS[dialect]


def main() -> None:
    """Record as `coa record` does; options are the fields of `ProgramRecording`."""
    place = sys.argv.index("--")
    own, command = sys.argv[1:place], sys.argv[place + 1 :]
    asked = ProgramRecording(command=tuple(command))
    for name, value in zip(own[1::2], own[2::2], strict=True):
        kind = type(getattr(asked, name.lstrip("-")))
        asked = replace(asked, **{name.lstrip("-"): kind(value)})
    done = record_program(asked, Path(own[0]))
    raise SystemExit(done.code)


if __name__ == "__main__":
    main()
