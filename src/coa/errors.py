"""The error tree, and `boundary()`, which decides whose fault a failure is.

Four parties can fail, and each is treated in its own way:

* the user (a recipe, a file, a flag): raise a `CoaError`; the command line prints one line, exit 2;
* the world (an engine, a tool, a package index): `boundary(ToolError, "web_search")` classifies it,
  the caller retries it if it is transient, and otherwise records it;
* the model (a bad tag, a bad argument): never an exception, always an observation it can read;
* us (a broken invariant): `assert` with the values.

A message says where, what was found, what was expected and what to do, in one or two sentences.
Every class is also the standard type a caller would expect, carries no logger, and pickles.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class CoaError(Exception):
    """Root of every error that a person can act on."""


class ConfigError(CoaError, ValueError):
    """A recipe, an override or an option that cannot be used as given."""


class RecordError(CoaError, ValueError):
    """A file whose content is not what its name promises; the message has path and line."""


class GrammarError(CoaError, ValueError):
    """A grammar that contradicts itself."""


class UsageError(CoaError, ValueError):
    """A command called with something it cannot work on (an empty question, a missing file)."""


class ModelError(CoaError, LookupError):
    """A model reference that cannot be resolved, or an adapter that does not fit its base."""


class MissingExtra(CoaError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs packages that are not installed. "
            f'Install them with: pip install "chain-of-agents[{extra}]"'
        )
        self.what, self.extra = what, extra

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.what, self.extra)


class Unavailable(CoaError, ConnectionError):
    """Something outside this process did not answer (a package index, a server)."""


class EngineError(CoaError, RuntimeError):
    """An engine failed to complete a request."""


class ToolError(CoaError, RuntimeError):
    """A tool failed; the model sees the message as an observation."""


class ToolTimeout(ToolError, TimeoutError):
    """A tool did not answer within its time limit."""


class ToolMistake(CoaError, ValueError):
    """The model called a tool wrongly; the message tells it how to do better."""


class TrainingError(CoaError, RuntimeError):
    """Training cannot go on (no trainable token, a loss that is not finite)."""


@contextmanager
def boundary(error: type[CoaError], what: str, *, located: bool = False) -> Iterator[None]:
    """Turn whatever `what` raises into `error`, keeping the cause; `located` adds the line of code
    it came from, for whoever wrote that.

    Our own errors pass through untouched, and what is no `Exception`, as a cancellation or Ctrl-C:
    they already say whose fault they are.
    """
    try:
        yield
    except CoaError:
        raise
    except Exception as exc:
        at = f" ({_place(exc)})" if located else ""
        raise error(f"{what} failed: {type(exc).__name__}: {exc}{at}") from exc


def _place(exc: Exception) -> str:
    """The file and the line that raised it."""
    frame = traceback.extract_tb(exc.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """Return ' Did you mean 'x'?' for the nearest known name, or the list of what is known."""
    names = list(known)
    near = difflib.get_close_matches(found, names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Known: {', '.join(sorted(names))}." if names else ""
