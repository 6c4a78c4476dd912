"""Trains the predictors of published papers, such as ProMoE and ExpertFlow, on recorded routing with numpy.

Promises: training with the same seed and number of threads gives bit-identical results. Requests that are used to
evaluate a predictor are never used to train it. Saving writes a complete file or leaves the old file unchanged. This
package does not know about devices, or about how a model is run or recorded, or how results are displayed.
"""
