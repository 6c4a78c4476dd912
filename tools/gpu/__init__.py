"""What tests and measurements on GPUs have in common: builds with a backend, the folder for a bare machine, steps.

`tools/vulkan_tests.py` and `tools/gpu_trial.py` are the commands.
"""
