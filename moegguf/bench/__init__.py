"""Runs benchmarks: each system in its own process, several in turns under the same limits, with rows of results. Also
records traces.

Promises: load, prompt and generation are timed separately, as in llama-bench. Compared systems run in turns under one
memory limit, by default with a cold page cache, and their tokens are compared. This package does not know flags or
terminals.
"""
