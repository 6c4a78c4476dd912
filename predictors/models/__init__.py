"""Tests of the demo model: `quiz_demo.py` asks it questions and counts the right answers. The code that trains it is in
`recipes/`."""
