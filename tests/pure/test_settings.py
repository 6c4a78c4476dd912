"""Tests environment variables of servers and loads, refused values, the table of
options, and its printed page."""

import dataclasses
import inspect
import math
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from moegguf import Llama
from moegguf.errors import OptionError
from moegguf.options import (
    GROUPS,
    OF_COMMANDS,
    OF_EVERY_LOAD,
    OPTIONS,
    load_options_of,
    page,
)
from moegguf.quantities import parse_duration
from moegguf.settings import (
    Environment,
    Host,
    Settings,
    parse_host,
    parse_option,
    read_load_keywords,
    read_settings,
)

# The cases of ollama-python's _parse_host, followed by forms that it does not list.
HOSTS = [
    (None, "http://127.0.0.1:11434"), ("", "http://127.0.0.1:11434"), ("1.2.3.4", "http://1.2.3.4:11434"),
    (":56789", "http://127.0.0.1:56789"), ("1.2.3.4:56789", "http://1.2.3.4:56789"),
    ("http://1.2.3.4", "http://1.2.3.4:80"), ("https://1.2.3.4", "https://1.2.3.4:443"),
    ("example.com", "http://example.com:11434"), ("example.com/", "http://example.com:11434"),
    ("example.com/path", "http://example.com:11434/path"),
    ("https://example.com:56789/path", "https://example.com:56789/path"),
    ("[0001:002:003:0004::1]", "http://[0001:002:003:0004::1]:11434"),
    ("http://[0001:002:003:0004::1]", "http://[0001:002:003:0004::1]:80"),
    ("[0001:002:003:0004::1]:56789/path", "http://[0001:002:003:0004::1]:56789/path"),
    ("::1", "http://[::1]:11434"), ("[::1]", "http://[::1]:11434"), ("  localhost  ", "http://localhost:11434"),
    ("HTTP://Example.COM", "http://example.com:80"), ("http://:8080", "http://127.0.0.1:8080"),
    (":0", "http://127.0.0.1:0"), ("0.0.0.0", "http://0.0.0.0:11434"),
]  # fmt: skip

BAD_HOSTS = [
    "ftp://x", "a:99999", "a:-1", "a:port", "a b", "http://[::1", "a\nb", "tcp://1.2.3.4:1", "user:secret@host",
    "http://user:secret@host", "host?a=b", "http://host/#part",
    "https://user:s@/secret @host:1", "http://me:se cret@host",
]  # fmt: skip


@pytest.mark.parametrize(("text", "url"), HOSTS)
def test_parse_host_returns_the_url_of_an_address(text: str | None, url: str) -> None:
    assert parse_host(text).url == url


@pytest.mark.parametrize("text", BAD_HOSTS)
def test_parse_host_rejects_other_texts_and_hides_passwords(text: str) -> None:
    with pytest.raises(OptionError, match="not an address") as error:
        parse_host(text)
    assert "secret" not in str(error.value) and "cret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("", True), ("localhost:1", True), ("LOCALHOST", True), ("127.0.0.2", True), ("[::1]", True),
        ("0.0.0.0", False), ("[::]", False), ("192.168.0.1", False), ("example.com", False),
        ("localhost.evil.com", False),
    ],
)  # fmt: skip
def test_is_loopback_is_true_only_for_local_addresses(
    text: str, loopback: bool
) -> None:
    assert parse_host(text).is_loopback is loopback


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0), ("0", 0), (300, 300), ("300", 300), (1.5, 1.5), ("1.5", 1.5), ("5m", 300), ("1h30m", 5400),
        ("300ms", 0.3), ("1.5h", 5400), (".5s", 0.5), ("+5s", 5), ("2us", 2e-6), ("2µs", 2e-6), ("7ns", 7e-9),
        ("1h1m1s", 3661), (" 5m ", 300), ("0s", 0),
        (-1, math.inf), ("-1", math.inf), ("-1m", math.inf), (-0.5, math.inf), (math.inf, math.inf),
        (1e30, math.inf), (10**400, math.inf), ("9999999h", math.inf),
    ],
)  # fmt: skip
def test_parse_duration_reads_numbers_and_units(value: Any, seconds: float) -> None:
    assert parse_duration(value) == pytest.approx(seconds)
    assert isinstance(parse_duration(value), float)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "m",
        "5 m",
        "1e3",
        "5min",
        "5m-1s",
        "--5",
        "0x10",
        "٣m",
        "9" * 400,
        math.nan,
        True,
        None,
        [],
        {},
    ],
)
def test_parse_duration_rejects_other_values(value: Any) -> None:
    with pytest.raises(OptionError, match="not a duration"):
        parse_duration(value)


