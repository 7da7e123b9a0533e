"""The references a user can give, with what is here already."""

from __future__ import annotations

from coa.engines import store
from coa.engines.lora import WEIGHTS
from coa.engines.store import BASE, OURS, is_pulled, is_shipped, speedrun_adapter, trained_on
from coa.models.card import listed

_FORMS = {
    f"{BASE}+ADAPTER_DIR": "an adapter from `coa sft` or `coa rl`",
    "hf:ID_OR_PATH[+ADAPTER_DIR]": "a model folder, or one of the hub, which is fetched",
    "openai:MODEL@URL": "a model on a server (vLLM, llama.cpp); its key is in COA_API_KEY",
    "scripted:FILE": "turns written beforehand, for tests",
}


def describe_models() -> list[dict[str, str]]:
    """One entry for each reference and for each form of one."""
    base = "ready" if is_pulled() else "not pulled"
    models = []
    if is_shipped():
        models.append({"ref": OURS, "state": base, "about": f"the default; {shipped_in_words()}"})
    about = "SmolLM2-135M-Instruct, Apache-2.0"
    about += "" if is_pulled() else "; get it with: coa model pull"
    models.append({"ref": BASE, "state": base, "about": about})
    if (trained := speedrun_adapter()) is not None:
        about = "the adapter of `coa speedrun` in this folder"
        models.append({"ref": f"{BASE}+{trained}", "state": base, "about": about})
    models += [{"ref": ref, "state": "form", "about": about} for ref, about in _FORMS.items()]
    return models


def shipped_in_words() -> str:
    """What the package carries: '9.8 MB adapter on smollm2-135m, shipped; knows web'."""
    if not is_shipped():
        return f"this version does not ship {OURS}"
    grammars = ", ".join(listed(trained_on(OURS).get("grammar"))) or "no grammar"
    size = (store.SHIPPED / WEIGHTS).stat().st_size / 1e6
    return f"{size:.1f} MB adapter on {BASE}, shipped; knows {grammars}"
