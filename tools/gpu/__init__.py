"""Code for tests and measurements on GPUs: builds with a GPU backend, folders to copy to another machine, steps.

`tools/vulkan_tests.py`, `tools/gpu_trial.py` and `tools/gpu/short_run.sh` are the commands.
"""
