"""Calls from one interpreter to another: what is asked, what is answered, and nothing else.

A program answers (`Answering`), and somebody outside of its process asks: the host, for one call,
or a check in a slot of its own (`Checking`), which has proxies where the program's functions would
be. Both directions are lines of JSON; a value crosses as a literal (`encode`, `decode`) or not at
all. What comes from the program's process is its claim, whoever in there wrote it: it may be a
wrong value, it cannot be a verdict. Nothing goes in but names and arguments, so that nothing in
there tells what the right value would be.
"""

from __future__ import annotations

import builtins
import json
import linecache
import numbers
import os
import select
from collections import deque
from collections.abc import Callable, Iterator, KeysView
from fractions import Fraction
from typing import Any, NoReturn

PASSED, FAILED, UNJUDGED = "passed", "failed", "unjudged"
CHECK = "check.py"
FORGED = "it wrote to the channel of its results itself"
LONGEST_REPLY = 4 << 20
_CHUNK = 1 << 16
_MOST_KEYS = 10_000
"""Of a set or a dict that a program says: keys can be made to collide, and cost the judge hours."""
_LONGEST_REASON = 300
_DECIMAL_BITS = 13_000
"""Python refuses to read integers with more digits than that."""
_END_ITERATION = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
Json = Any


class CannotCross(Exception):
    """A value is no literal; the text is the name of its type."""


# -- values ------------------------------------------------------------------------------------


def encode(value: Any, exact: bool = False) -> Json:
    """A value as JSON that keeps its type; `CannotCross` when it is no literal.

    What equals a literal in Python crosses as that literal: a Counter, a deque, an array of numpy,
    a whole fraction. `exact`: only literals do.
    """
    kind = type(value)
    if kind in (str, bool, float, type(None)):
        return value
    if kind is int:
        return value if value.bit_length() < _DECIMAL_BITS else {"i": hex(value)}
    if isinstance(value, Proxy):
        return {"h": handle_of(value)}
    if kind not in _LITERALS:
        if exact:
            raise CannotCross(kind.__name__)
        value = _as_literal(value)
        if type(value) not in _LITERALS:
            return encode(value)
    if isinstance(value, dict):
        return {"d": [[encode(key, exact), encode(each, exact)] for key, each in value.items()]}
    if isinstance(value, bytes):
        return {"b": value.decode("latin-1")}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    inner = [encode(each, exact) for each in value]
    return inner if type(value) is list else {_LITERALS[type(value)]: inner}


_LITERALS = {list: "", tuple: "t", set: "s", frozenset: "f", dict: "d", bytes: "b", complex: "c"}


def _as_literal(value: Any) -> Any:
    """The literal that a value of another type is equal to."""
    for kind, bare in _BARE.items():
        if isinstance(value, kind):
            return bare(value)
    if hasattr(value, "tolist") and not isinstance(value, type):
        return value.tolist()
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Number) and not isinstance(value, numbers.Rational):
        return float(value)  # type: ignore[arg-type]
    if isinstance(value, numbers.Rational):
        found = Fraction(int(value.numerator), int(value.denominator))
        return int(found) if found.denominator == 1 else float(found)
    raise CannotCross(type(value).__name__)


_BARE: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: lambda value: int.__add__(value, 0),
    float: float.__pos__,
    complex: lambda value: complex.__add__(value, 0),
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    bytearray: bytes,
    dict: lambda value: dict(dict.items(value)),
    **{kind: kind for kind in (tuple, list, set, frozenset)},
    deque: list,
    KeysView: set,
}
"""Type -> the literal without a subclass around it."""


