"""Grammar: the chain-of-agents protocol as one value.

Roles, their tags, who writes each, which may follow which, and what a score forces. The parser, the
renderer, the stop strings, the prompts, the converter, the format score and the loss mask are all
read from this value, so they cannot disagree.

The state of a half-written trajectory is a small frozen value too: `grammar.allowed(state)` says
which blocks may come next, `grammar.advance(state, block)` moves on or says what is wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, get_args

from coa.errors import GrammarError, did_you_mean

_WORDS = {"one": 1, "two": 2, "three": 3, "four": 4}
_WORD = "one|two|three|four"
_MEANING = r"\s*\([^()\n]{1,60}\)"
_TO = r"\s*(?:-|\u2013|\u2014|to|through|and|\.\.\.?)\s*(?:4|four)\b(?!\.\d)"
_SCALE = re.compile(
    r"(?:\b(?:on|from|between|in|of)\s+)?(?:\ba\s+scale\s+(?:of|from)\s+)?"
    rf"(?<![\d.])\b(?:1|one)(?:{_TO}|{_MEANING}{_TO}(?:{_MEANING})?)(?:\s+scale\b)?",
    re.I,
)
"""The scale itself: 'on a scale of 1 to 4', '(1-4)', 'from 1 (wrong) to 4 (right)'. Taken out
before a score is looked for."""
_DENIED = re.compile(
    rf"\b(?:not|never|isn't|no)\s+(?:an?\s+)?(?:[1-4](?:\s*/\s*4)?|{_WORD}|good|average|fair|poor)\b"
    r"(?![.,/]?\d)[\s,]*(?:but\b)?",
    re.I,
)
"""What is said not to be: 'not 4 but 2', 'not poor'. Taken out before a score is looked for."""
_REASON = (
    r"a|an|and|as|because|but|given|here|if|of\s+(?:4|four)\b(?!\s+[a-z])|or|out\s+of|overall|since|"
    r"so|though|although|while"
)
_COUNTED = re.compile(
    rf"\b(?:(?:scored|scoring)\s+(?:[a-z']+\s+){{0,3}}?(?:\d+|{_WORD})\s+(?!(?:{_REASON})\b)"
    rf"|scores?\s+(?:(?!is\b|was\b)[a-z']+\s+){{0,3}}?(?:\d+|{_WORD})\s+"
    rf"(?!(?:{_REASON}|at|for|from|in|is|on|to|was|with)\b)"
    r"|(?:gives?|deserves)\s+(?:[a-z']+\s+){0,3}?\d+\s+"
    rf"(?!(?:{_REASON}|at|for|from|in|on|to|with|points?|stars?|marks?)\b))(?-i:[a-z]+)",
    re.I,
)
"""What counts other things or is only supposed: 'scored 2 goals', 'a score of 1 would mean',
'gives 3 dates'. Taken out before a score is looked for."""
_DIGIT = r"(?<![\d.,/\w])(?P<{0}>[1-4])(?:\.0)?(?:\s*/\s*4)?(?![\d/\w]|[.,]\d)"
_RANGE = r"(?!\s*(?:-|\u2013|or|to)\s*(?:[0-9]|one|two|three|four)\b)"
_KEY = (
    r"\b(?:scores?|scored|scoring|ratings?|rate|rated|grade|graded|verdict|"
    r"(?:give|gives|deserves|assign)(?:\s+(?:it|this|that|the\s+\w+))?)\b"
)
_LABELLED = re.compile(
    r"\b(?:scores?|ratings?|grade|verdict)\b[^\n.;:=0-9]{0,40}?(?:[:=]|\bis\b|\s[-\u2013\u2014]\s)"
    rf"(?:[\s*_(]|\b(?:an?|now|only|still)\b){{0,12}}(?:{_DIGIT.format('n')}|(?P<w>{_WORD})\b){_RANGE}",
    re.I,
)
"""'Score: 3', 'the score is 3': surer than any number after a verb."""
_KEYED = re.compile(
    rf"{_KEY}(?:[^\n.;0-9]{{0,40}}?{_DIGIT.format('n')}|"
    rf"(?:[\s:=*_-]|\b(?:is|of|as|at|a|an|it)\b){{1,12}}(?P<w>{_WORD})\b){_RANGE}",
    re.I,
)
_OUT_OF = re.compile(
    rf"(?<![\d.,/\w-])(?:(?P<n>[1-4])(?:\.0)?|(?P<w>\b(?:{_WORD})))\s*(?:/|\(?out\s+of)\s*"
    r"(?:4|four)\b(?!\.\d)",
    re.I,
)
_ALONE = re.compile(
    r"(?:^|(?<=[.!?:;\n]))[ \t*_(]*([1-4])(?:\.0)?(?=[ \t*_)]*(?:$|[.!?:;,\n]|[-]\s))"
)
"""A number that is a sentence, a line or an opening of its own."""
_OFF_SCALE = re.compile(rf"{_KEY}[^\n.;0-9]{{0,40}}?\d", re.I)
_RATING = r"(?P<r>good|average|fair|poor)"


def parse_score(text: str) -> int | None:
    """The score from 1 to 4 in `text`; of labels, or else of verbs, the last one wins."""
    text = _COUNTED.sub(" ", _SCALE.sub(" ", _DENIED.sub(" ", text)))
    for pattern in (_LABELLED, _KEYED, _OUT_OF):
        found = [m.group("n") or m.group("w").lower() for m in pattern.finditer(text)]
        if found:
            return _WORDS.get(found[-1]) or int(found[-1])
    if _OFF_SCALE.search(text):
        return None
    alone = set(_ALONE.findall(text.strip()))
    return int(alone.pop()) if len(alone) == 1 else None


def parse_ratings(text: str, criteria: Sequence[str]) -> dict[str, str] | None:
    """The rating of each criterion, or None if one is missing. 'fair' reads as 'average'."""
    text = _DENIED.sub(" ", text)
    names = {c: r"[\s_-]+".join(map(re.escape, c.split())) for c in criteria}
    ratings: dict[str, str] = {}
    for criterion, name in names.items():
        others = "|".join(other for c, other in names.items() if c != criterion)
        gap = rf"(?:(?!\b(?:{others})\b)[\s\S]){{0,80}}?" if others else r"[\s\S]{0,80}?"
        pattern = rf"\b{name}\b{gap}(?<![/|])\b{_RATING}\b(?![/|])"
        found = [m.group("r").lower() for m in re.finditer(pattern, text, re.I)]
        if not found:
            return None
        word = found[-1]
        ratings[criterion] = "average" if word == "fair" else word
    return ratings


Kind = Literal["think", "plan", "tool", "delegation", "reflection", "suggestion", "check", "answer"]
Body = Literal["text", "code", "json"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BODIES: tuple[Body, ...] = get_args(Body)
_NEVER_EMPTY: tuple[Kind, ...] = ("delegation", "tool", "suggestion", "answer")
ANY_TOOL = "tool"
"""In a successor list: every tool role, also one that is added at run time."""

_ADDED = {"agent": "", "sparing": False, "call": "", "free": "", "argument": "", "example": ""}
_ADDED |= {"signature": ""}
"""Fields that older grammars lack. Where they say nothing no record has them, so that a grammar has
the fingerprint that it always had."""

NO_THOUGHT = "Next step."
"""Stands where a grammar demands a thought and nobody had one."""

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


class FaultKind(StrEnum):
    """What can be wrong with text that a model wrote."""

    STRAY = "stray"
    UNKNOWN = "unknown_tag"
    UNOPENED = "unopened"
    UNCLOSED = "unclosed"
    NESTED = "nested"
    CROSSING = "crossing"
    FORGED = "forged"
    EMPTY = "empty"
    ILLEGAL = "illegal"
    UNSCORED = "unscored"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake, where it is, and a sentence the model can act on."""

    kind: FaultKind
    at: int
    message: str


