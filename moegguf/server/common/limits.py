"""Limits of a request: every number, length and depth is bounded before it reaches a model.

Chosen against known attacks on other servers: huge headers, gzip bombs, deep JSON, unbounded counts.
"""

from __future__ import annotations

BODY_BYTES = 8 << 20
IMAGES_BODY_BYTES = 32 << 20  # body of a request that may have images as base64
ALL_BODIES_BYTES = 256 << 20  # bodies of all requests that are read, wait or are answered
HEADER_BYTES = 16 << 10
JSON_VALUES = 1 << 17

READ_S = 60.0  # time for a body to arrive
PING_S = 15.0  # time between two comments that keep an idle event stream open

MESSAGES = 4096
TOOLS = 256
STOPS = 64
STOP_CHARS = 1024
INPUTS = 2048
CHOICES = 128  # answers to one prompt
NAME_CHARS = 512

FORM_FIELDS = 16  # fields of a form, without its file
FORM_PART_BYTES = 4 << 10  # bytes of each field
FILE_NAME_CHARS = 255
