"""A language model that is a script: it plays every agent of an office, without a key or a GPU.

    python model.py [--port 8000] [--seed 0] [--slips 0.1] [--wrong 0.05] [--faults 0.02]

It speaks chat completions and Responses, whole or as a stream, as OpenAI's server does. What it
says follows from the request alone: the words of the question, the tools on offer and what tools
and colleagues have returned so far. It knows no customer, no invoice and no policy, so its
answers are only as good as what it was told. As a real model it makes mistakes: it misspells a name
and has to try again (--slips), it forgets the last step and answers wrongly (--wrong), and the
server is busy now and then (--faults). These depend on the seed and the request, not on a clock.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Json = dict[str, Any]
NAME = "script-without-gold"
"""What it says it is, whichever model was asked for, so that a comparison names it."""

# -- what is asked -----------------------------------------------------------------------------

_NAME = r"(?P<c>[A-Z]\w+(?: [A-Z]\w+)+)"
QUESTIONS = {
    "pair": rf"In which city is {_NAME}, and what did it pay in (?P<y>\d+)\?",
    "city": rf"In which city is {_NAME}\?",
    "policy": r"(?:What is the limit in|Which limit does) our policy on (?P<t>[a-z ]+?)(?: set)?\?",
    "discount": rf"(?:What|How many percent of) discount does {_NAME} get\?",
    "net": rf"What did {_NAME} owe for (?P<y>\d+) after its discount\?",
    "reduced": rf"What did {_NAME} owe for (?P<y>\d+) after (?P<p>\d+) percent discount\?",
    "both": rf"What did {_NAME} pay in (?P<y>\d+) and (?P<y2>\d+) together\?",
    "converted": rf"(?:What did {_NAME} pay in (?P<y>\d+)|How much was the invoice of "
    rf"{_NAME.replace('<c>', '<c2>')} for (?P<y3>\d+)), in (?P<cur>[A-Z]+)\?",
    "invoice": rf"(?:What did {_NAME} pay in (?P<y>\d+)|How much was the invoice of "
    rf"{_NAME.replace('<c>', '<c2>')} for (?P<y3>\d+))\?",
}
RESEARCH = {"city", "policy", "discount"}
"""Questions for whoever looks after customers and policies; the others are about money."""
TOOLS = {
    "find_customer": "research",
    "search_policy": "research",
    "lookup_invoice": "account",
    "convert": "account",
    "deduct": "account",
    "add": "account",
}
"""Tool -> a part of the name of the colleague who has it."""


class Asked(NamedTuple):
    """A question that was understood: its kind and its words."""

    kind: str
    words: dict[str, str]
    text: str

    @property
    def field(self) -> str:
        return "research" if self.kind in RESEARCH else "account"

    @property
    def owner(self) -> str:
        return "researcher" if self.kind in RESEARCH else "accountant"

    @classmethod
    def found_in(cls, text: str) -> Asked | None:
        """The last question of a text."""
        found = [
            (match.start(), kind, match)
            for kind, pattern in QUESTIONS.items()
            for match in re.finditer(pattern, text)
        ]
        if not found:
            return None
        _, kind, match = max(found, key=lambda each: each[0])
        words = {name: said for name, said in match.groupdict().items() if said}
        words["c"] = words.get("c", words.get("c2", ""))
        words["y"] = words.get("y", words.get("y3", ""))
        return cls(kind, words, match[0])


# -- what was said so far ----------------------------------------------------------------------


@dataclass
class Turn:
    """One message of the conversation."""

    role: str
    text: str = ""
    calls: list[tuple[str, str, Json]] = field(default_factory=list)
    """(id, tool, arguments)"""
    answers: str = ""
    """The id of the call that it is the result of."""


@dataclass
class Asking:
    """What a request holds, in whichever API."""

    system: str
    turns: list[Turn]
    tools: dict[str, Json]
    """Name -> schema of the arguments."""
    stops: list[str] = field(default_factory=list)
    """Texts that end a reply and are not part of it."""


@dataclass
class Reply:
    text: str = ""
    thought: str = ""
    calls: list[tuple[str, Json]] = field(default_factory=list)


class Used(NamedTuple):
    """A tool, or a colleague, that was used, and what came back."""

    tool: str
    arguments: Json
    result: str


_FAILED = re.compile(r"Error executing tool '(\w+)' with arguments (\{.*?\}): (.*)")
"""How smolagents tells a model of a tool that failed: the call itself is no longer shown."""


def uses_of(turns: Sequence[Turn]) -> Iterator[Used]:
    """What was used so far, from calls as an API has them or as frameworks write them."""
    results = {turn.answers: turn.text for turn in turns if turn.answers}
    for at, turn in enumerate(turns):
        for key, tool, arguments in turn.calls:
            if key in results:
                yield Used(tool, arguments, results[key])
        if turn.role == "user" and (failed := _FAILED.search(turn.text)):
            yield Used(failed[1], ast.literal_eval(failed[2]), failed[3])
        if turn.role != "assistant" or turn.calls:
            continue
        after = next((t.text for t in turns[at + 1 :] if t.role in ("user", "tool")), None)
        if after is None:
            continue
        if "<code>" in turn.text:
            program = turn.text.split("<code>", 1)[1].split("</code>")[0]
            yield from _run_of(program, after)
        elif "Calling tools:" in turn.text:  # smolagents writes calls as a Python list
            called = ast.literal_eval(turn.text.split("Calling tools:", 1)[1].strip())
            seen = _without_heads(re.sub(r"^Observation:\s*", "", after))
            lines = seen.split("\n") if len(called) > 1 else [seen]
            for each, line in zip(called, lines, strict=False):
                made = each["function"]
                yield Used(made["name"], _object(made["arguments"]), line)


def _without_heads(text: str) -> str:
    """What was returned, without the line that smolagents puts before a colleague's report."""
    lines = [line for line in text.split("\n") if "answer from your managed agent" not in line]
    return "\n".join(lines)


