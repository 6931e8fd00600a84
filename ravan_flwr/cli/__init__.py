"""Offer the command `ravan-flwr`. Torch and Flower are imported by the commands that need them."""

import argparse
import importlib.metadata
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from ravan_flwr.cli import deployment, preset_wizard, results, running, studying
from ravan_flwr.cli.parts import Commands
from ravan_flwr.config.key import nearest
from ravan_flwr.config.keys import KEYS
from ravan_flwr.launch.signals import Ended, ending_on_signals
from ravan_flwr.runs.console import hush


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run the command, exit: 0 done, 1 failed, 2 asked for wrongly."""
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if "command" not in parsed:
        parser.print_help()
        return
    words = [word for word in unknown if "settings" in parsed and not word.startswith("-")]
    if strange := [word for word in unknown if word not in words]:
        parser.error(_about(strange[0]))
    if words:
        parsed.settings += words  # argparse takes those that stand together, before an option
    command: Callable[[argparse.Namespace], None] = parsed.command
    try:
        with ending_on_signals():
            command(parsed)
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        hush()
        sys.exit(128 + signal.SIGPIPE)
    except ValueError as error:
        sys.exit(_complain(error, 2))
    except (RuntimeError, OSError) as error:
        sys.exit(_complain(error, 1))
    except Ended as ended:
        sys.exit(_complain(f"ended by {ended.signal.name}", 128 + ended.signal))
    except KeyboardInterrupt:
        sys.exit(_complain("interrupted", 130))


def _about(word: str) -> str:
    """Describe an unknown option, which may be a key with dashes before it."""
    name, _, value = word.lstrip("-").partition("=")
    key = nearest(name, ("num-clients", *KEYS))
    written = f"; keys are written without dashes: {key}={value or 'VALUE'}"
    return f"unrecognized argument {word!r}{written if key else ''}"


def _complain(problem: object, status: int) -> int:
    with suppress(OSError):  # of a terminal that was closed
        sys.stderr.write(f"ravan-flwr: error: {problem}\n")
        sys.stderr.flush()
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ravan-flwr",
        description="Federated fine-tuning with multi-head low-rank adapters.",
    )
    version = importlib.metadata.version("ravan-flwr")
    parser.add_argument("--version", action="version", version=f"ravan-flwr {version}")
    commands: Commands = parser.add_subparsers(metavar="COMMAND")
    for group in (running, preset_wizard, studying, results, deployment):
        group.add(commands)
    return parser
