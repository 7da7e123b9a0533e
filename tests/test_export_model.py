"""Exports: other programs compute what we compute, from the same tokens, or there is no folder."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from typer.testing import CliRunner

from tiny_model import TEMPLATE, make_tiny_model
from trained_runs import make_base, make_run

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from coa.cli import app  # noqa: E402
from coa.errors import ModelError, UsageError  # noqa: E402
from coa.io.download import writing_to  # noqa: E402
from coa.io.files import lock_output, whole_folder  # noqa: E402
from coa.models.export import (  # noqa: E402
    Merged,
    export_model,
    how_to_prompt,
)
from coa.models.gguf_file import convert_gguf  # noqa: E402
from coa.models.references import resolve, trained_on  # noqa: E402
from coa.models.weights import (  # noqa: E402
    adapter_hash,
    base_hash,
    read_tensors,
)
from coa.train.forward import load_causal  # noqa: E402
from coa.train.policy import Policy  # noqa: E402

IDS = [1, 40, 7, 99, 300, 12, 5, 2, 77, 150]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(autouse=True)
def cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COA_CACHE", str(place / "cache"))


@pytest.fixture(scope="module")
def ref(place: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COA_CACHE", str(place / "cache"))
        make_base(place / "cache")
        return f"smollm2-135m+{make_run(place / 'run', 'smollm2-135m')}"


@pytest.fixture(scope="module")
def merged(ref: str, place: Path) -> Any:
    """Our own tensors of the merged model, by name."""
    source = resolve(ref)
    found = Merged(source, place / "cache" / "models" / "smollm2-135m")
    return {name: found.take(name) for name in found.shapes}


def silent(line: str) -> None:
    """Takes what an export says."""


def test_transformers_computes_what_we_compute(ref: str, tmp_path: Path) -> None:
    report = export_model(ref, tmp_path / "out", note=silent)
    assert report["dtype"] == "float32" and "model.safetensors" in report["files"]
    policy = Policy(ref)
    with torch.no_grad():
        ours = policy.logits(policy.hidden([IDS]))
        theirs = load_causal(tmp_path / "out", torch.float32)(torch.tensor([IDS])).logits[0]
        plain = Policy("smollm2-135m")
        untrained = plain.logits(plain.hidden([IDS]))
    scale = float(ours.abs().max())
    assert float((ours - theirs).abs().max()) < 1e-5 * scale
    assert float((ours - untrained).abs().max()) > 1e-2 * scale
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert ends["eos_token_id"] == [0, 2] and "_from_model_config" not in ends
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["adapter_sha256"] == adapter_hash(resolve(ref).adapter or Path())
    assert trained_on(f"hf:{tmp_path / 'out'}") == {"grammar": ["mhqa", "web"], "prompt": "compact"}


def test_the_readme_holds_the_prompts_that_the_model_knows(ref: str, tmp_path: Path) -> None:
    from coa.grammar import load_grammar, system_prompt

    export_model(ref, tmp_path / "out", note=silent)
    text = (tmp_path / "out" / "README.md").read_text()
    for name in ("mhqa", "web"):
        grammar = load_grammar(name)
        assert f"~~~~\n{system_prompt(grammar, 'compact')}\n~~~~" in text
        assert all(f"`{stop}`" in text for stop in grammar.stop_strings)
        observation = grammar.render_observation("TEXT", "a call")  # as the loop writes it
        assert f"is a newline: `{observation}`".replace("\n", "\\n") in text
    assert "<|im_end|>\n<|im_start|>assistant\n~~~~" in text
    origin = "made from HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0), a 4-bit copy.\n"
    assert text.endswith(origin)
    export_model("smollm2-135m", tmp_path / "base", "gguf", note=silent)
    text = (tmp_path / "base" / "README.md").read_text()
    assert "llama-server -m smollm2-135m-f16.gguf" in text and "a chat model as its base is" in text


def test_a_grammar_of_ones_own_is_named_and_hinders_no_export(ref: str, place: Path) -> None:
    folder = place / "cache" / "models" / "smollm2-135m"
    own = how_to_prompt("mine", folder, {"grammar": "my_own", "prompt": "compact"})
    assert "### `my_own`" in own and "coa grammar show FILE.toml" in own and "~~~~" not in own
    both = how_to_prompt("mine", folder, {"grammar": ["my_own", "mhqa"], "prompt": ["full"]})
    assert "### `mhqa` (full prompt)" in both and both.count("~~~~") == 4


@pytest.mark.parametrize("gguf_name", ["", "model-f16.gguf"])
@pytest.mark.parametrize(
    ("known", "options"),
    [
        ({"grammar": ["code", "mhqa"], "prompt": "compact"}, "--grammar mhqa --prompt compact "),
        ({"grammar": "web", "prompt": "full"}, "--grammar web --prompt full "),
        ({"grammar": ["web", "code"]}, "--grammar web --prompt compact "),
        ({"grammar": "my_own"}, "--grammar FILE.toml --prompt compact "),
        ({}, ""),
    ],
)
def test_the_command_of_the_readme_asks_for_what_the_model_was_trained_on(
    ref: str, place: Path, known: dict[str, Any], options: str, gguf_name: str
) -> None:
    folder = place / "cache" / "models" / "smollm2-135m"
    text = how_to_prompt("mine", folder, known, gguf_name)
    [command] = re.findall(r'coa ask "[^"]+" (.*?)(?:\\\n +)?--model', text, re.DOTALL)
    assert command == options


@pytest.mark.parametrize(
    ("dtype", "error"), [("float32", 0.0), ("", 2**-11), ("bfloat16", 2**-8), ("q8_0", 1 / 127)]
)
def test_a_gguf_holds_the_merged_weights(
    ref: str, merged: Any, dtype: str, error: float, tmp_path: Path
) -> None:
    """Read back with our own reader, which reads the embedded model's file."""
    report = export_model(ref, tmp_path / "out", "gguf", dtype, note=silent)
    [name] = [file for file in report["files"] if file.endswith(".gguf")]
    convert_gguf(tmp_path / "out" / name, tmp_path / "back")
    back = read_tensors(tmp_path / "back")
    assert back.keys() == merged.keys()
    for title, wanted in merged.items():
        bound = error * float(wanted.abs().max()) if wanted.dim() > 1 else 0.0
        assert float((back[title] - wanted).abs().max()) <= bound, title
    ours = json.loads((Path(resolve(ref).path or "") / "config.json").read_text())
    theirs = json.loads((tmp_path / "back" / "config.json").read_text())
    same = ("hidden_size", "num_key_value_heads", "head_dim", "vocab_size", "eos_token_id")
    assert [theirs[key] for key in same] == [ours[key] for key in same]
    assert theirs["tie_word_embeddings"] and theirs["rms_norm_eps"] == ours["rms_norm_eps"]


