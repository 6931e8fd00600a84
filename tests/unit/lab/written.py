"""Studies that tests write."""

import yaml

from ravan_flwr.lab.spec import read_study


def written(folder, **fields):
    """Write a study with these fields beside the usual ones, and return its path."""
    content = {
        "title": "A study", "num-clients": 3, "seeds": [0, 1, 2], "settings": {"num-rounds": 2},
    } | {name.replace("_", "-"): value for name, value in fields.items()}  # fmt: skip
    folder.mkdir(exist_ok=True)
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def study_of(folder, **fields):
    return read_study(written(folder, **fields))
