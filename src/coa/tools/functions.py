"""`tool`: a Python function becomes a Tool; its schema, role and prompt line are derived from it.

A function of one string takes the text of its block as it stands. Any other signature takes a JSON
object: names, types, defaults and `Annotated[..., Field(...)]` become the schema that the model is
shown, that constrained decoding obeys and that arguments are checked against.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import threading
from collections.abc import Callable
from typing import Any, get_type_hints

from coa.errors import ConfigError, ToolMistake
from coa.tools.arguments import shape_of
from coa.tools.base import Tool

_ANNOTATIONS = ("title", "default")
"""Keywords of a schema that say nothing about which arguments are right."""


def tool(function: Callable[..., Any] | None = None, *, name: str = "", **limits: Any) -> Any:
    """Make a Tool of a function (async, or plain and run in a thread).

    The name is the function's, the description its docstring's first line. What it returns is
    shown as text; anything but a string as JSON.
    """

    def build(function: Callable[..., Any]) -> Tool:
        about = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
        called = name or function.__name__
        if _takes_text(function):

            async def run(argument: str) -> str:
                return _text(await _call(function, argument))

            return Tool(name=called, run=run, about=about, **limits)
        model = _arguments_model(function, called)
        schema = _plain(model.model_json_schema())

        async def run_with_arguments(argument: str) -> str:
            return _text(await _call(function, **_converted(model, argument)))

        shape = f"the content is a JSON object {shape_of(schema)}"
        return Tool(
            name=called,
            run=run_with_arguments,
            about=f"{about}; {shape}" if about else shape[0].upper() + shape[1:],
            body="json",
            schema=json.dumps(schema),
            **limits,
        )

    return build if function is None else build(function)


def _takes_text(function: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(function).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) != 1 or parameters[0].kind not in positional:
        return False
    return get_type_hints(function).get(parameters[0].name, str) is str


def _arguments_model(function: Callable[..., Any], name: str) -> Any:
    """A pydantic model with a field for each parameter."""
    from pydantic import ConfigDict, PydanticSchemaGenerationError, create_model

    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tool {name!r}: parameter {parameter.name!r} has no name in JSON; give each "
                "argument a parameter of its own."
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"tool {name!r}: parameter {parameter.name!r} has no type; write one, as in "
                f"'{parameter.name}: str', for its schema."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticSchemaGenerationError as exc:
        first = str(exc).partition("\n")[0]
        raise ConfigError(f"tool {name!r}: a parameter's type has no schema: {first}") from exc


def _converted(model: Any, argument: str) -> dict[str, Any]:
    """Python values of the arguments, nested models and enumerations included."""
    from pydantic import ValidationError

    try:
        values = model.model_validate_json(argument)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the arguments"
        raise ToolMistake(f"{where}: {first['msg']}.") from exc
    return {field: getattr(values, field) for field in model.model_fields}


def _plain(schema: Any) -> Any:
    """The schema without what only describes it."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):  # names of ours, not keywords
            kept[key] = {name: _plain(part) for name, part in value.items()}
        elif key not in _ANNOTATIONS:
            kept[key] = _plain(value)
    return kept


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=str)


async def _call(function: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    """Run an async function here, a plain one in a thread of its own, which dies with the process:
    one that hangs takes no place in a shared pool and does not keep the program from ending."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **arguments)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():  # timed out or cancelled meanwhile
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def work() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = function(*args, **arguments)
        except StopIteration:  # a future cannot carry it: the caller would wait for ever
            error = RuntimeError("StopIteration")
        except BaseException as exc:
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop has ended; nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name=f"tool {function.__name__}", daemon=True).start()
    return await future