@pytest.fixture(scope="module")
def tokenizers(ref: str, place: Path) -> tuple[Tokenizer, Tokenizer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COA_CACHE", str(place / "cache"))
        export_model("smollm2-135m", place / "tokens", "gguf", note=silent)
    convert_gguf(place / "tokens" / "smollm2-135m-f16.gguf", place / "tokens-back")
    folders = (place / "cache" / "models" / "smollm2-135m", place / "tokens-back")
    first, second = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in folders)
    return first, second


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60) | st.text("<|im_end>0129 \n/answer", max_size=60))
def test_the_tokenizer_goes_along(tokenizers: tuple[Tokenizer, Tokenizer], text: str) -> None:
    first, second = tokenizers
    assert first.encode(text).ids == second.encode(text).ids


def test_of_several_chat_templates_the_default_one_goes_along(tmp_path: Path) -> None:
    folder = make_base(tmp_path)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]
    for written, read in ((several, TEMPLATE), (several[:1], None)):
        path.write_text(json.dumps(config | {"chat_template": written}))
        report = export_model(f"hf:{folder}", tmp_path / f"{read is None}", "gguf", note=silent)
        [name] = [file for file in report["files"] if file.endswith(".gguf")]
        fields = gguf.GGUFReader(tmp_path / f"{read is None}" / name).fields
        held = fields.get("tokenizer.chat_template")
        assert (held and held.contents()) == read


