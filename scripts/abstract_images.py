"""Draw the images on which the backbone of `fashion-vit` is pretrained: outlines with a filling.

An outline is a letter or a sign of the fonts that come with matplotlib, or a shape that is made of
random curves and polygons. A filling is a pattern: stripes, checks, dots, shades, grain. No clothes
or accessories are drawn, and no photograph is read: shapes are random ellipses and polygons, and
only letters, digits, arrows and signs of the fonts are used.
"""

from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

from scripts.pretraining import Glyph, render

SIDE, FIT = 64, 46  # of a template, and of the drawing in it
IMAGE = 28
FINE = 2 * IMAGE  # outlines are sampled at this many points a side, and averaged
SHAPES = 256
# Letters and digits in all fonts that have them, then further signs of the widest font.
LETTERS = [chr(c) for c in [*range(0x21, 0x7F), *range(0x391, 0x3CA), *range(0x410, 0x450)]]
SIGNS = [
    chr(c)
    for low, high in (
        (0x2190, 0x21B8), (0x25A0, 0x2600), (0x2600, 0x2640), (0x2654, 0x2672), (0x2701, 0x2776),
    )
    for c in range(low, high)
]  # fmt: skip
WIDEST = "DejaVuSans.ttf"
HELD_OUT_FONTS = ("DejaVuSerif-Italic.ttf", "STIXGeneralBol.ttf")
FONTS = [
    "DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSans-Oblique.ttf", "DejaVuSansMono.ttf",
    "DejaVuSansMono-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf",
    "STIXGeneral.ttf", "STIXGeneralItalic.ttf", "STIXGeneralBolIta.ttf", *HELD_OUT_FONTS,
]  # fmt: skip
ALIKE = 0.2  # signs with a mean difference below this, over the ink of both, are one class
PATTERNS = 12


def font_file(name: str) -> Path:
    """Find a font that comes with matplotlib."""
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name


def letter_classes() -> list[str]:
    """List the classes of the fonts; similar signs of the widest font are one class."""
    found: list[tuple[str, np.ndarray]] = []
    for label, image in render(font_file(WIDEST), [*LETTERS, *SIGNS], SIDE, FIT):
        letter, ink = [*LETTERS, *SIGNS][label], image / 255
        at = next((n for n, (_, other) in enumerate(found) if _are_alike(ink, other)), None)
        if at is None:
            found.append((letter, ink))
        else:
            found[at] = (found[at][0] + letter, found[at][1])
    return [letters for letters, _ in found]


def _are_alike(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).sum() < ALIKE * (one + other).sum())