def _run_of(program: str, after: str) -> Iterator[Used]:
    """Calls with literal arguments that a program prints, one line of its output each."""
    output = after.split("Execution logs:", 1)[-1].split("Last output", 1)[0].strip()
    lines = _without_heads(output).split("\n")
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.keywords:
            values = {each.arg or "": ast.literal_eval(each.value) for each in node.keywords}
            yield Used(node.func.id, values, lines.pop(0) if lines else after)


def _object(arguments: Any) -> Json:
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


# -- how an agent decides ----------------------------------------------------------------------


_AMOUNT = r"[\d.]+ \w+|not found"
_SHAPES = {"discount": r"\d+ percent|not found", "city": r"^[A-Z]\w+|not found"}
"""What an answer to a kind of question looks like."""


class Need(Exception):
    """Something has to be used before the work can go on."""

    def __init__(self, calls: list[tuple[str, Json]], thought: str) -> None:
        super().__init__(thought)
        self.calls, self.thought = calls, thought


class Found(Exception):
    """The answer is clear before the end: something is not there."""


class Stuck(Exception):
    """Neither a tool nor a colleague can do it."""


class Mind:
    """One agent at one moment: it works at its question until something is missing."""

    def __init__(self, asking: Asking, asked: Asked, seed: int, slips: float, wrong: float) -> None:
        self.asking, self.asked = asking, asked
        self.used = list(uses_of(asking.turns))
        self.functions = {*asking.tools, *re.findall(r"^\s*def (\w+)\(", asking.system, re.M)}
        self.shares = {"slips": slips, "wrong": wrong}
        self.seed = seed
        self.found = ""
        """The last thing that it found out."""

    def happens(self, what: str) -> bool:
        """Whether this happens at this question: always the same for a seed."""
        share = self.shares.get(what, 0.5)
        return random.Random(f"{self.seed} {what} {self.asked.text}").random() < share

    def answer(self) -> str:
        try:
            return self.solve(self.asked)
        except Found as found:
            return str(found)
        except Stuck:
            return self.found or "Nothing in the records that I have."

    # Questions, and what has to be known for each of them.

    def ask(self, *questions: str) -> list[str]:
        """Answers to questions, from my own tools, from a colleague, or as I was told."""
        answers: list[str] = []
        missing: list[tuple[str, Json]] = []
        thoughts: list[str] = []
        stuck = False
        for text in questions:
            asked = Asked.found_in(text)
            assert asked, text
            colleague = next((name for name in sorted(self.functions) if asked.field in name), None)
            answer: str | None = None
            if self.can_do(asked):
                try:
                    answer = self.solve(asked)
                except Need as need:
                    missing += need.calls
                    thoughts.append(need.thought)
            elif colleague:
                job = self.job_for(colleague, text)
                answer = self.told_by(colleague, job, asked)
                missing += [] if answer else [(colleague, job)]
                thoughts += [] if answer else [f"This is a question for the {asked.owner}."]
            else:
                try:
                    answer = self.heard(asked)
                except Stuck:
                    stuck = True
            answers.append(answer or "")
            self.found = answer or self.found
        if missing:
            one_at_a_time = any(name.startswith("transfer_to") for name, _ in missing)
            together = self.happens("at once") and not one_at_a_time
            raise Need(missing, " ".join(thoughts)) if together else Need(missing[:1], thoughts[0])
        if stuck:
            raise Stuck
        return answers

    def can_do(self, asked: Asked) -> bool:
        """Whether I have the tools for a question."""
        return any(owner == asked.field for tool, owner in TOOLS.items() if tool in self.functions)

    def solve(self, asked: Asked) -> str:
        kind, words = asked.kind, asked.words
        name, year = words["c"], words["y"]
        if "hand the question over" in self.asking.system.lower():
            return self.ask(asked.text)[0]
        if kind == "pair":
            questions = (f"In which city is {name}?", f"What did {name} pay in {year}?")
            city, paid = self.ask(*questions)
            return "not found" if "not found" in (city, paid) else f"{city}, {paid}"
        if kind == "net":
            (percent,) = self.ask(f"What discount does {name} get?")
            if percent == "not found":
                return percent
            (owed,) = self.ask(f"What did {name} owe for {year} after {percent} discount?")
            return owed
        if not self.can_do(asked):
            return self.ask(asked.text)[0]
        return str(getattr(self, kind)(**words))

    def city(self, c: str, **_: str) -> str:
        found = self.use("I look the customer up.", "find_customer", name=c)
        return found.split(" in ")[1].split(" and ")[0]

    def policy(self, t: str, **_: str) -> str:
        said = self.use("The policies should say that.", "search_policy", query=t)
        return said.rsplit(" is ", 1)[-1].rstrip(".")

    def discount(self, c: str, **_: str) -> str:
        found = self.use("The discount depends on the price group.", "find_customer", name=c)
        group = found.rstrip(".").split()[-1]
        about = f"discounts for {group} customers"
        said = self.use(f"The price group is {group}.", "search_policy", query=about)
        return said.rsplit(" is ", 1)[-1].rstrip(".")

    def invoice(self, c: str, y: str, **_: str) -> str:
        return self.use("I need the invoice.", "lookup_invoice", customer=c, year=int(y))

    def converted(self, c: str, y: str, cur: str, **_: str) -> str:
        euros = self.invoice(c, y)
        if self.happens("wrong"):
            return euros
        return self.use("Now the conversion.", "convert", amount=amount(euros), currency=cur)

    def reduced(self, c: str, y: str, p: str, **_: str) -> str:
        euros = self.invoice(c, y)
        if self.happens("wrong"):
            return euros
        return self.use("The discount goes off.", "deduct", amount=amount(euros), percent=int(p))

    def both(self, c: str, y: str, y2: str, **_: str) -> str:
        wanted = [("lookup_invoice", {"customer": c, "year": int(each)}) for each in (y, y2)]
        first, second = self.use_all("I need both invoices.", wanted)
        if self.happens("wrong"):
            return first
        sums = {"first": amount(first), "second": amount(second)}
        return self.use("Now the sum.", "add", **sums)

    # What was used, and what is to be used next.

    def use(self, thought: str, tool: str, **arguments: Any) -> str:
        return self.use_all(thought, [(tool, arguments)])[0]

    def use_all(self, thought: str, calls: list[tuple[str, Json]]) -> list[str]:
        slip = {**calls[0][1]}
        for key in slip.keys() & {"name", "customer"}:  # half of a name is no name
            slip[key] = slip[key].split()[0]
        if slip != calls[0][1] and self.happens("slips") and not self.result_of(calls[0]):
            if not self.result_of((calls[0][0], slip)):
                raise Need([(calls[0][0], slip)], thought)
            thought = "That was not the full name."
        results = [self.result_of(call) for call in calls]
        missing = [call for call, result in zip(calls, results, strict=True) if result is None]
        if missing:
            raise Need(missing if self.happens("at once") else missing[:1], thought)
        for result in results:
            assert result is not None
            if re.search(r"no customer|has no invoice|no policy", result):
                raise Found("not found")
            self.found = result
        return [result or "" for result in results]

    def result_of(self, call: tuple[str, Json]) -> str | None:
        """What a tool returned when it was used so."""
        tool, arguments = call
        same = (u.result for u in self.used if u.tool == tool and _same(u.arguments, arguments))
        return next((result.strip() for result in same), None)

    def job_for(self, colleague: str, question: str) -> Json:
        """The arguments that give a colleague a job; a handoff has none."""
        fields = self.asking.tools.get(colleague, {"properties": {"task": {}}}).get("properties")
        known = ("task", "question", "input", "request", "job")
        place = next((name for name in known if name in (fields or {})), None)
        return {place: question} if place else {}

    def told_by(self, colleague: str, job: Json, asked: Asked) -> str | None:
        """What a colleague reported for a job, at the call or, after a handoff, later on."""
        if job:
            said = self.result_of((colleague, job))
            return short(said) if said else None
        for at, turn in enumerate(self.asking.turns):
            if any(tool == colleague for _, tool, _ in turn.calls):
                later = [t for t in self.asking.turns[at:] if t.role == "assistant" and not t.calls]
                fits = re.search(_SHAPES.get(asked.kind, _AMOUNT), later[0].text) if later else None
                return (fits[0] if fits else short(later[0].text)) if later else None
        return None

    def heard(self, asked: Asked) -> str:
        """What others have said in the conversation, where it fits the question."""
        shape = _SHAPES.get(asked.kind, _AMOUNT)
        said = [t.text for t in self.asking.turns if t.role == "assistant" and not t.calls]
        for turn in self.asking.turns:  # CrewAI hands on what another agent found as context
            if turn.role == "user" and "context you're working with" in turn.text:
                said.append(turn.text.split("context you're working with", 1)[1])
        for text in reversed(said):
            for line in text.splitlines():
                if match := re.search(shape, line.strip()):
                    return match[0]
        raise Stuck


