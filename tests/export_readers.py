"""Other people's trainers read our export files; run by their own Python, prints JSON.

    python export_readers.py datasets|hub|trl|verl|verl_tasks|llama_factory FOLDER [MODEL]

A trainer prints a list of `{"ids": [...], "labels": [...]}`, what it would train on, without
padding; `datasets` prints the columns and the number of rows of every file, `hub` the number of
rows of the whole folder, read as its card says.
"""

from __future__ import annotations

import json
import os
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1", "WANDB_MODE": "disabled"}
IGNORED = -100


def read_with_datasets(folder: Path) -> dict[str, Any]:
    from datasets import load_dataset

    kinds = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in kinds and path.name != "dataset_info.json":
            loaded = load_dataset(
                kinds[path.suffix],
                data_files=str(path),
                split="train",
                cache_dir=str(folder / ".datasets"),
            )
            name = path.relative_to(folder).as_posix()
            found[name] = {"rows": len(loaded), "columns": loaded.column_names}
    return found


def read_as_the_hub_does(folder: Path) -> dict[str, int]:
    from datasets import load_dataset

    loaded = load_dataset(str(folder), cache_dir=str(folder / ".datasets"))
    return {name: len(split) for name, split in loaded.items()}


def tokenizer_of(model: str, template: Path | None) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if template is not None and template.is_file():
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def read_with_trl(folder: Path, model: str) -> list[dict[str, list[int]]]:
    """Construct a real SFTTrainer: its preparation and its collator make the batches."""
    from datasets import load_dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    template = folder / "chat_template.jinja"
    tokenizer = tokenizer_of(model, template)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, **shape)
    files = str(folder / "train.jsonl")
    cache = str(folder / ".datasets")
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir=str(folder / ".trainer"),
            assistant_only_loss=template.is_file(),
            max_length=None,
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        train_dataset=load_dataset("json", data_files=files, split="train", cache_dir=cache),
        processing_class=tokenizer,
    )
    found = []
    for row in trainer.train_dataset:
        batch = trainer.data_collator([{key: row[key] for key in ("input_ids", "labels")}])
        found.append({"ids": batch["input_ids"][0].tolist(), "labels": batch["labels"][0].tolist()})
    return found


def read_with_verl(folder: Path, model: str) -> list[dict[str, list[int]]]:
    from omegaconf import OmegaConf
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    tokenizer = tokenizer_of(model, folder / "chat_template.jinja")
    # NOTE: it encodes message by message, as our rows do, and by default refuses a chain for which
    # encoding it as one text would give other ids.
    asked = {"pad_mode": "no_padding", "max_length": 1 << 20, "ignore_input_ids_mismatch": True}
    config = OmegaConf.create(asked)
    rows = MultiTurnSFTDataset(str(folder / "sft.parquet"), tokenizer, config)
    found = []
    for at in range(len(rows)):
        ids, mask = rows[at]["input_ids"].tolist(), rows[at]["loss_mask"].tolist()
        labels = [i if m else IGNORED for i, m in zip(ids, mask, strict=True)]
        found.append({"ids": ids, "labels": labels})
    return found


def read_tasks_with_verl(folder: Path, model: str) -> list[dict[str, Any]]:
    """What verl's dataset for reinforcement learning hands to a rollout."""
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = OmegaConf.create({"cache_dir": str(folder / ".verl"), "max_prompt_length": 4096})
    rows = RLHFDataset(str(folder / "rl.parquet"), tokenizer_of(model, None), config)
    wanted = ("data_source", "raw_prompt", "index", "tools_kwargs", "reward_model")
    return [{key: rows[at][key] for key in wanted} for at in range(len(rows))]


def read_with_llama_factory(folder: Path, model: str) -> list[dict[str, list[int]]]:
    # NOTE: it imports torchaudio, whose builds do not match a CPU torch; text needs none of it.
    sys.modules["torchaudio"] = module_from_spec(ModuleSpec("torchaudio", None))
    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import get_dataset_list
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import TEMPLATES

    listed = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    (attributes,) = get_dataset_list(list(listed), str(folder))
    asked = {"cutoff_len": 1 << 20, "mask_history": False, "train_on_prompt": False}
    settings = types.SimpleNamespace(media_dir="", **asked)
    align = get_dataset_converter(attributes.formatting, attributes, settings)
    reader = SupervisedDatasetProcessor(
        TEMPLATES["empty"], tokenizer_of(model, None), None, settings
    )
    rows = json.loads((folder / attributes.dataset_name).read_text(encoding="utf-8"))
    aligned = [align(row) for row in rows]
    encoded = reader.preprocess_dataset({key: [r[key] for r in aligned] for key in aligned[0]})
    pairs = zip(encoded["input_ids"], encoded["labels"], strict=True)
    return [{"ids": ids, "labels": labels} for ids, labels in pairs]


READERS = {
    "trl": read_with_trl,
    "verl": read_with_verl,
    "verl_tasks": read_tasks_with_verl,
    "llama_factory": read_with_llama_factory,
}


def main(reader: str, folder: str, model: str = "") -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print; the result goes out alone
    if reader == "datasets":
        found: Any = read_with_datasets(Path(folder))
    elif reader == "hub":
        found = read_as_the_hub_does(Path(folder))
    else:
        found = READERS[reader](Path(folder), model)
    json.dump(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
