"""Pretrain the small vision transformer behind the preset `digits-vit`, on letters.

The handwritten digits that the preset fine-tunes on are 8 x 8 images that were made by
counting the ink in the 4 x 4 blocks of a 32 x 32 bitmap. This script makes letters in the
same way: it renders the Latin and Greek alphabets in the fonts below, distorts them
(rotation, shear, aspect, stroke width, a smooth elastic field), fits them into 32 x 32,
and counts the ink. **No digit is ever drawn**, and no handwritten digit is ever read.

The classifier over letters is thrown away; the backbone is rounded to float16, so that
every machine decodes the same bits, and written as JSON, because a Flower app carries
text files only.

    sudo apt-get install fonts-dejavu fonts-liberation fonts-bwht fonts-comic-neue \
        fonts-dancingscript fonts-ebgaramond fonts-jura fonts-kaushanscript fonts-lobster \
        fonts-opendyslexic fonts-breip fonts-crosextra-carlito fonts-ecolier-court \
        fonts-essays1743 fonts-femkeklaver fonts-dkg-handwriting fonts-humor-sans \
        fonts-inconsolata fonts-isabella fonts-klee fonts-kristi fonts-leckerli-one \
        fonts-lindenhill fonts-quicksand fonts-rufscript fonts-sjfonts fonts-summersby \
        fonts-tomsontalks fonts-ubuntu-title
    python -m scripts.pretrain_digits_vit            # about 40 minutes on two cores
"""

import argparse
import base64
import hashlib
import json
import logging
import zlib
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.training.bundled import FORMAT
from scripts.pretraining import Glyph, evenly, log, normalise, render, small_vit, stacked, train

# Upper and lower case that differ only in size are one class, since size is normalised.
CLASSES = [
    *"A B D E F G H I J L M N Q R T Y a b d e f g h i j l m n q r t y".split(),
    *["Cc", "Kk", "Oo", "Pp", "Ss", "Uu", "Vv", "Ww", "Xx", "Zz"],
    *"Γ Δ Θ Λ Ξ Π Σ Φ Ψ Ω α β γ δ ε ζ η θ λ μ ξ π σ φ ψ ω".split(),
]
FONT_FOLDERS = ["/usr/share/fonts/opentype", "/usr/share/fonts/truetype"]
SKIPPED_FONTS = ["DejaVuMath"]  # symbols only
HELD_OUT_FONTS = ["SteveHand", "BecauseWeLearn", "femkeklaver", "LiberationSerif-Italic"]
GLYPH, FIT, BITMAP, IMAGE = 48, 36, 32, 8
NOT_KEPT = {"id2label", "label2id", "transformers_version"}  # of the model's configuration


def find_fonts() -> list[Path]:
    """List every font of the folders, in the order of the file names."""
    files = [f for folder in FONT_FOLDERS for f in Path(folder).rglob("*.[ot]tf")]
    files = [f for f in files if not any(s in f.name for s in SKIPPED_FONTS)]
    if len(files) < 90:
        raise SystemExit(
            f"found {len(files)} fonts under {FONT_FOLDERS}, expected at least 90: "
            "install the packages named at the top of this script"
        )
    return sorted(files, key=lambda f: f.name)


