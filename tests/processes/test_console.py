"""What a person sees, and what is no error: to have seen enough."""

import subprocess
import sys


def test_a_reader_who_has_seen_enough_ends_a_command_in_silence():
    with subprocess.Popen(
        [sys.executable, "-m", "ravan_flwr", "plan"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before the first line
        told = process.stderr.read()
    assert told == b""
    assert process.returncode == 128 + 13  # as the shell tells of SIGPIPE
