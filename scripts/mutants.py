"""Change the package in one place at a time, and list the changes that no test notices.

    python -m scripts.mutants                                  # every module of TESTS, every flag
    python -m scripts.mutants extras/secure/shamir flags --number 10
    python -m scripts.mutants --fast --output FILE             # with the tests of `make test` alone
    python -m scripts.mutants --again FILE                     # those that survived there

A mutant is a copy of the package with one small change: another comparison or operator, a number
plus one, a condition negated, a call or an error left out. The changes of a module are drawn with a
fixed seed. A flag of a method (`methods/__init__.py`) is flipped. The tests that TESTS names run in
a fork of a process that has imported the libraries. A mutant is killed if one of them fails, or
takes far longer than without the change; else it survives.
"""

import argparse
import ast
import copy
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ravan_flwr.methods import METHODS, MethodInfo
from tests import ROOT
from tests.fork_server import ALL, WORKER, Forked, ForkServer, Python

FLAGS = "flags"
# Module -> the tests that are to notice a change of it; the quickest come first.
TESTS = {
    "server/aggregation": "unit/server/test_aggregation.py properties/test_server_optimizer.py "
    "unit/server/test_buffered.py unit/server/test_update_norm_check.py "
    "unit/server/test_strategy.py properties/test_ravan.py properties/test_robust.py "
    "properties/test_hostile_replies.py properties/test_lies.py properties/test_methods.py",
    "server/robust": "properties/test_robust.py unit/server/test_attackers.py "
    "unit/server/test_update_norm_check.py",
    "server/update_norm_check": "unit/server/test_update_norm_check.py "
    "unit/server/test_aggregation.py unit/server/test_attackers.py properties/test_lies.py",
    "methods/tensors": "unit/methods/test_tensors.py unit/methods/test_extensions.py "
    "properties/test_robust.py properties/test_hostile_replies.py properties/test_methods.py",
    "methods/ravan": "unit/methods/test_ravan.py unit/methods/test_selection.py "
    "unit/methods/test_tensors.py properties/test_ravan.py properties/test_first_round.py "
    "properties/test_options_of_methods.py",
    "messages/sparsity": "unit/messages/test_sparsity.py properties/test_sparsity.py",
    "privacy/account": "properties/test_privacy.py "
    "unit/extras/example_privacy/test_account_book.py",
    "extras/example_privacy/gradients": "properties/test_private_examples.py "
    "properties/test_examples_apart.py unit/extras/example_privacy/test_steps.py",
    "extras/secure/shamir": "unit/extras/secure/test_primitives.py "
    "unit/extras/secure/test_rounds.py",
    "runs/checkpoint": "unit/runs/test_checkpoint.py unit/runs/test_directory.py "
    "unit/test_hostile_files.py runs/test_going_back.py",
    "config/checks": "unit/config",
    FLAGS: "unit/methods/test_flags.py unit/config/test_without_effect.py "
    "unit/config/test_private.py unit/config/test_run_config.py",
}
NUMBER = 40
OTHER: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
FUNCTIONS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "floor": "ceil",
    "ceil": "floor",
}


