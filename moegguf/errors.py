"""Every error moegguf raises on purpose.

All errors have the base class `MoeggufError`. Each kind of error has a subclass, which also inherits the builtin error
that a caller would expect (`ValueError`, `OSError`, ...). A message states the rule, the value that broke it and the
next step. Only the frontends print messages.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoeggufError(Exception):
    """Base of all errors that moegguf raises on purpose."""


class ModelNotFoundError(MoeggufError, FileNotFoundError):
    """There is no model with this name, or no file at this path. `hint` is only the next step, without the reason."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ModelFormatError(MoeggufError, ValueError):
    """The GGUF file breaks a rule of the format; the message has the key or tensor, and the offset."""


class BudgetError(MoeggufError, ValueError):
    """The expert budget cannot be read or is too small; the message lists what is accepted."""


class OptionError(MoeggufError, TypeError):
    """An option does not exist or has a value that is not allowed."""

    @classmethod
    def unknown(
        cls, name: str, known: Iterable[str], listed: str = "help(moegguf.Llama)", what: str = "option"
    ) -> OptionError:
        """Returns the error for an unknown option. The message has the most similar known name, or the place where all
        names are listed."""
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"see {listed} for the list."
        return cls(f"unknown {what} {name!r}; {hint}")


class TraceError(MoeggufError, ValueError):
    """A routing trace is damaged, or belongs to another version or model. The message states the difference."""


class LibraryError(MoeggufError, RuntimeError):
    """The native library is missing, is built for another processor, or failed to compute. Or `llama_cpp` of another
    package was imported before moegguf."""


class ExpertIOError(MoeggufError, OSError):
    """Reading a model's file failed during a load, or reading an expert failed even after a retry. In the second case
    only the request that needed the expert fails."""


class AllocationError(MoeggufError, MemoryError):
    """Memory could not be allocated, a thread could not be created, or a measuring process failed."""


class ClosedError(MoeggufError, ValueError):
    """The model was used after close()."""


class ForkError(MoeggufError, RuntimeError):
    """The model was used in a child made by fork(); load it again there, or start the child with spawn."""


class GenerationCancelled(MoeggufError):  # noqa: N818 (a requested state, not an error)
    """Generation was stopped on request, before it was finished."""


class CallbackError(MoeggufError, RuntimeError):
    """A callback of the user raised an exception, which is the `__cause__`. Or the callback called the model that waits
    for it."""


class ModelNameError(MoeggufError, ValueError):
    """The text is not a valid name of a model."""


class PullError(MoeggufError, OSError):
    """A download has failed; received bytes are kept and the same call continues from there."""


class TemplateError(MoeggufError, ValueError):
    """A chat template cannot be used: it fails, takes too long or writes too much."""


class ContextError(MoeggufError, ValueError):
    """A prompt has more tokens than the context holds."""


class SchemaError(MoeggufError, ValueError):
    """A JSON schema or grammar is invalid or not supported."""


class CapabilityError(MoeggufError, ValueError):
    """The model lacks a requested capability, such as calling tools."""


class BusyError(MoeggufError, RuntimeError):
    """A file, a model or the server is in use or about to end; try again later."""


QUEUE_IS_FULL = "server busy, please try again.  maximum pending requests exceeded"  # text of Ollama's error


class QueueFullError(BusyError):
    """The queue of requests is full. `retry_after_s` is the number of seconds after which it may have room again."""

    def __init__(self, message: str = QUEUE_IS_FULL, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerError(MoeggufError, RuntimeError):
    """A worker process has ended or does not respond. Only requests to this process have failed."""


class DeviceLostError(WorkerError):
    """A GPU failed while a model computed on it, which ended the worker process. The next request loads the model again
    without this GPU."""


class BatchFileError(MoeggufError, ValueError):
    """The file of requests or the answers of a batch cannot be used: the format is wrong, the answers belong to other
    requests, or another process uses them."""


class StorageError(MoeggufError, OSError):
    """A file cannot be stored, because the disk is full or the server's limit is reached. Stored files are not lost."""


class UnknownIdError(MoeggufError, LookupError):
    """No stored file or batch has this id."""
