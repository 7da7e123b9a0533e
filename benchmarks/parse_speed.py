"""How fast whole trajectories are parsed, beside common means: `coa bench parse` as a script."""

from __future__ import annotations

import json

from coa.io.runs import Json
from coa.lab.bench import bench_parse


def measure() -> Json:
    return bench_parse()


if __name__ == "__main__":
    print(json.dumps(measure()))
