"""The controller: decides which experts to keep and which to fetch ahead, from what the router chose so far.

Promises: every predictor and policy is numpy over gates, the same objects live and in simulation; nothing it does,
fails to do or does late changes a token; each prediction can be judged without acting on it.
It does not know devices, ctypes, llama.cpp, or who asked. It hears gates and answers with scores (the lowest is
evicted first) and with experts to fetch ahead.
"""