@dataclass(frozen=True, slots=True)
class Block:
    """One closed block: a role and what stands between its tags."""

    role: str
    body: str
    start: int = field(default=0, compare=False)
    end: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of block. `next` lists what may follow it, interleaved thinking aside."""

    name: str
    kind: Kind
    next: tuple[str, ...] = ()
    about: str = ""
    """One or two sentences for the full prompt."""
    hint: str = ""
    """What the body holds, in a word or two, for the compact prompt."""
    body: Body = "text"
    tool: str = ""
    """The tool that this role calls, when its name is not the role's."""
    ratings: tuple[str, ...] = ()
    """Criteria that a reflection rates good, average or poor; any poor forces a new plan."""
    pass_score: int = 0
    """For a check: this score (of 4) or more releases the answer, less forces a new plan."""
    agent: str = ""
    """Of a recorded team: the agent that plans or criticises in this block, or, in a delegation,
    the one whose work it begins. The converter finds the block of a message by it."""
    signature: str = ""
    """Of a tool that the grammar did not know: what the compact prompt says of it."""
    argument: str = ""
    """What a text or a program is called where calls are JSON (`Grammar.call`)."""
    example: str = ""
    """A body that the worked example of the full prompt may show."""

    @property
    def only(self) -> str:
        """The argument that is its text or its program, where calls are JSON."""
        return self.argument or "input"


