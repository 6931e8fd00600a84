"""Shared code of the scripts that pretrain a small backbone: render glyphs, train, resume."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification

log = logging.getLogger("pretrain")

Glyph = tuple[int, np.ndarray]  # its class, and its ink as bytes
WARM_UP = 500  # steps
EVERY = 1000  # steps between reports, and between checkpoints


def render(font_file: Path, classes: Sequence[Iterable[str]], side: int, fit: int) -> list[Glyph]:
    """Draw every letter that a font has, `fit` pixels large in the middle of a grey square."""
    with TTFont(font_file, lazy=True) as opened:
        known = opened.getBestCmap()
    font = ImageFont.truetype(str(font_file), 96)
    glyphs = []
    for label, letters in enumerate(classes):
        for letter in letters:
            if ord(letter) not in known:
                continue
            canvas = Image.new("L", (288, 288))
            ImageDraw.Draw(canvas).text((96, 96), letter, fill=255, font=font)
            box = canvas.getbbox()
            if box is not None:
                glyphs.append((label, _centred(canvas.crop(box), side, fit)))
    return glyphs


def _centred(ink: Image.Image, side: int, fit: int) -> np.ndarray:
    """Scale the ink to `fit` pixels; the rest of the square is room for distortions."""
    scale = fit / max(ink.size)
    size = (max(1, round(ink.width * scale)), max(1, round(ink.height * scale)))
    ink = ink.resize(size, Image.Resampling.LANCZOS)
    square = Image.new("L", (side, side))
    square.paste(ink, ((side - size[0]) // 2, (side - size[1]) // 2))
    return np.asarray(square)


def stacked(glyphs: Sequence[Glyph]) -> tuple[Tensor, Tensor]:
    """Make (n, 1, side, side) grey values in [0, 1], and the classes."""
    images = torch.from_numpy(np.stack([image for _, image in glyphs])).float() / 255
    return images[:, None], torch.tensor([label for label, _ in glyphs])


def evenly(labels: Tensor) -> Tensor:
    """Weight examples so that rare classes are drawn half-way to uniformly often."""
    return labels.bincount().float().rsqrt()[labels]


def small_vit(image_size: int, patch_size: int, classes: int) -> ViTForImageClassification:
    """Build a vision transformer of 16 patches; its classifier is not kept."""
    config = ViTConfig(
        image_size=image_size,
        patch_size=patch_size,
        num_channels=1,
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=192,
        layer_norm_eps=1e-6,
    )
    config.num_labels = classes
    return ViTForImageClassification(config)


def normalise(images: Tensor) -> Tensor:
    """Map [0, 1] to [-1, 1], as the presets do."""
    return images * 2 - 1


@dataclass(frozen=True)
class Checkpoint:
    """Keep the state of a training and its options in a file."""

    path: Path
    options: Mapping[str, int | float]

    def keep(self, parts: Mapping[str, Any], generator: torch.Generator, step: int) -> None:
        """Write the file completely, in place of the previous one."""
        content = {name: part.state_dict() for name, part in parts.items()}
        content |= {"options": dict(self.options), "step": step}
        content |= {"generator": generator.get_state()}
        new = self.path.with_suffix(".new")
        torch.save(content, new)
        new.replace(self.path)

    def go_on(self, parts: Mapping[str, Any], generator: torch.Generator) -> int:
        """Load the file, if it exists; return the number of finished steps."""
        if not self.path.is_file():
            return 0
        content = torch.load(self.path, weights_only=True)
        if content["options"] != self.options:
            raise SystemExit(
                f"{self.path} was begun with other options: then {content['options']}, now "
                f"{dict(self.options)}; give the same, or remove it to begin anew"
            )
        for name, part in parts.items():
            part.load_state_dict(content[name])
        generator.set_state(content["generator"])
        log.info("going on after step %d of %s", content["step"], self.path)
        return int(content["step"])


def train(
    model: PreTrainedModel,
    loss_of_a_batch: Callable[[], Tensor],
    generator: torch.Generator,
    *,
    steps: int,
    learning_rate: float,
    report: Callable[[], str],
    checkpoint: Checkpoint | None = None,
) -> None:
    """Take the steps of AdamW under a cosine, and resume from the checkpoint if it exists.

    All randomness of the batches is the generator's, whose state the checkpoint keeps.
    """
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate)

    def rate(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        return min(1.0, (step + 1) / WARM_UP) * cosine

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = checkpoint.go_on(parts, generator) if checkpoint else 0
    started = time.monotonic()
    for step in range(first, steps):
        model.train()
        loss = loss_of_a_batch()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % EVERY == EVERY - 1:
            log.info(
                "step %d, loss %.3f, %s, %.0f s",
                step + 1, loss.item(), report(), time.monotonic() - started,
            )  # fmt: skip
            if checkpoint is not None:
                checkpoint.keep(parts, generator, step + 1)
