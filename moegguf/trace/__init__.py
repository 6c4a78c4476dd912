"""Recorded routing (traces): the file format, the recorder, replays, and Belady's bound.

Promises: a replay uses the same classes of store and controller as a live run. With the policy, predictor and slots of
the live run, it makes the same lookups, hits, misses and evictions. The live run must have had the option `lockstep`,
or a native policy and no predictions. A damaged file raises TraceError. This package does not know how a model is run
or how results are displayed.
"""
