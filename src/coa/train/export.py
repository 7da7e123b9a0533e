"""The export stage: a directory of trajectories in, files for other trainers out.

It stands with training because the tokenised format is made of training rows.
"""

from __future__ import annotations

from pathlib import Path

from coa.distillation.exports import Format, Note, choose_grammar, export
from coa.errors import ModelError
from coa.io.runs import Json
from coa.models.codec import Codec
from coa.tasks import Task, TaskSet
from coa.train.rows import row_maker
from coa.trajectory import load_trajectories


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
    folder = source if source.is_dir() else source.parent
    codec = codec_of(model) if model else None
    gold: list[Task] = list(TaskSet.load(tasks)) if tasks else []
    chains = load_trajectories(source)
    mixed = len({chain.grammar for chain in chains}) > 1
    name = f"{to}-{Path(choose_grammar(chains, grammar)).stem}" if mixed else to
    target = out or folder / "exports" / name
    report = export(
        chains,
        to,
        target,
        grammar=grammar,
        codec=codec,
        make_row=row_maker(codec) if codec else None,
        tasks=gold,
        note=note,
    )
    return report | {"out": str(target)}


def codec_of(ref: str) -> Codec:
    """The tokenizer and chat template of a local model; nothing else of it is loaded."""
    from coa.models.references import model_folder, resolve

    source = resolve(ref)
    if source.kind != "local":
        raise ModelError(
            f"{ref!r} has no tokenizer here. Export for a local model: smollm2-135m or hf:FOLDER."
        )
    return Codec.from_folder(model_folder(source))
