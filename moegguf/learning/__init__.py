"""Training: recorded routing becomes the arrays of the papers' predictors, with numpy alone.

Promises: a training is repeated bit by bit by its seed and number of threads. Requests that a
figure is about are never trained on. A saved file is whole, or the old file stays. Does not know
how a model is run or recorded, devices, and how results are displayed.
"""
