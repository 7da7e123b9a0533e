"""Exports: trajectories in, the files that other people's trainers read out.

Each format keeps as much of our loss mask as its trainer can express; docs/datasets.md says what
that is. What a format cannot hold faithfully is left out, counted, with its reason: nothing is
changed silently. Files are whole or not there, and the same trajectories give the same bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from coa.errors import (
    CoaError,
    ConfigError,
    GrammarError,
    ModelError,
    RecordError,
    UsageError,
    did_you_mean,
)
from coa.grammar import load_grammar, system_prompt
from coa.grammar.prompt import EARLIER, earlier
from coa.io.files import first_record, foreign, whole_file
from coa.io.runs import Json, write_atomic, write_jsonl
from coa.io.tables import need_pyarrow
from coa.models.codec import Codec, Offsets, codec_of
from coa.rollouts import choose_environments
from coa.tasks import Task, TaskSet
from coa.train.rows import Row, build_row
from coa.trajectory import CHAT_MARKER, Author, Segment, StopReason, Trajectory, load_trajectories

Format = Literal["alpaca", "sharegpt", "trl", "trl-tokens", "verl"]
FORMATS: tuple[Format, ...] = get_args(Format)
TRAIN, TEMPLATE, LISTED = "train.jsonl", "chat_template.jinja", "dataset_info.json"
ALPACA, SHAREGPT, SFT, RL = "alpaca.json", "sharegpt.json", "sft.parquet", "rl.parquet"
FILES = {
    "alpaca": (ALPACA, LISTED),
    "sharegpt": (SHAREGPT, LISTED),
    "trl": (TRAIN, TEMPLATE),
    "trl-tokens": (TRAIN,),
    "verl": (SFT, TEMPLATE),
}
"""Format -> what is written of chains; of tasks it is one more file, `RL`."""
OWN = "coa_"
"""How the names of our datasets begin in a `dataset_info.json`."""
QUESTION = "\n\nQuestion: "
"""Between instructions and question in the one user message of the AFM datasets."""
IGNORED = -100
"""The label of a token that is not trained, for PyTorch and all that is built on it."""
Truth = Literal["struct", "text"]
Note = Callable[[str], None]
Encode = Callable[[str], tuple[list[int], Offsets]]


class NotExportable(CoaError, ValueError):
    """A trajectory that a format cannot hold as it is; the message is the reason."""


def run_export(
    source: Path,
    to: Format,
    out: Path | None = None,
    *,
    grammar: str = "",
    model: str = "",
    tasks: Path | None = None,
    note: Note = print,
) -> Json:
    """`coa export`: by default into `exports/FORMAT` beside the trajectories.

    Where these have several grammars it is `exports/FORMAT-GRAMMAR`, so that exports of one after
    the other do not replace each other.
    """
    codec = codec_of(model) if model else None
    gold = TaskSet.load(tasks).tasks if tasks else ()
    chains = load_trajectories(source)
    mixed = len({chain.grammar for chain in chains}) > 1
    name = f"{to}-{Path(choose_grammar(chains, grammar)).stem}" if mixed else to
    target = out or (source if source.is_dir() else source.parent) / "exports" / name
    report = export(chains, to, target, grammar=grammar, codec=codec, tasks=gold, note=note)
    return report | {"out": str(target)}


def export(
    trajectories: Sequence[Trajectory],
    to: Format,
    out: Path,
    *,
    grammar: str = "",
    codec: Codec | None = None,
    tasks: Sequence[Task] = (),
    truth: Truth = "struct",
    note: Note = print,
) -> Json:
    """Write one format into the directory `out`; returns what was written and what was not.

    `grammar` chooses among several, the most frequent one by default. `codec` is of the model that
    will be trained: prompts then have its chat format (ChatML otherwise) and cuts lie between its
    tokens; the tokenised format cannot do without. `tasks` with gold become verl's rows for
    reinforcement learning. An `out` that holds something else than an earlier export is refused.
    """
    if to not in FORMATS:
        raise UsageError(f"{to!r} is not an export format.{did_you_mean(to, FORMATS)}")
    tasks = TaskSet(tuple(tasks)).tasks if to == "verl" else ()
    if not trajectories and not tasks:
        raise UsageError("there is no trajectory to export.")
    check_place(out, [*FILES[to], *([RL] if tasks else ())])
    name = choose_grammar(trajectories, grammar) if trajectories else grammar or _grammar_for(tasks)
    left: Counter[str] = Counter()
    make, rows, used = _maker(to, codec), list[Json](), list[Trajectory]()
    for trajectory in trajectories:
        reason = _objection(trajectory, name) or _oddity(trajectory, plain=to != "trl-tokens")
        if not reason:
            try:
                rows.append(make(trajectory))
                used.append(trajectory)
                continue
            except NotExportable as error:
                reason = str(error)
            except CoaError as error:  # it begins with the name of the task
                reason = (str(error).partition(": ")[2] or str(error)).rstrip(".")
        left[reason] += 1
    judged = [task for task in tasks if task.answers]
    left += Counter({"tasks without a gold answer": len(tasks) - len(judged)})
    told = [f"left out {count}: {reason}" for reason, count in left.most_common()]
    if not rows and not judged:
        raise RecordError(f"there is nothing to export: {'; '.join(told)}.")
    for line in told:
        note(f"{line}.")
    report: Json = {"to": to, "grammar": name, "rows": len(rows), "rl_rows": len(judged)}
    report["left_out"] = dict(left.most_common())
    report["mistakes_trained"] = _count_mistakes(used, to, codec, note)
    report["files"] = _save(to, out, rows, name, codec) if rows else []
    if judged:
        system, tools = _opening(used, grammar or name)
        prompts = [system + _history(task, used, grammar or name) for task in judged]
        made = [_rl_row(*each, tools, truth) for each in zip(judged, prompts, strict=True)]
        _save_parquet(out / RL, made)
        report["files"].append(RL)
    return report


def choose_grammar(trajectories: Sequence[Trajectory], asked: str) -> str:
    """The name of the grammar to export: the asked one, or the most frequent."""
    if asked:
        return load_grammar(asked).name if asked.endswith(".toml") else asked
    counts = Counter(trajectory.grammar for trajectory in trajectories)
    return min(counts, key=lambda name: (-counts[name], name))


def _grammar_for(tasks: Sequence[Task]) -> str:
    """The grammar that all these tasks are made for."""
    environments, _ = choose_environments((), TaskSet(tuple(tasks)))
    found = sorted({env.value().name for env in environments})
    if len(found) > 1:
        listed = ", ".join(found)
        raise ConfigError(f"the tasks suit several grammars: {listed}. Choose one with --grammar.")
    return found[0]


def _opening(used: Sequence[Trajectory], grammar: str) -> tuple[str, Sequence[str]]:
    """The system text and the tools that tasks open with: those of the chains, which may have fewer
    tools than the grammar."""
    if used:
        return used[0].segments[0].text.partition(EARLIER)[0], used[0].tools
    try:
        loaded = load_grammar(grammar)
    except GrammarError as error:
        raise UsageError(f"{error} Give its file with --grammar FILE.toml.") from None
    return system_prompt(loaded), list(loaded.tool_roles)


def _history(task: Task, used: Sequence[Trajectory], grammar: str) -> str:
    """What a prompt says of the messages before the question of a task."""
    if not task.history:
        return ""
    return earlier(used[0].protocol if used else load_grammar(grammar), task.history)


# ------------------------------------------------------------------------------------------------
# Which trajectories an export takes.
# ------------------------------------------------------------------------------------------------


def _objection(trajectory: Trajectory, grammar: str) -> str:
    """Why a model cannot learn from a trajectory; empty: it can."""
    if trajectory.grammar != grammar:
        other = trajectory.grammar
        return f"of grammar {other!r}, not {grammar!r}; export them apart with --grammar {other}"
    if not trajectory.segments or trajectory.segments[0].author is not Author.PROMPT:
        return "without a prompt segment at the beginning"
    if trajectory.stop is not StopReason.ANSWERED:
        how = f"it stopped with {trajectory.stop.value!r}" if trajectory.stop else "no stop reason"
        return f"unfinished ({how}); only chains that end with an answer are exported"
    if not any(piece.trained and piece.text.strip() for piece in pieces(trajectory)):
        return "without any text to train on"
    return ""


def _oddity(trajectory: Trajectory, plain: bool) -> str:
    """What its text holds that a tokenizer could not read or, where a trainer will encode the plain
    text, would read as its own marker."""
    texts = (trajectory.question, *(segment.text for segment in trajectory.segments))
    if plain and any(CHAT_MARKER.search(text) for text in texts):
        return (
            "with a chat marker such as <|im_end|> in their text, which a trainer's tokenizer "
            "would take for its own; only trl-tokens can hold them"
        )
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return "with text that UTF-8 cannot write (half of a surrogate pair)"
    return ""


def _count_mistakes(used: Sequence[Trajectory], to: Format, codec: Codec | None, note: Note) -> int:
    """How many rows train a marked mistake, because the format cannot mask it."""
    if to not in ("alpaca", "sharegpt") or (to == "sharegpt" and codec is not None):
        return 0
    count = sum(any(segment.errs for segment in t.segments) for t in used)
    if count:
        advice = "sharegpt with --model, " if to == "sharegpt" else ""
        note(
            f"{count} of {len(used)} rows hold marked mistakes, which {to} cannot mask: a trainer "
            f"will learn them. To mask them, use {advice}trl, trl-tokens or verl."
        )
    return count


# ------------------------------------------------------------------------------------------------
# What of a chain is trained, and the chat format around it.
# ------------------------------------------------------------------------------------------------


class ExportPiece(NamedTuple):
    """Text that is trained as a whole or not at all."""

    role: str
    """`assistant`, `tool` or `mistake`."""
    text: str

    @property
    def trained(self) -> bool:
        return self.role == "assistant"


def pieces(trajectory: Trajectory, encode: Encode | None = None) -> list[ExportPiece]:
    """The chain after its prompt, cut into the longest pieces of one role.

    A token that holds a part of a mistake is not trained by our rows. With `encode` the cuts are
    put there; without it, the blank before a word is taken to belong to the word's token.
    """
    found: list[ExportPiece] = []
    for segment in trajectory.segments:
        for role, text in _cut(segment, encode):
            if found and found[-1].role == role:
                found[-1] = ExportPiece(role, found[-1].text + text)
            elif text:
                found.append(ExportPiece(role, text))
    return found


def _cut(segment: Segment, encode: Encode | None) -> Iterator[tuple[str, str]]:
    """(role, text) of the parts of a segment, in order."""
    text, done = segment.text, 0
    if segment.author is Author.PROMPT:
        return
    if segment.author is Author.ENV:
        yield "tool", text
        return
    for start, end in sorted(_mistakes(text, segment.errs, encode)):
        yield "assistant", text[done:start]
        yield "mistake", text[max(start, done) : end]
        done = max(done, end)
    yield "assistant", text[done:]


def _mistakes(text: str, spans: Sequence[tuple[int, int]], encode: Encode | None) -> Offsets:
    """Marked spans, widened to the borders of tokens."""
    if not spans:
        return []
    if encode is None:
        spans = [(max(0, start), end) for start, end in spans if start < end]
        return [(start - (text[start - 1 : start] == " "), end) for start, end in spans]
    ends = [end for _, end in encode(text)[1]]
    tokens = zip([0, *ends], ends, strict=False)
    return [t for t in tokens if any(t[0] < end and start < t[1] for start, end in spans)]


@dataclass(frozen=True, slots=True)
class Frame:
    """What a chat format writes before, between and after system text and question; by default it
    is ChatML, the format of the embedded model, of Qwen and of many others."""

    before: str = "<|im_start|>system\n"
    between: str = "<|im_end|>\n<|im_start|>user\n"
    after: str = "<|im_end|>\n<|im_start|>assistant\n"

    @classmethod
    def of(cls, codec: Codec | None) -> Frame:
        """The chat format of a model."""
        if codec is None:
            return CHATML
        before, between, after = codec.frame
        return cls(before, "\n\n" if between is None else between, after)

    def prompt(self, system: str, user: str) -> str:
        return f"{self.before}{system}{self.between}{user}{self.after}"

    def template(self) -> str:
        """A Jinja chat template: one turn without headers between its pieces, of which only
        `assistant` stands in generation markers. It never ends the turn, and neither do we."""
        before, between, after = (
            json.dumps(text, ensure_ascii=False) for text in (self.before, self.between, self.after)
        )
        return (
            f"{_TEMPLATE_HEAD}"
            f"{{{{- {before} + message['content'] + {between} -}}}}\n"
            "{%- elif message['role'] == 'user' -%}\n"
            f"{{{{- message['content'] + {after} -}}}}\n"
            f"{_TEMPLATE_TAIL}"
        )


CHATML = Frame()
_TEMPLATE_HEAD = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
"""
_TEMPLATE_TAIL = """\
{%- elif message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] -}}
{%- endgeneration -%}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{%- endfor -%}
"""