@dataclass(frozen=True)
class Mutant:
    """One change: a file of the package, its new text, and what is different."""

    module: str
    path: Path
    text: str
    change: str


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node with one change each, not counting changes within its children."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            new.ops = [OTHER[type(op)]()]
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(new.op) in OTHER:
            new.op = OTHER[type(new.op)]()
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float() as value):
            new.value = value + 1
        case ast.UnaryOp(op=ast.Not()):
            yield new.operand
            return
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            new.func = ast.Name(FUNCTIONS[name])
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in FUNCTIONS:
            new.func = ast.Attribute(owner, FUNCTIONS[name])
        case ast.Raise() | ast.Expr(value=ast.Call()):
            yield ast.Pass()
            return
        case _:
            return
    yield new


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of code that runs: no annotations, decorators, or parts of f-strings."""
    skipped = {"annotation", "returns", "decorator_list", "type_comment"}
    for name, value in ast.iter_fields(tree):
        if name in skipped:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from nodes_of(child)


def mutants_of(module: str, number: int, seed: int) -> list[Mutant]:
    """Draw so many mutants of a module, in the order of its lines."""
    path = Path("ravan_flwr", f"{module}.py")
    source = (ROOT / path).read_text()
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)]
    found: list[tuple[int, Mutant]] = []
    for node in nodes_of(ast.parse(source)):
        for new in changed(node):
            assert isinstance(node, ast.expr | ast.stmt)
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            old, now = source.encode()[begin:end].decode(), ast.unparse(new)
            if isinstance(node, ast.expr):
                now = f"({now})"
            text = source.encode()[:begin].decode() + now + source.encode()[end:].decode()
            change = f"{path}:{node.lineno}: {' '.join(old.split())[:60]} -> {now[:60]}"
            found.append((begin, Mutant(module, path, text, change)))
    drawn = random.Random(f"{seed} {module}").sample(found, min(number, len(found)))  # noqa: S311
    return [mutant for _, mutant in sorted(drawn, key=lambda pair: pair[0])]


def flag_mutants() -> list[Mutant]:
    """Return a mutant for each flag of each method, which is flipped."""
    path = Path("ravan_flwr/methods/__init__.py")
    source = (ROOT / path).read_text()
    mutants = []
    for name, info in METHODS.items():
        for field in dataclasses.fields(MethodInfo):
            value = getattr(info, field.name)
            if isinstance(value, bool):
                line = f'METHODS["{name}"] = replace(METHODS["{name}"], {field.name}={not value})'
                text = f"{source}\nfrom dataclasses import replace\n\n{line}\n"
                change = f"{path}: {name}: {field.name} = {value} -> {not value}"
                mutants.append(Mutant(FLAGS, path, text, change))
    return mutants


class Copy:
    """A copy of the files that Git knows, in which one mutant at a time is tried."""

    def __init__(self, folder: Path, python: Python) -> None:
        self.folder, self.python, self.tried = folder, python, 0
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def run(self, tests: str, options: Sequence[str], limit: float) -> bool:
        """Return whether these tests pass within a time."""
        self.tried += 1
        # As pytest-xdist's workers are started: their `sys.executable` is the real Python.
        words = [str(self.python.scripts / WORKER), "-m", "pytest", "-q", "-x"]
        words += ["-p", "no:cacheprovider", "-p", "no:xdist", *options]
        words += [f"tests/{name}" for name in tests.split()]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "CI": ""}
        with (self.folder / "log").open("wb") as log:
            process = Forked(
                words, env=environment, cwd=self.folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            return process.wait(limit) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return False

    def kills(self, mutant: Mutant, options: Sequence[str], limit: float) -> bool:
        """Return whether the tests notice a mutant."""
        path = self.folder / mutant.path
        original = path.read_text()
        try:
            self._write(path, mutant.text)
            return not self.run(TESTS[mutant.module], options, limit)
        finally:
            self._write(path, original)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # A compiled file is used if the second and the size of the source are the same.
        moment = time.time() + 2 * self.tried
        os.utime(path, (moment, moment))


def say(line: str) -> None:
    """Print a line at once: a module takes minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Try mutants; exit with 1 if one survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(TESTS)}")
    parser.add_argument("--number", type=int, default=NUMBER, help=f"of a module ({NUMBER})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes of tests at a time (2)")
    parser.add_argument("--fast", action="store_true", help="with the tests of `make test` alone")
    parser.add_argument("--output", type=Path, help="a file to add a JSON line a mutant to")
    parser.add_argument("--again", type=Path, help="such a file: only its mutants that survived")
    options = parser.parse_args()
    if unknown := [name for name in options.modules if name not in TESTS]:
        parser.error(f"{unknown[0]!r} is unknown; expected {', '.join(TESTS)}")
    marks = ["--fast"] if options.fast else []
    lines = options.again.read_text().splitlines() if options.again else []
    again = {x["change"] for x in map(json.loads, lines) if not x["killed"]}
    survived = killed = 0
    with (
        tempfile.TemporaryDirectory() as root,
        ForkServer(ALL) as python,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(Copy(Path(root, str(number)), python))

        def attempt(mutant: Mutant, limit: float) -> bool:
            mine = copies.get()
            try:
                return mine.kills(mutant, marks, limit)
            finally:
                copies.put(mine)

        for module in options.modules or TESTS:
            first, began = copies.get(), time.monotonic()
            passed = first.run(TESTS[module], marks, 3600)
            seconds = time.monotonic() - began
            if not passed:
                sys.stdout.write((first.folder / "log").read_text()[-3000:])
                sys.exit(f"error: {module}: its tests fail without a change; mend them first")
            copies.put(first)
            mutants = (
                flag_mutants()
                if module == FLAGS
                else mutants_of(module, options.number, options.seed)
            )
            if options.again:
                mutants = [mutant for mutant in mutants if mutant.change in again]
            results = []
            trying = pool.map(lambda m, s=seconds: attempt(m, 60 + 5 * s), mutants)
            for mutant, result in zip(mutants, trying, strict=True):
                results.append(result)
                if not result:
                    say(f"survived  {mutant.change}")
                if options.output:
                    with options.output.open("a") as file:
                        file.write(json.dumps({"change": mutant.change, "killed": result}) + "\n")
            killed += sum(results)
            survived += len(results) - sum(results)
            found = f"killed {sum(results)} of {len(results)}"
            say(f"{module}: {found}, its tests take {seconds:.0f} s")
    say(f"killed {killed} of {killed + survived}")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
