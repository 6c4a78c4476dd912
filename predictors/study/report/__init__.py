"""One HTML page with everything measured about a recorded routing: `python -m predictors.study.report`."""
