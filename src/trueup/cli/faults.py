"""Report the errors of a command in one sentence: what went wrong, where, and what to do.

Every subcommand runs inside `Guarded`. Errors of users, files and devices become one line and exit status 2. Anything
else is a fault of ours: one line that says so, and exit status 1. `--debug`, or TRUEUP_DEBUG=1, shows the traceback.
"""

from __future__ import annotations

import dis
import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

DEBUG = "TRUEUP_DEBUG"

_WAYS = {
    errno.EACCES: "choose a place where you may write, or change its permissions",
    errno.EPERM: "choose a place where you may write, or change its permissions",
    errno.EROFS: "it is read-only: choose another place",
    errno.ENOSPC: "free some space, then run the same command again",
    errno.EDQUOT: "free some space, then run the same command again",
    errno.EFBIG: "choose a place that takes larger files",
    errno.ENOTDIR: "a part of this path is a file: choose another place",
    errno.EEXIST: "a file is in the way: choose another place",
    errno.EISDIR: "it is a folder: give a file",
    errno.ENOENT: "check the path",
}


class Guarded(TyperGroup):
    """A group of commands that answers every error in a sentence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept `--debug` anywhere in the command."""
        if "--debug" in args:
            args = [arg for arg in args if arg != "--debug"]
            ctx.meta["trueup.debug"] = True
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a subcommand, with paragraphs of help on one line each: the terminal breaks them."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help:
            command.help = "\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n"))
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        if ctx.meta.get("trueup.debug") or os.environ.get(DEBUG, "") not in ("", "0"):
            return super().invoke(ctx)
        with _plain_warnings(), _sentences():
            return super().invoke(ctx)


class Resumable(TyperCommand):
    """A command that may be interrupted: run again, it continues where it stopped."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; after Ctrl-C, say how to go on."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("\ninterrupted; run the same command again to continue", err=True)
            raise typer.Exit(130) from None


@contextmanager
def _sentences() -> Iterator[None]:
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt:
        typer.echo("\ninterrupted", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise
    except Exception as error:
        if type(error).__module__.startswith(("click.", "typer.")):
            raise
        known = _sentence(error)
        if known is not None:
            typer.echo(f"error: {known}", err=True)
            raise typer.Exit(2) from error
        where = _where_raised(error)
        typer.echo(
            f"error: this should not happen ({type(error).__name__}: {error}{where}); please report it, with the "
            "traceback that --debug shows",
            err=True,
        )
        raise typer.Exit(1) from error


def _sentence(error: Exception) -> str | None:
    """Describe an error that a user, a file or a device caused; return None for any other."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        named = [os.fspath(name) for name in (error.filename, error.filename2) if isinstance(name, str | os.PathLike)]
        where = f"{named[-1]}: " if named else ""
        way = _WAYS.get(error.errno)
        return f"{where}{error.strerror}" + (f"; {way}" if way else "")
    if isinstance(error, ValueError | OSError | ImportError | MemoryError) or _is_refusal(error):
        text = str(error)
        return " ".join(text.split()) if text else f"out of memory ({type(error).__name__})"
    if type(error).__name__ == "OutOfMemoryError":
        return f"{str(error).splitlines()[0]} Use a smaller batch, or --device cpu"
    return None


def _is_refusal(error: Exception) -> bool:
    """Whether this code refused something: TraceError, or a TypeError from a `raise`, not from a failed operation."""
    if type(error).__name__ == "TraceError":
        return True
    last = _innermost(error)
    if not isinstance(error, TypeError) or last is None:
        return False
    ours = str(last.tb_frame.f_globals.get("__name__")).startswith("trueup")
    return ours and last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _innermost(error: Exception) -> TracebackType | None:
    """Innermost entry of an error's traceback: where it was raised."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last


def _where_raised(error: Exception) -> str:
    last = _innermost(error)
    return "" if last is None else f", {Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show a warning as one line, without the line of code that gave it."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        if issubclass(category, UserWarning):
            typer.echo(f"warning: {message}", err=True)
        else:
            shown(message, category, *rest, **options)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
