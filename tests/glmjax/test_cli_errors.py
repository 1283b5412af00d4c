"""What the command line says of values that its options cannot have, over every option of every command."""

import enum
import sys
from typing import get_args, get_type_hints

import pytest
import typer

from glmjax import cli
from glmjax.cli_errors import usage_message

RULES = {int: "a whole number", float: "a number"}
WRONG = {int: ("many", "1.5", "0x10", ""), float: ("many", "1,5", "")}


def commands(group, path=()):
    """Every command with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def bad_values():
    """Every option and argument with a value that it cannot have, and what is to be said of it."""
    for path, command in commands(typer.main.get_command(cli.app)):
        hints = get_type_hints(command.callback)
        needed = [
            word
            for param in command.params
            if param.required
            for word in ([*param.opts[-1:], "x"] if param.param_type_name == "option" else ["x"])
        ]
        for param in command.params:
            kinds = (hints[param.name], *get_args(hints[param.name]))
            for kind in kinds:
                if kind in RULES:
                    rule, values = RULES[kind], WRONG[kind]
                elif isinstance(kind, type) and issubclass(kind, enum.Enum):
                    rule = f"{'one of ' * (len(kind) > 1)}{', '.join(repr(member.value) for member in kind)}"
                    values = ("nonsense", "", next(iter(kind)).value.upper())
                else:
                    continue
                assert param.param_type_name == "option", "an argument of this kind needs a case here"
                for opt in param.opts:
                    for value in values:
                        yield [*path, *needed], opt, value, rule


CASES = list(bad_values())


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["glmjax", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return (end.value.code, *capsys.readouterr())


def test_the_cases_cover_every_command_that_has_such_options():
    covered = {words[0] for words, *_ in CASES}
    assert covered == {"serve", "generate", "convert", "proxy", "bench", "demo"}  # kernels has flags and names only
    assert len({(words[0], option) for words, option, *_ in CASES}) > 80


@pytest.mark.parametrize("command", sorted({words[0] for words, *_ in CASES}))
def test_a_bad_value_is_told_with_its_option_and_what_would_be_right(monkeypatch, capsys, command):
    for words, option, value, rule in CASES:
        if words[0] == command:
            said = run(monkeypatch, capsys, *words, f"{option}={value}")
            assert said == (2, "", f"glmjax: {option} must be {rule}, got {value!r}\n")


@pytest.mark.parametrize(
    ("option", "text", "end"),
    [
        ("--layout", "tp=x", "tp must be a whole number such as 8, got 'x'\n"),
        ("--layout", "nope", "dp8_ep8 or dcp8\n"),
        ("--prefill", "q=1", "'q' is not a degree; use dp, tp, pcp, dcp, ep or interleave\n"),
        ("--decode", "dp=0", "dp must be a whole number of at least 1, got 0\n"),
        ("--decode", "", "dp8_ep8 or dcp8\n"),
    ],
)
def test_a_bad_layout_is_told_with_its_option(monkeypatch, capsys, option, text, end):
    code, out, err = run(monkeypatch, capsys, "serve", "x", f"{option}={text}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"glmjax: {option}: ") and err.endswith(end)


class ClickError(Exception):
    """As click raises it itself, for versions of typer that leave types to it."""

    def __init__(self, message, param=None, ctx=None):
        super().__init__(message)
        self.message, self.param, self.ctx = message, param, ctx

    def format_message(self):
        return f"Invalid value: {self.message}"


def test_clicks_own_errors_are_told_the_same_way():
    command = typer.main.get_command(cli.app).commands["serve"]
    (tp,) = (param for param in command.params if param.name == "tp")
    ctx = type("Context", (), {"command": command})
    error = ClickError("'y' is not a valid integer.", tp, ctx)
    assert usage_message(error) == "--tp must be a whole number, got 'y'"


def test_other_errors_stay_as_they_are():
    assert usage_message(ClickError("no such thing")) == "Invalid value: no such thing"
