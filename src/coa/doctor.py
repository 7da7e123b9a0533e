"""`coa doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import platform
import shutil
import sys
from importlib import metadata, util

from coa.engines.store import BASE, cache_dir, is_pulled
from coa.machine import cores, memory_gb, native_bfloat16
from coa.runs import Json
from coa.tools.sandbox import Tier, reach_tier

PACKAGES = {
    "pydantic": "core",
    "tantivy": "core",
    "tokenizers": "core",
    "torch": "train",
    "transformers": "train",
    "peft": "train",
    "safetensors": "train",
}


def examine() -> Json:
    """Findings: each check has ok, found and, when not ok, what to do."""
    checks: list[Json] = []

    def add(name: str, ok: bool, found: str, fix: str = "") -> None:
        checks.append({"check": name, "ok": ok, "found": found} | ({} if ok else {"fix": fix}))

    version = platform.python_version()
    add("python", sys.version_info >= (3, 11), version, "install Python 3.11 or newer")
    for package, extra in PACKAGES.items():
        present = util.find_spec(package) is not None
        found = metadata.version(package) if present else "not installed"
        target = "chain-of-agents" if extra == "core" else f'"chain-of-agents[{extra}]"'
        add(package, present, found, f"pip install {target}")
    add("cores", True, str(cores()))
    memory = memory_gb()
    add("memory", memory is None or memory >= 4, f"{memory} GB", "training needs about 4 GB")
    if util.find_spec("torch") is not None:
        from coa.engines.kernels import load_kernels

        kernels = load_kernels()
        slower = f"{kernels}: torch is used, slower"
        add("kernels", True, slower if isinstance(kernels, str) else "compiled")
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
    return {"ok": all(check["ok"] for check in checks), "checks": checks}


def print_findings(findings: Json) -> None:
    """One line a check; what is wrong has its remedy."""
    for check in findings["checks"]:
        mark = "ok" if check["ok"] else "!!"
        remedy = f"  -> {check['fix']}" if "fix" in check else ""
        print(f"{mark}  {check['check']:<14} {check['found']}{remedy}")