@dataclass(frozen=True, slots=True)
class GrammarState:
    """Where a trajectory stands: enough to say what may come next."""

    last: str | None = None
    """The last block that is not an interleaved thought."""
    thought: bool = False
    """An interleaved thought stands before the next block already."""
    forced: tuple[str, ...] = ()
    """Roles that a score has made obligatory."""
    awaiting: bool = False
    """A tool was called and its observation is due."""
    suggestion: str | None = None
    done: bool = False

    @property
    def ended(self) -> bool:
        """Whether a turn of the model ends here."""
        return self.awaiting or self.done


@dataclass(frozen=True)
class Grammar:
    """The protocol as a value. Build one with `load_grammar` or `grammar_from_toml`."""

    name: str
    roles: tuple[Role, ...]
    start: tuple[str, ...]
    interleave: str = ""
    """The role that must stand before every other block, if any."""
    observation: str = "observation"
    preamble: str = ""
    brief: str = ""
    sparing: bool = False
    """The interleaved role may be left out where there is nothing to say."""
    call: str = ""
    """The tag in which every call stands, as a JSON object with `name` and `arguments`; empty: each
    tool has a tag of its own."""
    free: str = ""
    """The role that text outside of any block is read as; empty: such text is a fault."""
    origin: str = field(default="", compare=False, repr=False)
    """Fingerprint of the grammar that this one binds to tools; empty: it is not bound."""

    def __post_init__(self) -> None:
        self._refuse(_problems(self))

    def _refuse(self, problems: Iterator[str]) -> None:
        """Raise the first problem, if there is any."""
        for problem in problems:
            raise GrammarError(f"grammar {self.name!r}: {problem}")

    # -- look-ups ---------------------------------------------------------------------------

    @cached_property
    def by_name(self) -> dict[str, Role]:
        return {role.name: role for role in self.roles}

    @cached_property
    def tagged(self) -> dict[str, Role]:
        """What the model may open: a role by its tag. All calls share one where `call` names it."""
        if not self.call:
            return self.by_name
        shared = Role(self.call, "tool", body="json")
        roles = (shared if role.kind == "tool" else role for role in self.roles)
        return {role.name: role for role in roles}

    def tag(self, name: str) -> str:
        """The tag in which a role, or the observation, is written."""
        return self.call if self.call and name in self.tool_roles else name

    def choice(self, names: Iterable[str]) -> str:
        """The tags of roles as a choice, for prompts and messages."""
        return " or ".join(dict.fromkeys(f"<{self.tag(name)}>" for name in names))

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """Every tag name, the runtime's observation included."""
        return (*self.tagged, self.observation)

    @cached_property
    def _any_tag(self) -> str:
        return "|".join(sorted(map(re.escape, self.tags), key=len, reverse=True))

    @cached_property
    def tag_pattern(self) -> re.Pattern[str]:
        return re.compile(f"<(/?)({self._any_tag})>")

    @cached_property
    def _tag_like(self) -> re.Pattern[str]:
        return re.compile(rf"<(?=\s*/?\s*(?:{self._any_tag})\b)", re.IGNORECASE)

    def of_kind(self, kind: Kind) -> tuple[str, ...]:
        return tuple(role.name for role in self.roles if role.kind == kind)

    @cached_property
    def tool_roles(self) -> tuple[str, ...]:
        return self.of_kind("tool")

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """Where the model's turn ends: a call is made, the answer is given, or it starts to
        write an observation itself."""
        closing = dict.fromkeys(map(self.tag, (*self.tool_roles, *self.of_kind("answer"))))
        return (*(f"</{name}>" for name in closing), f"<{self.observation}>")

    def expand(self, names: Iterable[str]) -> tuple[str, ...]:
        """Replace the word `tool` by the tool roles, keeping order and dropping repeats."""
        flat: dict[str, None] = {}
        for name in names:
            flat.update(dict.fromkeys(self.tool_roles if name == ANY_TOOL else (name,)))
        return tuple(flat)

    def record(self) -> dict[str, Any]:
        """The value as a table of plain values, for files and fingerprints."""
        value = asdict(self)
        for table in (value, *value["roles"]):
            for name, usual in _ADDED.items():
                if table.get(name) == usual:
                    del table[name]
        return value

    def fingerprint(self) -> str:
        """A hash of the value, for manifests: a name does not say what a file of one's own held."""
        value = self.record()
        del value["origin"]
        return hashlib.sha256(repr(value).encode()).hexdigest()[:16]

    @cached_property
    def unbound_id(self) -> str:
        """The fingerprint of the grammar without the tools that it was bound to."""
        return self.origin or self.fingerprint()

    # -- text -------------------------------------------------------------------------------

    def escape(self, text: str) -> str:
        """Make text from a tool or a stranger harmless: nothing in it reads as one of our tags."""
        return self._tag_like.sub("&lt;", text)

    def escape_json(self, text: str) -> str:
        """The same for JSON, where a `<` can be written in another way and nothing is lost."""
        return self._tag_like.sub(r"\\u003c", text)

    def render(self, blocks: Sequence[Block]) -> str:
        """The text of blocks as a model would write them."""
        return "\n".join(map(self._written, blocks))

    def _written(self, block: Block) -> str:
        tag = self.tag(block.role)
        body = block.body if tag == block.role else f"\n{self._call(block)}\n"
        return f"<{tag}>{body}</{tag}>"

    def _call(self, block: Block) -> str:
        """A call as JSON; what looks like a tag inside of it is written as JSON can write it."""
        role = self.by_name[block.role]
        given = _json_object(block.body) if role.body == "json" else None
        arguments = {role.only: block.body.strip()} if given is None else given
        called = {"name": role.name, "arguments": arguments}
        return self.escape_json(json.dumps(called, ensure_ascii=False))

    def read_call(self, text: str, start: int, end: int) -> Block | Fault:
        """The block that a call in JSON stands for, or what is wrong with it."""
        called = _json_object(text) or {}
        name, given = called.get("name"), called.get("arguments")
        if not isinstance(name, str) or name not in self.tool_roles or not isinstance(given, dict):
            known = ", ".join(self.tool_roles) or "there is none"
            problem = (
                f"<{self.call}> holds no JSON object with a tool's name ({known}) and arguments."
            )
            return Fault(FaultKind.UNREADABLE, start, problem)
        role = self.by_name[name]
        if role.body == "json":
            return Block(name, json.dumps(given, ensure_ascii=False), start, end)
        body = given.get(role.only)
        if isinstance(body, list) and all(isinstance(each, str) for each in body):
            body = " | ".join(body)
        if isinstance(body, str):
            return Block(name, body, start, end)
        problem = f"{name} takes its {role.hint or 'text'} as the argument {role.only!r}."
        return Fault(FaultKind.UNREADABLE, start, problem)

    def render_observation(self, text: str, after: str = "") -> str:
        """The runtime's block, which follows `after`. The text of a tool is escaped here, and only
        here; a line break that the model's last token already holds is not repeated."""
        lead = "" if after.endswith("\n") else "\n"
        return f"{lead}<{self.observation}>{self.escape(text)}</{self.observation}>\n"

    # -- the state machine ------------------------------------------------------------------

    def allowed(self, state: GrammarState) -> tuple[str, ...]:
        """Roles that may come next; the observation when one is due; nothing after the answer."""
        if state.done:
            return ()
        if state.awaiting:
            return (self.observation,)
        if self.interleave and not state.thought:
            return (self.interleave, *(self._due(state) if self.sparing else ()))
        return self._due(state)

    def _due(self, state: GrammarState) -> tuple[str, ...]:
        """Roles that may come next, an interleaved thought aside."""
        if state.forced:
            return state.forced
        return self.expand(self.start if state.last is None else self.by_name[state.last].next)

    def advance(self, state: GrammarState, block: Block) -> GrammarState | Fault:
        """The state after `block`, or what is wrong with it."""
        if block.role == self.observation:
            return replace(state, awaiting=False, thought=False)
        fault = self._check(state, block)
        if fault is not None:
            return fault
        role = self.by_name[block.role]
        if role.name == self.interleave:
            return replace(state, thought=True)
        forced = self._forced_by(role, block.body)
        if isinstance(forced, Fault):
            return replace(forced, at=block.start)
        return GrammarState(
            last=role.name,
            forced=forced,
            awaiting=role.kind == "tool",
            suggestion=block.body.strip() if role.kind == "suggestion" else state.suggestion,
            done=role.kind == "answer",
        )

    def _check(self, state: GrammarState, block: Block) -> Fault | None:
        role = self.by_name[block.role]
        options = self.allowed(state)
        if block.role not in options:
            problem = f"<{self.tag(block.role)}> may not come here; write {self.choice(options)}."
            problem = problem if options else "Nothing may follow the answer."
            return Fault(FaultKind.ILLEGAL, block.start, problem)
        if role.kind in _NEVER_EMPTY and not block.body.strip():
            return Fault(FaultKind.EMPTY, block.start, f"<{self.tag(block.role)}> is empty.")
        return None

    def _forced_by(self, role: Role, body: str) -> tuple[str, ...] | Fault:
        """Roles that a score in `body` makes obligatory."""
        if role.ratings:
            ratings = parse_ratings(body, role.ratings)
            if ratings is None:
                wanted = f"must rate {', '.join(role.ratings)} as good, average or poor."
                return Fault(FaultKind.UNSCORED, 0, f"<{role.name}> {wanted}")
            return self.of_kind("plan") if "poor" in ratings.values() else ()
        if role.pass_score:
            score = parse_score(body)
            if score is None:
                return Fault(FaultKind.UNSCORED, 0, f"<{role.name}> must give a score from 1 to 4.")
            return self.of_kind("answer") if score >= role.pass_score else self.of_kind("plan")
        return ()

    # -- variants ---------------------------------------------------------------------------

    def with_tools(self, tools: Sequence[Role]) -> Grammar:
        """The same grammar with exactly these tool roles, also ones never seen in training, which
        may come wherever a tool may.

        Blocks that only a missing tool leads to (a reflection without any tool) go with it.
        """
        successors = next((r.next for r in self.roles if r.kind == "tool"), (ANY_TOOL, "answer"))
        known = {role.name: role for role in self.roles if role.kind == "tool"}
        wanted = [known.get(tool.name, tool) for tool in tools]
        bound = [replace(role, kind="tool", next=role.next or successors) for role in wanted]
        first = next((i for i, r in enumerate(self.roles) if r.kind == "tool"), len(self.roles))
        after = [role for role in self.roles[first:] if role.kind != "tool"]
        together = [*self.roles[:first], *bound, *after]
        self._refuse(_name_problems([role.name for role in together], self.observation))
        gone = known.keys() - {role.name for role in bound}
        new = tuple(role.name for role in bound if role.name not in known)

        def left(names: tuple[str, ...]) -> tuple[str, ...]:
            """Successors in which any tool stands for those that are gone; an answer where there
            is no tool at all."""
            if ANY_TOOL not in names and known.keys() & {*names}:
                names = (*names, *new)
            told = tuple(dict.fromkeys(ANY_TOOL if name in gone else name for name in names))
            told = told if bound else tuple(name for name in told if name != ANY_TOOL)
            lost = gone & {*names} or (ANY_TOOL in names and not bound)
            return (told or self.of_kind("answer")) if lost else names

        roles = [replace(role, next=left(role.next)) for role in together]
        start = left(self.start)
        reached = _reachable(roles, (*start, ANY_TOOL))
        reached |= {self.interleave, *self.of_kind("answer")}
        kept = tuple(role for role in roles if role.name in reached)
        return replace(self, roles=kept, start=start, origin=self.unbound_id)

    def mermaid(self) -> str:
        """The succession of blocks as a Mermaid state diagram."""
        lines = ["stateDiagram-v2"]
        lines += [f"    [*] --> {name}" for name in self.expand(self.start)]
        for role in self.roles:
            if role.name == self.interleave:
                continue
            for name in self.expand(role.next):
                lines.append(f"    {role.name} --> {name}{self._edge_label(role, name)}")
            if role.kind == "answer":
                lines.append(f"    {role.name} --> [*]")
        if self.interleave:
            when = "may come before each" if self.sparing else "before each"
            lines.append(f"    note right of {self.roles[-1].name}: {self.interleave} {when}")
        return "\n".join(lines)

    def _edge_label(self, role: Role, target: str) -> str:
        kind = self.by_name[target].kind
        if role.pass_score and kind in ("answer", "plan"):
            sign = f">= {role.pass_score}" if kind == "answer" else f"< {role.pass_score}"
            return f": score {sign}"
        return f": {self.observation}" if role.kind == "tool" else ""


