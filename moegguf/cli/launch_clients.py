"""Coding agents and chat programs that `moegguf launch` supports, and the settings with
which each program uses a server.

No file of another program is changed. A program that reads settings from its
environment or its arguments receives them that way, for this start only. For other
programs the settings are printed, so that the user can add them to the program's own
settings. docs/clients.md has links to the documentation of each program.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

# Sent if the user has set no API key, since some programs require one.
NO_KEY = "moegguf"


@dataclass(frozen=True)
class Target:
    """A server and one of its models. `key` is an API key, NO_KEY if the user has set
    no key, or a placeholder for a key in printed settings."""

    url: str
    model: str
    key: str

    @property
    def openai_url(self) -> str:
        """Returns the base URL of the server's OpenAI API."""
        return f"{self.url}/v1"


@dataclass(frozen=True)
class Start:
    """The environment variables and arguments with which a program is started."""

    environment: dict[str, str]  # variables that are added to the program's environment
    arguments: tuple[str, ...] = ()  # command-line arguments


@dataclass(frozen=True)
class LaunchClient:
    """A program that can use a server. It has at least one of `start` and
    `settings`."""

    title: str
    command: str = ""
    # Returns the variables and arguments for a server.
    start: Callable[[Target], Start] | None = None
    # Returns instructions with the settings that the user must enter.
    settings: Callable[[Target], str] | None = None


def _claude(to: Target) -> Start:
    models = (
        "ANTHROPIC_MODEL",
        *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")),
    )
    access = {
        "ANTHROPIC_BASE_URL": to.url,
        "ANTHROPIC_AUTH_TOKEN": to.key,
        "ANTHROPIC_API_KEY": "",
    }
    return Start(access | dict.fromkeys(models, to.model))


def _codex(to: Target) -> Start:
    provider = {
        "name": "moegguf",
        "base_url": to.openai_url,
        "env_key": "MOEGGUF_LAUNCH_KEY",
        "wire_api": "responses",
    }
    settings = {"model": to.model, "model_provider": "moegguf"}
    settings |= {
        f"model_providers.moegguf.{name}": value for name, value in provider.items()
    }
    words = (
        word
        for name, value in settings.items()
        for word in ("-c", f"{name}={json.dumps(value)}")
    )
    return Start({"MOEGGUF_LAUNCH_KEY": to.key}, tuple(words))


def _opencode(to: Target) -> Start:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "moegguf",
        "options": {"baseURL": to.openai_url, "apiKey": to.key},
        "models": {to.model: {"name": to.model}},
    }
    config = {"model": f"moegguf/{to.model}", "provider": {"moegguf": provider}}
    return Start({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _aider(to: Target) -> Start:
    access = {"OPENAI_API_BASE": to.openai_url, "OPENAI_API_KEY": to.key}
    return Start(access, ("--model", f"openai/{to.model}"))


def _open_webui(to: Target) -> Start:
    return Start(
        {"OPENAI_API_BASE_URL": to.openai_url, "OPENAI_API_KEY": to.key}, ("serve",)
    )


def _cline(to: Target) -> str:
    return f"""\
In Cline's settings (the gear):
  API Provider  OpenAI Compatible
  Base URL      {to.openai_url}
  API Key       {to.key}
  Model ID      {to.model}
"""


def _continue(to: Target) -> str:
    return f"""\
In ~/.continue/config.yaml, below `models:`:
  - name: moegguf
    provider: ollama
    model: {json.dumps(to.model)}
    apiBase: {to.url}
    apiKey: {to.key}
"""


def _zed(to: Target) -> str:
    settings = {"language_models": {"ollama": {"api_url": to.url}}}
    return f"""\
In ~/.config/zed/settings.json (Zed finds the models there itself):
{json.dumps(settings, indent=2)}
The key is {to.key}. Enter it in Zed's settings of the provider Ollama,
or start Zed with OLLAMA_API_KEY={to.key}.
"""


def _vscode(to: Target) -> str:
    model = {
        "id": to.model,
        "name": to.model,
        "url": f"{to.openai_url}/chat/completions",
        "toolCalling": True,
        "vision": False,
        "maxInputTokens": 28672,
        "maxOutputTokens": 4096,
    }
    settings = {
        "name": "moegguf",
        "vendor": "customendpoint",
        "apiType": "chat-completions",
        "models": [model],
    }
    return f"""\
In VS Code: "Chat: Manage Language Models", Add, Custom Endpoint.
The key is {to.key}. Add the following entry to chatLanguageModels.json.
Both sizes together must not exceed the model's context:
{json.dumps(settings, indent=2)}
"""


CLIENTS = {
    "claude": LaunchClient("Claude Code", "claude", _claude),
    "codex": LaunchClient("Codex", "codex", _codex),
    "opencode": LaunchClient("OpenCode", "opencode", _opencode),
    "aider": LaunchClient("Aider", "aider", _aider),
    "open-webui": LaunchClient("Open WebUI", "open-webui", _open_webui),
    "cline": LaunchClient("Cline", settings=_cline),
    "continue": LaunchClient("Continue", settings=_continue),
    "zed": LaunchClient("Zed", settings=_zed),
    "vscode": LaunchClient("VS Code", settings=_vscode),
}
