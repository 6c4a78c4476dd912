"""Loaded models, each in its own worker process, and the scheduling of requests over
them.

Promises: an abort in native code kills only the worker process in which it happens. Its
requests are repeated, or end with a clear error. Unloading a model stops its process.
The answers to one client from one model start in the order in which their requests
arrived. No request interrupts another request's answer. A model is loaded only if its
planned memory fits alongside the other models. To make room, idle models are unloaded
in the order of their last use. A cancelled answer ends after the current pass at the
latest. A batch keeps its finished answers when its process is killed. This package
contains processes, queues, budgets, requests and batches. It does not know about
terminals or HTTP servers.
"""
