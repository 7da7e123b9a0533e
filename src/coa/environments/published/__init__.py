"""Benchmarks that others publish, read from a user's own files into tasks with gold."""

from __future__ import annotations

from coa.environments.published.catalogue import (
    BENCHMARKS,
    Benchmark,
    Loaded,
    Wheel,
    find_benchmark,
    load_benchmark,
)

__all__ = ["BENCHMARKS", "Benchmark", "Loaded", "Wheel", "find_benchmark", "load_benchmark"]
