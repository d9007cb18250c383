"""BrokenAnswerError: what a reader of a server's answer raises, for a provider to put into its own words."""

from __future__ import annotations

__all__ = ["BrokenAnswerError"]


class BrokenAnswerError(ValueError):
    """A server's answer has broken off, or cannot be read; the message says how, and belongs behind the server's name.

    `reported` is the error object of the server, where it sent one. `is_transient`: the same request may succeed later.
    """

    def __init__(self, message: str, *, reported: object = None, is_transient: bool = False) -> None:
        super().__init__(message)
        self.reported = reported
        self.is_transient = is_transient
