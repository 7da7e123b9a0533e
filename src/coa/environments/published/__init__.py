"""Benchmarks that others publish, read from a user's own files into tasks with gold."""

from __future__ import annotations

from coa.environments.published.catalogue import (
    BENCHMARKS,
    Benchmark,
    BenchmarkWheel,
    Loaded,
    find_benchmark,
    load_benchmark,
)

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "BenchmarkWheel",
    "Loaded",
    "find_benchmark",
    "load_benchmark",
]
