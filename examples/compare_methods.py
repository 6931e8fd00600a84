"""Compare two methods from Python: run, lay over each other, look inside, take home.

    python examples/compare_methods.py FOLDER [KEY=VALUE ...]

Settings such as `num-rounds=3` go to both runs.
"""

import sys
from pathlib import Path

from ravan_flwr import export_run, result_of, simulate, write_report, write_spectra
from ravan_flwr.config.keys import read_settings


def main(folder: Path, words: list[str]) -> None:
    """Run RAVAN and HetLoRA on the same clients, of which a quarter can afford everything."""
    settings, num_clients = read_settings(words)
    runs = []
    for method, options in {"ravan": {"head-mean": "all"}, "hetlora": {}}.items():
        given = {"budgets": "uniform", **options, **settings}
        given |= {"method": method, "output-dir": str(folder)}
        run = simulate(given, num_clients)
        runs.append(run.run_dir)
        print(method, run.summary["metrics"]["final"], f"{run.summary['bytes-up']:,} bytes up")

    print("report", write_report(runs, folder / "report"))
    print("spectra", *write_spectra(runs, folder / "spectra", top=32))

    # The model itself, with the last state in it, as long as the block lasts.
    with result_of(runs[0]) as loaded:
        model = loaded.model
        print(loaded.evaluate())
        first = model.method.delta_weights(model.adapters)[0]
        print("delta-weight of", model.layers[0].name, tuple(first.shape), float(first.norm()))

    export_run(runs[0], "merged", folder / "model")
    print("model", folder / "model")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") or "=" in sys.argv[1]:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
