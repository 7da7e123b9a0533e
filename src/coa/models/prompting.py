"""How to ask an exported model without coa: the README of an export.

A model that was trained on a grammar answers one prompt well: that one. Here it stands word for
word, with the strings at which its turn ends and what to append then.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coa.engines.codec import Codec
from coa.errors import GrammarError
from coa.models.card import listed
from coa.protocol import Block, Grammar, PromptKind, load_grammar, system_prompt
from coa.tasks.sets import DEFAULT_SET, KINDS

_QUESTION = "What is the capital of the country where Osaka is located?"


def how_to_prompt(
    title: str, folder: Path, known: dict[str, Any], gguf: str = "", terms: str = ""
) -> str:
    """The README; `known` is what `trained_on` says, `gguf` the name of a file, if it is one, and
    `terms` under which licence the weights are, where that is known."""
    lines = [f"# {title}", "", *_use(gguf, known), "", *_protocol(folder, known), ""]
    return "\n".join([*lines, *(["## Licence", "", terms, ""] if terms else [])])


def _use(gguf: str, known: dict[str, Any]) -> Iterator[str]:
    asked = f'    coa ask "{_QUESTION}"{_options(known)}'
    yield "Exported with `coa model export`. `manifest.json` has the hashes of what it was made of."
    yield ""
    if gguf:
        yield "With llama.cpp:"
        yield ""
        yield f"    llama-server -m {gguf} --port 8080"
        yield f"{asked} \\"
        yield f"        --model openai:{gguf.removesuffix('.gguf')}@http://localhost:8080/v1"
        yield ""
        yield "The name in front of the @ is the one that the server lists under `/v1/models`."
        return
    yield "With coa, where `DIR` is this folder:"
    yield ""
    yield f"{asked} --model hf:DIR"
    yield ""
    yield "With transformers alone (`system` and `stops` are below):"
    yield ""
    for line in _SNIPPET.splitlines():
        yield f"    {line}".rstrip()


def _options(known: dict[str, Any]) -> str:
    """How to ask for what the model was trained on, which a server does not tell; else nothing."""
    names, kinds = _trained(known)
    if not names:
        return ""
    usual = KINDS[DEFAULT_SET].grammar
    name = usual if usual in names else names[0]
    given = "FILE.toml" if _preset(name) is None else name
    return f" --grammar {given} --prompt {kinds[0]}"


def _trained(known: dict[str, Any]) -> tuple[list[str], list[PromptKind]]:
    """The grammars and the prompts that a model was trained on."""
    kinds = listed(known.get("prompt")) or ["compact"]
    return listed(known.get("grammar")), ["full" if each == "full" else "compact" for each in kinds]


def _preset(name: str) -> Grammar | None:
    """None for a grammar that was read from a file, which is not known here."""
    try:
        return load_grammar(name)
    except GrammarError:
        return None


_SNIPPET = f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = AutoModelForCausalLM.from_pretrained("DIR")
chat = [
    {{"role": "system", "content": system}},
    {{"role": "user", "content": "{_QUESTION}"}},
]
text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
done = model.generate(**ids, max_new_tokens=256, stop_strings=stops, tokenizer=tokenizer)
print(tokenizer.decode(done[0][ids["input_ids"].shape[1]:]))"""


def _protocol(folder: Path, known: dict[str, Any]) -> Iterator[str]:
    names, kinds = _trained(known)
    yield "## How to prompt it"
    yield ""
    if not names:
        yield "Nothing says which prompt it was trained on: it is a chat model as its base is."
        return
    yield from _LOOP.splitlines()
    first = ""
    for name in names:
        grammar = _preset(name)
        if grammar is None:
            yield from ("", f"### `{name}`", "")
            yield "A grammar of one's own: `coa grammar show FILE.toml --prompt compact`."
            continue
        for kind in kinds:
            yield from _grammar_lines(grammar, kind)
            first = first or system_prompt(grammar, kind)
    if first:
        yield from ("", "As one text, with the question above:", "")
        codec = Codec.from_folder(folder)
        prompt = codec.encode_prompt(first, _QUESTION)
        text = codec.tokenizer.decode(prompt, skip_special_tokens=False)
        yield from ["~~~~", *text.splitlines(), "~~~~"]


_LOOP = """\
It writes blocks. Generate until one of the stop strings, keep the stop string, run the tool that
the last block calls, append what it returned as an observation to the same assistant turn, and
generate on. An answer block ends the work. In the text of a tool write `<` of a block's tag as
`&lt;`, or a page can speak for the model."""


def _grammar_lines(grammar: Grammar, kind: PromptKind) -> Iterator[str]:
    yield ""
    yield f"### `{grammar.name}` ({kind} prompt)"
    yield ""
    yield "System prompt:"
    yield ""
    yield from ["~~~~", *system_prompt(grammar, kind).splitlines(), "~~~~"]
    yield ""
    yield f"Stop strings: {', '.join(f'`{stop}`' for stop in grammar.stop_strings)}"
    yield ""
    shown = grammar.render([Block(grammar.observation, "TEXT")])
    yield f"Observation, where `\\n` is a newline: `\\n{shown}\\n`"
