"""Fine-tune a small vision transformer on handwritten digits by RAVAN, with PEFT and Trainer.

    python examples/peft_script.py [FOLDER]      a minute on a CPU, without a connection
FOLDER gets the adapter. PEFT comes by pip install -e ".[peft]".
"""

import sys

import torch
from peft import PeftModel, get_peft_model
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from ravan_flwr import RavanConfig
from ravan_flwr.training.bundled import bundled_file, read_backbone

folder = sys.argv[1] if len(sys.argv) > 1 else "digits-adapter"
if folder.startswith("-"):
    sys.exit(__doc__)
config, weights = read_backbone(bundled_file("digits-vit"))  # pretrained on rendered letters
digits = load_digits()
pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (images, 1, 8, 8)
examples = [{"pixel_values": x, "labels": int(digits.target[i])} for i, x in enumerate(pixels)]


def backbone() -> ViTForImageClassification:
    """Make the pretrained network with a new classifier."""
    torch.manual_seed(0)
    network = ViTForImageClassification(ViTConfig(**config | {"num_labels": 10}))
    network.load_state_dict(weights, strict=False)
    return network


model = get_peft_model(backbone(), RavanConfig(r=8, num_heads=4, modules_to_save=["classifier"]))
model.print_trainable_parameters()
options = TrainingArguments(folder, num_train_epochs=3, learning_rate=3e-3, report_to="none")
Trainer(model, options, train_dataset=examples[:1400]).train()
model.save_pretrained(folder)
logits = PeftModel.from_pretrained(backbone(), folder).eval()(pixels[1400:]).logits
print(f"accuracy {(logits.argmax(1).numpy() == digits.target[1400:]).mean():.3f}")
