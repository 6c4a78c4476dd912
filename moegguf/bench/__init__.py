"""Measurements: one system in a process of its own, several in turns under the same limits, and rows of results.

Promises: load, prompt and generation are timed apart, as llama-bench does; systems that are compared run interleaved
under the same memory limit, with a cold page cache where that is asked for, and their tokens are compared.
Does not know how rows are displayed.
"""