def check_markers(codec: Codec) -> None:
    """Raise when the chat template writes a marker that the tokenizer would split into pieces.

    [INST] is ordinary text for the models that were trained with it.
    """
    written = CHAT_MARKER.findall(Frame.of(codec).prompt("", ""))
    for marker in (each for each in written if each.startswith("<")):
        count = len(codec.tokenizer.encode(marker, add_special_tokens=False).ids)
        if count > 1:
            raise ModelError(
                f"the model's chat template writes {marker!r}, which its tokenizer does not know "
                f"and splits into {count} tokens. Use a model whose vocabulary has them."
            )


# ------------------------------------------------------------------------------------------------
# One row of each format.
# ------------------------------------------------------------------------------------------------


def _maker(to: Format, codec: Codec | None) -> Callable[[Trajectory], Json]:
    """What makes a row of a chain."""
    encode = codec.encode_with_offsets if codec else None
    if to == "trl-tokens":
        if codec is None:
            raise UsageError("trl-tokens needs the model whose tokens it writes: --model REF.")
        check_markers(codec)
        return lambda trajectory: _token_row(trajectory, build_row(trajectory, codec))
    if to == "alpaca":
        return _alpaca_row
    if to == "sharegpt":
        frame = Frame.of(codec) if codec else None
        return lambda trajectory: _sharegpt_row(trajectory, frame, encode)
    return lambda trajectory: _message_row(trajectory, encode)


