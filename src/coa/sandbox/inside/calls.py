"""Calls from one interpreter to another: what is asked, what is answered, and nothing else.

A program answers (`Answering`), and somebody outside of its process asks: the host, for one call,
or a check in a slot of its own (`Checking`), which has proxies where the program's functions would
be. Both directions are lines of JSON; a value crosses as a literal (`encode`, `decode`) or not at
all. What comes from the program's process is its claim, whoever in there wrote it: it may be a
wrong value, it cannot be a verdict. Nothing goes in but names and arguments, so that nothing in
there tells what the right value would be.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import linecache
import numbers
import os
import select
import sys
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Generator, Iterator, KeysView, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
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
_MOST_NAMES = 200
"""Of the special methods of a type."""
_DECIMAL_BITS = 13_000
"""Python refuses to read integers with more digits than that."""
_END_ITERATION = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
Json = Any


class CannotCross(Exception):
    """A value is no literal; the text is the name of its type."""


# -- values ------------------------------------------------------------------------------------


def encode(value: Any, exact: bool = False, kinds: bool = False) -> Json:
    """A value as JSON that keeps its type; `CannotCross` when it is no literal.

    What equals a literal in Python crosses as that literal: a Counter, a deque, an array of numpy,
    a whole fraction. `kinds`: these and some others cross as what they are; `exact`: nothing else
    but these and literals crosses.
    """
    kind = type(value)
    if kind in (str, bool, float, type(None)):
        return value
    if kind is int:
        return value if value.bit_length() < _DECIMAL_BITS else {"i": hex(value)}
    if isinstance(value, Proxy):
        return {"h": handle_of(value)}
    if kind not in _LITERALS:
        if (exact or kinds) and (parts := _parts(value)):
            return {"x": [encode(each, exact, kinds) for each in parts]}
        if exact:
            raise CannotCross(kind.__name__)
        value = _as_literal(value)
        if type(value) not in _LITERALS:
            return encode(value, exact, kinds)
    if isinstance(value, dict):
        pairs = value.items()
        return {"d": [[encode(each, exact, kinds) for each in pair] for pair in pairs]}
    if isinstance(value, bytes):
        return {"b": value.decode("latin-1")}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    inner = [encode(each, exact, kinds) for each in value]
    return inner if type(value) is list else {_LITERALS[type(value)]: inner}


_LITERALS = {list: "", tuple: "t", set: "s", frozenset: "f", dict: "d", bytes: "b", complex: "c"}


def _parts(value: Any) -> list[Any] | None:
    """The name of a type that is no literal, but known on both sides, and what makes such a value
    there; None for another type."""
    kind = type(value)
    if kind in _TAKEN and getattr(value, "tzinfo", None) is None:
        return [kind.__name__, *_TAKEN[kind](value)]
    if isinstance(value, tuple) and kind.__bases__ == (tuple,) and hasattr(kind, "_fields"):
        return ["namedtuple", kind.__name__, list(kind._fields), *tuple(value)]
    if kind.__name__ == "ndarray" and value.dtype.kind in "biufcU":
        return ["ndarray", value.dtype.str, value.tolist()]
    return None


def _array(dtype: str, value: Any) -> Any:
    return sys.modules["numpy"].array(value, dtype=dtype)


_TAKEN: dict[type, Callable[[Any], list[Any]]] = {
    Counter: lambda value: [dict(value)],
    Decimal: lambda value: [str(value)],
    Fraction: lambda value: [value.numerator, value.denominator],
    OrderedDict: lambda value: [list(value.items())],
    date: lambda value: [value.year, value.month, value.day],
    datetime: lambda value: [*value.timetuple()[:6], value.microsecond],
    deque: lambda value: [list(value), value.maxlen],
    range: lambda value: [value.start, value.stop, value.step],
    time: lambda value: [value.hour, value.minute, value.second, value.microsecond],
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
}
"""Type -> what it is made of."""
_MADE: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in _TAKEN},
    "namedtuple": lambda name, fields, *values: namedtuple(name, fields)(*values),
    "ndarray": _array,
}


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


def decode(told: Json, held: Callable[[int], Any] | None = None, kinds: bool = False) -> Any:
    """The value that `encode` was given; ValueError for anything else. `held`: what a handle of
    the other side stands for here. `kinds`: other types than those of literals are made, too, which
    can be dear: for a sandbox, not for the host."""
    if told is None or isinstance(told, (str, bool, int, float)):
        return told
    try:
        if isinstance(told, list):
            return [decode(each, held, kinds) for each in told]
        ((name, inner),) = told.items()
        if name in "sfd" and held is None and len(inner) > _MOST_KEYS:
            raise ValueError(f"more than {_MOST_KEYS} keys")
        if name == "h" and held is not None:
            return held(inner)
        if name == "d":
            pairs = ((decode(key, held, kinds), decode(each, held, kinds)) for key, each in inner)
            return dict(pairs)
        if name == "i":
            return int(inner, 16)
        if name == "x" and kinds:
            made, *parts = decode(inner, held, kinds)
            return _MADE[made](*parts)
        if name == "b":
            return inner.encode("latin-1")
        if name == "c":
            return complex(float(inner[0]), float(inner[1]))
        kind = {"t": tuple, "s": set, "f": frozenset}[name]
        if isinstance(inner, list):
            return kind(decode(each, held, kinds) for each in inner)
    except (
        *(AttributeError, LookupError, TypeError, OverflowError, RecursionError, ZeroDivisionError),
        InvalidOperation,
    ) as error:
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
        self._handles: dict[int, int] = {}
        """Identity -> place: the same object is the same one over there."""

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
                # `sum` of Python is not its own.
                if self._scope.keys().isdisjoint(request["names"]):
                    raise NameError(f"name {request['names'][-1]!r} is not defined")
                value = eval(compile(request["eval"], "<call>", "eval"), self._scope)
            else:
                value = self._walk(request["steps"], given)
            reply |= self._told(value, "steps" in request)
        except BaseException as error:  # SystemExit, too: the process is not its own to end
            reply |= {"raised": _names_of(type(error)), "text": _text_of(error)}
            with contextlib.suppress(Exception):
                reply["args"] = encode(list(error.args), kinds=True)
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
                given[:] = [decode(each, self._held.__getitem__, kinds=True) for each in more]
                value = value(*given[0], **given[1])
        return value

    def _told(self, value: Any, kinds: bool) -> Json:
        made = [each for each in type(value).__mro__ if each.__module__ == "__main__"]
        own = {name for each in made for name in vars(each)}
        # A `class Stack(list)` with a `push` is a list, and more than a list.
        fields = getattr(type(value), "_fields", ())
        more = kinds and any(name[0] != "_" and name not in fields for name in own)
        literal = True
        try:
            told = encode(value, kinds=kinds)
            if not more:
                return {"value": told}
        except Exception:  # one of its own methods failed, or it contains itself
            literal = False
        if id(value) not in self._handles:
            self._handles[id(value)] = len(self._held)
            self._held.append(value)
        found: Json = {"held": self._handles[id(value)], "type": type(value).__name__}
        has = {name for each in type(value).__mro__[:-1] for name in vars(each)}
        found |= {"own": _special(own), "has": _special(has), "literal": literal}
        if isinstance(value, type) and issubclass(value, Exception):
            found["raises"] = _names_of(value)
        return found

    def _changed(self, given: list[Any], step: Json) -> Json:
        """The arguments as the call left them, if it changed any."""
        try:
            found = [encode(each) for each in given]
        except Exception:  # changed into what cannot cross: as if they were not
            return None
        return found if found != step[1:] else None


def _special(names: set[str]) -> list[str]:
    return sorted(name for name in names if name[:2] == name[-2:] == "__")[:_MOST_NAMES]


def _names_of(kind: type) -> list[str]:
    return [each.__name__ for each in kind.__mro__][:20]


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
    "await": asyncio.run,
    "literal": lambda value: decode(encode(value, kinds=True), kinds=True),
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
        self.classes: dict[int, str] = {}
        """Classes of the program that the check names, by their places."""
        self.trouble: Json = None
        """The verdict, when something else than the check itself has decided it."""
        self.keeps, self.changed = False, False
        """Whether arguments stay as they are where a call has a result; and whether one had both, a
        result and a changed argument."""
        self._proxies: dict[int, Proxy] = {}
        self._kinds: dict[str, type[Exception]] = {}
        """Exceptions that the program defines and the check names."""

    def stop(self, verdict: str, reason: str, suspect: bool = False) -> NoReturn:
        self.trouble = self.trouble or verdict_of(verdict, reason, suspect)
        raise Stop

    def bind(self, scope: dict[str, Any], names: list[str], keeps: bool) -> None:
        """Give the check these names of the program, those that there are. What is not there is
        nowhere: neither the library nor Python may stand in for it."""
        self.keeps = keeps
        for name in names:
            scope.pop(name, None)
            try:
                found = scope[name] = self.ask(["name", name])
                if isinstance(found, Proxy) and name[:1].isupper():
                    self.classes[handle_of(found)] = name
            except NameError:
                if hasattr(builtins, name):
                    scope[name] = _absent(name)

    def ask(self, *steps: Json, given: tuple[Any, ...] = ()) -> Any:
        """What the program says: a value, a proxy of one, or its exception, raised."""
        if self.trouble:
            raise Stop
        self.asked += 1
        reply = self._exchange({"n": self.asked, "steps": steps})
        try:
            if "given" in reply:
                result = reply.get("value", ()) is not None
                self.changed = self.changed or result
                for old, new in zip(given, reply["given"], strict=True):
                    if not (result and self.keeps):
                        _write_back(old, decode(new, kinds=True))
            if "value" in reply:
                return decode(reply["value"], kinds=True)
            if "held" in reply:
                return self._stand_in(reply)
            raise self._exception(reply, steps[-1] == _NEXT)
        except (ValueError, TypeError, LookupError) as error:
            if hasattr(error, "claimed"):
                raise
            self.stop(FAILED, FORGED, True)

    def _stand_in(self, reply: Json) -> Any:
        """What stands here for a value that stays over there."""
        place, kind = reply["held"], str(reply.get("type"))[:50]
        if kind == "generator":
            return self._generate(place)
        if kind == "coroutine":
            return self._wait(place)
        if "raises" in reply:
            names = [str(each) for each in reply["raises"]]
            base = type(_nearest(names, {}, False) or RuntimeError())
            name = names[0] if names[0].isidentifier() else "Error"
            return self._kinds.setdefault(name, type(name, (base,), {}))
        if place not in self._proxies:
            own, has = ({*map(str, reply.get(name) or ())} for name in ("own", "has"))
            self._proxies[place] = Proxy(self, place, kind, own, has, reply.get("literal") is True)
        return self._proxies[place]

    def _generate(self, place: int) -> Generator[Any, Any]:
        while True:
            try:
                sent = yield self.ask(["held", place], _NEXT)
            except StopIteration:
                return
            if sent is not None:
                self.stop(UNJUDGED, "the test sends a value into a generator")

    async def _wait(self, place: int) -> Any:
        return self.ask(["held", place], ["do", "await"])

    def _exception(self, reply: Json, iterating: bool) -> Exception:
        names, text = reply["raised"], str(reply.get("text", ""))
        error = _nearest(names, self._kinds, iterating)
        if error is None:
            error = RuntimeError(f"{names[0] if names else 'an exception'}: {text}")
        else:
            args = decode(reply["args"], kinds=True) if "args" in reply else [text]
            error.args = tuple(args) if isinstance(args, list) else (text,)
        error.claimed = True  # type: ignore[attr-defined]
        return error

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


def _absent(name: str) -> Callable[..., NoReturn]:
    def absent(*_: Any, **__: Any) -> NoReturn:
        raise NameError(f"name {name!r} is not defined")

    return absent


def _nearest(
    names: list[str], known: Mapping[str, type[Exception]], iterating: bool
) -> Exception | None:
    """The nearest exception that is known or Python's own. What ends an iteration is none, or
    `all(map(f, ...))` would be true of whatever was left."""
    for name in names:
        kind: Any = known.get(name) or getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            continue
        if name in _END_ITERATION and not (iterating and name == "StopIteration"):
            break
        try:
            error: Exception = kind.__new__(kind)
            return error
        except TypeError:
            break
    return None


_NEXT: Json = ["do", "__next__"]
_OPERATORS = (
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ "
    "__truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ "
    "__and__ __rand__ __or__ __ror__ __xor__ __rxor__ __matmul__ __rmatmul__ __divmod__ "
    "__rdivmod__ __lshift__ __rlshift__ __rshift__ __rrshift__ __contains__"
).split()
"""What is told the other value: asked of a program it could say whatever suits it."""
_COMPARES = "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __contains__".split()
_READS = (
    "__len__ __getitem__ __int__ __float__ __abs__ __neg__ __pos__ __invert__ __round__ __trunc__ "
    "__floor__ __ceil__ __index__ __complex__ __bytes__ __reversed__ __enter__ __exit__ __bool__"
).split()
"""What is not told the other value. Of one of the test's own classes it is what the test is about;
of another value it would have to agree with the rest that the program says of it."""
_WRITES = "__setitem__ __delitem__ __setattr__ __delattr__".split()
_UNKNOWN = (
    "__hash__ __aenter__ __await__ __aiter__ __anext__ __copy__ __deepcopy__ __reduce__ "
    "__reduce_ex__ __dir__"
).split()
_OF_OBJECT = ("__reduce__", "__reduce_ex__", "__dir__")
TOLD = frozenset(
    "startswith endswith issubset issuperset isdisjoint equals difference symmetric_difference "
    "intersection count index find rfind".split()
)
"""Methods of Python's own values that are told what a test wants to find."""