@pytest.mark.parametrize(
    ("ref_", "to", "dtype", "message"),
    [
        ("smollm2-135m", "onnx", "", r"--to 'onnx': unknown format\. Known: gguf, hf\."),
        ("smollm2-135m", "ggfu", "", r"--to 'ggfu': unknown format\. Did you mean 'gguf'\?"),
        ("smollm2-135m", "hf", "q8_0", r"--dtype 'q8_0': expected one of float32, bfloat16, float"),
        ("openai:m@http://localhost/v1", "hf", "", r"has no weights here\. Export a local model:"),
        ("gpt-4", "hf", "", r"Unknown model 'gpt-4'"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    ref_: str, to: str, dtype: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises((ModelError, UsageError), match=message) as caught:
        export_model(ref_, tmp_path / "out", to, dtype, note=silent)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_a_model_that_llama_cpp_would_read_otherwise_is_refused(tmp_path: Path) -> None:
    qwen = make_tiny_model(tmp_path / "qwen", kind="qwen2")
    with pytest.raises(
        ModelError, match=r"found architecture 'qwen2'; a GGUF is written for plain"
    ):
        export_model(f"hf:{qwen}", tmp_path / "out", "gguf", note=silent)
    llama = make_tiny_model(tmp_path / "llama")
    path = llama / "tokenizer.json"
    spec = json.loads(path.read_text())
    for changed in (
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "NFC"}},
        {"post_processor": {"type": "TemplateProcessing"}},
        {"model": {"type": "Unigram"}},
    ):
        path.write_text(json.dumps(spec | changed))
        with pytest.raises(
            ModelError, match=r"llama.cpp's way of splitting text .* not known here"
        ):
            export_model(f"hf:{llama}", tmp_path / "out", "gguf", note=silent)
    more = {"id": 9999, "content": "<more>", "special": True}
    path.write_text(json.dumps(spec | {"added_tokens": [*spec["added_tokens"], more]}))
    with pytest.raises(ModelError, match=r"has a token 9999, and the model has \d+ only"):
        export_model(f"hf:{llama}", tmp_path / "out", "gguf", note=silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "dtype", "value"),
    [("hf", "float16", 1e5), ("gguf", "float16", 1e5), ("gguf", "q8_0", 1e7)],
)
def test_a_value_that_the_type_cannot_hold_is_one_line_and_no_folder(
    to: str, dtype: str, value: float, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = make_tiny_model(tmp_path / "wide")
    add_tensors(folder, {name: read_tensors(folder)[name].fill_(value)})
    with pytest.raises(ModelError) as caught:
        export_model(f"hf:{folder}", tmp_path / "out", to, dtype, note=silent)
    assert str(caught.value) == (
        f"{folder}: '{name}' has the value {value:g}, which {dtype} cannot hold. "
        "Export with --dtype bfloat16 or float32."
    )
    assert not (tmp_path / "out").exists()
    export_model(f"hf:{folder}", tmp_path / "out", to, "bfloat16", note=silent)


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_quantised_weights_are_refused(to: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "int4")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match=r"config\.json, 'gptq'\), expected plain ones\. Export"):
        export_model(f"hf:{folder}", tmp_path / "out", to, note=silent)
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_is_no_weight_is_copied_as_it_is(tmp_path: Path) -> None:
    folder, table = make_tiny_model(tmp_path / "llama"), torch.tensor([2**31 + 1, -7])
    add_tensors(folder, {"a.table": table})  # the first by name
    export_model(f"hf:{folder}", tmp_path / "out", "hf", "bfloat16", note=silent)
    found = read_tensors(tmp_path / "out")
    copied = found.pop("a.table")
    assert copied.dtype == torch.int64 and copied.tolist() == table.tolist()
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def add_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """Give a model more tensors, or others."""
    from safetensors.torch import save_file

    changed = read_tensors(folder) | tensors
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def test_another_base_is_refused(ref: str, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=9)
    adapter = ref.partition("+")[2]
    with pytest.raises(ModelError, match=r"trained on a base with hash '\w{12}', this base has"):
        export_model(f"hf:{other}+{adapter}", tmp_path / "out", note=silent)
    assert not (tmp_path / "out").exists() and base_hash(other)


