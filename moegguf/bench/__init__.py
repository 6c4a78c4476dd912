"""Runs benchmarks. Each compared system runs in its own process, several systems take turns under the same limits, and
the results become rows of a table. Also records traces.

Promises: load, prompt and generation are timed separately, as in llama-bench. Compared systems run in turns under one
memory limit, by default with a cold page cache, and their tokens are compared. This package does not know flags or
terminals.
"""
