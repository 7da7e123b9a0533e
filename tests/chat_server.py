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
    """Use it as a context manager."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.bodies: list[Json] = []
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
        lines = []
        for number, unit in enumerate(self.units, start=1):
            seen = [
                at
                for at, u in enumerate(self.units[: number - 1], 1)
                if u.branch in ("", unit.branch)
            ]
            after = ", ".join(map(str, seen)) or "none"
            lines.append(f"searcher: {unit.need} (after {after})")
        lines += ["coder: calculate it"] if self.programs else []
        lines += ["verifier: say what was found"]
        return "THOUGHT: I plan.\n" + "\n".join(f"{n}. {line}" for n, line in enumerate(lines, 1))


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
            return f"THOUGHT: I need {unit.need}.\nINPUT: {unit.argument}"
        if agent == "reader":
            return self._read(body, script.units[step(texts) - 1])
        if agent == "coder":
            return f"THOUGHT: I write a program.\nINPUT:\n{script.programs[0]}"
        if agent in ("reflector", "critic"):
            return approval(body)
        asked = "\n".join(texts[1:])
        if asked.rfind("Give the answer.") > asked.rfind("Check this answer"):
            return f"THOUGHT: The reports say so.\nANSWER: {script.answer}"
        return "THOUGHT: I check it.\nREASON: It agrees with the reports.\nSCORE: 4"

    def question(self, body: Json) -> str:
        told = "\n".join(contents(body)[1:])
        return max((q for q in self.scripts if q in told), key=len)

    def _read(self, body: Json, unit: Unit) -> str:
        """Open what the experts opened, one after the other, and report."""
        messages = body["messages"]
        said = max(
            at for at, m in enumerate(messages) if re.search(r"^Step \d+:", m["content"], re.M)
        )
        opened = sum("INPUT:" in m["content"] for m in messages[said:] if m["role"] == "assistant")
        if opened < len(unit.opens):
            return f"THOUGHT: I open it.\nINPUT: {unit.opens[opened]}"
        return f"REPORT: {unit.report}"


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
    return f"{CRITERIA[0]}: good, average or poor" in body["messages"][0]["content"]


def approval(body: Json) -> str:
    if is_rated(body):
        return "\n".join(f"{name}: good" for name in CRITERIA) + "\nREASON: It agrees."
    return "VERDICT: approve\nREASON: It agrees."


def objection(body: Json, worst: str, verdict: str, reason: str) -> str:
    if is_rated(body):
        lines = [f"{CRITERIA[0]}: good", f"{CRITERIA[1]}: {worst}", f"{CRITERIA[2]}: good"]
        return "\n".join(lines) + f"\nREASON: {reason}"
    return f"VERDICT: {verdict}\nREASON: {reason}"