def test_default_settings_match_ollama_and_placement_rejects_other_words() -> None:
    settings = read_settings({})
    assert settings == Settings()
    assert settings.host == Host("http", "127.0.0.1", 11434)
    assert (settings.keep_alive_s, settings.max_queue, settings.load_timeout_s) == (
        300,
        512,
        300,
    )
    assert (
        read_load_keywords(environ={})
        == read_load_keywords(commands=True, environ={"OLLAMA_NUM_PARALLEL": "0"})
        == {}
    )
    assert read_load_keywords(environ={"MOEGGUF_PLACEMENT": " Slots "}) == {
        "placement": "slots"
    }
    wanted = "MOEGGUF_PLACEMENT: 'guess' must be one of auto, layers, slots, slots-mapped, cpu"
    with pytest.raises(OptionError, match=wanted):
        read_load_keywords(environ={"MOEGGUF_PLACEMENT": "guess"})


def test_load_variables_set_keywords_for_commands_only() -> None:
    given = {
        "CONTEXT_LENGTH": ("8192", {"n_ctx": 8192}),
        "NUM_PARALLEL": ("4", {"n_seq_max": 4}),
        "KV_TOKENS": ("9000", {"kv_tokens": 9000}),
        "KV_CACHE_TYPE": ("Q8_0", {"type_k": "q8_0", "type_v": "q8_0"}),
        "FLASH_ATTENTION": ("0", {"flash_attn": False}),
    }
    for name, (text, keywords) in given.items():
        for prefix in ("OLLAMA", "MOEGGUF"):
            environ = {f"{prefix}_{name}": text}
            assert read_load_keywords(commands=True, environ=environ) == keywords
            assert read_load_keywords(environ=environ) == {}
    assert read_load_keywords(environ={"OLLAMA_EXPERT_CACHE": "50%"}) == {}