class Proxy:
    """A value that stays in the program's process: it can be called, and looked into.

    Beside a literal it is wrong, for what equals a literal crosses as one. What its type does not
    have fails as in Python. Whatever else a check does with it cannot be judged, and is suspect
    unless the check is about that class.
    """

    __slots__ = tuple("__checking __has __held __items __literal __meant __own __type".split())

    def __init__(
        self, checking: Checking, held: int, kind: str, own: set[str], has: set[str], literal: bool
    ) -> None:
        """`own`, `has`: special names, those of its classes that the program made and all of them;
        `literal`: it is of a class made from a list or the like."""
        values = (checking, has, held, None, literal, False, own, kind)
        for name, value in zip(Proxy.__slots__, values, strict=True):
            object.__setattr__(self, f"_Proxy{name}", value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        # The check is about what it makes itself, by a class that it names.
        return self.__meaning(
            self.__checking.classes.get(self.__held), self.__send([], list(args), named)
        )

    def __meaning(self, kind: str | None, found: Any) -> Any:
        if isinstance(found, Proxy):
            object.__setattr__(found, "_Proxy__meant", found.__type == kind)
        return found

    def __getattr__(self, name: str) -> Any:
        if name in TOLD and self.__literal:
            return getattr(self.__plain(), name)
        if name in TOLD and not self.__meant:
            self.__unknown(name)
        if name[:2] == name[-2:] == "__" and name not in ("__name__", "__doc__", "__dict__"):
            if name not in self.__has:
                raise AttributeError(f"{self.__type!r} object has no attribute {name!r}")
            self.__unknown(name)
        return self.__checking.ask(["held", self.__held], ["get", name])

    def __iter__(self) -> Iterator[Any]:
        if "__next__" in self.__has:
            return self
        return iter(self.__plain() if self.__literal else self.__listed())

    def __instancecheck__(self, other: Any) -> bool:
        return isinstance(other, Proxy) and self.__send(["__instancecheck__"], [other], {}) is True

    def __subclasscheck__(self, other: Any) -> bool:
        return isinstance(other, Proxy) and self.__send(["__subclasscheck__"], [other], {}) is True

    def __send(self, names: list[str], args: list[Any], named: dict[str, Any]) -> Any:
        given = args, named
        try:
            told = [encode(each, exact=True) for each in given]
        except (CannotCross, RecursionError) as error:
            self.__checking.stop(UNJUDGED, f"the test gives the program a {error}, no literal")
        steps = [["held", self.__held], *(["get", name] for name in names), ["call", *told]]
        return self.__checking.ask(*steps, given=given)

    def __do(self, what: str) -> Any:
        return self.__checking.ask(["held", self.__held], ["do", what])

    def __plain(self) -> Any:
        return self.__do("literal")

    def __listed(self) -> list[Any]:
        """What it goes over, once for all: a program must not say now this and now that. One of
        the check's own classes may change in between."""
        if self.__items is None or self.__meant:
            object.__setattr__(self, "_Proxy__items", list(self.__do("__iter__")))
        return list(self.__items)

    def __apply(self, method: str, *args: Any) -> Any:
        """A special method, by the literal that this is, or as far as it can be judged."""
        if self.__literal and method not in _WRITES:
            found = getattr(self.__plain(), method, None)
            return NotImplemented if found is None else found(*args)
        if method in _WRITES:
            return self.__send([method], [*args], {})
        if method in _OPERATORS:
            return self.__beside(method, *args)
        if method not in self.__has and method not in _OF_OBJECT:
            if method == "__bool__":
                return self.__apply("__len__") > 0 if "__len__" in self.__has else True
            if method == "__hash__":
                return object.__hash__(self)
            raise TypeError(f"a {self.__type!r} has no {method}")
        if method == "__bool__" and not self.__own:
            return self.__do("__bool__") is True
        if self.__meant and method in _READS:
            return self.__send([method], [*args], {})
        if method == "__len__" and "__iter__" in self.__has and "__next__" not in self.__has:
            return len(self.__listed())
        return self.__unknown(method)

    def __beside(self, operator: str, other: Any, *more: Any) -> Any:
        if operator in ("__eq__", "__ne__") and not {"__eq__", operator} & self.__has:
            if isinstance(other, Proxy):
                return (self is other) is (operator == "__eq__")
        elif self.__meant:
            if operator in _COMPARES:
                return self.__unknown(operator)
            return self.__meaning(self.__type, self.__send([operator], [other, *more], {}))
        within = other if isinstance(other, (list, tuple, set, dict)) else (other,)
        unlike = type(other) in _LITERALS or type(other).__name__ != self.__type
        if unlike and not any(isinstance(each, Proxy) for each in within):
            reason = f"its result is a {self.__type}, where the test has another value"
            self.__checking.stop(FAILED, reason, operator in self.__own)
        return self.__unknown(operator)

    def __unknown(self, method: str) -> Any:
        reason = f"the test needs {method} of a {self.__type}"
        self.__checking.stop(UNJUDGED, reason, not self.__meant)


def handle_of(proxy: Proxy) -> int:
    return int(object.__getattribute__(proxy, "_Proxy__held"))


def _equip() -> None:
    def applies(name: str) -> Any:
        return lambda self, *args: self._Proxy__apply(name, *args)

    def does(name: str) -> Any:
        return lambda self: self._Proxy__do(name)

    for name in (*_OPERATORS, *_READS, *_WRITES, *_UNKNOWN):
        setattr(Proxy, name, applies(name))
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
    found = {**(checking.trouble or found), "changed": checking.changed}
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
