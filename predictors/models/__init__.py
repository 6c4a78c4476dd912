"""Questions to the demo model: `quiz_demo.py` counts right answers. `recipes/` holds the training."""