def _same(one: Json, other: Json) -> bool:
    """Whether arguments are the same; frameworks add some and turn numbers into text."""
    return all(str(one.get(name)) == str(value) for name, value in other.items())


def amount(text: str) -> float:
    number = float(text.split()[0])
    return int(number) if number == int(number) else number


def short(report: str) -> str:
    """The answer in a colleague's report: its first line."""
    lines = [line.strip() for line in _without_heads(report).splitlines() if line.strip()]
    return lines[0] if lines else ""


class Model:
    """What every agent's model says next."""

    def __init__(self, seed: int = 0, slips: float = 0.0, wrong: float = 0.0) -> None:
        self.seed, self.slips, self.wrong = seed, slips, wrong

    def reply(self, asking: Asking) -> Reply:
        asked = self._asked(asking)
        if asked is None:
            return self._done(asking, "I see no question about the office.")
        mind = Mind(asking, asked, self.seed, self.slips, self.wrong)
        if "<end_plan>" in asking.turns[-1].text or "facts survey" in asking.turns[0].text:
            return Reply(f"1. Find out what is needed for: {asked.text}\n2. Answer.\n<end_plan>")
        try:
            return self._done(asking, mind.answer())
        except Need as need:
            said = need.thought if mind.happens("says why") or "<code>" in asking.system else ""
            if "<code>" in asking.system and not asking.tools:
                return Reply(_program(said, need.calls))
            return Reply("", said, need.calls)

    @staticmethod
    def _asked(asking: Asking) -> Asked | None:
        """The question: the last that a user, or whoever gave the job, has asked."""
        for turn in reversed(asking.turns):
            if turn.role != "user" or turn.text.startswith("Observation"):
                continue
            if asked := Asked.found_in(turn.text):
                return asked
        return None

    @staticmethod
    def _done(asking: Asking, answer: str) -> Reply:
        if "final_answer" in asking.tools:
            return Reply(calls=[("final_answer", {"answer": answer})])
        if "<code>" in asking.system:
            return Reply(_program("That is the answer.", [("final_answer", {"answer": answer})]))
        return Reply(answer)