def _alpaca_row(trajectory: Trajectory) -> Json:
    """Instructions and question in one user message, the whole chain in one answer.

    AFM's training code finds observations by their text: `<tag` after a line break, up to `tag>`
    and exactly two line breaks. Ours end with one, so one is added here.
    """
    prompt, *chain = trajectory.segments
    tag = trajectory.protocol.observation
    output, expected = "", []
    following = [*(segment.text for segment in chain[1:]), ""]
    for segment, after in zip(chain, following, strict=True):
        begin = len(output)
        output += segment.text
        if segment.author is Author.ENV:
            output += "" if after.startswith("\n") else "\n"
            expected.append((begin + segment.text.startswith("\n"), begin + len(segment.text) + 1))
    if _released_mask(output, tag) != expected:
        raise NotExportable(
            f"their text would mislead AFM's masker, which searches for <{tag} and {tag}> in it; "
            "use another format"
        )
    instruction = f"{prompt.text}{QUESTION}{trajectory.question}"
    return {"instruction": instruction, "input": "", "output": output}


def _released_mask(text: str, tag: str) -> list[tuple[int, int]]:
    """Spans that AFM's masker takes for observations; -1 where it would not see a border.

    It compares token ids of Qwen's tokenizer. There `<tag` is only found after a line break, and
    the end only when exactly two line breaks follow it.
    """
    spans, opened, closed = [], f"<{tag}", f"{tag}>\n\n"
    start = text.find(opened)
    while start >= 0:
        end = text.find(closed, start)
        end = end + len(closed) if end >= 0 else -1
        if text[start - 1 : start] != "\n" or text[end : end + 1] == "\n":
            end = -1
        spans.append((start, end))
        start = text.find(opened, end) if end >= 0 else -1
    return spans


