"""Ctrl-C on the command line: at once and in one line, whatever runs; in order where something is to be cleaned up."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import small_model

from glmjax import cli_interrupt

SECONDS = 10.0  # in which it has ended, on a busy machine; a compile of the demo takes five times that
# Seconds within one instruction of Python, as a compile is.
LONG = "import hashlib; print('ready', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 1 << 29)"


def start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def interrupted(process, wait_for=lambda line: True, stream="stdout", seconds=SECONDS):
    """Exit code, and what comes on standard error after a line for which ``wait_for`` holds.

    Standard error is at its end only when no process that was started has it any more.
    """
    try:
        seen = []
        for line in getattr(process, stream):
            seen.append(line)
            if wait_for(line):
                break
        else:
            raise AssertionError("".join(seen))
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=seconds)
        return process.returncode, err
    finally:
        process.kill()
        process.wait()


def besides_log(err):
    return [line for line in err.splitlines() if not re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO ", line)]


def test_it_ends_what_does_not_come_back_to_python():
    process = start("-c", f"from glmjax import cli_interrupt\nwith cli_interrupt.at_once():\n {LONG}")
    assert interrupted(process) == (130, "glmjax: interrupted\n")


def test_it_is_one_line_while_modules_are_imported():
    """Whose authors make other errors of KeyboardInterrupt."""
    code = (
        "import sys, types\n"
        "from glmjax import cli\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'glmjax.demo':\n"
        "            import time\n"
        "            print('ready', flush=True)\n"
        "            try:\n"
        "                time.sleep(60)\n"
        "            except BaseException as error:\n"
        "                raise ImportError('broken') from error\n"
        "sys.meta_path.insert(0, Slow())\n"
        "sys.argv = ['glmjax', 'demo', 'x']\n"
        "cli.main()\n"
    )
    assert interrupted(start("-c", code)) == (130, "glmjax: interrupted\n")


def test_what_puts_things_in_order_is_interrupted_as_python_does(capsys):
    before = signal.getsignal(signal.SIGINT)
    with cli_interrupt.at_once():
        inside = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), cli_interrupt.in_order():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is inside is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt), cli_interrupt.in_order():  # of a program, which calls no command
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with cli_interrupt.at_once():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_folder_that_is_half_written_is_taken_away(tmp_path):
    folder = small_model.write_checkpoint(tmp_path / "small")
    code = (
        "import sys, time\n"
        "from glmjax import checkpoint, cli\n"
        "def slow(*_, **__):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "checkpoint.write_hf = slow\n"
        f"sys.argv = ['glmjax', 'convert', {str(folder)!r}, {str(tmp_path / 'other')!r}, '--to', 'hf']\n"
        "cli.main()\n"
    )
    code, err = interrupted(start("-c", code))
    assert (code, besides_log(err), os.listdir(tmp_path)) == (130, ["glmjax: interrupted"], ["small"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "demo", "-p", "a"),
        ("serve", "demo", "--port", "0"),
        ("serve", "demo", "--port", "0", "--prefill", "dp=1", "--decode", "dp=1"),  # processes of their own end too
    ],
    ids=lambda value: " ".join(value),
)
def test_a_compile_is_interrupted_at_once(arguments, tmp_path):
    off = {"GLMJAX_CACHE": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    process = start("-m", "glmjax", *arguments, **off)
    code, err = interrupted(process, re.compile("Compiling: .* programs").search, "stderr")
    assert (code, besides_log(err)) == (130, ["glmjax: interrupted"])
