"""Tests of the demo model: `quiz_demo.py` asks questions and counts right answers. `recipes/` holds the training."""
