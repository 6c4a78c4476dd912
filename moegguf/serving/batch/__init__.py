"""Batches of requests in OpenAI's batch file format: read, answered and stored so that a killed process loses nothing.

Promises: each request has one line of answer, however often the process is killed; a line that is no request is an
error of that line. Whoever runs a batch gives the function from (url, body) to (status, body). Does not know HTTP or
terminals.
"""
