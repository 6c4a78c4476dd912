"""Code for tests and measurements on GPUs: builds with a GPU backend, folders to copy
to another machine, and the steps of trials.

The main commands are `tools/vulkan_tests.py`, `tools/gpu_trial.py` and
`tools/gpu/short_run.sh`.
"""
