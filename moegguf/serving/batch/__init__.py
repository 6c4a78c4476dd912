"""Batches of requests in OpenAI's batch file format: read, answered and stored so that
answers survive a killed process.

Promises: after a kill, only requests without a stored answer are resent. The lines of a
batch's answers are in the order of its requests. The caller supplies the function that
answers a request. This package handles neither HTTP connections nor terminals.
"""
