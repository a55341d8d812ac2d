"""What the documentation says of commands and options is there, and of the daemon nothing is left out."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from flowcheck.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def test_every_option_of_the_daemon_is_explained() -> None:
    text = (ROOT / "docs" / "daemon.md").read_text()
    daemon = main.get_command(click.Context(main), "daemon")
    assert daemon is not None
    named = set(re.findall(r"--[a-z][a-z-]+", text))
    assert named <= options(daemon)
    assert [option.name for option in daemon.params if not named & {*option.opts, *option.secondary_opts}] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_documentation_exist_with_their_options(page: Path) -> None:
    context = click.Context(main)
    for words in re.findall(r"^    (?:FLOWCHECK_KEY=\S+ )?flowcheck (.*)$", page.read_text(), re.MULTILINE):
        line = re.split(r"\s#|\s--\s", words + " ")[0].split()
        command = main.get_command(context, line[0])
        assert command is not None, words
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(command), line[1])
            assert command is not None, words
        given = {word.partition("=")[0] for word in line[1:] if re.match(r"-[a-z-]", word)}
        assert given <= options(command), words


def test_links_of_the_documentation_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
