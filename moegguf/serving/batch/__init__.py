"""Batches of requests in OpenAI's batch file format: read, answered and stored so that a killed process loses nothing.

Promises: each request gets one line with an answer, however often the process is killed. A line that is not a valid
request only makes an error for this line. The caller supplies the function that answers a request. Does not know HTTP
or terminals.
"""
