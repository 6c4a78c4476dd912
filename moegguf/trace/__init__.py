"""Recorded routing: file format, recorder, replays, statistics and reports.

Promises: a replay makes the same lookups, hits, misses and evictions as the live run that was recorded, by calling the
same store and the same controller; a damaged file is a TraceError; a predictor is scored with a control on the same
trace shuffled in time. Does not know how a model is run or how results are displayed.
"""