def _sharegpt_row(trajectory: Trajectory, frame: Frame | None, encode: Encode | None) -> Json:
    """Turns of human, gpt and observation; a trainer masks what gpt did not say.

    With a frame the first turn holds the whole prompt in the model's own format, and what is not
    trained is an observation, mistakes included: for a template that adds nothing. Without one,
    turns are as people write them, and mistakes are part of what gpt says.
    """
    system, question = trajectory.segments[0].text, trajectory.question
    turns = [_turn("system", system), _turn("human", question)]
    said = {"assistant": "gpt", "mistake": "gpt"}
    if frame is not None:
        turns, said = [_turn("human", frame.prompt(system, question))], {"assistant": "gpt"}
    for role, text in pieces(trajectory, encode):
        speaker, last = said.get(role, "observation"), turns[-1]["from"]
        if last == speaker or (last == "human" and speaker == "observation"):
            turns[-1]["value"] += text
        else:
            turns.append(_turn(speaker, text))
    while turns[-1]["from"] == "observation":  # nothing that is trained comes after it
        turns.pop()
    return {"conversations": turns}


def _turn(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


def _message_row(trajectory: Trajectory, encode: Encode | None) -> Json:
    """Messages whose roles say what is trained; `Frame.template` joins them to one turn."""
    parts = [("system", trajectory.segments[0].text), ("user", trajectory.question)]
    parts += [(piece.role, piece.text) for piece in pieces(trajectory, encode)]
    messages = [{"role": role, "content": text} for role, text in parts]
    return {"task_id": trajectory.task_id, "messages": messages}


def _token_row(trajectory: Trajectory, row: Row) -> Json:
    """Ids and labels of one of our own training rows."""
    labels = [i if w > 0 else IGNORED for i, w in zip(row.ids, row.weights, strict=True)]
    return {"task_id": trajectory.task_id, "input_ids": list(row.ids), "labels": labels}


def _rl_row(task: Task, system: str, tools: Sequence[str], truth: Truth) -> Json:
    """A task for verl. Every value of a column has the same type, whatever the task is.

    `ground_truth` is a struct: the scorers of AFM and verl that compare texts index it as a dict
    and fail on a JSON string. Scorers of mathematics take one plain string: `truth="text"` writes
    the first answer. Every task has an index of its own, because AFM's trainer groups rollouts by
    it. Tools are told the question and never the answer.
    """
    source = str(task.meta.get("data_source") or task.meta.get("set") or "coa")
    told = {"question": task.question, "data_source": source, "ground_truth": ""}
    target = list(task.answers)
    gold: Any = {"target": target, "question": task.question}
    return {
        "data_source": source,
        "prompt": [
            {"role": "system", "content": system},
            {"role": "user", "content": task.question},
        ],
        "ability": "coding" if "code" in tools else "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": target[0] if truth == "text" else gold},
        "extra_info": {
            "index": task.id,
            "split": str(task.meta.get("split", "train")),
            "question": task.question,
            "answer": target,
            "gold": json.dumps(dict(task.gold), ensure_ascii=False, sort_keys=True),
            "need_tools_kwargs": bool(tools),  # parquet has no struct without fields
            **({"tools_kwargs": {t: {"create_kwargs": told} for t in tools}} if tools else {}),
        },
    }