def _program(thought: str, calls: list[tuple[str, Json]]) -> str:
    """A turn of an agent that writes its calls as Python."""
    lines = []
    for name, arguments in calls:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        lines.append(f"{name}({given})" if name == "final_answer" else f"print({name}({given}))")
    return f"Thought: {thought}\n<code>\n" + "\n".join(lines) + "\n</code>"


# -- the two APIs ------------------------------------------------------------------------------


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


class Chat:
    """Chat completions."""

    def read(self, body: Json) -> Asking:
        turns = []
        for each in body["messages"]:
            role = "system" if each["role"] == "developer" else each["role"]
            calls = [
                (call["id"], call["function"]["name"], _object(call["function"]["arguments"]))
                for call in each.get("tool_calls") or ()
            ]
            answers = each.get("tool_call_id", "")
            turns.append(Turn(role, _text_of(each.get("content")), calls, answers))
        declared = [each["function"] for each in body.get("tools") or ()]
        system = "\n".join(turn.text for turn in turns if turn.role == "system")
        rest = [turn for turn in turns if turn.role != "system"]
        stops = body.get("stop") or []
        return Asking(
            system,
            rest,
            {each["name"]: each.get("parameters") or {} for each in declared},
            [stops] if isinstance(stops, str) else stops,
        )

    def write(self, key: str, model: str, reply: Reply, usage: tuple[int, int, int]) -> Json:
        message: Json = {"role": "assistant", "content": reply.text or reply.thought or None}
        if reply.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{key}_{at}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for at, (name, arguments) in enumerate(reply.calls)
            ]
        given, cached, written = usage
        return {
            "id": f"chatcmpl-{key}",
            "object": "chat.completion",
            "created": 1,
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": "tool_calls" if reply.calls else "stop",
                }
            ],
            "usage": {
                "prompt_tokens": given,
                "completion_tokens": written,
                "total_tokens": given + written,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }

    def events(self, made: Json, body: Json) -> Iterator[tuple[str, Json]]:
        """The same as a stream; its usage only where it was asked for."""
        head = {key: made[key] for key in ("id", "created", "model")}
        head["object"] = "chat.completion.chunk"
        message = made["choices"][0]["message"]

        def chunk(delta: Json, finish: str | None = None) -> tuple[str, Json]:
            return "", {
                **head,
                "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
            }

        yield chunk({"role": "assistant", "content": ""})
        for word in re.findall(r"\S*\s*", message["content"] or ""):
            if word:
                yield chunk({"content": word})
        for at, call in enumerate(message.get("tool_calls", [])):
            called = {**call["function"], "arguments": ""}
            yield chunk({"tool_calls": [{**call, "index": at, "function": called}]})
            arguments = call["function"]["arguments"]
            for start in range(0, len(arguments), 12):
                piece = {"arguments": arguments[start : start + 12]}
                yield chunk({"tool_calls": [{"index": at, "function": piece}]})
        yield chunk({}, made["choices"][0]["finish_reason"])
        if (body.get("stream_options") or {}).get("include_usage"):
            yield "", {**head, "choices": [], "usage": made["usage"]}
        yield "", {}


