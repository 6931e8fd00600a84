"""Pretrain the small vision transformer behind the preset `fashion-vit`, on letters and shapes.

The network learns to classify the outline and the pattern of drawn images (`abstract_images.py`),
which are unrelated to clothes. The classifier is discarded, and the backbone is
saved as a folder that `transformers` reads. It is not part of the app: a user makes
it once, and copies it to all devices of a federation, which must be identical. The same seed draws
the same images everywhere, but the trained bits differ between kinds of processors,
numbers of threads and versions of PyTorch, and so do results slightly: use one folder for all runs.

    pip install -e ".[pretrain]"
    python -m scripts.pretrain_fashion_vit       # about 15 minutes of one core

An interrupted training is resumed when it is started again with the same options.
"""

import argparse
import json
import logging
from pathlib import Path

import torch
import transformers
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import ViTForImageClassification

from ravan_flwr.data.hub import no_bars
from ravan_flwr.data.model_folder import pretrained_folder
from scripts.abstract_images import IMAGE, PATTERNS, SHAPES, Drawing, outlines
from scripts.pretraining import Checkpoint, evenly, log, normalise, small_vit, stacked, train

NAME = "fashion-vit"
PATCH = 7
OF_PATTERNS = 0.5  # weight of the pattern's loss, beside the outline's
OF_SHAPES = 0.6  # fraction of the images; the others are of letters and signs


@torch.inference_mode()
def accuracy(
    model: ViTForImageClassification, templates: Tensor, labels: Tensor, seed: int
) -> float:
    """Measure the accuracy on outlines, on one image of each template."""
    model.eval()
    drawing, right = Drawing(torch.Generator().manual_seed(seed)), 0
    for some, labels_ in zip(templates.split(512), labels.split(512), strict=True):
        logits = model(pixel_values=normalise(drawing.images(some)[0])).logits
        right += int((logits[:, :-PATTERNS].argmax(-1) == labels_).sum())
    return right / len(labels)


def weights(labels: Tensor, letters: int) -> Tensor:
    """Return how often each outline is drawn: less often for letters in many fonts."""
    weight = evenly(labels)
    is_shape = labels >= letters
    weight[is_shape] *= OF_SHAPES / weight[is_shape].sum()
    weight[~is_shape] *= (1 - OF_SHAPES) / weight[~is_shape].sum()
    return weight


def save(model: ViTForImageClassification, folder: Path, origin: dict[str, object]) -> None:
    """Write the folder, without the classifier."""
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("classifier")}
    model.config.num_labels = 2  # for its classifier, which is not kept
    with no_bars():
        model.save_pretrained(folder, state_dict=state)
    (folder / "origin.json").write_text(json.dumps(origin, indent=1) + "\n")


def arguments_given() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=9_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=pretrained_folder(NAME))
    parser.add_argument("--sheet", type=Path, help="write a sheet of training images and stop")
    parsed = parser.parse_args()
    if (parsed.output / "config.json").exists() and not parsed.sheet:
        raise SystemExit(
            f"{parsed.output} is there already; runs that are to be compared need one and the "
            "same: keep it, or name another folder with --output"
        )
    return parsed


def write_sheet(path: Path, templates: Tensor, weight: Tensor, generator: torch.Generator) -> None:
    """Write a sheet of 20 x 20 training images."""
    pick = torch.multinomial(weight, 400, replacement=True, generator=generator)
    sheet = Drawing(generator).images(templates[pick])[0].reshape(20, 20, IMAGE, IMAGE)
    sheet = sheet.permute(0, 2, 1, 3).reshape(20 * IMAGE, 20 * IMAGE)
    Image.fromarray((sheet * 255).byte().numpy()).save(path)


def main() -> None:
    """Draw, train, write."""
    arguments = arguments_given()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("fontTools").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    drawing = Drawing(generator)

    training, held_out, letters = outlines()
    classes = letters + SHAPES
    (templates, labels), (others, their_labels) = stacked(training), stacked(held_out)
    weight = weights(labels, letters)
    log.info("%d classes, %d outlines, %d held out", classes, len(templates), len(others))
    if arguments.sheet:
        write_sheet(arguments.sheet, templates, weight, generator)
        return

    model = small_vit(IMAGE, PATCH, classes + PATTERNS)

    def loss_of_a_batch() -> Tensor:
        pick = torch.multinomial(
            weight, arguments.batch_size, replacement=True, generator=generator
        )
        images, patterns = drawing.images(templates[pick])
        logits = model(pixel_values=normalise(images)).logits
        outline = F.cross_entropy(logits[:, :-PATTERNS], labels[pick], label_smoothing=0.05)
        return outline + OF_PATTERNS * F.cross_entropy(logits[:, -PATTERNS:], patterns)

    def measured() -> float:
        return accuracy(model, others, their_labels, seed=1)

    options = {
        "seed": arguments.seed,
        "steps": arguments.steps,
        "batch-size": arguments.batch_size,
        "learning-rate": arguments.learning_rate,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(arguments.output / "training.pt", options)
    train(
        model,
        loss_of_a_batch,
        generator,
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        report=lambda: f"accuracy on fonts that it has not seen {measured():.3f}",
        checkpoint=checkpoint,
    )
    origin = {
        "script": "scripts/pretrain_fashion_vit.py",
        **options,
        "outlines": len(templates),
        "classes": classes,
        "patterns": PATTERNS,
        "accuracy-on-held-out-fonts": round(measured(), 4),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    save(model, arguments.output, origin)
    checkpoint.path.unlink(missing_ok=True)
    log.info("wrote %s: %s", arguments.output, origin)


if __name__ == "__main__":
    main()
