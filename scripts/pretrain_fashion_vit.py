"""Pretrain the small vision transformer behind the preset `fashion-vit`, on letters and shapes.

The network learns to name the outline and the pattern of drawn images (`abstract_images.py`),
which have nothing to do with clothes. The classifier over them is thrown away; what is left is
saved as a folder that `transformers` reads. It does not travel with the app: a user makes
it once, and copies it to all devices of a federation, which must have the same. The same seed draws
the same images everywhere, but the bits of what is trained differ between kinds of processors,
numbers of threads and versions of PyTorch, and so do results, a little: compare runs on one folder.

    pip install -e ".[pretrain]"
    python -m scripts.pretrain_fashion_vit       # about 15 minutes of one core

An interrupted training continues where it was when it is started again with the same options.
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
OF_PATTERNS = 0.5  # weight of naming the pattern, beside the outline
OF_SHAPES = 0.6  # part of the images; the others are of letters and signs


@torch.inference_mode()
def accuracy(
    model: ViTForImageClassification, templates: Tensor, labels: Tensor, seed: int
) -> float:
    """Measure how many outlines are named rightly, on one image of each template."""
    model.eval()
    drawing, right = Drawing(torch.Generator().manual_seed(seed)), 0
    for some, wanted in zip(templates.split(512), labels.split(512), strict=True):
        logits = model(pixel_values=normalise(drawing.images(some)[0])).logits
        right += int((logits[:, :-PATTERNS].argmax(-1) == wanted).sum())
    return right / len(labels)


def weights(labels: Tensor, letters: int) -> Tensor:
    """Say how often each outline is drawn: a letter in many fonts not as often as it has fonts."""
    weight = evenly(labels)
    is_shape = labels >= letters
    weight[is_shape] *= OF_SHAPES / weight[is_shape].sum()
    weight[~is_shape] *= (1 - OF_SHAPES) / weight[~is_shape].sum()
    return weight


def save(model: ViTForImageClassification, folder: Path, origin: dict[str, object]) -> None:
    """Write the folder, without the classifier."""
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("classifier")}
    model.config.num_labels = 2  # those of its classifier, which is not kept
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
    given = parser.parse_args()
    if (given.output / "config.json").exists() and not given.sheet:
        raise SystemExit(
            f"{given.output} is there already; runs that are to be compared need one and the same: "
            "keep it, or name another folder with --output"
        )
    return given


def write_sheet(path: Path, templates: Tensor, weight: Tensor, generator: torch.Generator) -> None:
    """Write a sheet of 20 x 20 training images."""
    pick = torch.multinomial(weight, 400, replacement=True, generator=generator)
    sheet = Drawing(generator).images(templates[pick])[0].reshape(20, 20, IMAGE, IMAGE)
    sheet = sheet.permute(0, 2, 1, 3).reshape(20 * IMAGE, 20 * IMAGE)
    Image.fromarray((sheet * 255).byte().numpy()).save(path)


def main() -> None:
    """Draw, train, write."""
    given = arguments_given()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("fontTools").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(given.seed)
    torch.manual_seed(given.seed)
    drawing = Drawing(generator)

    seen, unseen, letters = outlines()
    classes = letters + SHAPES
    (templates, labels), (others, their_labels) = stacked(seen), stacked(unseen)
    weight = weights(labels, letters)
    log.info("%d classes, %d outlines, %d held out", classes, len(templates), len(others))
    if given.sheet:
        write_sheet(given.sheet, templates, weight, generator)
        return

    model = small_vit(IMAGE, PATCH, classes + PATTERNS)

    def loss_of_a_batch() -> Tensor:
        pick = torch.multinomial(weight, given.batch_size, replacement=True, generator=generator)
        images, patterns = drawing.images(templates[pick])
        logits = model(pixel_values=normalise(images)).logits
        outline = F.cross_entropy(logits[:, :-PATTERNS], labels[pick], label_smoothing=0.05)
        return outline + OF_PATTERNS * F.cross_entropy(logits[:, -PATTERNS:], patterns)

    def measured() -> float:
        return accuracy(model, others, their_labels, seed=1)

    options = {
        "seed": given.seed,
        "steps": given.steps,
        "batch-size": given.batch_size,
        "learning-rate": given.learning_rate,
    }
    given.output.mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(given.output / "training.pt", options)
    train(
        model,
        loss_of_a_batch,
        generator,
        steps=given.steps,
        learning_rate=given.learning_rate,
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
    save(model, given.output, origin)
    checkpoint.path.unlink(missing_ok=True)
    log.info("wrote %s: %s", given.output, origin)


if __name__ == "__main__":
    main()
