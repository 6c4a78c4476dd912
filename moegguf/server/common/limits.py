"""Limits on requests, which the server checks before a request reaches a model.

The limits stop attacks that are known from other servers, such as huge headers, bodies
and counts.
"""

from __future__ import annotations

BODY_BYTES = 8 << 20
# Maximum bytes of a body that may contain images in base64.
IMAGES_BODY_BYTES = 32 << 20
# Maximum total bytes of the bodies of all unfinished requests.
ALL_BODIES_BYTES = 256 << 20
HEADER_BYTES = 16 << 10
JSON_VALUES = 1 << 17

READ_S = 60.0  # maximum seconds for a body to arrive; in an upload, the longest pause
PING_S = 15.0  # seconds between the lines that keep an event stream open

MESSAGES = 4096
TOOLS = 256
STOPS = 64
STOP_CHARS = 1024
INPUTS = 2048
CHOICES = 128  # maximum number of answers to one prompt
NAME_CHARS = 512

FORM_FIELDS = 16  # maximum number of form fields, not counting the file
FORM_PART_BYTES = 4 << 10  # maximum bytes of each form field, except the file
FILE_NAME_CHARS = 255
