"""Recompute every number in the tables of benchmarks/results/ from the records of the runs.

    python -m scripts.check_results

The pages that readers open first (`FIRST`) repeat some of them: each number with an interval there
must be in a table of another page, or be the difference between two rows of one table.

A table is between marks (`<!-- study NAME: TITLE -->`). Its study's file defines the rows, and
its record (`NAME.jsonl`) has the results of their runs. No code is shared with
`ravan_flwr/lab`. It ends with 1 and a line for each cell on which the two disagree.
"""

import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
# Student's t, two-sided 95 %, by degrees of freedom, as printed in tables of statistics.
T95 = {2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582, 6: 2.446912, 7: 2.364624, 8: 2.306004,
       9: 2.262157}  # fmt: skip
TABLE = re.compile(
    r"^<!-- study ([^:\n]+): ([^\n]+) -->\n(.*?)^<!-- end of study -->$", re.M | re.S
)
FIRST = ("README.md", "docs/results.md", "docs/compare.md", "docs/privacy.md",
         "benchmarks/results/README.md", "benchmarks/results/overview.md")  # fmt: skip
NUMBER = re.compile(r"\d+\.\d+ ± \d+\.\d+")
RATE = "learning-rate"
LESS = ("loss", "perplexity", "time")  # lower is better
Values = dict[int, float]  # by seed


def key_of(words: Iterable[str]) -> frozenset[str]:
    """Return a run's key; a run on a validation split has its own `eval-every`."""
    return frozenset(word for word in words if not word.startswith("eval-every="))


def half(values: list[float]) -> float:
    """Return half the width of the mean's 95 % interval."""
    return T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def shown(values: list[float], metric: str, *, signed: bool = False) -> str:
    """Format a mean with its interval as in a table."""
    if not values:
        return "-"
    numbers = [statistics.mean(values), *([half(values)] if len(values) > 2 else [])]
    text = [f"{x:.3f}" if metric in LESS else f"{100 * x:.1f}" for x in numbers]
    return ("+" if signed and numbers[0] > 0 else "") + " ± ".join(text)


def p_value(values: list[float]) -> float:
    """Integrate Student's density by Simpson's rule, from 0 to t, for the paired test."""
    n, mean = len(values) - 1, statistics.mean(values)
    if not (error := half(values) / T95[n]):
        return float(not mean)
    t = abs(mean) / error
    scale = math.gamma((n + 1) / 2) / math.gamma(n / 2) / math.sqrt(n * math.pi)
    at: list[float] = [
        scale * (1 + (t * i / 20000) ** 2 / n) ** (-(n + 1) / 2) for i in range(20001)
    ]
    return 1 - 2 * t / 60000 * (at[0] + at[-1] + 4 * sum(at[1:-1:2]) + 2 * sum(at[2:-1:2]))


def paired(mine: Values, other: Values) -> list[float]:
    """Return paired differences by common seeds."""
    return [mine[seed] - other[seed] for seed in mine if seed in other]


