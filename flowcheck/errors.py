"""Errors that end a command: one line for a person, one exit status for a script."""

from __future__ import annotations


class FlowcheckError(Exception):
    """A failure that flowcheck can explain. The message is one line: what went wrong and what to do."""

    exit_code = 1


class UsageError(FlowcheckError):
    """The command was called with options that do not fit together."""

    exit_code = 2


class NothingRestorable(FlowcheckError):
    """No whole step of the asked run, epoch or step number exists."""

    exit_code = 3


class Revoked(FlowcheckError):
    """A step that was being read is no longer held: its memory is needed. Asking again gives a newer one."""


class VerificationFailed(FlowcheckError):
    """Stored bytes differ from their checksums, or files are missing."""

    exit_code = 4


class NoPermission(FlowcheckError):
    """The operating system refused a capture socket, a namespace or a file."""

    exit_code = 77


class BadConfig(FlowcheckError):
    """A configuration file or job file has a field that cannot be used."""

    exit_code = 78
