"""Tests of the demo model: `quiz_demo.py` sends it questions and counts the right
answers.

The code that trains the model is in `recipes/`.
"""
