"""Offer the command `ravan-flwr`. Torch and Flower are imported by the commands that need them."""

import argparse
import importlib.metadata
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from ravan_flwr.cli import deployment, results, running, studying
from ravan_flwr.cli.parts import Commands
from ravan_flwr.config.key import nearest
from ravan_flwr.config.keys import KEYS
from ravan_flwr.runs.console import hush

# One for each command, shown by its --help.
EXAMPLES = {
    "simulate": "preset=conf/mine.yaml num-clients=5 method=fedit",
    "plan": "preset=glue-llama device=cuda",
    "new": "mine --data texts --model model --clients 5",
    "study": "conf/studies/methods-digits.yaml --jobs 2",
    "tune": "preset=conf/mine.yaml method=ravan",
    "report": "runs/* --output comparison",
    "evaluate": "runs/RUN --data test.csv",
    "predict": "runs/RUN --data new.csv --output answers.csv",
    "export": "runs/RUN --as merged model",
    "keys": "keys --host server.example.org --nodes 3",
    "doctor": "/etc/ravan-flwr/node-0 --superlink server.example.org:8000",
    "deliver": "runs/RUN edge",
}


class _Help(argparse.HelpFormatter):
    """Keep the lines of a text that has several."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Ended(KeyboardInterrupt):
    """End the command on a signal: what cleans up after Ctrl-C cleans up after it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a terminal that closes, end a command once, as Ctrl-C does.

    Under `nohup` SIGHUP is ignored, and stays so. Only a process's main thread may set this.
    """
    ended = False

    def end(number: int, _: object) -> None:
        nonlocal ended
        if not ended:  # a second one does not stop the cleaning up
            ended = True
            raise Ended(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        signals = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
        heard = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    for group in (running, studying, results, deployment):
        group.add(commands)
    for name, sub in commands.choices.items():
        sub.formatter_class = _Help
        example = f"example:\n  ravan-flwr {name} {EXAMPLES[name]}"
        sub.epilog = f"{example}\n\n{sub.epilog}" if sub.epilog else example
    return parser