class Study:
    """A study's file and its record; a row is identified by its table's title and its own name."""

    def __init__(self, name: str, record: Path) -> None:
        self.file = yaml.safe_load((ROOT / "conf/studies" / f"{name}.yaml").read_text())
        self.tables = {table["title"]: table for table in self.file["tables"]}
        lines = [json.loads(text) for text in record.read_text().splitlines()]
        self.runs = {(x["clients"], key_of(x["settings"].split())): x for x in lines}
        self.words = {word for x in lines for word in x["settings"].split()}

    def row(self, title: str, name: str) -> tuple[dict[str, Any], str, bool]:
        """Return a row's settings, the key that it may choose, and whether it does."""
        table = self.tables[title]
        rows = {str(key): value or {} for key, value in table["rows"].items()}
        settings = self.file["settings"] | table.get("settings", {}) | rows[name]
        key = next(iter(self.tables[table.get("rates-of", title)].get("choose", {RATE: None})))
        return settings, key, key not in settings

    def line(self, settings: dict[str, Any], more: dict[str, Any]) -> Any:
        """Return the line of a run; None if it is not done."""
        settings = settings | more
        clients = settings.pop("num-clients", self.file["num-clients"])
        words = [f"{k}={str(v).lower() if v in (True, False) else v}" for k, v in settings.items()]
        return self.runs.get((clients, key_of(words)))

    def tried(self, title: str, name: str) -> tuple[bool, dict[float, list[Any]]]:
        """Return whether a seed is left out, and rate -> its runs, one a seed."""
        title = self.tables[title].get("rates-of", title)
        settings, key, _ = self.row(title, name)
        out = self.tables[title].get("leave-one-seed-out", False)
        held = {} if out else {"evaluate-on": "clients", "validation-share": 0.2}
        seeds = self.file["seeds"] if out else self.file["choose"]["seeds"]
        rates = sorted({float(x.partition("=")[2]) for x in self.words if x.startswith(f"{key}=")})
        choose = self.file.get("choose", {}) | self.tables[title].get("choose", {})
        if choose.get("extensions") == 0:  # the record may have other rates for other tables
            rates = sorted({*map(float, choose[key])} & {*rates})
        found = {r: [self.line(settings, held | {key: r, "seed": s}) for s in seeds] for r in rates}
        return out, {rate: lines for rate, lines in found.items() if any(lines)}

    def scores(self, title: str, name: str) -> dict[float, list[float]]:
        """Return rate -> values by which it is chosen, for rates without a failed run."""
        out, runs_by_rate = self.tried(title, name)
        done = {r: x for r, x in runs_by_rate.items() if all(y and "failed" not in y for y in x)}
        first = self.tables[title].get("rates-of", title)
        return {
            rate: [self.value(first, x) if out else x["final"][x["metric"]] for x in lines]
            for rate, lines in done.items()
        }

    def taken(self, title: str, name: str) -> dict[int, float]:
        """Return the rate of each seed; ties are broken by lower loss, then smaller rate."""
        scores, (out, runs_by_rate), found = self.scores(title, name), self.tried(title, name), {}
        if not scores:
            return {}
        sign = -1 if next(iter(runs_by_rate.values()))[0]["metric"] in LESS else 1
        for place, seed in enumerate(self.file["seeds"]):
            order = {}
            for rate, x in scores.items():
                rest = [n for n in range(len(x)) if not (out and n == place)]
                loss = statistics.mean(runs_by_rate[rate][n]["final"]["loss"] for n in rest)
                order[rate] = (sign * statistics.mean(x[n] for n in rest), -loss, -rate)
            found[seed] = max(order, key=lambda rate: order[rate])
        return found

    def value(self, title: str, line: Any, last: int = 0) -> float:
        """Return the table's metric of a run, or its mean over the last evaluations."""
        metric = self.tables[title].get("metric", line["metric"])
        last = last or self.tables[title].get("mean-of-last", 0)
        values = line["curve"][metric][-last:] if last else [line["final"][metric]]
        return float(statistics.mean(values))

    def lines(self, title: str, name: str, rate: float | None = None) -> dict[int, Any]:
        """Return the finished runs of a row, by seed."""
        settings, key, chooses = self.row(title, name)
        rates = dict.fromkeys(self.file["seeds"], rate)
        if chooses and rate is None:
            rates = {**self.taken(title, name)}
        chosen = {s: {key: rates[s]} if chooses else {} for s in rates}
        found = {s: self.line(settings, more | {"seed": s}) for s, more in chosen.items()}
        return {seed: x for seed, x in found.items() if x and "failed" not in x}

    def values(self, title: str, name: str, rate: float | None = None, last: int = 0) -> Values:
        """Return a row's values over runs with enough evaluations; none if one has no time."""
        lines = self.lines(title, name, rate)
        if self.missed(title, name):
            return {}
        enough = {seed: x for seed, x in lines.items() if len(x["curve"]["round"]) >= last}
        return {seed: self.value(title, x, last) for seed, x in enough.items()}

    def missed(self, title: str, name: str) -> int:
        """Count the runs of a row that ended before the table's target, or its evaluations."""
        timed = self.tables[title].get("metric") == "time"
        last = self.tables[title].get("mean-of-last", 0)
        return sum(
            (timed and "time" not in x["final"]) or len(x["curve"]["round"]) < last
            for x in self.lines(title, name).values()
        )


