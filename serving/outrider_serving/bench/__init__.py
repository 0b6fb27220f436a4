"""Comparisons of two ways to generate, as ratios measured side by side in one run.

Data flows one way: `cli` -> `workloads` (what is generated) -> two `sides` (what generates) -> `compare` (in
interleaved pairs) -> `pairs` (interval, stopping rule, verdict) -> `report` (tables and JSON).
`docs/bench.md` says what the figures mean.
"""
