"""Measurements behind every claim of the README: ``python -m benchmarks --help``."""
