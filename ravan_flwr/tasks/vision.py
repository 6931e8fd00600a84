"""Classify images.

The model's image processor resizes every image once, to bytes. Its rescaling and normalising
are one multiplication and one addition per channel, done on the accelerator. If a processor
computes anything else, as EfficientNet's does, its numbers are kept. For a model without a
processor, an image is converted to the model's size and channels, and its pixels from [0, 1] to
[-1, 1].
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor

from ravan_flwr.data.examples import label_numbers
from ravan_flwr.data.model_folder import PROCESSOR, model_file_errors, read_json
from ravan_flwr.data.rows import UnreadableError, check_bits, read_image
from ravan_flwr.tasks.base import (
    Batch,
    Columns,
    Encoded,
    Shapes,
    encoded_as_it_is,
    mapped,
    read_tensors,
)  # fmt: skip
from ravan_flwr.tasks.extensions import Classification

log = logging.getLogger(__name__)


class Vision(Classification):
    """Read the columns `image` and `label`."""

    reads = "images"
    auto_class = "AutoModelForImageClassification"
    pipeline = "image-classification"

    def load_reader(self, folder: Path) -> Any:
        if not (folder / PROCESSOR).is_file():
            if "image_size" not in self.model_config:
                raise ValueError(
                    f"model {folder}: its config.json has no image_size, expected one, or a "
                    f"{PROCESSOR} beside it; add one of them, or choose another model"
                )
            log.info(
                "model %s has no %s: images are resized to %d x %d, and pixels scaled to [-1, 1]",
                *(folder, PROCESSOR, *self._input_shape[1:]),
            )
            return None
        _check_sides(folder)
        # Pillow's resizing is the same on every machine; torchvision's depends on it.
        with model_file_errors(str(folder), PROCESSOR):
            return AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )

    def encode(self, examples: datasets.Dataset) -> Encoded:
        labels = label_numbers(examples, self.data.labels, "labels")
        try:
            return self._encode(examples, labels)
        except UnreadableError:
            wrong = []
            for value in examples["image"]:
                try:
                    read_image(value, Path())
                except UnreadableError as error:
                    name = (value or {}).get("path") or "an image without a name"
                    wrong.append(f"{name} ({error})")
            listed = "; ".join(wrong[:10]) + ("; ..." if len(wrong) > 10 else "")
            raise ValueError(
                f"images: {len(wrong)} of {len(examples)} cannot be read: {listed}; expected whole "
                "image files; take them out, or save them again"
            ) from None

    def _encode(self, examples: datasets.Dataset, labels: np.ndarray) -> Encoded:
        if self.reader is None:
            return self._without_processor(examples, labels)
        feature = examples.features["image"]
        first = self._pixels(_images([examples[0]["image"]], feature))[0]
        numbered = examples.select_columns("image").add_column("labels", labels)

        def encoded(columns: Mapping[str, Any]) -> Columns:
            pixels = self._pixels(_images(columns["image"], feature))
            return {"pixel_values": pixels, "labels": np.asarray(columns["labels"])}

        features = {
            "pixel_values": datasets.Array3D(first.shape, str(first.dtype)),
            "labels": datasets.Value("int64"),
        }
        settings = {
            "reader": self.reader.to_dict(), "channels": self._channels, "labels": self.data.labels
        }  # fmt: skip
        return encoded_as_it_is(mapped(numbered, encoded, features, settings))

    def _without_processor(self, examples: datasets.Dataset, labels: np.ndarray) -> Encoded:
        shape, feature = self._input_shape, examples.features["image"]
        if isinstance(feature, datasets.Image):
            images = np.stack(
                [_bytes(_images([value], feature)[0], shape) for value in examples["image"]]
            )
        elif getattr(feature, "dtype", "") == "uint8":  # the "numpy" format would widen it
            rows = np.arange(len(examples))
            images = read_tensors(examples.select_columns(["image"]), rows)["image"].numpy()
        else:
            images = examples.with_format("numpy", columns=["image"])[:]["image"]
        images = images.astype(np.uint8) if _check_range(images) > 1 else images
        # Bytes remain bytes until a batch is computed, which takes a quarter of the memory.
        pixels = _as_tensor(images) if images.dtype == np.uint8 else _centred(images)
        if tuple(pixels.shape[1:]) != shape:
            raise ValueError(
                f"images: got arrays of {tuple(pixels.shape[1:])}, expected {shape} (channels, "
                "height, width), the model's, since it has no preprocessor_config.json; give "
                "images as files, which are resized"
            )
        batch = {"pixel_values": pixels, "labels": torch.from_numpy(labels).long()}
        return Encoded(batch, np.arange(len(labels)))

    @property
    def _input_shape(self) -> tuple[int, int, int]:
        """Return the channels, height and width of the model's input."""
        height, width = _height_and_width(self.model_config["image_size"])
        return self._channels, height, width

    @property
    def _channels(self) -> int:
        return int(self.model_config.get("num_channels", 3))

    def inputs(self, columns: Mapping[str, Any]) -> Columns:
        images = columns["image"]
        if self.reader is None:
            return {
                "pixel_values": np.stack([_bytes(image, self._input_shape) for image in images])
            }
        return {"pixel_values": self._pixels(images)}

    def _pixels(self, images: Sequence[Any]) -> np.ndarray:
        """Return resized images, (images, channels, height, width).

        They are neither rescaled nor normalised if `_affine` does so. A processor may return images
        of different sizes; these cannot be stacked.
        """
        return self._processed(images, **_RESIZE if self._is_affine else {})

    def _processed(self, images: Sequence[Any], **options: bool) -> np.ndarray:
        """Return the processor's output."""
        converted = [_for_processor(image, self._channels) for image in images]
        read = self.reader(images=converted, return_tensors="np", **options)
        return cast(np.ndarray, read["pixel_values"])

    @cached_property
    def _is_affine(self) -> bool:
        """Return whether the processor resizes to bytes, and all else that it does is `_affine`."""
        gradient = [Image.linear_gradient("L")]
        resized, whole = self._processed(gradient, **_RESIZE), self._processed(gradient)
        scale, shift = self._affine(torch.device("cpu"))
        pixels = (torch.from_numpy(resized) * scale + shift).numpy()
        is_same = pixels.shape == whole.shape and np.allclose(pixels, whole, atol=1e-4)
        return resized.dtype == np.uint8 and is_same

    def shapes(self, config: Any, batch_size: int) -> Shapes:
        if hasattr(config, "image_size"):
            height, width = _height_and_width(config.image_size)
        else:
            height, width = self._pixels([Image.new("RGB", (64, 64))]).shape[2:]
        return {
            "pixel_values": ((batch_size, config.num_channels, height, width), torch.float32),
            "labels": ((batch_size,), torch.int64),
        }

    def logits(self, network: nn.Module, batch: Batch) -> Tensor:
        pixels = batch["pixel_values"]
        if pixels.dtype == torch.uint8 and self.reader is None:
            pixels = (pixels.float() / 255 * 2).sub_(1)
        elif pixels.dtype == torch.uint8:  # resized by the processor
            scale, shift = self._affine(pixels.device)
            pixels = torch.addcmul(shift, pixels.float(), scale)
        return cast(Tensor, network(pixel_values=pixels).logits)

    def _affine(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return scale and shift by channel, equal to the processor's rescaling and normalising."""
        reader = self.reader
        factor = float(reader.rescale_factor) if reader.do_rescale else 1.0
        mean, std = (reader.image_mean, reader.image_std) if reader.do_normalize else ([0.0], [1.0])
        return _affine(factor, tuple(mean), tuple(std), device)


TASK = Vision


# The options of a processor that only resizes.
_RESIZE = {"do_rescale": False, "do_normalize": False}


def _height_and_width(side: Any) -> tuple[int, int]:
    """Return height and width from a pair, or from the side of a square."""
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return int(height), int(width)


_LONGEST = 4096  # pixels of a side of processed images


def _check_sides(folder: Path) -> None:
    """Raise ValueError if an image processor is configured to make huge images."""
    settings = read_json(folder / PROCESSOR, str(folder))
    for key in ("size", "crop_size", "pad_size"):
        value = settings.get(key)
        pair = value if isinstance(value, list) else [value]
        sides = value.values() if isinstance(value, dict) else pair
        if wrong := [side for side in sides if isinstance(side, int | float) and side > _LONGEST]:
            raise ValueError(
                f"model {folder}: its {PROCESSOR} says {key} = {wrong[0]:,}, expected "
                f"{_LONGEST:,} at most; lower it there, or choose another model"
            )


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _affine(
    factor: float, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return scale and shift by channel, for pixels * scale + shift.

    They are cached, since a GPU would wait for them.
    """
    means = torch.tensor(mean, dtype=torch.float32, device=device).view(-1, 1, 1)
    stds = torch.tensor(std, dtype=torch.float32, device=device).view(-1, 1, 1)
    return factor / stds, -means / stds


def _for_processor(image: Any, channels: int) -> Any:
    """Return an image of bytes with the model's channels, as its processor expects."""
    if hasattr(image, "convert"):
        check_bits(image.mode, "an image")
        return image.convert(_mode(channels))
    array = np.asarray(image)
    array = (array * (255 / _check_range(array))).round().astype(np.uint8)
    return np.repeat(array[..., None], channels, axis=-1) if array.ndim == 2 else array


def _check_range(images: np.ndarray) -> int:
    """Return the value of white: 255 in whole numbers, else 1; ValueError for other values."""
    white = 255 if images.dtype.kind in "iu" else 1
    if images.size and not (images.min() >= 0 and images.max() <= white):
        raise ValueError(
            f"images: got numbers from {images.min():g} to {images.max():g}, expected whole "
            "ones from 0 to 255, or others from 0 to 1; scale them, or give images as files"
        )
    return white


def _mode(channels: int) -> str:
    """Return Pillow's mode for images with that number of channels."""
    return "L" if channels == 1 else "RGB"


def _images(values: Sequence[Any], feature: Any) -> list[Any]:
    """Return images that are read from files, and other values unchanged.

    A missing image raises UnreadableError.
    """
    if not isinstance(feature, datasets.Image):
        return list(values)
    images = [
        read_image(value, Path()) if value is None or isinstance(value, dict) else value
        for value in values
    ]
    return [image.convert(feature.mode) if feature.mode else image for image in images]


def _centred(images: np.ndarray) -> Tensor:
    """Convert images in [0, 1] to (images, channels, height, width), in [-1, 1]."""
    return (_as_tensor(images).float() * 2).sub_(1)  # one copy less than `* 2 - 1`


def _as_tensor(images: np.ndarray) -> Tensor:
    """Convert images to (images, channels, height, width)."""
    pixels = torch.from_numpy(images)
    return pixels[:, None] if pixels.ndim == 3 else pixels


def _bytes(image: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """Convert an image to (channels, height, width), in [0, 255]."""
    channels, height, width = shape
    check_bits(image.mode, "an image")
    image = image.convert(_mode(channels))
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(image)
    return np.moveaxis(array, -1, 0) if array.ndim == 3 else array[None]
