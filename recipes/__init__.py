"""Recipes that made a model and need not run again: see README.md. Nothing imports them except their own tests."""
