"""The shape of what `coa bench` measures; never the figures themselves."""

from __future__ import annotations

import pytest

from coa.errors import UsageError
from coa.evaluate.bench import bench_parse, run_bench


def test_the_parse_bench_has_one_number_per_peer_and_its_ratio() -> None:
    result = bench_parse(megabytes=0.05)
    peers = set(result) - {"ours", "unit", "ratio"}
    assert {"regex", "html.parser"} <= peers == set(result["ratio"])
    assert result["unit"] == "MB/s"
    assert all(result[name] > 0 for name in ("ours", *peers))


def test_an_unknown_measurement_is_named() -> None:
    with pytest.raises(UsageError, match=r"'parser' is not a measurement\. Did you mean 'parse'"):
        run_bench("parser")
