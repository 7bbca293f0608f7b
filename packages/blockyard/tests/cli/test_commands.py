"""The command `blockyard` without the packages that bring its subcommands."""

from __future__ import annotations

import pytest

from blockyard.cli import parsing
from blockyard.cli.command import EXTRAS
from blockyard.errors import MissingExtra


@pytest.fixture(autouse=True)
def only_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "installed_commands", dict)


def test_help_names_each_command_and_the_extra_that_installs_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parsing.parse(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "replay, curve, plan, fleet with 'blockyard[lab]'" in shown
    assert all(f"'blockyard[{extra}]'" in shown for extra in EXTRAS.values())


def test_unknown_command_is_refused_with_the_commands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsing.parse(["nonsense"])
    error = capsys.readouterr().err
    assert "'nonsense' is not a command" in error
    assert all(name in error for name in EXTRAS)


@pytest.mark.parametrize("name", EXTRAS)
def test_command_that_is_not_installed_names_its_extra(name: str) -> None:
    with pytest.raises(MissingExtra, match=rf"blockyard {name} is not installed: .*\[{EXTRAS[name]}\]"):
        parsing.parse(name.split())
