"""The error tree. Each error is one line for its reader: what is wrong and what to do about it.

`exit_code` is what the command line ends with (2 for bad input, 1 for the rest), `http_status` what the server answers,
`code` the machine-readable name in an OpenAI error body.
"""

from __future__ import annotations


class RimuruError(Exception):
    """Base of all errors that a user may see."""

    exit_code = 1
    http_status = 500
    code = "internal_error"


class BadInputError(RimuruError):
    """The user's input (option, file, request) cannot be used."""

    exit_code = 2
    http_status = 400
    code = "invalid_request_error"


class FileFormatError(BadInputError):
    """A file is damaged, cut off, hostile, or not of the expected kind."""

    code = "bad_model_file"


class UnsupportedModelError(BadInputError):
    """A sound file that this version cannot run: architecture, quantisation type, tokenizer."""

    code = "unsupported_model"


class ContextLengthError(BadInputError):
    """The prompt does not fit in the context."""

    code = "context_length_exceeded"


class NotEnoughMemoryError(BadInputError):
    """The memory budget cannot hold what was asked for."""

    http_status = 503
    code = "not_enough_memory"


class AuditError(RimuruError):
    """A structure found its own invariants broken. Always a fault of the engine, never of the user."""


class StoreReadError(RimuruError):
    """Expert weights could not be read from disk, or their checksum is wrong."""

    exit_code = 2
    http_status = 503
    code = "store_read_error"


class LostPagesError(RimuruError):
    """What a request had written, or was to begin with, did not come to its pages; it has to be run again."""


class QueueFullError(RimuruError):
    """Too many requests are waiting."""

    http_status = 429
    code = "queue_full"
