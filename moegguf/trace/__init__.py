"""Recorded routing: file format, recorder and replays, with Belady's bound.

Promises: a replay makes the same lookups, hits, misses and evictions as the live run that was recorded, by calling the
same store and the same controller; a damaged file is a TraceError. Does not know how a model is run or how results are
displayed.
"""
