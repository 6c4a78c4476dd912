"""Trains the predictors of published papers, such as ProMoE and ExpertFlow, on recorded
routing with numpy.

Promises: training on the same machine with the same trace, options and number of
threads gives bit-identical results. Requests that are used to evaluate a predictor are
never used to train it. Saving writes a complete file or leaves the old file unchanged.
This package does not know about GPUs, or how a model is run, how a trace is recorded,
or how results are displayed.
"""
