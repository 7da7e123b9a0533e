"""How long `import coa` takes: fresh interpreters, with the time of an empty one taken off.

    python benchmarks/import_time.py [--json]

The promise is under 0.3 s. It is a figure and not a test, as a busy machine would fail it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

REPEATS = 15
PROMISE = 0.3


def seconds(statement: str) -> list[float]:
    """Wall-clock seconds of `python -c statement`, one per repeat, after one warm-up."""
    taken = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        taken.append(time.perf_counter() - start)
    return taken[1:]


def main() -> None:
    empty = statistics.median(seconds("pass"))
    result: dict[str, object] = {"unit": "s", "n": REPEATS, "interpreter": round(empty, 4)}
    for name, statement in (("ours", "import coa"), ("cli", "import coa.cli")):
        try:
            taken = seconds(statement)
        except subprocess.CalledProcessError:
            result[name] = None
            continue
        result[name] = round(statistics.median(taken) - empty, 4)
        result[f"{name}_range"] = [round(min(taken) - empty, 4), round(max(taken) - empty, 4)]
    if "--json" in sys.argv[1:]:
        print(json.dumps(result))
        return
    print(f"import coa: {result['ours']} s over an empty interpreter (promise: {PROMISE} s)")
    print(f"import coa.cli: {result['cli']} s")


if __name__ == "__main__":
    main()
