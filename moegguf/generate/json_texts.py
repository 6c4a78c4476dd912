"""How JSON, and texts of some formats in it, are written: bodies of grammar rules (GBNF)."""

from __future__ import annotations

SPACE = '(" " | "\\n" [ \\t]{0,20})?'
HEX = "[0-9a-fA-F]"
# no half of a surrogate pair, which is no text
CHARACTER = (
    r'[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2}))'
)
WHOLE = '"-"? ("0" | [1-9] [0-9]{0,15})'
NUMBER = f'{WHOLE} ("." [0-9]{{1,15}})? ([eE] [-+]? [0-9]{{1,2}})?'
DATE = (
    '[0-9]{4} "-" (("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])'
    ' | ("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30") | "02-" ("0" [1-9] | [12] [0-9]))'
)
TIME = (
    '("0" [0-9] | "1" [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,6})?'
    ' ("Z" | [-+] ("0" [0-9] | "1" [0-4]) ":" [0-5] [0-9])'
)
BYTE = '("25" [0-5] | "2" [0-4] [0-9] | "1" [0-9] [0-9] | [1-9] [0-9] | [0-9])'
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f'{DATE} "T" {TIME}',
    "uuid": f'{HEX}{{8}} "-" {HEX}{{4}} "-" {HEX}{{4}} "-" {HEX}{{4}} "-" {HEX}{{12}}',
    "ipv4": f'{BYTE} "." {BYTE} "." {BYTE} "." {BYTE}',
    "email": (
        '[a-zA-Z0-9] [a-zA-Z0-9._+-]{0,62} "@" [a-zA-Z0-9] [a-zA-Z0-9-]{0,62} ("." [a-zA-Z] [a-zA-Z0-9-]{1,62}){1,3}'
    ),
}

ESCAPED = ['"', "\\", "\x7f", "\x00\x1f"]
"""Characters and ranges that a JSON string does not have as they are."""
