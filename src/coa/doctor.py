"""`coa doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata, util

from coa.io.machine import cores, memory_gb, native_bfloat16
from coa.io.runs import Json
from coa.models.references import BASE, OURS, cache_dir, is_pulled, shipped_in_words
from coa.sandbox import Tier, reach_tier

PACKAGES = {
    "core": ("pydantic", "tantivy", "tokenizers"),
    "train": ("torch", "transformers", "peft", "safetensors", "llguidance"),
}
OPTIONAL = {
    "tools": ("lxml", "pypdf", "markdown_it", "math_verify", "numpy", "sympy"),
    "gym": ("reasoning_gym",),
    "serve": ("starlette", "uvicorn"),
    "mcp": ("mcp",),
    "export": ("pyarrow",),
}
"""Needed for some of what coa does: reading pages and documents, scoring, programs, gym tasks, the
server, MCP, and parquet files."""


def examine() -> Json:
    """Findings: each check has ok, found and, when not ok, what to do.

    What is optional and missing is not ok, but nothing that the whole depends on.
    """
    checks: list[Json] = []

    def add(name: str, ok: bool, found: str, fix: str = "", optional: bool = False) -> None:
        remedy = {} if ok else {"fix": fix, "optional": optional}
        checks.append({"check": name, "ok": ok, "found": found} | remedy)

    version = platform.python_version()
    add("python", sys.version_info >= (3, 11), version, "install Python 3.11 or newer")
    distributions = metadata.packages_distributions()
    for extra, packages in (PACKAGES | OPTIONAL).items():
        target = "chain-of-agents" if extra == "core" else f'"chain-of-agents[{extra}]"'
        for package in packages:
            found = _version(package, distributions)
            shown, remedy = found or "not installed", f"pip install {target}"
            add(package, bool(found), shown, remedy, extra in OPTIONAL)
    add("cores", True, str(cores()))
    memory = memory_gb()
    shown = "unknown" if memory is None else f"{memory} GB"
    add("memory", memory is None or memory >= 4, shown, "SFT needs 4 GB, `make run` 12")
    if util.find_spec("torch") is not None:
        from coa.engines.kernels import load_kernels

        kernels = load_kernels()
        slower = f"{kernels}: torch is used, slower"
        add("kernels", True, slower if isinstance(kernels, str) else "compiled")
        add("gpu", True, _gpu())
    tier, findings = reach_tier()
    needed = tier >= Tier.FULL
    fixes = "; ".join(each.fix for each in findings if not each.ok and each.fix)
    add("code sandbox", needed, f"tier {tier.name.lower()}", fixes or "see docs/security.md")
    for each in findings:
        add(f"  {each.layer}", each.ok or needed, each.found, each.fix)
    add("bfloat16", True, "native" if native_bfloat16() else "not native: float32 is used")
    folder = cache_dir()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = round(shutil.disk_usage(existing).free / 1e9, 1)
    add("disk", free >= 2, f"{free} GB free at {folder}", "free at least 2 GB, or set COA_CACHE")
    pulled = is_pulled()
    add("model", pulled, f"{BASE} {'ready' if pulled else 'not pulled'}", "coa model pull")
    add(OURS, True, shipped_in_words())
    return {"ok": all(each["ok"] or each["optional"] for each in checks), "checks": checks}


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none that torch sees: the CPU is used"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _version(package: str, distributions: Mapping[str, list[str]]) -> str:
    """'' for one that is not installed."""
    if util.find_spec(package) is None:
        return ""
    name = distributions.get(package, [""])[0]
    return metadata.version(name) if name else "of unknown version"


def print_findings(findings: Json) -> None:
    """One line a check; what is wrong has its remedy."""
    for check in findings["checks"]:
        mark = "ok" if check["ok"] else "--" if check["optional"] else "!!"
        remedy = f"  -> {check['fix']}" if "fix" in check else ""
        print(f"{mark}  {check['check']:<14} {check['found']}{remedy}")
