"""Benchmarks: one system per process, several in turns under the same limits, and rows of results. Also records traces.

Promises: load, prompt and generation are timed apart, as llama-bench does. Compared systems run interleaved under one
memory limit, with a cold page cache by default, and their tokens are compared.
Does not know flags and terminals.
"""
