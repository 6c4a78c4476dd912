"""Training: recorded routing becomes what the papers' predictors know of a model, with numpy alone.

Promises: a training is repeated bit by bit by its seed and number of threads; requests that a
figure is about are never trained on; what is saved is whole, or the old file stays. Does not know
how a model is run or recorded, devices, and how results are displayed.
"""
