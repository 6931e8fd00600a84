"""Settings of runs with a small model and small data."""

from tests.support.tiny import OF_IMAGES, save_data, save_model


def small_settings(folder, kind, glue_task="mnli", save=save_model):
    """Return the settings of a run with a model of this architecture, whose files stay there."""
    preset = "svhn-vit-b16" if kind in OF_IMAGES else "glue-llama"
    preset = "newsgroups-t5" if kind == "t5" else preset
    task = glue_task if preset == "glue-llama" else ""
    if not (folder / kind).is_dir():
        save(kind, folder / kind)
    if not (folder / preset).is_dir():
        save_data(preset, folder / preset, task)
    return {
        "preset": preset, "model": str(folder / kind), "data": str(folder / preset),
        "lora-rank": 2, "num-rounds": 1, "local-steps": 2, "batch-size": 8, "eval-every": 1,
        "partition": "iid", "tracking": "none", "learning-rate": 1e-2,
        **({"glue-task": task} if task else {}),
        **({} if kind in OF_IMAGES else {"max-length": 16}),
    }  # fmt: skip
