"""Tell what a tuning chose: for people, for machines, and as a picture."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ravan_flwr.reports.chart import INK, Caption, Chart
from ravan_flwr.reports.charts import Series, lines
from ravan_flwr.runs.directory import write_atomically
from ravan_flwr.studies.halving import Choice, Measured


def summary(choice: Choice) -> str:
    """Write the rate that was chosen, and those that are as good as it, for people."""
    last = choice.rungs[-1]
    seeds = ", ".join(map(str, last.rung.seeds))
    text = [
        f"learning rate {choice.rate:g}: {choice.score.metric} {choice.score} "
        f"({last.rung.length}, seeds {seeds})"
    ]
    alike = [rate for rate in last.alike() if rate != choice.rate]
    for rate in sorted(set(last.scores) - {choice.rate}):
        noise = "within noise of it" if rate in alike else "worse by more than noise"
        text.append(f"  {rate:g}: {last.scores[rate]}, {noise}")
    if choice.at_the_edge:
        text.append(
            f"  it is the last of the rates tried ({_rates(choice.tried)}): a better one may lie "
            "beyond; name others with --rates"
        )
    if choice.failed:
        text.append(f"  {len(choice.failed)} runs failed; results.md says why")
    return "\n".join(text)


def write_results(choice: Choice) -> None:
    """Write `results.md`, `results.json` and the picture to the tuning's folder."""
    folder, drawn = choice.folder, picture(choice)
    write_atomically(folder / "results.md", markdown(choice, drawn).encode())
    text = json.dumps(as_json(choice), indent=2, allow_nan=False) + "\n"
    write_atomically(folder / "results.json", text.encode())
    drawn.write(folder)


def picture(choice: Choice) -> Chart:
    """Draw the metric by learning rate, a line for each rung with a band over its seeds."""
    metric, config = choice.score.metric, choice.tuning.config
    caption = Caption(
        "metric-by-rate",
        f"{metric.capitalize()} by learning rate",
        f"The {metric} of {config.method} on examples that clients hold back, by learning rate; "
        f"the dotted line is the rate that was chosen, {choice.rate:g}.",
    )
    chart = lines(
        caption,
        [_series(measured) for measured in choice.rungs],
        x=f"learning rate of {config.method}",
        y=f"{metric}, held-back examples",
        whole=False,
    )
    (axes,) = chart.figure.axes
    axes.set_xscale("log")
    axes.set_xticks(sorted(choice.tried), [f"{rate:g}" for rate in sorted(choice.tried)])
    axes.set_xticks([], minor=True)
    for line in axes.get_lines():
        line.set_marker("o")
    axes.axvline(choice.rate, color=INK, linestyle=":", linewidth=1)
    return chart


def _series(measured: Measured) -> Series:
    rung, rates = measured.rung, sorted(measured.scores)
    by_seed = [
        (rates, [measured.scores[rate].values[number] for rate in rates])
        for number in range(len(rung.seeds))
    ]
    seeds = f", {len(rung.seeds)} seeds" if len(rung.seeds) > 1 else ""
    return Series(f"{rung.length}{seeds}", by_seed)


def markdown(choice: Choice, drawn: Chart) -> str:
    """Write all that was measured, for people."""
    tuning, config = choice.tuning, choice.tuning.config
    text = [
        f"# Learning rate of {config.method} in preset {config.preset}",
        "",
        summary(choice),
        "",
        f"![{drawn.about}]({drawn.name}.png)",
        "",
        f"Tried: {_rates(choice.tried)}. Measured on the {100 * config.validation_share:g} % of "
        f"their examples that {tuning.num_clients} clients hold back; the test examples took no "
        "part. Worse by more than noise: the 95 % interval of the difference, paired by seed, lies "
        "below zero.",
        "",
        *_table(choice),
    ]
    if choice.failed:
        text += ["", "## Failed", "", *(f"- `{run}`: {why}" for run, why in choice.failed.items())]
    return "\n".join([*text, ""])


def _table(choice: Choice) -> Iterator[str]:
    """Yield a row for each rate, with a column for each rung."""
    rungs = choice.rungs
    heads = [f"{one.rung.length}, seed {_words(one.rung.seeds)}" for one in rungs]
    yield _row(["learning rate", *heads])
    yield _row(["---"] * (len(rungs) + 1))
    for rate in sorted(choice.tried):
        name = f"**{rate:g}**" if rate == choice.rate else f"{rate:g}"
        yield _row([name, *(str(one.scores.get(rate, "")) for one in rungs)])


def as_json(choice: Choice) -> dict[str, Any]:
    """Return the same for machines, in full precision."""
    config = choice.tuning.config
    return {
        "preset": config.preset,
        "method": config.method,
        "num-clients": choice.tuning.num_clients,
        "settings": choice.tuning.given,
        "metric": choice.score.metric,
        "learning-rate": choice.rate,
        "within-noise": choice.rungs[-1].alike(),
        "edge": choice.at_the_edge,
        "tried": sorted(choice.tried),
        "rungs": [
            {
                "rounds": one.rung.rounds,
                "seeds": list(one.rung.seeds),
                "values": {f"{rate:g}": score.values for rate, score in one.scores.items()},
                "losses": {f"{rate:g}": score.losses for rate, score in one.scores.items()},
            }
            for one in choice.rungs
        ],
        "failed": choice.failed,
    }


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted(rates))


def _words(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