class Responses:
    """The Responses API. What was stored is found again by `previous_response_id`."""

    def __init__(self) -> None:
        self.stored: dict[str, list[Json]] = {}

    def read(self, body: Json) -> Asking:
        given = body["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        items = self.stored.get(body.get("previous_response_id") or "", []) + items
        body["_items"] = items
        turns: list[Turn] = []
        for item in items:
            kind = item.get("type", "message")
            if kind == "message":
                turns.append(Turn(item["role"], _text_of(item["content"])))
            elif kind == "function_call":
                call = (item["call_id"], item["name"], _object(item["arguments"]))
                if turns and turns[-1].calls:
                    turns[-1].calls.append(call)
                else:
                    turns.append(Turn("assistant", calls=[call]))
            elif kind == "function_call_output":
                turns.append(Turn("tool", _text_of(item["output"]), answers=item["call_id"]))
        system = [body.get("instructions") or ""]
        system += [turn.text for turn in turns if turn.role in ("system", "developer")]
        rest = [turn for turn in turns if turn.role not in ("system", "developer")]
        declared = {t["name"]: t.get("parameters") or {} for t in body.get("tools") or ()}
        return Asking("\n".join(system), rest, declared)

    def write(self, key: str, model: str, reply: Reply, usage: tuple[int, int, int]) -> Json:
        output: list[Json] = []
        if reply.thought:
            thought = {"type": "summary_text", "text": reply.thought}
            output.append({"id": f"rs_{key}", "type": "reasoning", "summary": [thought]})
        if reply.text:
            part = {"type": "output_text", "text": reply.text, "annotations": []}
            output.append(
                {
                    "id": f"msg_{key}",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [part],
                }
            )
        for at, (name, arguments) in enumerate(reply.calls):
            output.append(
                {
                    "id": f"fc_{key}_{at}",
                    "type": "function_call",
                    "call_id": f"call_{key}_{at}",
                    "name": name,
                    "arguments": json.dumps(arguments),
                    "status": "completed",
                }
            )
        given, cached, written = usage
        return {
            "id": f"resp_{key}",
            "object": "response",
            "created_at": 1,
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": given,
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": given + written,
            },
        }

    def events(self, made: Json, body: Json) -> Iterator[tuple[str, Json]]:
        number = 0

        def event(kind: str, **more: Any) -> tuple[str, Json]:
            nonlocal number
            number += 1
            return kind, {"type": kind, "sequence_number": number - 1, **more}

        begun = {**made, "status": "in_progress", "output": [], "usage": None}
        yield event("response.created", response=begun)
        for at, item in enumerate(made["output"]):
            place = {"item_id": item["id"], "output_index": at}
            empty: Json = {"content": [], "arguments": "", "summary": []}
            opened = {key: empty.get(key, value) for key, value in item.items()}
            yield event("response.output_item.added", output_index=at, item=opened)
            if item["type"] == "function_call":
                text, kind = item["arguments"], "response.function_call_arguments"
                yield event(f"{kind}.delta", **place, delta=text)
                yield event(f"{kind}.done", **place, name=item["name"], arguments=text)
            elif item["type"] == "message":
                part = item["content"][0]
                place["content_index"] = 0
                opened = {**part, "text": ""}
                yield event("response.content_part.added", **place, part=opened)
                kind = "response.output_text"
                yield event(f"{kind}.delta", **place, delta=part["text"], logprobs=[])
                yield event(f"{kind}.done", **place, text=part["text"], logprobs=[])
                yield event("response.content_part.done", **place, part=part)
            yield event("response.output_item.done", output_index=at, item=item)
        yield event("response.completed", response=made)