def decode(told: Json, held: Callable[[int], Any] | None = None) -> Any:
    """The value that `encode` was given; ValueError for anything else. `held`: what a handle of
    the other side stands for here."""
    if told is None or isinstance(told, (str, bool, int, float)):
        return told
    try:
        if isinstance(told, list):
            return [decode(each, held) for each in told]
        ((name, inner),) = told.items()
        if name in "sfd" and held is None and len(inner) > _MOST_KEYS:
            raise ValueError(f"more than {_MOST_KEYS} keys")
        if name == "h" and held is not None:
            return held(inner)
        if name == "d":
            return {decode(key, held): decode(each, held) for key, each in inner}
        if name == "i":
            return int(inner, 16)
        if name == "b":
            return inner.encode("latin-1")
        if name == "c":
            return complex(float(inner[0]), float(inner[1]))
        kind = {"t": tuple, "s": set, "f": frozenset}[name]
        if isinstance(inner, list):
            return kind(decode(each, held) for each in inner)
    except (AttributeError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no value: {error}") from None
    raise ValueError("no value")


def read_reply(line: bytes | str, number: int) -> Json:
    """The reply to a request of that number; ValueError for anything else."""
    try:
        reply = json.loads(line)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(reply, dict) or type(reply.get("n")) is not int or reply["n"] != number:
        raise ValueError("no reply to this request")
    if "raised" in reply:
        names = reply["raised"]
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise ValueError("no exception")
    elif "value" not in reply and type(reply.get("held")) is not int:
        raise ValueError("no result")
    return reply


# -- the program's side ------------------------------------------------------------------------


class Answering:
    """Evaluates what is asked, in the names of a program."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self._scope = scope
        self._held: list[Any] = []

    def serve(self, asks: int, replies: int) -> None:
        """Answer line by line until nothing more is asked."""
        with open(asks, "rb") as asked:
            for line in asked:
                told = json.dumps(self._reply(json.loads(line))).encode() + b"\n"
                while told:
                    told = told[os.write(replies, told) :]

    def _reply(self, request: Json) -> Json:
        reply: Json = {"n": request["n"]}
        given: list[Any] = []
        try:
            if "eval" in request:
                value = eval(compile(request["eval"], "<call>", "eval"), self._scope)
            else:
                value = self._walk(request["steps"], given)
            reply |= self._told(value)
        except BaseException as error:  # SystemExit, too: the process is not its own to end
            kinds = [each.__name__ for each in type(error).__mro__]
            reply |= {"raised": kinds[:20], "text": _text_of(error)}
        if given and (changed := self._changed(given, request["steps"][-1])):
            reply["given"] = changed
        return reply

    def _walk(self, steps: list[Json], given: list[Any]) -> Any:
        value: Any = None
        for what, *more in steps:
            if what == "name":
                if more[0] not in self._scope:
                    raise NameError(f"name {more[0]!r} is not defined")
                value = self._scope[more[0]]
            elif what == "held":
                value = self._held[more[0]]
            elif what == "get":
                value = getattr(value, more[0])
            elif what == "do":
                value = _DOES[more[0]](value)
            else:
                given[:] = [decode(each, self._held.__getitem__) for each in more]
                value = value(*given[0], **given[1])
        return value

    def _told(self, value: Any) -> Json:
        try:
            return {"value": encode(value)}
        except Exception:  # one of its own methods failed, or it contains itself
            self._held.append(value)
            kinds = type(value).__mro__
            made = [each for each in kinds if each.__module__ == "__main__"]
            own = {name for each in made for name in vars(each)} & {*_OPERATORS}
            named = {"held": len(self._held) - 1, "type": type(value).__name__}
            return named | {"own": sorted(own | ({"__class__"} if made else set()))}

    def _changed(self, given: list[Any], step: Json) -> Json:
        """The arguments as the call left them, if it changed any."""
        try:
            found = [encode(each) for each in given]
        except Exception:  # changed into what cannot cross: as if they were not
            return None
        return found if found != step[1:] else None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_REASON]
    except BaseException:
        return ""


_DOES: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool,
    "__str__": str,
    "__repr__": repr,
    "__iter__": list,
    "__next__": next,
}
"""What a check may do with a value that stays over there: nothing that is told what it wants, and
nothing that has to agree with something else that it says, as a length with its elements."""

# -- the check's side --------------------------------------------------------------------------


class Stop(BaseException):
    """Ends a check, whatever it catches: the verdict is there."""


class Checking:
    """Asks a program for a check, and keeps what went wrong."""

    def __init__(self, asks: int, replies: int) -> None:
        self._asks, self._replies, self._buffer = asks, replies, b""
        self.asked = 0
        self.trouble: Json = None
        """The verdict, when something else than the check itself has decided it."""

    def stop(self, verdict: str, reason: str, suspect: bool = False) -> NoReturn:
        self.trouble = self.trouble or verdict_of(verdict, reason, suspect)
        raise Stop

    def bind(self, scope: dict[str, Any], names: list[str]) -> None:
        """Give the check these names of the program, those that there are."""
        for name in names:
            try:
                scope[name] = self.ask(["name", name])
            except NameError:
                continue

    def ask(self, *steps: Json, given: tuple[Any, ...] = ()) -> Any:
        """What the program says: a value, a proxy of one, or its exception, raised."""
        if self.trouble:
            raise Stop
        self.asked += 1
        reply = self._exchange({"n": self.asked, "steps": steps})
        try:
            if "given" in reply:
                for old, new in zip(given, reply["given"], strict=True):
                    _write_back(old, decode(new))
            if "value" in reply:
                return decode(reply["value"])
        except (ValueError, TypeError):
            self.stop(FAILED, FORGED, True)
        if "held" in reply:
            own = reply.get("own")
            own = frozenset(map(str, own)) if isinstance(own, list) else frozenset()
            return Proxy(self, reply["held"], str(reply.get("type"))[:50], own)
        raise _exception(reply["raised"], str(reply.get("text", "")), steps[-1] == _NEXT)

    def _exchange(self, request: Json) -> Json:
        if self.spoke_first():
            self.stop(FAILED, FORGED, True)
        told = json.dumps(request).encode() + b"\n"
        try:
            while told:
                told = told[os.write(self._asks, told) :]
            line = self._line()
        except OSError:
            self.stop(FAILED, "")
        try:
            return read_reply(line, request["n"])
        except ValueError:
            self.stop(FAILED, FORGED, True)

    def spoke_first(self) -> bool:
        """Whether there is a reply to what nobody asked."""
        if not self._buffer and select.select([self._replies], [], [], 0)[0]:
            self._buffer = os.read(self._replies, _CHUNK)
        return bool(self._buffer)

    def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            more = os.read(self._replies, _CHUNK)
            if not more:
                self.stop(FAILED, "")  # its process is gone, and the host knows why
            self._buffer += more
            if len(self._buffer) > LONGEST_REPLY:
                self.stop(FAILED, f"a result of more than {LONGEST_REPLY} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def verdict_of(verdict: str, reason: str = "", suspect: bool = False) -> Json:
    return {"verdict": verdict, "reason": reason[:_LONGEST_REASON], "suspect": suspect}


def _write_back(old: Any, new: Any) -> None:
    """Make an argument what the call made of it, in place, as far as it is the same container."""
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        for one, other in zip(old, new, strict=True):
            _write_back(one, other)
    elif isinstance(old, list) and isinstance(new, list):
        same = len(old) == len(new)
        old[:] = [_kept(*pair) for pair in zip(old, new, strict=True)] if same else new
    elif isinstance(old, dict) and isinstance(new, dict):
        kept = {key: _kept(old.get(key), each) for key, each in new.items()}
        old.clear()
        old.update(kept)
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)


def _kept(old: Any, new: Any) -> Any:
    if type(old) is not type(new) or not isinstance(new, (list, dict, set)):
        return new
    _write_back(old, new)
    return old


def _exception(names: list[str], text: str, iterating: bool) -> Exception:
    """The nearest exception of Python's own. What ends an iteration is none, or `all(map(f, ...))`
    would be true of whatever was left."""
    for name in names:
        kind = getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            continue
        if name in _END_ITERATION and not (iterating and name == "StopIteration"):
            break
        try:
            error = kind.__new__(kind)
            error.args = (text,)
        except TypeError:
            break
        error.claimed = True  # type: ignore[attr-defined]
        return error
    return RuntimeError(f"{names[0] if names else 'an exception'}: {text}")


_NEXT = ["do", "__next__"]
_OPERATORS = (
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ "
    "__truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ "
    "__and__ __rand__ __or__ __ror__ __xor__ __rxor__ __matmul__ __rmatmul__ __divmod__ "
    "__rdivmod__ __lshift__ __rlshift__ __rshift__ __rrshift__ __contains__"
).split()
"""What is told the other value: asked of a program it could say whatever suits it."""
_UNKNOWN = (
    "__hash__ __getitem__ __int__ __float__ __setitem__ __delitem__ __setattr__ "
    "__delattr__ __abs__ __neg__ __pos__ __invert__ __round__ __trunc__ __floor__ __ceil__ "
    "__index__ __complex__ __bytes__ __reversed__ __enter__ __exit__ __aenter__ __await__ "
    "__aiter__ __anext__ __copy__ __deepcopy__ __reduce__ __reduce_ex__ __instancecheck__ "
    "__subclasscheck__ __dir__"
).split()


class Proxy:
    """A value that stays in the program's process: it can be called, and looked into.

    Beside a literal it is wrong, for what equals a literal crosses as one. Whatever else a check
    does with it cannot be judged.
    """

    __slots__ = ("__checking", "__held", "__own", "__seen", "__type")

    def __init__(self, checking: Checking, held: int, kind: str, own: frozenset[str]) -> None:
        for name, value in zip(Proxy.__slots__, (checking, held, own, False, kind), strict=True):
            object.__setattr__(self, f"_Proxy{name}", value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        given = list(args), named
        try:
            told = [encode(each, exact=True) for each in given]
        except (CannotCross, RecursionError) as error:
            self.__checking.stop(UNJUDGED, f"the test gives the program a {error}, no literal")
        return self.__checking.ask(["held", self.__held], ["call", *told], given=given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            self.__checking.stop(UNJUDGED, f"the test asks for {name} of a {self.__type}")
        return self.__checking.ask(["held", self.__held], ["get", name])

    def __bool__(self) -> bool:
        if "__class__" in self.__own:  # of a class that the program made: it may change its mind
            self.__unknown("__bool__")
        return self.__do("__bool__") is True

    def __iter__(self) -> Iterator[Any]:
        if self.__seen:
            self.__checking.stop(UNJUDGED, f"the test goes over a {self.__type} twice")
        object.__setattr__(self, "_Proxy__seen", True)
        return iter(self.__do("__iter__"))

    def __len__(self) -> int:
        if not self.__seen:
            self.__unknown("__len__")
        raise TypeError  # `list` asks for it, as a hint, after it has begun

    def __do(self, what: str) -> Any:
        return self.__checking.ask(["held", self.__held], ["do", what])

    def __beside(self, operator: str, other: Any) -> None:
        if isinstance(other, Proxy):
            self.__checking.stop(UNJUDGED, f"the test compares two values of type {self.__type}")
        reason = f"its result is a {self.__type}, where the test has a literal"
        self.__checking.stop(FAILED, reason, operator in self.__own)

    def __unknown(self, method: str) -> None:
        self.__checking.stop(UNJUDGED, f"the test needs {method} of a {self.__type}")


def handle_of(proxy: Proxy) -> int:
    return int(object.__getattribute__(proxy, "_Proxy__held"))


def _equip() -> None:
    def beside(name: str) -> Any:
        return lambda self, other, *_: self._Proxy__beside(name, other)

    def unknown(name: str) -> Any:
        return lambda self, *_: self._Proxy__unknown(name)

    def does(name: str) -> Any:
        return lambda self: self._Proxy__do(name)

    for name in _OPERATORS:
        setattr(Proxy, name, beside(name))
    for name in _UNKNOWN:
        setattr(Proxy, name, unknown(name))
    for name in ("__str__", "__repr__", "__next__"):
        setattr(Proxy, name, does(name))
    Proxy.__format__ = lambda self, how: format(str(self), how)  # type: ignore[method-assign]


_equip()


def run_check(source: str, scope: dict[str, Any], asks: int, replies: int) -> None:
    """Run a check with `_program_`, which binds names of the program, and write the verdict to
    standard output, where nothing that the check prints arrives."""
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    checking = Checking(asks, replies)
    scope["_program_"] = checking.bind
    linecache.cache[CHECK] = (len(source), None, source.splitlines(keepends=True), CHECK)
    found = verdict_of(PASSED)
    try:
        exec(compile(source, CHECK, "exec", dont_inherit=True), scope)
        if not checking.asked:
            found = verdict_of(UNJUDGED, "the test asks nothing of the program")
    except SystemExit:
        found = verdict_of(UNJUDGED, "the test ended itself")
    except BaseException as error:
        missing = isinstance(error, (ImportError, SyntaxError)) and not hasattr(error, "claimed")
        said = f"{type(error).__name__}: {_text_of(error)}".rstrip(": ")
        found = verdict_of(UNJUDGED, f"the test cannot be run: {said}") if missing else found
        found = found if missing else verdict_of(FAILED, f"{_place_of(error)}{said}")
    found = checking.trouble or found
    if checking.spoke_first():  # a reply is left over: some other was not the program's own
        found = verdict_of(FAILED, FORGED, True)
    told = json.dumps(found).encode()
    while told:
        told = told[os.write(report, told) :]


def _place_of(error: BaseException) -> str:
    """The line of the check that an exception left it by."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != CHECK:
        trace = trace.tb_next
    while trace is not None and trace.tb_next is not None:
        if trace.tb_next.tb_frame.f_code.co_filename != CHECK:
            break
        trace = trace.tb_next
    line = linecache.getline(CHECK, trace.tb_lineno).strip() if trace is not None else ""
    return f"{line[: _LONGEST_REASON // 2]} " if line else ""
