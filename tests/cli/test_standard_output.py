"""A full disk or a closed pipe behind standard output ends in one line, whatever was asked for."""

import os
import subprocess
import sys

import pytest
from admin_commands import Api

pytestmark = pytest.mark.usefixtures("nothing_set")
CODE = "import sys; from spin_server.cli.main import main; sys.exit(main(sys.argv[1:]))"


def run_into(output: int, *command: str, buffered: bool) -> tuple[int, str]:
    """Run a command in a process of its own: exit status and standard error."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *command],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", ["audit", "key --help"])
@pytest.mark.parametrize(("kind", "buffered"), [("full", True), ("full", False), ("closed", True)])
def test_output_that_cannot_be_written_is_told(
    used: Api, words: str, kind: str, buffered: bool
) -> None:
    command = words.split()
    if "--help" not in command:
        command += ["--url", used.url, "--key-file", str(used.key_file)]
    if kind == "full":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    try:
        status, error = run_into(output, *command, buffered=buffered)
    finally:
        os.close(output)
    reason = {"full": "No space left on device", "closed": "Broken pipe"}[kind]
    assert (status, error) == (
        2,
        f"spin-server: standard output: expected room for the answer, got {reason}; a change may "
        "have been made all the same\n",
    )