def shape(number: int) -> np.ndarray:
    """Draw the random shape of that number: some curves and polygons, half of them symmetric."""
    random = np.random.default_rng([20171, number])
    canvas = np.zeros((4 * SIDE, 4 * SIDE), dtype=bool)
    for part in range(int(random.integers(1, 5))):
        drawn = _part(random)
        canvas = canvas & ~drawn if part and random.random() < 0.25 else canvas | drawn
    if random.random() < 0.6:
        canvas = canvas | canvas[:, ::-1]
    if not canvas.any():
        canvas = _part(np.random.default_rng(number)) | canvas
    rows, columns = np.flatnonzero(canvas.any(1)), np.flatnonzero(canvas.any(0))
    ink = Image.fromarray(canvas).convert("L")
    ink = ink.crop((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
    scale = FIT / max(ink.size)
    ink = ink.resize(
        (max(1, round(ink.width * scale)), max(1, round(ink.height * scale))),
        Image.Resampling.BOX,
    )
    square = Image.new("L", (SIDE, SIDE))
    square.paste(ink, ((SIDE - ink.width) // 2, (SIDE - ink.height) // 2))
    return np.asarray(square)


def _part(random: np.random.Generator) -> np.ndarray:
    """Draw a closed curve, or a polygon, somewhere in the middle."""
    corners = int(random.integers(3, 7)) if random.random() < 0.5 else 120
    angle = np.linspace(0, 2 * np.pi, corners, endpoint=False) + random.uniform(0, 2 * np.pi)
    radius = np.ones(corners)
    for wave in range(2, 6) if corners == 120 else ():
        radius += random.normal(0, 0.4 / wave) * np.cos(wave * angle + random.uniform(0, 6.3))
    radius *= random.uniform(0.7, 1.3, corners) if corners < 120 else 1.0
    size = random.uniform(12, 60, 2)
    x, y = size[0] * radius * np.cos(angle), size[1] * radius * np.sin(angle)
    turn = random.uniform(-0.8, 0.8)
    middle = 2 * SIDE + random.uniform(-50, 50, 2)
    points = [
        (
            middle[0] + a * np.cos(turn) - b * np.sin(turn),
            middle[1] + a * np.sin(turn) + b * np.cos(turn),
        )
        for a, b in zip(x, y, strict=True)
    ]
    canvas = Image.new("1", (4 * SIDE, 4 * SIDE))
    ImageDraw.Draw(canvas).polygon(points, fill=1)
    return np.asarray(canvas)


def outlines() -> tuple[list[Glyph], list[Glyph], int]:
    """Draw all outlines: for training, and of held-out fonts; count the letters.

    The classes of shapes follow those of letters.
    """
    classes = letter_classes()
    training: list[Glyph] = []
    held_out: list[Glyph] = []
    for name in FONTS:
        letters = classes if name.startswith("DejaVuSans") else [_letters(c) for c in classes]
        (held_out if name in HELD_OUT_FONTS else training).extend(
            render(font_file(name), letters, SIDE, FIT)
        )
    training += [(len(classes) + number, shape(number)) for number in range(SHAPES)]
    return training, held_out, len(classes)


def _letters(chars: str) -> str:
    return "".join(c for c in chars if c in LETTERS)


class Drawing:
    """Draw images of outlines, with all randomness from one generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def images(self, outlines: Tensor) -> tuple[Tensor, Tensor]:
        """Make (n, 1, 28, 28) grey images in [0, 1] of templates, and name their patterns."""
        n = len(outlines)
        mask = self._distorted(outlines)
        filling, pattern = self._filling(n)
        depth = F.avg_pool2d(mask, 5, stride=1, padding=2) ** 2  # low at the rim
        rim = self._uniform(n, -0.8, 0.8) * (self._uniform(n, 0, 1) < 0.5)
        filling = (filling + rim * (depth - 0.6)).clamp(0.02, 1)
        image = self._with_a_patch(torch.lerp(self._ground(n), filling, mask))
        noise = torch.randn(image.shape, generator=self.generator) * self._uniform(n, 0.0, 0.06)
        image = (image + noise * (self._uniform(n, 0, 1) < 0.5)).clamp(0, 1)
        return torch.where(self._uniform(n, 0, 1) < 0.15, 1 - image, image), pattern

    def _uniform(self, n: int, low: float, high: float, *shape: int) -> Tensor:
        drawn = torch.rand(n, *(shape or (1, 1, 1)), generator=self.generator)
        return drawn * (high - low) + low

    def _distorted(self, outlines: Tensor) -> Tensor:
        """Rotate, shear, stretch, move and bend; then make lines thicker or thinner."""
        n = len(outlines)
        angle, shear = self._uniform(n, -0.35, 0.35, 1)[:, 0], self._uniform(n, -0.3, 0.3, 1)[:, 0]
        wide, high = (self._uniform(n, 0.6, 1.3, 1)[:, 0] for _ in range(2))
        cos, sin = angle.cos(), angle.sin()
        matrix = torch.stack(
            [
                torch.stack([cos / wide, (sin + shear * cos) / wide], -1),
                torch.stack([-sin / high, (cos - shear * sin) / high], -1),
            ],
            1,
        )  # (n, 2, 2), from an image's point to the template's
        axis = (torch.arange(FINE) + 0.5) / FINE * 2 - 1
        target = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)  # (56, 56, x y)
        moved = target * 0.8 + self._uniform(n, -0.15, 0.15, 1, 1, 2)
        grid = torch.einsum("nij,nhwj->nhwi", matrix, moved)
        field = torch.randn(n, 2, 5, 5, generator=self.generator) * self._uniform(n, 0.0, 0.08)
        bent = F.interpolate(field, FINE, mode="bilinear", align_corners=True)
        ink = F.grid_sample(outlines, grid + bent.permute(0, 2, 3, 1), align_corners=False)
        ink = F.avg_pool2d(ink, 2)
        blurred = F.avg_pool2d(ink, 3, stride=1, padding=1)
        mixed = torch.lerp(ink, blurred, self._uniform(n, 0.0, 1.0))
        return ((mixed - self._uniform(n, 0.15, 0.6)) * 4 + 0.5).clamp(0, 1)

    def _filling(self, n: int) -> tuple[Tensor, Tensor]:
        """Draw a pattern for each image, in random strengths of grey."""
        pattern = torch.randint(PATTERNS, (n,), generator=self.generator)
        axis = (torch.arange(IMAGE) + 0.5) / IMAGE * 2 - 1
        y, x = axis.view(1, 1, -1, 1), axis.view(1, 1, 1, -1)
        lean, often = self._uniform(n, -0.2, 0.2), self._uniform(n, 7.0, 22.0)
        phase, other = self._uniform(n, 0, 6.3), self._uniform(n, 0, 6.3)
        across = torch.sin(often * (x + lean * y) + phase)
        along = torch.sin(often * (y - lean * x) + other)
        slanted = torch.sin(often * (x + y) / 1.4 + phase)
        side = torch.sign(self._uniform(n, -1, 1))
        noise = torch.randn(n, 1, IMAGE, IMAGE, generator=self.generator)
        coarse = torch.randn(n, 1, 6, 6, generator=self.generator)
        drawn = torch.stack(
            torch.broadcast_tensors(
                torch.zeros(n, 1, IMAGE, IMAGE),
                along,
                across,
                slanted,
                torch.sin(often * (x - y) / 1.4 + phase),
                (across * along * 4).clamp(-1, 1),  # checks
                ((across + along) * 3 - 3).clamp(-1, 1),  # dots
                torch.maximum(across, along),  # a grid
                side * y * 1.2,
                side * x * 1.2,
                F.interpolate(coarse, IMAGE, mode="bicubic", align_corners=True),  # blotches
                F.avg_pool2d(noise, 3, stride=1, padding=1) * 1.5,  # grain
            )
        )  # (patterns, n, 1, 56, 56)
        chosen = drawn[pattern, torch.arange(n)]
        middle, strength = self._uniform(n, 0.3, 0.85), self._uniform(n, 0.12, 0.5)
        return (middle + strength * chosen).clamp(0.02, 1), pattern

    def _ground(self, n: int) -> Tensor:
        """Draw the background: black mostly, or an even grey, or a shade."""
        kind = self._uniform(n, 0, 1)
        axis = torch.linspace(-1, 1, IMAGE)
        shade = self._uniform(n, -0.2, 0.2) * axis.view(1, 1, -1, 1)
        grey = self._uniform(n, 0.0, 0.35)
        ground = torch.where(kind < 0.65, torch.zeros(()), grey)
        return (ground + shade * (kind > 0.85)).clamp(0, 1)

    def _with_a_patch(self, images: Tensor) -> Tensor:
        """Cover a rectangle of some images."""
        n = len(images)
        line = torch.arange(IMAGE).float()
        inside = []
        for view in ((1, 1, -1, 1), (1, 1, 1, -1)):
            start, length = self._uniform(n, -4, IMAGE), self._uniform(n, 3, 10)
            inside.append((line.view(view) >= start) & (line.view(view) < start + length))
        covered = inside[0] & inside[1] & (self._uniform(n, 0, 1) < 0.3)
        return torch.where(covered, self._uniform(n, 0, 1), images)