def test_every_variable_is_read_with_both_prefixes() -> None:
    given = {
        "HOST": ("0.0.0.0:80", "host", Host("http", "0.0.0.0", 80)),
        "KEEP_ALIVE": ("-1", "keep_alive_s", math.inf),
        "ORIGINS": ("http://a, app://*,", "origins", ("http://a", "app://*")),
        "MAX_LOADED_MODELS": ("2", "max_models", 2),
        "MAX_QUEUE": ("7", "max_queue", 7),
        "LOAD_TIMEOUT": ("90", "load_timeout_s", 90),
        "MEMORY": ("8GiB", "memory_bytes", 8 << 30),
        "DEBUG": ("2", "debug", True),
        "NOHISTORY": ("true", "history", False),
        "API_KEY": ("k,l\nm", "api_keys", ("k", "l", "m")),
        "SHARE_CONTEXTS": ("1", "share_contexts", True),
        "THINK_BUDGET": ("-1", "reasoning_budget_tokens", -1),
        "THINK_BUDGET_MESSAGE": ("Enough.", "reasoning_budget_message", "Enough."),
        "BATCH_PARALLEL": ("3", "batch_parallel", 3),
        "BATCH_WINDOW": ("-1", "batch_window_s", math.inf),
        "RESPONSES_AGE": ("0", "responses_age_s", 0.0),
        "UPLOAD_LIMIT": ("1MiB", "upload_bytes", 1 << 20),
        "STORAGE_LIMIT": ("1GiB", "storage_bytes", 1 << 30),
        "TRUST_NETWORK": (
            "10.0.0.0/8,::1",
            "trusted",
            (ip_network("10.0.0.0/8"), ip_network("::1")),
        ),
    }
    for name, (text, field, value) in given.items():
        assert getattr(read_settings({f"OLLAMA_{name}": text}), field) == value, name
        both = read_settings({f"MOEGGUF_{name}": text, f"OLLAMA_{name}": "nonsense"})
        assert getattr(both, field) == value, name
    assert (
        read_settings({"MOEGGUF_MAX_QUEUE": " ", "OLLAMA_MAX_QUEUE": '"9"'}).max_queue
        == 9
    ), "empty is unset"
    assert read_settings({"OLLAMA_LOAD_TIMEOUT": "0"}).load_timeout_s == math.inf
    assert "k3y" not in repr(read_settings({"OLLAMA_API_KEY": "k3y"})), (
        "the key is in no text"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MAX_QUEUE", "many"), ("MAX_QUEUE", "-1"), ("MAX_QUEUE", "9" * 20), ("KV_CACHE_TYPE", "q1"), ("DEBUG", "loud"),
        ("FLASH_ATTENTION", "maybe"), ("KEEP_ALIVE", "soon"), ("MEMORY", "much"), ("MEMORY", "0"), ("HOST", "ftp://x"),
        ("CONTEXT_LENGTH", "1e9"), ("LOAD_TIMEOUT", "x"), ("BATCH_PARALLEL", "0"), ("UPLOAD_LIMIT", "0"),
        ("THINK_BUDGET", "-2"),
    ],
)  # fmt: skip
def test_wrong_value_raises_option_error_with_the_variable(
    name: str, text: str
) -> None:
    environ = {f"OLLAMA_{name}": text}
    with pytest.raises(OptionError, match=f"OLLAMA_{name}"):
        (read_settings(environ), read_load_keywords(commands=True, environ=environ))


ROOT = Path(__file__).resolve().parents[2]


def test_options_table_has_every_setting_and_prints_the_options_page() -> None:
    text = (ROOT / "docs" / "options.md").read_text()
    assert text == "\n".join(page()) + "\n", (
        "run `python -m moegguf.options > docs/options.md`"
    )
    *most, last = (f"MOEGGUF_{OPTIONS[name].variable}" for name in OF_COMMANDS)
    of_commands = f"{', '.join(most)} and {last}"
    assert f"The variables {of_commands} apply only in commands and servers." in text
    fields = {
        field.name
        for kind in (Environment, Settings)
        for field in dataclasses.fields(kind)
    }
    of_loading = {*OF_EVERY_LOAD, *OF_COMMANDS}
    known = fields - {"loading"} | of_loading | {"log"}
    assert known == {option.name for option in OPTIONS.values() if option.variable}
    assert all(option.group in GROUPS for option in OPTIONS.values())
    assert not fields & of_loading
    taken = {
        name
        for base in Llama.__mro__
        for name in inspect.signature(base.__init__).parameters
    }
    flags = {
        option.name
        for option in OPTIONS.values()
        if option.scope == "load" and option.flags
    }
    assert flags <= taken


@pytest.mark.parametrize("kind", [Environment, Settings])
def test_defaults_in_the_options_table_are_the_defaults_of_settings(
    kind: type[Environment] | type[Settings],
) -> None:
    # The table describes how a default of None or "" is chosen later.
    defaults = {
        name: default
        for name, default in vars(kind()).items()
        if name in OPTIONS and default not in (None, "")
    }
    assert defaults == {
        name: parse_option(name, OPTIONS[name].default, name) for name in defaults
    }


@pytest.mark.parametrize(
    ("num_gpu", "expected"),
    [(None, {}), (-1, {}), (0, {"n_gpu_layers": 0}), (7, {"n_gpu_layers": 7})],
)
def test_load_options_has_no_unset_parameters_but_num_gpu_0(
    num_gpu: int | None, expected: dict[str, int]
) -> None:
    given = {
        "num_ctx": 0,
        "num_thread": None,
        "expert_cache": "",
        "temperature": 1.0,
        "draft": "off",
        "num_gpu": num_gpu,
    }
    assert load_options_of(given) == {"draft": "off", **expected}
