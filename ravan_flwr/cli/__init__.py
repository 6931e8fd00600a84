"""The command `ravan-flwr`. Only the commands that need torch and Flower import them."""

import argparse
import importlib.metadata
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from ravan_flwr.cli import deployment, results, running, studying
from ravan_flwr.cli.parts import Commands
from ravan_flwr.config.keys import KEYS
from ravan_flwr.runs.console import discard_stdout

# The example of each command, shown by its --help.
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

# Commands of earlier versions -> what does the same.
EARLIER = {
    "watch": "`simulate tracking=tensorboard`", "spectrum": "`report --spectrum`",
    "secure-keys": "`keys`", "fetch": "`hf download`", "run": "`simulate --engine flower`",
}  # fmt: skip


class _Help(argparse.HelpFormatter):
    """Keep line breaks in help texts that have them."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class EndedBySignal(KeyboardInterrupt):
    """Raised by a signal. As a KeyboardInterrupt, it has the same cleanup as Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP (a terminal that closes) end a command once, as Ctrl-C does.

    Under `nohup` SIGHUP stays ignored. Only the main thread of a process can set signal handlers.
    """
    ended = False

    def end(number: int, _: object) -> None:
        nonlocal ended
        if not ended:  # a second signal does not interrupt the cleanup
            ended = True
            raise EndedBySignal(number)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        signals = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
        handled = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, end) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command of a command line. Exit statuses: 1 failed, 2 wrong usage or settings."""
    parser, arguments = _parser(), sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in EARLIER:
        parser.error(f"{arguments[0]!r} is no command any more, use {EARLIER[arguments[0]]}")
    parsed, unknown = parser.parse_known_args(arguments)
    if "command" not in parsed:
        parser.print_help()
        return
    words = [word for word in unknown if "settings" in parsed and not word.startswith("-")]
    if unrecognized := [word for word in unknown if word not in words]:
        parser.error(_unrecognized(unrecognized[0]))
    if words:
        parsed.settings += words  # argparse takes only consecutive words, before an option
    command: Callable[[argparse.Namespace], None] = parsed.command
    try:
        with ending_on_signals():
            command(parsed)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed it
        discard_stdout()
        sys.exit(128 + signal.SIGPIPE)
    except ValueError as error:
        sys.exit(_report_error(error, 2))
    except (RuntimeError, OSError) as error:
        sys.exit(_report_error(error, 1))
    except EndedBySignal as ended:
        sys.exit(_report_error(f"ended by {ended.signal.name}", 128 + ended.signal))
    except KeyboardInterrupt:
        sys.exit(_report_error("interrupted", 130))


def _unrecognized(word: str) -> str:
    """Return the error text of an unknown option, which may be a key written with dashes."""
    name, _, value = word.lstrip("-").partition("=")
    key = name.lower().replace("_", "-")
    written = f"keys are written without dashes: {key}={value or 'VALUE'}"
    known = key in ("num-clients", *KEYS)
    return f"unrecognized argument {word!r}; {written if known else '--help lists the options'}"


def _report_error(problem: object, status: int) -> int:
    with suppress(OSError):  # the terminal may be closed
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
