"""Trains the papers' predictors on recorded routing, with numpy alone.

Promises: a training with the same seed and number of threads gives the same bits each time. Requests from which a
published figure is computed are never used for training. Saving writes a complete file or leaves the old file
unchanged. This package does not know devices, how a model is run or recorded, or how results are displayed.
"""
