"""Trains the papers' predictors on recorded routing, with numpy alone.

Promises: the same seed and number of threads repeat a training bit by bit. Requests from which a published figure is
computed are never used for training. Saving writes a complete file or leaves the old file unchanged. This package does
not know devices, how a model is run or recorded, or how results are displayed.
"""
