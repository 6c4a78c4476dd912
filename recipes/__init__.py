"""Recipes that made the models. They need not run again; see README.md.

Only their own tests import them.
"""
