"""The exceptions of moegguf's public interface.

All exceptions in this module have the base class `MoeggufError`. Most of them also
inherit the builtin exception that a caller would expect (`ValueError`, `OSError`, ...).
A message usually states the rule, the value that broke the rule, and the next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoeggufError(Exception):
    """Base class of moegguf's public exceptions."""


class ModelNotFoundError(MoeggufError, FileNotFoundError):
    """A model or one of its files is missing or cannot be read, or a name or path
    matches several models. `hint` is the part of the message that states the next step,
    or "" if that part was not passed separately."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ModelFormatError(MoeggufError, ValueError):
    """A GGUF file breaks a rule of the format, or has contents that do not fit its use,
    for example as a projector."""


class BudgetError(MoeggufError, ValueError):
    """A memory budget cannot be parsed, is too small or too large, or does not fit this
    model or machine."""


class OptionError(MoeggufError, TypeError):
    """An option does not exist or has a value that is not allowed."""

    @classmethod
    def unknown(
        cls,
        name: str,
        known: Iterable[str],
        listed: str = "see help(moegguf.Llama) for the list.",
        what: str = "option",
    ) -> OptionError:
        """Returns the error for an unknown option. The message suggests the most
        similar name in `known`. If no name is similar, the message ends with
        `listed`, which lists all names or says where they are listed."""
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else listed
        return cls(f"unknown {what} {name!r}; {hint}")


class TraceError(MoeggufError, ValueError):
    """A routing trace, or another file with routing, is damaged or incomplete, or
    belongs to another version or model."""


class LibraryError(MoeggufError, RuntimeError):
    """A native library is missing, cannot be built or loaded, or failed during
    computation. Or another package's `llama_cpp` was imported before moegguf."""


class ExpertIOError(MoeggufError, OSError):
    """Reading a model's file failed, during a load or when an expert was needed. Or the
    file was written to or replaced while the model was loaded."""


class AllocationError(MoeggufError, MemoryError):
    """There is not enough memory, a compute thread could not be created, or a process
    that measures speeds failed."""


class ClosedError(MoeggufError, ValueError):
    """A model, an engine or an expert store was used after it was closed. Or it was
    closed before a request was answered."""


class ForkError(MoeggufError, RuntimeError):
    """The model was used in a child made by fork(); load it again there, or start the
    child with spawn."""


class GenerationCancelled(MoeggufError):  # noqa: N818 (a requested state, not an error)
    """Generation or loading was stopped early, either by the caller or because another
    request began on the same model."""


class CallbackError(MoeggufError, RuntimeError):
    """A user's callback, policy or predictor failed, or used the model that was waiting
    for it. If a callback raised an exception, that exception is the `__cause__`."""


class ModelNameError(MoeggufError, ValueError):
    """A string is not a valid model name, or not a valid file digest."""


class PullError(MoeggufError, OSError):
    """A model could not be fetched or removed, for example because a request to a model
    hub failed or the disk is full. A repeated download continues after the received
    bytes, unless these bytes were wrong."""


class TemplateError(MoeggufError, ValueError):
    """A chat template cannot be used: for example it fails, takes too long, produces
    too much text, or leaves out an image."""


class ContextError(MoeggufError, ValueError):
    """A prompt or another input has more tokens than fit in the context, or than the
    model can read at once."""


class SchemaError(MoeggufError, ValueError):
    """A JSON schema, a grammar or a tool's definition is invalid, too large or not
    supported."""


class CapabilityError(MoeggufError, ValueError):
    """A model, or the way it was loaded, lacks a requested capability, such as calling
    tools."""


class BusyError(MoeggufError, RuntimeError):
    """A file, a model or the server is busy, or the server is shutting down; a later
    attempt may succeed."""


# Ollama's error text.
QUEUE_IS_FULL = "server busy, please try again.  maximum pending requests exceeded"


class QueueFullError(BusyError):
    """The request queue is full. `retry_after_s` is the number of seconds after which
    the queue may have room again."""

    def __init__(self, message: str = QUEUE_IS_FULL, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerError(MoeggufError, RuntimeError):
    """A process that holds a model could not be started, has exited, made no progress
    with a load, or sent an invalid message."""


class DeviceLostError(WorkerError):
    """A GPU failed while it ran a model, and the worker process that held the model
    exited. The next request reloads the model without the GPUs on which the model
    ran."""


class BatchFileError(MoeggufError, ValueError):
    """A batch's request file or answer file cannot be used. For example, it cannot be
    read, or the answers belong to other requests."""


class StorageError(MoeggufError, OSError):
    """A file or database cannot be written, for example because the disk is full or a
    limit is reached. Or a database is damaged, or was written by a newer moegguf."""


class UnknownIdError(MoeggufError, LookupError):
    """No stored file, batch, response or slot has this id."""