def cells(study: Study, title: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield each column's name and the expected cell of a row."""
    table, lines, mine = study.tables[title], study.lines(title, name), study.values(title, name)
    first, rows = next(iter(lines.values())), [str(row) for row in table["rows"]]
    metric = table.get("metric", first["metric"])
    competing = [row for row in rows if row not in table.get("references", [])]
    against = table.get("against", "ravan" if "ravan" in rows else (competing or rows)[0])

    def differ(other: str, row: str, last: int = 0) -> str:
        if (other, row) == (title, name) or row not in map(str, study.tables[other]["rows"]):
            return "-"
        one, two = study.values(title, name, last=last), study.values(other, row, last=last)
        return shown(paired(one, two), metric, signed=True)

    yield metric, shown([*mine.values()], metric)
    if all("macro-f1" in x["final"] for x in lines.values()):
        last = table.get("mean-of-last", 1)
        macro_f1 = [statistics.mean(x["curve"]["macro-f1"][-last:]) for x in lines.values()]
        yield "macro-F1", shown(macro_f1, "macro-f1")
    yield "by seed", " ".join(shown([x], metric) for x in mine.values())
    yield f"to {against}", differ(title, against)
    last = table.get("compare-last", 0)
    yield f"the same, last {last}", differ(title, against, last)
    yield f"from {table.get('change-from')}", differ(table.get("change-from", title), name)
    planned = {
        x: paired(study.values(title, x), study.values(title, against))
        for x in table.get("contrasts", [])
    }
    ps = {x: p_value(values) if len(values) > 2 else 1.0 for x, values in planned.items()}
    ranks = sorted(ps, key=lambda x: ps[x])
    steps = [min(1.0, (len(ranks) - n) * ps[x]) for n, x in enumerate(ranks)]
    yield "p, Holm", f"{max(steps[: ranks.index(name) + 1]):.2g}" if name in ps else "-"
    yield "learning rate", f"{first[RATE]:g}"
    _, key, chooses = study.row(title, name)
    if chooses:
        scores, taken = study.scores(title, name), [*study.taken(title, name).values()]
        (out, tried), sign = study.tried(title, name), -1 if metric in LESS else 1
        best = max(scores, key=lambda x: sign * statistics.mean(scores[x])) if out else taken[0]
        each = " ".join(f"{taken.count(x)}×{x:g}" for x in sorted({*taken}))
        yield key.replace("-", " "), each if out else f"{best:g}"
        worse = {
            rate: [sign * (a - b) for a, b in zip(scores[best], x, strict=True)]
            for rate, x in scores.items()
            if rate != best
        }
        few = len(scores[best]) < 3  # seeds: no interval
        good = [rate for rate, x in worse.items() if not few and statistics.mean(x) <= half(x)]
        notes = ["unknown"] if few else [f"{rate:g}" for rate in good]
        if table.get("run-as-good"):
            moved = {rate: paired(study.values(title, name, rate), mine) for rate in good}
            notes = [f"{rate:g}: {shown(x, metric, signed=True)}" for rate, x in moved.items()]
        yield "as good", (", " if table.get("run-as-good") else " ").join(notes) or "-"
        yield "runs", str(sum(map(len, tried.values())))
        for rate in tried:
            missing = "failed" if all(tried[rate]) else "-"
            yield f"{rate:g}", shown(scores[rate], metric) if rate in scores else missing
    yield "rank", str(first["rank"] or "-")
    yield "parameters", f"{first['parameters']:,}"
    for head in ("up", "down"):
        sent = round(statistics.mean(x[f"bytes-{head}"] for x in lines.values()))
        yield head, f"{sent / 1e6:.2f} MB" if sent >= 1e5 else f"{sent / 1e3:.1f} kB"
    spent = [x["client-seconds"] for x in lines.values()]
    yield "client s", "-" if None in spent else f"{statistics.mean(spent):.0f}"


def wrong(page: Path) -> Iterator[str]:
    """Yield a line for each cell of a page that differs from the records."""
    for name, title, text in TABLE.findall(page.read_text()):
        study = Study(name, page.with_suffix("") / f"{name}.jsonl")
        table = [line[2:-2].split(" | ") for line in text.split("\n") if line.startswith("| ")]
        if not table:
            if study.runs:  # else it is planned
                yield f"{page.name}: {title}: has no table, and {len(study.runs)} runs are done"
            continue
        heads = [re.sub(r", (%|s$|mean of).*", "", head).strip() for head in table[0][1:]]
        for row in study.tables.get(title, {}).get("rows", ()):
            if (few := study.missed(title, row)) and f"{row} ({few} of" not in text:
                yield f"{page.name}: {title}: {row}: {few} runs missed the target, unsaid"
        for row, *found in table[2:]:
            of = title.removeprefix("rates of ")
            expected = dict(cells(study, of, row)) if title != "overview" else {}
            if title == "overview":
                for head in heads:
                    if row in map(str, study.tables[head]["rows"]):
                        (_, first), *more = cells(study, head, row)
                        change = [x for y, x in more if y.startswith("from ") and x != "-"]
                        expected[head] = "; ".join([first, *change])
            if title in study.tables and study.missed(title, row):
                yield f"{page.name}: {title}: {row}: has numbers, and a run missed its target"
            for head, cell in zip(heads, found, strict=True):
                says = re.sub(r"\*| \((edge|\d+ of \d+ seeds)\)", "", cell)
                is_open = "(open)" in (" ".join(found) if head == "runs" else says)
                if says != expected.get(head, "-") and not is_open:
                    right = expected.get(head, "-")
                    yield f"{page.name}: {title}: {row}: {head}: says {says}, records say {right}"


def differences(study: Study) -> Iterator[str]:
    """Yield the difference of any two rows of a table, at the end and in the last evaluations."""
    for title, table in study.tables.items():
        for last in {0, table.get("compare-last", 0)}:
            rows = {str(row): study.values(title, str(row), last=last) for row in table["rows"]}
            for one, two in itertools.combinations(rows.values(), 2):
                if len(both := paired(one, two)) > 2:
                    yield shown(both, table.get("metric", "accuracy")).removeprefix("-")


def unknown(pages: Iterable[Path], first: Iterable[Path]) -> Iterator[str]:
    """Yield a line for each number with an interval that no table of the pages supports."""
    known = set[str]()
    first = [*first]
    for page in pages:
        text = page.read_text() if page not in first else ""
        known |= {x for line in text.split("\n") if line[:1] == "|" for x in NUMBER.findall(line)}
        for name in {name for name, _, _ in TABLE.findall(text)}:
            known |= {*differences(Study(name, page.with_suffix("") / f"{name}.jsonl"))}
    for page in first:
        for number in NUMBER.findall(page.read_text()):
            if number not in known:
                yield f"{page.name}: says {number}, which no table says or implies"


def main() -> None:
    """Check all pages."""
    pages = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    found = [line for page in pages for line in wrong(page)]
    found += unknown(pages, [path for name in FIRST if (path := ROOT / name).is_file()])
    print("\n".join(found) or "every number of the tables is what the records say")  # noqa: T201
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
