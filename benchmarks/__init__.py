"""Measurements behind every claim of README.md and the docs: ``python -m benchmarks --help``."""
