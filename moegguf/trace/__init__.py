"""Recorded routing: its file format, its recorder, replays of it, and what can be concluded from it.

Promises: a replay makes the same lookups, hits, misses and evictions as the live run that was recorded, by calling the
same store and the same controller; a damaged file is a TraceError; a predictor is scored beside a control on the same
trace without order. Does not know how a model is run or how results are displayed.
"""
