"""Images without a processor are stored as bytes, and computed with as values from -1 to 1."""

import io
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import nn

from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks.vision import Vision


class Identity(nn.Module):
    def forward(self, pixel_values):
        self.logits = pixel_values
        return self


def task(channels=1, side=16):
    spec = DataSpec("hub", columns=(("image", "image"), ("label", "label")), labels=("a", "b"))
    sizes = {"image_size": side, "num_channels": channels}
    return Vision(spec, 0, lambda: None, lambda: sizes)


def examples(images, feature):
    features = datasets.Features({"image": feature, "label": datasets.Value("int64")})
    columns = {"image": images, "label": [0] * len(images)}
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.mark.parametrize(
    ("pixels", "dtype", "message"),
    [
        ([-1, 255], "int64", "got numbers from -1 to 255, expected whole ones from 0 to 255"),
        ([0.0, 255.0], "float32", "got numbers from 0 to 255, .* or others from 0 to 1"),
        ([0, 4095], "int16", "got numbers from 0 to 4095, expected whole ones from 0 to 255"),
    ],
)
@pytest.mark.parametrize("processor", [False, True])
def test_values_that_are_no_pixels_are_refused(pixels, dtype, message, processor, tmp_path):
    images = [[[pixels[(i + j) % 2] for i in range(16)] for j in range(16)]]
    vision = task()
    if processor:
        transformers.ViTImageProcessorPil().save_pretrained(tmp_path)
        vision = Vision(vision.data, 0, lambda: tmp_path, dict)
    with pytest.raises(ValueError, match=message):
        vision.encode(examples(images, datasets.Array2D((16, 16), dtype)))


def test_integers_of_any_type_are_stored_as_bytes():
    one, other = (
        task().encode(examples(GREYS.tolist(), datasets.Array2D((16, 16), dtype)))
        for dtype in ("int64", "uint8")
    )
    assert pixels(one).dtype == pixels(other).dtype == torch.uint8
    assert torch.equal(pixels(one), pixels(other))


def pixels(encoded):
    return encoded.take(np.arange(1))["pixel_values"]


GREYS = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)  # every byte once


def test_normalisation_constants_are_made_once_and_not_in_every_step(monkeypatch):
    """Each tensor that is made on a GPU synchronises with it."""
    vision = task(channels=3)
    vision.reader = SimpleNamespace(
        rescale_factor=1 / 255, do_rescale=True, do_normalize=True,
        image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.25, 0.21],
    )  # fmt: skip
    batch = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    with torch.inference_mode():
        first = vision.logits(Identity(), {"pixel_values": batch})
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in ([0.5, 0.4, 0.3], [0.5, 0.25, 0.21]))
    expected = (batch.double() / 255 - mean) / std
    torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(torch, "tensor", None)
    assert torch.equal(vision.logits(Identity(), {"pixel_values": batch}), first)


def logits_of(vision, encoded):
    return vision.logits(Identity(), encoded.take(np.arange(len(encoded))))


def test_every_byte_is_scaled_by_255():
    """By the formula in float32, in which pixels were stored before."""
    expected = torch.from_numpy(GREYS.astype(np.float32) / 255) * 2 - 1
    of_arrays = task().encode(examples(GREYS, datasets.Array2D((16, 16), "uint8")))
    of_images = task().encode(examples([Image.fromarray(GREYS[0])], datasets.Image()))
    for encoded in (of_arrays, of_images):
        assert pixels(encoded).dtype == torch.uint8
        assert torch.equal(logits_of(task(), encoded)[0], expected)


def test_a_prediction_uses_the_same_pixels_as_training():
    colours = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    pictures, vision = [Image.fromarray(image) for image in colours], task(channels=3)
    predicted = logits_of(vision, vision.encode(examples(pictures, datasets.Image())))
    batch = {"pixel_values": torch.from_numpy(vision.inputs({"image": pictures})["pixel_values"])}
    assert torch.equal(predicted, vision.logits(Identity(), batch))


@pytest.mark.parametrize("mode", [None, "L"])
def test_a_missing_image_is_reported(mode):
    feature = datasets.Image(mode, decode=False)
    content = io.BytesIO()
    Image.fromarray(GREYS[0]).save(content, "png")
    values = [{"bytes": content.getvalue(), "path": None}, None]
    with pytest.raises(ValueError, match="1 of 2 cannot be read: .*its image is missing"):
        task().encode(examples(values, feature))


def test_arrays_of_values_up_to_one_are_stored_unchanged():
    shares = (GREYS / 255).astype(np.float32)
    encoded = task().encode(examples(shares, datasets.Array2D((16, 16), "float32")))
    assert pixels(encoded).dtype == torch.float32
    assert torch.equal(logits_of(task(), encoded)[0], torch.from_numpy(shares) * 2 - 1)


def test_a_model_folder_without_a_processor_is_said_to_get_defaults(tmp_path, caplog):
    caplog.set_level("INFO")
    vision = Vision(task().data, 0, lambda: tmp_path, lambda: {"image_size": 16, "num_channels": 1})
    assert vision.reader is None
    assert "has no preprocessor_config.json: images are resized to 16 x 16" in caplog.text


@pytest.mark.parametrize(
    ("name", "changes", "dtype"),
    [
        ("ViTImageProcessor", {}, np.uint8),
        ("MobileViTImageProcessor", {}, np.uint8),  # in the order blue, green, red
        # It divides by the standard deviation a second time, or makes [-1, 1] of the bytes.
        ("EfficientNetImageProcessor", {}, np.float32),
        ("EfficientNetImageProcessor", {"include_top": False, "rescale_offset": True}, np.float32),
        ("EfficientNetImageProcessor", {"include_top": False}, np.uint8),
    ],
)
def test_the_network_gets_what_the_models_processor_computes(name, changes, dtype, tmp_path):
    getattr(transformers, f"{name}Pil")(**changes).save_pretrained(tmp_path)
    image = Image.fromarray(np.stack([GREYS[0], GREYS[0].T, 255 - GREYS[0]], -1))
    vision = Vision(DataSpec("hub", labels=("a", "b")), 0, lambda: tmp_path, dict)
    read = vision.inputs({"image": [image]})["pixel_values"]
    expected = vision.reader(images=[image], return_tensors="pt")["pixel_values"].float()
    assert read.dtype == dtype
    logits = vision.logits(Identity(), {"pixel_values": torch.from_numpy(read)})
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
