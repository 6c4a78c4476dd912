"""Recorded routing: file format, recorder and replays, with Belady's bound.

Promises: a replay makes the lookups, hits, misses and evictions of the live run that was recorded, because it calls the
same store and the same controller. A damaged file is a TraceError. Does not know how a model is run or how results are
displayed.
"""