# -- the server --------------------------------------------------------------------------------


class Served(ThreadingHTTPServer):
    """The model behind an address on loopback."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        model: Model,
        port: int = 0,
        faults: float = 0.0,
        watch: Callable[[str, Json, Json], None] | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", port), _Answering)
        self.model, self.faults, self.watch = model, faults, watch
        self.responses = Responses()
        self.apis = {"/chat/completions": Chat(), "/responses": self.responses}
        self.lock = threading.Lock()
        self.refused: set[str] = set()
        self.cached: set[str] = set()
        self.count = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def busy(self, body: bytes) -> bool:
        """Whether this request is refused once."""
        digest = hashlib.sha256(body).hexdigest()
        with self.lock:
            seen = digest in self.refused
            self.refused.add(digest)
        return not seen and random.Random(f"{self.model.seed} {digest}").random() < self.faults

    def usage(self, asking: Asking, reply: Reply) -> tuple[int, int, int]:
        """Tokens that went in, those of them in the cache, and those that came out."""
        declared = json.dumps(asking.tools)
        parts = [asking.system + declared]
        parts += [f"{turn.role}{turn.text}{turn.calls}" for turn in asking.turns]
        given = cached = 0
        digest = hashlib.sha256()
        known = True
        for part in parts:
            digest.update(part.encode())
            tokens = len(part) // 4 + 4
            with self.lock:
                known = known and digest.hexdigest() in self.cached
                self.cached.add(digest.hexdigest())
            given += tokens
            cached += tokens if known else 0
        written = len(f"{reply.text}{reply.thought}{json.dumps(reply.calls)}") // 4
        return given, cached, written

    def next_key(self) -> str:
        with self.lock:
            self.count += 1
            return f"{self.count:06}"


class _Answering(BaseHTTPRequestHandler):
    server: Served
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        listed = {"id": NAME, "object": "model", "created": 1, "owned_by": "nobody"}
        self._send(200, {"object": "list", "data": [listed]})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        end = next((end for end in self.server.apis if self.path.endswith(end)), None)
        if end is None:
            self._send(404, {"error": {"message": f"no such route: {self.path}"}})
            return
        if self.server.busy(raw):
            self._send(429, {"error": {"message": "busy, try again"}}, ("retry-after-ms", "20"))
            return
        api = self.server.apis[end]
        body = json.loads(raw)
        asking = api.read(body)
        reply = self.server.model.reply(asking)
        for stop in asking.stops:
            reply.text = reply.text.split(stop)[0]
        usage = self.server.usage(asking, reply)
        made = api.write(self.server.next_key(), NAME, reply, usage)
        if isinstance(api, Responses):  # it repeats these, and traces are made of what it says
            made |= {"instructions": body.get("instructions"), "tools": body.get("tools") or []}
            with self.server.lock:
                api.stored[made["id"]] = body.pop("_items") + made["output"]
        if self.server.watch:
            self.server.watch(self.path, body, made)
        if body.get("stream"):
            self._stream(api.events(made, body))
        else:
            self._send(200, made)

    def _send(self, status: int, body: Json, *headers: tuple[str, str]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    def _stream(self, events: Iterator[tuple[str, Json]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for name, event in events:
            head = f"event: {name}\n" if name else ""
            raw = f"{head}data: {json.dumps(event) if event else '[DONE]'}\n\n".encode()
            self.wfile.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        """It says nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slips", type=float, default=0.1)
    parser.add_argument("--wrong", type=float, default=0.05)
    parser.add_argument("--faults", type=float, default=0.02)
    given = parser.parse_args()
    model = Model(given.seed, given.slips, given.wrong)
    with Served(model, given.port, given.faults) as server:
        print(f"export OPENAI_BASE_URL={server.url} OPENAI_API_KEY=none", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
