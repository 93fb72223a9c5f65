"""Every error that GreedySnake raises on purpose.

    GreedySnakeError
    ├── ConfigError     a value the user gave cannot work
    ├── PlanError       the plan does not fit into the memory or disk it was given
    ├── StorageError    a file, directory or drive did not do what was asked
    ├── VerifyError     a schedule breaks a rule that training depends on
    ├── RankError       another process of the same training failed or is gone
    └── OpError         an operation of a step failed for any other reason

A message says what happened, with the values, and what to do next.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path


class GreedySnakeError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(GreedySnakeError):
    """A value the user gave cannot work."""


class PlanError(GreedySnakeError):
    """The plan does not fit into the memory or disk it was given."""


class StorageError(GreedySnakeError):
    """A file, directory or drive did not do what was asked.

    `path`, `offset`, `wanted`, `got` and `errno_name` are set when one transfer failed, else None.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        wanted: int | None = None,
        got: int | None = None,
        errno_name: str | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.wanted = wanted
        self.got = got
        self.errno_name = errno_name


class VerifyError(GreedySnakeError):
    """A schedule breaks a rule that training depends on; the message names the op and the rule."""


class RankError(GreedySnakeError):
    """Another process of the same training failed or is gone; the message says which, and what it said if it could.

    `is_gone` is true when it does not answer any more; else it goes on, and all can make another call.
    """

    def __init__(self, message: str, *, is_gone: bool = False) -> None:
        super().__init__(message)
        self.is_gone = is_gone


class OpError(GreedySnakeError):
    """An operation of a step failed; `op` is its printed name."""

    def __init__(self, message: str, *, op: str) -> None:
        super().__init__(message)
        self.op = op

    def __reduce__(self) -> tuple[Callable[..., OpError], tuple[object, ...]]:
        """So that it reaches another process."""
        return partial(OpError, op=self.op), self.args


@contextmanager
def explained(doing: str, path: Path | None = None) -> Iterator[None]:
    """Turn an OSError inside into a StorageError that says what was being done, and the next move.

    Without `path` it is about the one that the error names; an error that names none stays what it is.
    """
    try:
        yield
    except OSError as error:
        where = error.filename if path is None else path
        if not isinstance(where, str | Path):
            raise
        name = errno.errorcode.get(error.errno or 0, "unknown")
        move = NEXT_MOVE.get(error.errno or 0)
        raise StorageError(
            f"could not {doing} {where}: {error.strerror or error} ({name})" + (f": {move}" if move else ""),
            path=str(where),
            errno_name=name,
        ) from error


@contextmanager
def naming(prefix: str) -> Iterator[None]:
    """Puts the key before messages of things that do not know where their values came from."""
    try:
        yield
    except (ConfigError, PlanError) as error:
        raise type(error)(f"{prefix}{error}") from error
    except StorageError as error:
        raise StorageError(f"{prefix}{error}", path=error.path, errno_name=error.errno_name) from error


NEXT_MOVE = {
    errno.EROFS: "the filesystem is mounted read-only; give a directory that can be written",
    errno.EACCES: "change its permissions or those of its folder, or give another that this user may use",
    errno.EPERM: "change its permissions or those of its folder, or give another that this user may use",
    errno.ENOSPC: "free space there, or give a directory on another drive",
    errno.EDQUOT: "free space there or raise the quota",
    errno.EIO: "the drive reported an error; look at the kernel log (dmesg) before trusting it again",
    errno.ENOTDIR: "a part of the path is a file; give another directory",
    errno.EEXIST: "a file is there, or a link that leads nowhere; give another path",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or give a directory on another file system",
    errno.ENAMETOOLONG: "give a shorter one",
    errno.ELOOP: "links lead back to themselves; correct them, or give another path",
}

ANEW = "start anew (overwrite_output_dir=true; in Python resume=False)"
DISCARD = "(overwrite_output_dir=true; in Python overwrite=True)"
"""For messages about a checkpoint: the key of the command line, and the argument of the engine."""
