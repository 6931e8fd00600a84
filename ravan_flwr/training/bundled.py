"""Read backbones that are bundled with the app: a `transformers` model in one JSON file.

A Flower app bundle contains text files only, and does not compress them. So the weights are
safetensors, compressed, in base85. They are stored in float16 and converted to float32. This
conversion is exact, so every node has the same bits.
"""

import base64
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

FORMAT = "ravan-flwr-backbone/2"


def read_backbone(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read (configuration, float32 weights); ValueError unless the checksum is the file's own."""
    content = _content(path)
    weights = _unpacked(content["safetensors"])
    digest = hashlib.sha256(weights).hexdigest()
    if digest != content["sha256"]:
        raise ValueError(
            f"backbone file {path}: got checksum {digest}, expected {content['sha256']}; "
            "the file is damaged, so install ravan-flwr again"
        )
    halves = safetensors.torch.load(weights)
    return content["config"], {name: tensor.float() for name, tensor in halves.items()}


def read_backbone_config(path: Path) -> dict[str, Any]:
    """Read the configuration without the weights, which take a hundred times as long to unpack."""
    config: dict[str, Any] = _content(path)["config"]
    return config


def _content(path: Path) -> dict[str, Any]:
    """Read a backbone file, and leave the weights packed."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format") != FORMAT:
        raise ValueError(
            f"backbone file {path}: got format {content.get('format')!r}, expected {FORMAT!r}; "
            "use the file that came with this version of ravan-flwr"
        )
    return content


def _unpacked(text: str) -> bytes:
    """Decode and decompress; return b"" on failure, which has another checksum."""
    try:
        return zlib.decompress(base64.b85decode(text))
    except (ValueError, zlib.error):
        return b""


_FOLDER = Path(__file__).resolve().parent / "backbones"


def bundled_names() -> list[str]:
    """List the bundled backbones."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def bundled_file(name: str) -> Path:
    """Return the path of a bundled backbone; ValueError for an unknown name."""
    if name not in bundled_names():
        names = ", ".join(bundled_names())
        raise ValueError(f"model {name!r} is not bundled; expected one of: {names}")
    return _FOLDER / f"{name}.json"