def test_a_target_that_holds_something_is_left_alone(ref: str, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"exists and is not empty\. Give a new folder with --out"):
        export_model(ref, tmp_path, note=silent)
    with pytest.raises(UsageError, match=r"kept.txt: is a file, expected a new folder"):
        export_model(ref, tmp_path / "kept.txt", note=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target, part = tmp_path / "out", tmp_path / ".out.part"
    for failure, message in (
        (OSError(errno.ENOSPC, "No space left on device"), r"out: the disk is full; it needs 1 MB"),
        (RuntimeError("I/O error: No space left on device"), r"the disk is full"),
        (OSError(errno.EROFS, "Read-only"), r"cannot write there; give another folder with --out"),
    ):
        with (
            pytest.raises(UsageError, match=message),
            writing_to(target, "it needs 1 MB", "give another folder with --out"),
            whole_folder(target) as made,
        ):
            (made / "half").touch()
            raise failure
        assert not list(tmp_path.iterdir())
    (part / "out").mkdir(parents=True)
    (part / "out" / "left by a kill").touch()
    with whole_folder(target) as made:
        (made / "file").touch()
        with pytest.raises(UsageError, match="in use by another process"):
            lock_output(part)
        assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in target.iterdir()] == ["file"]
    with whole_folder(target, replaces=True) as made:
        (made / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"]


KILLED_AT_EVERY_CHANGE = """
import os, sys
from itertools import count
from pathlib import Path
from coa.io.files import whole_folder

target = Path(sys.argv[1])

def fill(text):
    with whole_folder(target, replaces=True) as made:
        kept = (target / "kept").read_text() if target.exists() else "kept"
        (made / "kept").write_text(kept)
        (made / "text").write_text(text)

def dying(act, left):
    def acted(*given, **named):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), 9)
        return act(*given, **named)
    return acted

fill("old")
for n in count(1):
    if not (child := os.fork()):
        left = [n]
        for name in ("mkdir", "rename", "unlink", "rmdir"):
            setattr(os, name, dying(getattr(os, name), left))
        fill("new")
        os._exit(0)
    killed = os.waitpid(child, 0)[1] == 9
    for text in (f"after {n}", f"again {n}"):
        fill(text)
        found = {path.name: path.read_text() for path in target.iterdir()}
        assert found == {"kept": "kept", "text": text}, (n, found)
        assert list(target.parent.iterdir()) == [target], n
    if not killed:
        break
print(n)
"""


@pytest.mark.parametrize("name", ["out", "replaced", "out.replaced"])
def test_a_folder_that_is_replaced_survives_a_kill_at_any_moment(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-c", KILLED_AT_EVERY_CHANGE, str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 8, "too few kills to mean anything"


def test_what_cannot_be_replaced_after_all_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "out", Path.rename
    target.mkdir()
    (target / "old").touch()

    def refused(path: Path, to: Path) -> Path:
        if to == target and path.name == "out":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="Input/output"), whole_folder(target, replaces=True):
        pass
    assert [path.name for path in target.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [target]


def test_the_command_exports(ref: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    done = CliRunner().invoke(app, ["model", "export", ref, "--out", str(out), "--to", "gguf"])
    assert (
        done.exit_code == 0 and done.stdout == f"{out}: README.md, manifest.json, model-f16.gguf\n"
    )
    wrong = CliRunner().invoke(app, ["model", "export", ref, "--out", str(out), "--json"])
    assert isinstance(wrong.exception, UsageError)
