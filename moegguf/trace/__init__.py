"""Recorded routing (traces): the file format, the recorder, replays, and Belady's
bound.

Promises: a replay uses the same classes of store and controller as a live run. With the
live run's policy, predictor and slots, a replay has the same lookups, hits, misses and
evictions. The live run must have had the option `lockstep`, or a native policy and no
predictions. Reading a damaged file raises TraceError. This package does not know how a
model is run or how results are displayed.
"""
