"""Recipes that make the models: the bundled demo and the laboratory model. README.md
describes them.

Apart from tests, no other package imports them. `predictors.study.regenerate` runs
recipes.make_lab_model if the laboratory model is missing.
"""
