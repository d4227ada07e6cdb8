"""`command-line`: every command of `trueup`, from its own help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


class CommandLine(SphinxDirective):
    """A section per command: what it does, and a table of its arguments and options."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        import typer.main

        from trueup import cli
        from trueup_lab.cli import add_commands

        app = cli.application() if hasattr(cli, "application") else cli.app
        add_commands(app)
        lines: list[str] = []
        for name, command in _commands("trueup", typer.main.get_command(app)):
            lines += _section(name, command)
        holder = nodes.section()
        holder.document = self.state.document
        self.state.nested_parse(StringList(lines, source=__name__), 0, holder, match_titles=1)
        return holder.children


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the commands without subcommands, by name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for part, below in sorted(command.commands.items()):
        yield from _commands(f"{name} {part}", below)


def _section(name: str, command: Any) -> list[str]:
    lines = [f"`{name}`", "-" * 80, "", *(command.help or "").replace("\b", "").split("\n"), ""]
    rows = [row for parameter in command.params if (row := _row(parameter))]
    if rows:
        lines += [".. list-table::", "   :widths: 30 70", ""]
        for what, meaning in rows:
            lines += [f"   * - {what}", f"     - {meaning}"]
    return [*lines, ""]


def _row(parameter: Any) -> tuple[str, str] | None:
    if "--help" in parameter.opts or getattr(parameter, "hidden", False):
        return None
    names = [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else [parameter.name]
    names = [name.upper() if parameter.param_type_name == "argument" else name for name in names]
    meaning = " ".join((getattr(parameter, "help", None) or "").split())
    default = parameter.default
    if default not in (None, False, True, (), []) and "default" not in meaning.lower() and not callable(default):
        shown = ", ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        meaning += f" Default: ``{shown}``."
    return ", ".join(f"``{name}``" for name in names), meaning.replace("`", "``").replace("````", "``") or "\\ "
