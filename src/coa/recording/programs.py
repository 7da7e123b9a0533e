"""Programs of agents that write code where others write a call (smolagents' CodeAgent).

Such an agent knows its tools as Python functions: their definitions stand in its prompt
(`functions_in`). It replies with a program (`program_in`), names keep their values from one program
to the next, and what is printed is the observation. `Programs.read` finds the calls of a program
whose arguments are known without running it: literals, names of literals, and earlier results that
were shown and whose type the prompt declares. The value of a call is known where the observation
shows it and can be read in one way only (`Program.values`).

All of this is by parsing: nothing is ever executed. A program with anything else in it (a loop, a
computation, an import) is None here and stays one call of a tool `python`.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from coa.io.runs import Json
from coa.recording.episode import ToolSpec

PYTHON = "python_interpreter"
"""What smolagents calls the tool that runs a program."""
PYTHON_TOOL = ToolSpec("python", "Runs a program and shows what it prints.", "code")
"""The tool of a program that is more than calls of tools."""
ENDS = "final_answer"
_TYPES = {
    **{"str": "string", "string": "string", "int": "integer", "integer": "integer"},
    **{"float": "number", "number": "number", "bool": "boolean", "boolean": "boolean"},
    **{"list": "array", "array": "array", "dict": "object", "object": "object"},
}
_DEFINED = re.compile(r"^def \w+\(.*\n(?:(?:[ \t]+.*)?\n)*", re.M)
_FENCES = (
    re.compile(r"<code>\s*\n?(.*?)(?:</code>|\Z)", re.S),
    re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n[ \t]*```|<end_code>|\Z)", re.S),
)
_OBSERVED = re.compile(
    r"\AExecution logs:\n(?P<logs>.*?)(?:Last output from code snippet:\n(?P<last>.*))?\Z", re.S
)
_SHORTENED = "This content has been truncated"


@dataclass(frozen=True, slots=True)
class Function:
    """A tool or an agent as the prompt defines it."""

    tool: ToolSpec
    parameters: tuple[str, ...]
    returns: str
    """JSON type; empty: any."""


@lru_cache(maxsize=256)
def functions_in(prompt: str) -> Mapping[str, Function]:
    """The functions that a prompt defines by their first lines and descriptions."""
    found: dict[str, Function] = {}
    for match in _DEFINED.finditer(f"{prompt}\n"):
        try:
            (node,) = ast.parse(textwrap.dedent(match[0])).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        about = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if isinstance(node, ast.FunctionDef) and about is not None:
            found.setdefault(node.name, _function(node, about))
    return found


def _function(node: ast.FunctionDef, about: str) -> Function:
    given = node.args.args
    optional = {each.arg for each in given[len(given) - len(node.args.defaults) :]}
    schema = {
        "type": "object",
        "properties": {each.arg: _typed(each.annotation) for each in given},
        "required": [each.arg for each in given if each.arg not in optional],
    }
    tool = ToolSpec(node.name, about.strip(), "json", json.dumps(schema, sort_keys=True))
    returns = _typed(node.returns).get("type", "")
    return Function(tool, tuple(each.arg for each in given), str(returns))


def _typed(annotation: ast.expr | None) -> Json:
    inner = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    name = inner.id if isinstance(inner, ast.Name) else ""
    return {"type": _TYPES[name]} if name in _TYPES else {}


def program_in(text: str) -> str:
    """The program of a reply; empty where it has none."""
    code = _structured(text).get("code")
    if isinstance(code, str):
        return program_in(code) or code.strip()
    for fence in _FENCES:
        if found := [block.strip() for block in fence.findall(text)]:
            return "\n\n".join(found)
    return ""


def _structured(text: str) -> Json:
    """The object that a reply is (smolagents with structured outputs); empty where it is none."""
    try:
        held = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        held = None
    return held if isinstance(held, dict) else {}


def is_last(code: str) -> bool:
    """Whether a program, read or not, ends the work of its agent."""
    return bool(re.search(rf"^[ \t]*{ENDS}\(", code, re.M))


def around_program(text: str) -> str:
    """What a reply says around its program."""
    held = _structured(text)
    if "code" in held:
        return str(held.get("thought") or held.get("thoughts") or "").strip()
    for fence in _FENCES:
        if fence.search(text):
            text = fence.sub("\n", text)
            break
    text = re.sub(r"^[ \t]*(?:Thoughts?|Code):[ \t]*", "", text, flags=re.M)
    return re.sub(r"\n\s*\n+", "\n", text).strip()


@dataclass(slots=True, eq=False)
class ProgramCall:
    """One call of a function in a program."""

    name: str
    arguments: Json
    returns: str = ""
    value: str | None = None
    """As it was shown; None: it was not, or not so that it can be told."""

    def known(self) -> Any:
        """Its value as Python has it; raises where that is not known."""
        if self.value is None:
            raise _Unread
        if self.returns == "string":
            return self.value
        if self.returns in ("integer", "number", "boolean"):
            return ast.literal_eval(self.value)
        raise _Unread


class _Unread(Exception):
    """Something in a program that is not known without running it."""


Piece = str | ProgramCall
"""Of a line that is printed: a text, or the value of a call."""


@dataclass(slots=True)
class Program:
    """A program that only calls functions, prints and ends."""

    calls: list[ProgramCall] = field(default_factory=list)
    printed: list[list[Piece]] = field(default_factory=list)
    last: ProgramCall | None = None
    """The call whose value is that of the last statement."""
    ends: bool = False
    answer: Piece = ""
    """What it ends with."""

    def read_values(self, observation: str) -> None:
        """Give calls the values that an observation shows."""
        found = _OBSERVED.match(observation)
        if not found or _SHORTENED in observation:
            return
        shown: dict[ProgramCall, str] = {}
        pattern, many = "", sum(self._unknown(line) for line in self.printed)
        unknown: list[ProgramCall] = []
        any_text = ".*" if many == 1 else r"[^\n]*"
        for line in self.printed:
            for piece in line:
                if isinstance(piece, str):
                    pattern += re.escape(piece)
                elif piece in unknown:
                    pattern += f"(?P=v{unknown.index(piece)})"
                else:
                    pattern += f"(?P<v{len(unknown)}>{any_text})"
                    unknown.append(piece)
            pattern += "\n"
        logs = found["logs"]
        one_way = many <= 1 or (
            all(self._unknown(line) <= 1 for line in self.printed)
            and logs.count("\n") == pattern.count("\n")
        )
        read = re.fullmatch(pattern, logs, re.S) if one_way else None
        if read:
            shown = {each: read[f"v{at}"] for at, each in enumerate(unknown)}
        last = found["last"]
        if self.last and last is not None and self.last not in shown:
            shown[self.last] = last.strip("\n")
        for each, value in shown.items():
            each.value = value

    @staticmethod
    def _unknown(line: Sequence[Piece]) -> int:
        return sum(isinstance(piece, ProgramCall) for piece in line)


class Programs:
    """The programs of one conversation, in order: names keep their values."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self.functions = functions
        self.names: dict[str, Any] = {}
        """Values of literals, or the call whose value a name has."""

    def read(self, code: str, observation: str | None, failed: bool) -> Program | None:
        """The calls of a program, with the values that its observation shows; None where it does
        more than call, print and end. A program that failed and makes one call: that failed."""
        names = dict(self.names)
        program = self._parsed(code)
        if program and failed and len(program.calls) != 1:
            program = None  # which of them failed is not said
        if program is None or failed:  # a name may have another value by now, or none
            used = set(re.findall(r"\w+", code))
            self.names = {name: value for name, value in names.items() if name not in used}
            self._forget_functions(code)
        if program and failed:
            program.ends, program.calls[0].value = False, observation
        elif program and observation is not None:
            program.read_values(observation)
        return program

    def _forget_functions(self, code: str) -> None:
        """Leave out functions that a program may have put something else in the place of."""
        replaced = (
            r"\b(?:def|class|as|import)\s[^\n]*\b{0}\b|\bfor\s+(?:\w+\s*,\s*)*{0}\b|\b{0}\s*=(?!=)"
        )
        self.functions = {
            name: function
            for name, function in self.functions.items()
            if not re.search(replaced.format(name), code)
        }

    def _parsed(self, code: str) -> Program | None:
        program = Program()
        try:
            for statement in ast.parse(code).body:
                if program.ends:
                    return None
                program.last = None
                self._statement(statement, program)
        except (_Unread, SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        return program if program.calls or program.ends else None

    def _statement(self, statement: ast.stmt, program: Program) -> None:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            (target,), value = statement.targets, self._value(statement.value, program)
            if not isinstance(target, ast.Name) or target.id in self.functions:
                raise _Unread
            self.names[target.id] = value
            program.last = value if isinstance(value, ProgramCall) else None
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            if name == "print" and not call.keywords:
                pieces: list[Piece] = []
                for argument in call.args:
                    pieces += [" "] if pieces else []
                    pieces += self._pieces(argument, program)
                program.printed.append(pieces)
            elif name == ENDS:
                (argument,) = [*call.args, *(each.value for each in call.keywords)]
                pieces = list(self._pieces(argument, program))
                if len(pieces) > 1 and all(isinstance(each, str) for each in pieces):
                    pieces = ["".join(map(str, pieces))]
                if len(pieces) != 1:
                    raise _Unread
                program.ends, program.answer = True, pieces[0]
            else:
                value = self._value(call, program)
                program.last = value if isinstance(value, ProgramCall) else None
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            raise _Unread

    def _pieces(self, node: ast.expr, program: Program) -> Iterator[Piece]:
        """What printing an expression writes."""
        if isinstance(node, ast.JoinedStr):
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    if part.conversion != -1 or part.format_spec is not None:
                        raise _Unread
                    yield from self._pieces(part.value, program)
                else:
                    yield from self._pieces(part, program)
            return
        value = self._value(node, program)
        if isinstance(value, ProgramCall) and value.value is not None:
            value = value.value  # a call of an earlier program, which was shown then
        yield value if isinstance(value, ProgramCall) else str(value)

    def _value(self, node: ast.expr, program: Program) -> Any:
        """The value of an expression, or the call whose value it is."""
        if isinstance(node, ast.Call):
            return self._call(node, program)
        if isinstance(node, ast.Name):
            if node.id not in self.names:
                raise _Unread
            return self.names[node.id]
        return self._literal(node)

    def _call(self, node: ast.Call, program: Program) -> ProgramCall:
        function = self.functions.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if function is None or len(node.args) > len(function.parameters):
            raise _Unread
        arguments = dict(zip(function.parameters, map(self._literal, node.args), strict=False))
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise _Unread
            arguments[keyword.arg] = self._literal(keyword.value)
        try:
            json.dumps(arguments)
        except (TypeError, ValueError):
            raise _Unread from None
        call = ProgramCall(function.tool.name, arguments, function.returns)
        program.calls.append(call)
        return call

    def _literal(self, node: ast.expr) -> Any:
        """A value that is known without running anything."""
        if isinstance(node, ast.Name):
            value = self.names.get(node.id, _Unread)
            if value is _Unread:
                raise _Unread
            return value.known() if isinstance(value, ProgramCall) else value
        if isinstance(node, ast.List | ast.Tuple):
            return [self._literal(each) for each in node.elts]
        if isinstance(node, ast.Dict):
            if None in node.keys:
                raise _Unread
            keys = [self._literal(each) for each in node.keys if each is not None]
            return dict(zip(keys, map(self._literal, node.values), strict=True))
        if isinstance(node, ast.JoinedStr):
            return "".join(self._formatted(part) for part in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = self._literal(node.left), self._literal(node.right)
            if all(isinstance(each, str) for each in parts):
                return parts[0] + parts[1]
        if isinstance(node, ast.Constant | ast.UnaryOp):
            return ast.literal_eval(node)
        raise _Unread

    def _formatted(self, node: ast.expr) -> str:
        if not isinstance(node, ast.FormattedValue):
            return str(self._literal(node))
        if node.conversion != -1 or node.format_spec is not None:
            raise _Unread
        value = self._literal(node.value)
        if not isinstance(value, str | int):
            raise _Unread
        return str(value)
