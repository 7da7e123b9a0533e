"""A scripted OpenAI-compatible chat server on loopback, and a team's replies taken from experts.

`ChatServer` answers every request with what a function of the request's body says: a text, or an
`Answer` that may also be refused, slow, cut in the middle, without counted tokens or not JSON. It
keeps the bodies that it saw.

`Oracle` is such a function. For every agent of a team it says what the rule-based experts would
say about the same question, in the form of the contracts; it knows agent and question only from the
messages of the request, as a model would.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import sleep
from types import TracebackType
from typing import Any

from coa.distillation.convert import in_one_line
from coa.io.runs import Json
from coa.recording.episode import Episode, ToolUse
from coa.recording.recorder import CRITERIA


@dataclass(frozen=True)
class Answer:
    """What comes back for one request."""

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    counted: bool = True
    """The tokens are counted: one for each word."""
    cached: int = 0
    finish: str = "stop"
    raw: bytes | None = None
    """The body itself, instead of a completion."""
    cut: bool = False
    """The connection is closed after half of the body."""
    delay_s: float = 0.0


Reply = Callable[[Json], "str | Answer"]


def words(body: Json) -> int:
    return sum(len(message["content"].split()) for message in body["messages"])


class ChatServer:
    """Use it as a context manager. `schemas` is the kind of `response_format` whose schema it
    follows, which is asked for once and is not among the bodies."""

    def __init__(self, reply: Reply, schemas: str = "json_schema") -> None:
        self.reply, self.schemas = reply, schemas
        self.bodies: list[Json] = []
        self.probes: list[Json] = []
        self.keys: list[str] = []
        """The Authorization headers."""
        self.most_at_once = self.at_once = 0
        self._lock = threading.Lock()
        outer = self

        class Answering(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients that are killed in the middle of a request are no news."""

        self._server = Quiet(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.ref = f"openai:tester@{self.url}"

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        assert request.path == "/v1/chat/completions", request.path
        form = body.get("response_format") or {}
        if isinstance(form.get("json_schema"), dict) and form["json_schema"]["name"] == "probe":
            self.probes.append(body)
            follows = form["type"] == self.schemas
            said = Answer('{"word": "coa", "why": ""}') if follows else Answer("no", status=400)
            return self._send(request, body, said)
        if form.get("type") == "json_object" and "hello" in body["messages"][-1]["content"]:
            self.probes.append(body)
            follows = self.schemas == "json_object"
            return self._send(request, body, Answer('{"word": "coa"}' if follows else "Hello!"))
        with self._lock:
            self.bodies.append(body)
            self.keys.append(request.headers.get("Authorization", ""))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            said = self.reply(body)
            answer = said if isinstance(said, Answer) else Answer(said)
            sleep(answer.delay_s)
            self._send(request, body, answer)
        except OSError:
            pass  # the client is gone
        finally:
            with self._lock:
                self.at_once -= 1

    def _send(self, request: BaseHTTPRequestHandler, body: Json, answer: Answer) -> None:
        content = answer.raw
        if content is None and answer.status != 200:
            content = json.dumps({"error": {"message": answer.text}}).encode()
        content = json.dumps(completion(body, answer)).encode() if content is None else content
        request.send_response(answer.status)
        for name, value in answer.headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content[: len(content) // 2] if answer.cut else content)
        if answer.cut:
            request.close_connection = True

    def __enter__(self) -> ChatServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def completion(body: Json, answer: Answer) -> Json:
    """A response as the API describes it."""
    message = {"role": "assistant", "content": answer.text}
    made: Json = {"id": "chat-1", "object": "chat.completion", "model": body["model"]}
    made["choices"] = [{"index": 0, "message": message, "finish_reason": answer.finish}]
    if answer.counted:
        made["usage"] = {
            "prompt_tokens": words(body),
            "completion_tokens": max(1, len(answer.text.split())),
            "prompt_tokens_details": {"cached_tokens": answer.cached},
        }
    return made


# -- what experts would say ----------------------------------------------------------------------


@dataclass
class Unit:
    """One look-up of the experts."""

    need: str
    argument: str
    branch: str
    opens: list[str] = field(default_factory=list)
    report: str = ""


@dataclass
class Script:
    """What the experts did for one question."""

    units: list[Unit] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)
    answer: str = ""

    @property
    def plan(self) -> str:
        steps: list[tuple[str, str, list[int]]] = []
        for number, unit in enumerate(self.units, start=1):
            before = enumerate(self.units[: number - 1], 1)
            after = [at for at, other in before if other.branch in ("", unit.branch)]
            steps.append(("searcher", unit.need, after))
        if self.programs:
            steps.append(("coder", "calculate it", [*range(1, len(steps) + 1)]))
        return plan(*steps, combine="say what was found", thought="I plan.")


def script_of(episode: Episode) -> Script:
    script, need = Script(answer=episode.answer or ""), ""
    for _, event in in_one_line(episode.events):
        if not isinstance(event, ToolUse):
            part = event.facts.get("part")
            if part == "query":
                need = event.thought.removeprefix("I need ").removesuffix(".")
            elif part == "finding":
                script.units[-1].report += f"{event.text} "
        elif event.agent == "searcher":
            script.units.append(Unit(need, event.argument, event.branch))
        elif event.agent == "reader":
            script.units[-1].opens.append(event.argument)
        else:
            script.programs.append(event.argument)
    return script


class Oracle:
    """Replies of a team that knows what the experts know."""

    def __init__(self, episodes: Iterable[Episode]) -> None:
        self.scripts = {episode.question: script_of(episode) for episode in episodes}

    def __call__(self, body: Json) -> str:
        agent, question, texts = who(body), self.question(body), contents(body)
        script = self.scripts[question]
        if agent == "planner":
            return script.plan
        if agent == "searcher":
            unit = script.units[step(texts) - 1]
            return call(unit.argument, f"I need {unit.need}.")
        if agent == "reader":
            return self._read(body, script.units[step(texts) - 1])
        if agent == "coder":
            return program(script.programs[0], "I write a program.")
        if agent in ("reflector", "critic"):
            return approval(body)
        asked = "\n".join(texts[1:])
        if asked.rfind("Give the answer.") > asked.rfind("Check this answer"):
            return answer(script.answer, "The reports say so.")
        return check(4, "It agrees with the reports.")

    def question(self, body: Json) -> str:
        told = "\n".join(contents(body)[1:])
        return max((q for q in self.scripts if q in told), key=len)

    def _read(self, body: Json, unit: Unit) -> str:
        """Open what the experts opened, one after the other, and report."""
        messages = body["messages"]
        said = max(
            at for at, m in enumerate(messages) if re.search(r"^Step \d+:", m["content"], re.M)
        )
        opened = sum('"open": "h' in m["content"] for m in messages[said:])
        if opened < len(unit.opens):
            return report("", thought="I open it.", open=unit.opens[opened])
        return report(unit.report)


def who(body: Json) -> str:
    """The agent that a request is for."""
    found = re.search(r"You are the (\w+)\.", body["messages"][0]["content"])
    assert found, body["messages"][0]
    return found[1]


def contents(body: Json) -> list[str]:
    return [message["content"] for message in body["messages"]]


def step(texts: Sequence[str]) -> int:
    """The number of the step that was given last."""
    found = re.findall(r"^Step (\d+):", "\n".join(texts[1:]), re.M)
    return int(found[-1])


def is_rated(body: Json) -> bool:
    return f'"{CRITERIA[0]}"' in body["messages"][0]["content"]


# -- replies in the forms that agents are asked for ------------------------------------------------


def plan(
    *steps: tuple[str, str, list[int]] | str, combine: str = "say it", thought: str = "So."
) -> str:
    """Steps as (agent, task, steps before), or tasks of the first worker that need no others."""
    told = [each if isinstance(each, tuple) else ("", each, []) for each in steps]
    shown = [
        {**({"agent": agent} if agent else {}), "task": task, "after": after}
        for agent, task, after in told
    ]
    return json.dumps({"thought": thought, "steps": shown, "combine": combine})


def call(argument: Any, thought: str = "So.") -> str:
    return json.dumps({"thought": thought, "input": argument})


def program(text: str, thought: str = "So.") -> str:
    return json.dumps({"thought": thought, "program": text})


def report(text: str, found: bool = True, thought: str = "So.", open: str = "") -> str:
    said = {"thought": thought, "found": found, "report": text}
    return json.dumps(said | ({"open": open} if open else {}))


def answer(text: str, thought: str = "So.") -> str:
    return json.dumps({"thought": thought, "answer": text})


def check(score: int, reason: str = "It is so.") -> str:
    return json.dumps({"reason": reason, "score": score})


def approval(body: Json) -> str:
    return objection(body, "good", "approve", "It agrees.")


def objection(body: Json, worst: str, verdict: str, reason: str) -> str:
    if is_rated(body):
        rated = dict(zip(CRITERIA, ("good", worst, "good"), strict=True))
        return json.dumps({"thought": "", **rated, "reason": reason})
    return json.dumps({"reason": reason, "verdict": verdict})
