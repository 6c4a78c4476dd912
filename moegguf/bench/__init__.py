"""Runs benchmarks and turns their results into table rows. Also records traces.

Promises of a series of runs (`moegguf bench` without --preset): load, prompt and
generation are timed separately, as in llama-bench, except in measurements of drafts.
Systems in a comparison run in turns, and each run has its own process, under the same
memory limit if one is set. The page cache is cold by default, and the systems' tokens
are compared. This package does not know how flags are parsed.
"""
