"""`tool`: a Python function becomes a Tool; its schema, role and prompt line are derived from it.

A function of one string takes the text of its block as it stands. Any other signature takes a JSON
object: names, types, defaults, `Annotated[..., Field(...)]` and the `Args:` of the docstring become
the schema and the description that the model is shown, that constrained decoding obeys and that
arguments are checked against. A parameter annotated `State` is not an argument: it gets the state
of the rollout, which the environment's `setup` made.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from coa.errors import CoaError, ConfigError, RecordError, ToolError, ToolMistake, ToolTimeout
from coa.tasks import Task
from coa.tools.arguments import described, signature_of, without_words
from coa.tools.base import RunTool, Tool, in_thread

Blames = Literal["model", "outside"]
_ANNOTATIONS = ("title", "default", "description")
"""Keywords of a schema that say nothing about which arguments are right."""
_SECTION = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$")
_ARGUMENT = re.compile(r"^(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class State:
    """Annotates the parameter of a tool or a reward that is given the state of its rollout:
    `state: State`, or `state: Annotated[Ledger, State]` for a type checker."""


def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str = "",
    errors: Blames = "model",
    **limits: Any,
) -> Any:
    """Make a Tool of a function (async, or plain and run in a thread).

    The name is the function's, the description its docstring's first line and its `Args:`. What it
    returns is shown as text; anything but a string as JSON. What it raises is an observation that
    the model can act on, and counts as the model's mistake; `errors="outside"` says that failures
    are the world's (a database, a network), which never count against the model.
    """
    if errors not in get_args(Blames):
        raise ConfigError(f"tool errors={errors!r}: expected 'model' or 'outside'.")

    def build(function: Callable[..., Any]) -> Tool:
        if isinstance(function, type) or not inspect.isroutine(function):
            found = repr(function) if not callable(function) else f"{function!r}, which is none"
            raise ConfigError(
                f"a tool is {found}; expected a function or a method. A def that calls it, with "
                "types and a docstring, is one."
            )
        called = name or getattr(function, "__name__", "")
        if called == "<lambda>":
            raise ConfigError("a tool is a lambda, which has no name; write it as a def.")
        return _tool(function, called, errors, limits)

    return build if function is None else build(function)


def _tool(function: Callable[..., Any], name: str, errors: Blames, limits: dict[str, Any]) -> Tool:
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as exc:
        raise ConfigError(
            f"tool {name!r}: a type of its parameters cannot be read: {type(exc).__name__}: {exc}."
        ) from exc
    states = [each for each, hint in hints.items() if is_state(hint)]
    parameters = [
        each for each in inspect.signature(function).parameters.values() if each.name not in states
    ]
    about = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
    meanings = argument_meanings(inspect.getdoc(function) or "")

    call = _caller(function, name, errors)

    def with_state(run: Callable[..., Awaitable[str]]) -> dict[str, Any]:
        """The function of a tool without a state, or what makes one of a state."""

        def bound(state: Any) -> RunTool:
            return lambda argument: run(argument, dict.fromkeys(states, state))

        async def without(argument: str) -> str:
            raise ToolError(f"{name} works on the state of a rollout, and there is none here.")

        return {"run": without, "with_state": bound} if states else {"run": bound(None)}

    if _takes_text(parameters, hints):
        only = parameters[0].name
        if meaning := meanings.get(only):
            about = f"{about}; the content is {meaning}" if about else f"The content is {meaning}"

        async def run(argument: str, state: dict[str, Any]) -> str:
            if parameters[0].kind is inspect.Parameter.POSITIONAL_ONLY:
                return await call(argument, **state)
            return await call(**{only: argument}, **state)

        limits = {"signature": f"text. {about}".strip(), **limits}
        return Tool(name=name, about=about, parameter=only, **with_state(run), **limits)
    model, schema = _arguments_model(parameters, hints, name)
    for each, part in schema.get("properties", {}).items():
        if each in meanings:
            part.setdefault("description", meanings[each])

    async def run_with_arguments(argument: str, state: dict[str, Any]) -> str:
        return await call(**_converted(model, argument), **state)

    return Tool(
        name=name,
        about=described(about, schema),
        signature=signature_of(about, schema),
        body="json",
        schema=json.dumps(without_words(schema, _ANNOTATIONS)),
        **with_state(run_with_arguments),
        **limits,
    )


def argument_meanings(doc: str) -> dict[str, str]:
    """What the `Args:` section of a docstring says of each argument."""
    found: dict[str, str] = {}
    lines = iter(doc.splitlines())
    if not any(_SECTION.match(line) for line in lines):
        return {}
    depth, name = "", ""
    for line in lines:
        matched = _ARGUMENT.match(line)
        if matched and (not depth or matched[1] == depth):
            depth, name = matched[1], matched[2]
            found[name] = matched[3].strip()
        elif line.strip() and line.startswith(depth + " ") and name:
            found[name] = f"{found[name]} {line.strip()}".strip()
        elif line.strip() or not name:
            break
    return {each: said.rstrip(".") for each, said in found.items() if said}


def is_state(hint: Any) -> bool:
    """Whether an annotation asks for the state of a rollout, perhaps optionally."""
    if isinstance(hint, str):
        return hint.split("|")[0].strip() in ("State", "coa.State")
    if get_origin(hint) is Annotated:
        return State in get_args(hint)[1:]
    return hint is State or State in get_args(hint)


def _takes_text(parameters: list[inspect.Parameter], hints: dict[str, Any]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) != 1 or parameters[0].kind not in positional:
        return False
    return hints.get(parameters[0].name, str) is str


def _arguments_model(
    parameters: list[inspect.Parameter], hints: dict[str, Any], name: str
) -> tuple[Any, dict[str, Any]]:
    """A pydantic model with a field for each parameter, and its JSON schema."""
    from pydantic import ConfigDict, PydanticSchemaGenerationError, create_model
    from pydantic.errors import PydanticInvalidForJsonSchema

    fields: dict[str, Any] = {}
    for parameter in parameters:
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
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        return model, model.model_json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema) as exc:
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


def _caller(
    function: Callable[..., Any], name: str, errors: Blames
) -> Callable[..., Awaitable[str]]:
    """Calls the function, shows what it returns as text, and says whose fault its errors are."""

    async def call(*given: Any, **arguments: Any) -> str:
        try:
            if inspect.iscoroutinefunction(function):
                result = await function(*given, **arguments)
            else:
                result = await in_thread(function, *given, **arguments)
            if isinstance(result, str):
                return result
            return json.dumps(result, ensure_ascii=False, default=str)
        except CoaError:
            raise
        except TimeoutError:
            raise ToolTimeout(f"{name} gave no answer in time.") from None
        except Exception as exc:
            kind = ToolMistake if errors == "model" else ToolError
            raise kind(f"{name} failed: {type(exc).__name__}: {exc}") from exc

    return call


# Tools that a task declares as JSON, and that nobody implements.

NOTED = "The call was noted. Make another one if the task needs it; otherwise answer."


def declared_tools(task: Task) -> list[Tool]:
    """The tools that a task declares under `meta["tools"]`; none where it does not.

    A benchmark of function calls asks which calls are made, not what comes of them. Each
    declaration (name, description, and parameters as a JSON schema: the `function` of what OpenAI's
    clients send) becomes a tool whose arguments are checked like any other's, and which says that
    the call was noted. The reward `calls` reads the calls from the chain.
    """
    listed = task.meta.get("tools") or []
    if not isinstance(listed, list):
        found = type(listed).__name__
        raise RecordError(f"task {task.id}: tools is a {found}, expected a list of declarations.")
    return [_declared(task, each) for each in listed]


def _declared(task: Task, declaration: Any) -> Tool:
    try:
        name, schema = declaration["name"], declaration["parameters"]
        about = str(declaration.get("description") or "").strip().rstrip(".")
        said, signature = described(about, schema), signature_of(about, schema)
        if not isinstance(name, str):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise RecordError(
            f"task {task.id}: a tool is {str(declaration)[:60]!r}, expected an object with name, "
            "description and parameters (a JSON schema)."
        ) from None
    plain = json.dumps(without_words(schema))
    return Tool(name, _note, said, body="json", schema=plain, pure=True, signature=signature)


async def _note(argument: str) -> str:
    return NOTED
