"""Recorded routing (traces): the file format, the recorder, replays, and Belady's bound.

Promises: a replay makes the same lookups, hits, misses and evictions as the live run that was recorded, because it uses
the same store and the same controller. A damaged file raises TraceError. This package does not know how a model is run
or how results are displayed.
"""
