"""The command line, and what commands of other distributions share with the core's own."""

from __future__ import annotations

from ._alone import ended_with
from ._configured import key_fields
from ._files import temporary_folder
from ._main import main
from ._output import CodedError, json_option, print_json
from ._plots import drawing, picture_path
from ._values import Number, pair, seconds
from ._words import duration, size

__all__ = [
    "CodedError",
    "Number",
    "drawing",
    "duration",
    "ended_with",
    "json_option",
    "key_fields",
    "main",
    "pair",
    "picture_path",
    "print_json",
    "seconds",
    "size",
    "temporary_folder",
]
