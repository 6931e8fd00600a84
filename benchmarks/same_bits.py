"""Print a hash of the last state of a short run of every method.

A change that keeps results to the bit prints the same lines before and after it:

    python -m benchmarks.same_bits > before.txt
    python -m benchmarks.same_bits | diff before.txt -
"""

import hashlib
import json
import sys
import tempfile
from contextlib import redirect_stdout

from safetensors.torch import load_file

from ravan_flwr import simulate
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar

SHORT: dict[str, Scalar] = {
    "num-rounds": 2, "local-steps": 2, "clients-per-round": 4, "eval-every": 2,
    "tracking": "none",
}  # fmt: skip
FURTHER: dict[str, dict[str, Scalar]] = {
    **{
        f"{method}, unequal": {"method": method, "budgets": "uniform"}
        for method in ("ravan", "hetlora", "flexlora", "raflora", "flora", "fed-plora")
    },
    "masked": {"secure-aggregation": True},
    "wire=int8": {"wire": "int8"},
    "server-optimizer=adam": {"server-optimizer": "adam:0.01"},
    "robust=median": {"weighting": "median"},
}


def hash_of(config: dict[str, Scalar]) -> str:
    """Run, and hash the metrics and the names and bytes of all tensors of the last checkpoint."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        run = simulate({**SHORT, **config, "output-dir": folder}, num_clients=5)
        last = json.loads((run.run_dir / "rounds.jsonl").read_text().splitlines()[-1])
        digest.update(str(last["metrics"]).encode())
        (path,) = sorted(run.run_dir.glob("checkpoints/round-*.safetensors"))[-1:]
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Print a line for each method, and for each further kind of round with RAVAN."""
    runs: dict[str, dict[str, Scalar]] = {name: {"method": name} for name in METHODS}
    runs |= FURTHER
    for name, config in runs.items():
        sys.stdout.write(f"{name:24} {hash_of(config)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