# ------------------------------------------------------------------------------------------------
# Writing: into a folder that is new, empty, or holds an earlier export.
#
# Each file is known by what it holds, so that no marker lies among files of which a trainer reads
# the whole folder. Rows for LLaMA-Factory look like anybody's: they are ours when the list beside
# them says so. That list is the one file that is added to, whoever wrote it.
# ------------------------------------------------------------------------------------------------


def _save(
    to: Format, out: Path, rows: Sequence[Json], grammar: str, codec: Codec | None
) -> list[str]:
    names = FILES[to]
    if LISTED in names:
        listed = _with_dataset(out / LISTED, f"{OWN}{Path(grammar).stem}", names[0], to)
        # The list comes first: by it, rows that a kill left behind are known as ours.
        for name, value in ((LISTED, listed), (names[0], rows)):
            write_atomic(out / name, json.dumps(value, ensure_ascii=False, indent=2) + "\n")
    elif to == "verl":
        _save_parquet(out / SFT, rows)
    else:
        write_jsonl(out / TRAIN, rows)
    if TEMPLATE in names:
        write_atomic(out / TEMPLATE, Frame.of(codec).template())
    return list(names)


def _save_parquet(path: Path, rows: Sequence[Json]) -> None:
    pyarrow = need_pyarrow("A parquet file")
    table = pyarrow.Table.from_pylist(list(rows))
    with whole_file(path) as file:
        pyarrow.parquet.write_table(table, file)


