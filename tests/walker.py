"""Random text for the tests of the protocol: legal trajectories, and everything else."""

from __future__ import annotations

import random
from collections.abc import Callable

from coa.grammar import Block, Grammar, GrammarState

Say = Callable[[], str]
"""Draws free text for a body."""

RATED = "Information Conflict: {}\nTool Effectiveness: {}\nTrajectory Monitoring: {}\n"
WORDS = (
    *("the river", " ", "\n", "\t", "\r\n", "1989", "3.5", "|", "&lt;", "&", "<", ">", "</", "/>"),
    *("<b>", "</b>", "<br/>", "<answ", "swer>", "< answer >", "<Answer>", "</ANSWER>", "<think"),
    *("\u00e9", "\u6771\u4eac", "\U0001f600", "\u0000", "\u0007", "\u202e", "\u2028", "\ufeff"),
    *("```", "`", "'", '"', "\\", "{}", "[]", "<|im_end|>", "<s>", "e\u0301", "\u00a0"),
)


def without_tags(grammar: Grammar, text: str) -> str:
    """`text` with every tag of the grammar taken out, also those that taking out makes."""
    while grammar.tag_pattern.search(text):
        text = grammar.tag_pattern.sub("", text)
    return text


def free_text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(12)))


def any_text(grammar: Grammar, rng: random.Random) -> str:
    """Text that may hold tags: whole, half, spaced, in another case."""
    tags = [f"<{slash}{name}>" for name in grammar.tags for slash in ("", "/")]
    pieces = (*WORDS, *tags, *(tag.upper() for tag in tags), *(tag[:-1] for tag in tags))
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(24)))


def legal_blocks(grammar: Grammar, rng: random.Random, say: Say | None = None) -> list[Block]:
    """A random walk through the state machine up to the answer, observations included."""
    say = say or (lambda: free_text(rng))
    state, blocks = GrammarState(), list[Block]()
    while not state.done:
        options = grammar.allowed(state)
        hurry = [n for n in ("answer", "suggested_answer") if n in options and len(blocks) > 20]
        role = hurry[0] if hurry else rng.choice(options)
        block = Block(role, _body(grammar, rng, role, say, hurried=len(blocks) > 20))
        moved = grammar.advance(state, block)
        assert isinstance(moved, GrammarState), (block, moved)
        state = moved
        blocks.append(block)
    return blocks


def _body(grammar: Grammar, rng: random.Random, name: str, say: Say, hurried: bool) -> str:
    if name == grammar.observation:
        return grammar.escape(rng.choice((say(), any_text(grammar, rng))))
    role, text = grammar.by_name[name], without_tags(grammar, say())
    if role.ratings:
        return RATED.format(*rng.choices(("good", "average", "fair", "poor"), k=3))
    if role.pass_score:
        return f"Score: {4 if hurried else rng.randrange(1, 5)}\nchecked against what was found"
    if role.body == "code":
        return _program(grammar, rng, text.replace("`", ""))
    if grammar.tag(name) != name:  # space around an argument is not written
        return f"{text}?".strip()
    return text if role.kind in ("think", "plan", "reflection") else f"{text}?"


def _program(grammar: Grammar, rng: random.Random, text: str) -> str:
    if rng.random() < 0.3:
        return f"print({text!a})"
    tag = rng.choice([f"</{name}>" for name in grammar.tags] + [f"<{n}>" for n in grammar.tags])
    stdin = rng.choice(("", "\n```sh\n1 2\n```"))
    return f"\n```py\nprint({text!a})\ns = '{tag}'  # {tag}\n```{stdin}\n"


def broken_text(grammar: Grammar, rng: random.Random) -> str:
    """Random, truncated or spliced text."""
    kind = rng.randrange(4)
    if kind == 0:
        return any_text(grammar, rng)
    text = grammar.render(legal_blocks(grammar, rng)[: rng.randrange(1, 9)])
    cut = rng.randrange(len(text) + 1)
    if kind == 1:
        return text[:cut]
    if kind == 2:
        return text[:cut] + any_text(grammar, rng) + text[cut:]
    return text[cut:] + text[: rng.randrange(len(text) + 1)]


def chunks(text: str, rng: random.Random) -> list[str]:
    """`text` in random pieces, empty ones among them."""
    most = rng.choice((2, 3, 9, 40))
    pieces, at = [], 0
    while at < len(text):
        size = rng.randrange(most)
        pieces.append(text[at : at + size])
        at += size
    return pieces