def _problems(grammar: Grammar) -> Iterator[str]:
    """What a grammar contradicts itself in."""
    names = [role.name for role in grammar.roles]
    yield from _name_problems(names, grammar.observation)
    for role in grammar.roles:
        where = f"roles.{role.name}"
        if role.kind not in KINDS:
            yield f"{where}.kind is {role.kind!r}; expected one of {', '.join(KINDS)}."
        if role.body not in BODIES:
            yield f"{where}.body is {role.body!r}; expected one of {', '.join(BODIES)}."
    lists = {f"roles.{r.name}.next": r.next for r in grammar.roles} | {"start": grammar.start}
    for where, targets in lists.items():
        for target in targets:
            if target != ANY_TOOL and target not in names:
                hint = did_you_mean(target, [*names, ANY_TOOL])
                yield f"{where} names {target!r}, which is not a role.{hint}"
    if not _NAME.match(grammar.observation):
        found = f"observation is {grammar.observation!r}"
        yield f"{found}; expected lower-case letters, digits and underscores."
    if grammar.call in (*names, grammar.observation):
        yield f"call is {grammar.call!r}, which is a role or the observation already."
    if grammar.call and not _NAME.match(grammar.call):
        yield f"call is {grammar.call!r}; expected lower-case letters, digits and underscores."
    if grammar.free and grammar.free not in grammar.of_kind("think"):
        yield f"free names {grammar.free!r}, which is no role of kind 'think'."
    if grammar.interleave and grammar.interleave not in names:
        yield f"interleave names {grammar.interleave!r}, which is not a role."
    if not grammar.of_kind("answer"):
        yield "it has no role of kind 'answer', so no trajectory could end."
    scored = any(role.ratings or role.pass_score for role in grammar.roles)
    if scored and not grammar.of_kind("plan"):
        yield "a score can force a plan, but there is no role of kind 'plan'."
    if not grammar.start:
        yield "start is empty; name the roles that may come first."
    reached = _reachable(grammar.roles, grammar.start) | {grammar.interleave}
    for role in grammar.roles:
        if role.name not in reached and role.kind != "tool":
            yield f"role {role.name!r} can never be reached from start."
        ends = role.kind == "answer" or role.name == grammar.interleave
        if not ends and not grammar.expand(role.next):
            yield f"role {role.name!r} has no successor, so a trajectory would be stuck there."


def _json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None: it is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_block_name(name: str) -> bool:
    """Whether a block could be called so, others of the same grammar aside."""
    return name != ANY_TOOL and bool(_NAME.match(name))


def _name_problems(names: Sequence[str], observation: str) -> Iterator[str]:
    for name in names:
        if not _NAME.match(name):
            yield f"role {name!r} must be lower-case letters, digits and underscores."
        elif not is_block_name(name) or name == observation or names.count(name) > 1:
            yield f"role {name!r} is defined twice or reserved."


def _reachable(roles: Sequence[Role], start: Iterable[str]) -> set[str]:
    """Names of the roles that a trajectory can come to from `start`."""
    by_name = {role.name: role for role in roles}
    tools = [role.name for role in roles if role.kind == "tool"]
    reached: set[str] = set()
    frontier = list(start)
    while frontier:
        name = frontier.pop()
        if name == ANY_TOOL:
            frontier += [each for each in tools if each not in reached]
        elif name not in reached:
            reached.add(name)
            frontier += by_name[name].next
    return reached