_COLUMNS: dict[str, Json] = {
    "alpaca": {"columns": {"prompt": "instruction", "query": "input", "response": "output"}},
    "sharegpt": {
        "columns": {"messages": "conversations"},
        "tags": {
            "role_tag": "from",
            "content_tag": "value",
            "user_tag": "human",
            "assistant_tag": "gpt",
            "observation_tag": "observation",
            "function_tag": "function_call",
            "system_tag": "system",
        },
    },
}
"""What LLaMA-Factory's dataset_info.json says about the rows of a format."""


def _with_dataset(path: Path, name: str, file: str, to: str) -> Json:
    """What a `dataset_info.json` lists, with our dataset; those of others stay as they are."""
    listed = _listed(path)
    for other, entry in listed.items():
        if other != name and isinstance(entry, dict) and entry.get("file_name") == file:
            raise RecordError(
                f"{path}: the dataset {other!r} is in {file}, which this export would replace. "
                "Give another directory with --out."
            )
    return listed | {name: {"file_name": file, "formatting": to, **_COLUMNS[to]}}


def _listed(path: Path) -> Json:
    """The datasets that a `dataset_info.json` lists; none where it is not there."""
    if not path.exists():
        return {}
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, dict):
        raise RecordError(
            f"{path}: not a JSON object, so that nothing can be added to its datasets. "
            "Correct it, or give another directory with --out."
        )
    return listed


def check_place(out: Path, names: Collection[str]) -> None:
    """Refuse a folder of somebody else's, and files under `names` that no export of ours wrote."""
    standing = next(each for each in (out, *out.parents) if each.exists())
    if not standing.is_dir():
        raise UsageError(f"{standing}: is a file, expected a folder. Name another one with --out.")
    empty = {each for each in out.glob("[!.]*") if each.is_file() and not each.stat().st_size}
    held = sorted(each.name for each in out.glob("[!.]*") if each not in empty)
    for name in names:
        if name in held and name != LISTED and not _is_ours(out / name):
            raise foreign(out / name, "a new file or one that coa export wrote")
    welcome = LISTED in names and LISTED in held
    if held and not welcome and not any(_is_ours(out / name) for name in held):
        raise UsageError(
            f"{out}: holds {held[0]!r} and no export, expected a folder that is new, empty or of "
            "an earlier export. Name another one with --out."
        )


def _is_ours(path: Path) -> bool:
    """Whether a file holds what an export writes under its name."""
    if not path.is_file():
        return False
    if path.name == TRAIN:
        fields = (first_record(path) or {}).keys()
        return fields in ({"task_id", "messages"}, {"task_id", "input_ids", "labels"})
    if path.name == TEMPLATE:
        text = path.read_text(encoding="utf-8", errors="replace")
        return text.startswith(_TEMPLATE_HEAD) and text.endswith(_TEMPLATE_TAIL)
    if path.name in (ALPACA, SHAREGPT):
        try:
            listed = _listed(path.with_name(LISTED))
        except RecordError:
            return False
        ours = (entry for name, entry in listed.items() if name.startswith(OWN))
        return any(isinstance(each, dict) and each.get("file_name") == path.name for each in ours)
    return path.name in (SFT, RL) and _has_columns(path)


def _has_columns(path: Path) -> bool:
    """Whether a parquet file has what only ours have: AFM's tasks have the rest of our columns."""
    pyarrow = need_pyarrow("Reading a parquet file")
    try:
        schema = pyarrow.parquet.read_metadata(path).schema
    except (pyarrow.ArrowException, OSError):
        return False
    found = {schema.column(number).path for number in range(len(schema))}
    if path.name == SFT:
        return {column.partition(".")[0] for column in found} == {"task_id", "messages"}
    return {"extra_info.index", "extra_info.gold"} <= found