def distort(glyphs: Tensor, generator: torch.Generator) -> Tensor:
    """(n, 1, GLYPH, GLYPH) grey in [0, 1] -> (n, 1, 8, 8), counts of ink in [0, 1]."""
    n = len(glyphs)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(n, *shape, generator=generator) * (high - low) + low

    # The inverse of rotate . shear . stretch, since grid_sample looks up the source.
    angle, shear = uniform(-0.3, 0.3), uniform(-0.35, 0.35)
    wide = uniform(0.75, 1.25)
    cos, sin = angle.cos(), angle.sin()
    matrix = torch.stack(
        [
            torch.stack([cos / wide, (sin + shear * cos) / wide], -1),
            torch.stack([-sin, cos - shear * sin], -1),
        ],
        1,
    )  # (n, 2, 2)
    axis = (torch.arange(BITMAP) + 0.5) / BITMAP * 2 - 1
    target = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)  # (32, 32, x y)
    grid = torch.einsum("nij,hwj->nhwi", matrix, target)
    field = torch.randn(n, 2, 5, 5, generator=generator) * uniform(0.0, 0.10, 1, 1, 1)
    smooth = F.interpolate(field, BITMAP, mode="bicubic", align_corners=True)
    grid = grid + smooth.permute(0, 2, 3, 1)

    # Fit the ink to the whole bitmap, as in the original digits: find its extent first.
    rough = F.grid_sample(glyphs, grid * 1.3, align_corners=False)[:, 0] > 0.3
    low, high = extent(rough)
    centre, half = (low + high) / 2 * 1.3, (high - low) / 2 * 1.3
    zoom = half.amax(1, keepdim=True).expand(-1, 2) * uniform(0.95, 1.12, 1)
    slack = (zoom - half).clamp(min=0)
    offset = centre + slack * uniform(-0.3, 0.3, 2)
    target = target * zoom[:, None, None, :] + offset[:, None, None, :]
    grid = torch.einsum("nij,nhwj->nhwi", matrix, target)
    fine = F.grid_sample(smooth, target.clamp(-1, 1), align_corners=False)
    grid = grid + fine.permute(0, 2, 3, 1)
    image = F.grid_sample(glyphs, grid, align_corners=False)

    # Stroke width: blur, then a threshold that is low for thick strokes and high for thin.
    blurred = F.avg_pool2d(F.pad(image, (2, 2, 2, 2)), 5, stride=1)
    mix = uniform(0.0, 1.0, 1, 1, 1)
    ink = (mix * blurred + (1 - mix) * image > uniform(0.12, 0.5, 1, 1, 1)).float()
    counts = F.avg_pool2d(ink, BITMAP // IMAGE)
    noisy = counts + uniform(-0.06, 0.06, 1, IMAGE, IMAGE) * (counts > 0)
    return (noisy.clamp(0, 1) * 16).round() / 16


def extent(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find the bounding box of the mask, (n, x y) low and high in [-1, 1]; all if it is empty."""
    side = mask.shape[-1]
    bounds = []
    for dim in (1, 2):  # any over rows leaves the columns, and vice versa
        line = mask.any(dim)
        position = torch.arange(side).expand_as(line)
        first = torch.where(line, position, side).amin(1)
        last = torch.where(line, position + 1, 0).amax(1)
        empty = first >= last
        bounds.append((first.masked_fill(empty, 0), last.masked_fill(empty, side)))
    low = torch.stack([b[0] for b in bounds], -1) / side * 2 - 1
    high = torch.stack([b[1] for b in bounds], -1) / side * 2 - 1
    return low, high


@torch.inference_mode()
def accuracy(model: nn.Module, glyphs: Tensor, labels: Tensor, generator: torch.Generator) -> float:
    """Measure the accuracy on one distorted copy of every glyph."""
    model.eval()
    right = 0
    for g, y in zip(glyphs.split(1024), labels.split(1024), strict=True):
        logits = model(pixel_values=normalise(distort(g, generator))).logits
        right += int((logits.argmax(-1) == y).sum())
    return right / len(labels)


def encode_backbone(
    config: dict[str, Any], state: dict[str, Tensor], origin: dict[str, Any]
) -> str:
    """Return the text of a backbone file: its origin, its configuration, its weights."""
    halves = {name: tensor.to(torch.float16).contiguous() for name, tensor in state.items()}
    weights = safetensors.torch.save(halves)
    content = {
        "format": FORMAT,
        "origin": origin,
        "config": config,
        "sha256": hashlib.sha256(weights).hexdigest(),
        "safetensors": base64.b85encode(zlib.compress(weights, 9)).decode("ascii"),
    }
    return json.dumps(content, indent=1) + "\n"


def main() -> None:
    """Render, train, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("ravan_flwr/training/backbones/digits-vit.json")
    )
    parser.add_argument("--sheet", type=Path, help="write a sheet of training images and stop")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("fontTools").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(arguments.seed)
    torch.manual_seed(arguments.seed)

    training: list[Glyph] = []
    unseen: list[Glyph] = []
    fonts = find_fonts()
    for font in fonts:
        held_out = any(name in font.name for name in HELD_OUT_FONTS)
        (unseen if held_out else training).extend(render(font, CLASSES, GLYPH, FIT))
    (glyphs, labels), (test_glyphs, test_labels) = stacked(training), stacked(unseen)
    log.info("%d fonts, %d glyphs, %d held out", len(fonts), len(glyphs), len(test_glyphs))
    if arguments.sheet:
        pick = torch.randint(len(glyphs), (400,), generator=generator)
        sheet = distort(glyphs[pick], generator).reshape(20, 20, IMAGE, IMAGE)
        sheet = F.pad(sheet, (1, 1, 1, 1)).permute(0, 2, 1, 3).reshape(200, 200)
        Image.fromarray((sheet * 255).byte().numpy()).resize((1000, 1000), 0).save(arguments.sheet)
        return

    model = small_vit(IMAGE, 2, len(CLASSES))
    weight = evenly(labels)

    def loss_of_a_batch() -> Tensor:
        pick = torch.multinomial(
            weight, arguments.batch_size, replacement=True, generator=generator
        )
        logits = model(pixel_values=normalise(distort(glyphs[pick], generator))).logits
        return F.cross_entropy(logits, labels[pick], label_smoothing=0.05)

    def measured() -> float:
        return accuracy(model, test_glyphs, test_labels, torch.Generator().manual_seed(1))

    train(
        model,
        loss_of_a_batch,
        generator,
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        report=lambda: f"accuracy on held-out fonts {measured():.3f}",
    )

    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    final = measured()
    origin = {
        "script": "scripts/pretrain_digits_vit.py",
        "seed": arguments.seed,
        "steps": arguments.steps,
        "batch-size": arguments.batch_size,
        "learning-rate": arguments.learning_rate,
        "fonts": len(fonts),
        "glyphs": len(glyphs),
        "classes": len(CLASSES),
        "accuracy-on-held-out-fonts": round(final, 4),
    }
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("classifier")}
    settings = {k: v for k, v in model.config.to_diff_dict().items() if k not in NOT_KEPT}
    settings["architectures"] = [type(model).__name__]
    arguments.output.write_text(encode_backbone(settings, state, origin))
    log.info("wrote %s: %s", arguments.output, origin)


if __name__ == "__main__":
    main()
