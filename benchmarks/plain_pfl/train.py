"""Fine-tune by FedAvg with pfl-research 0.6, written like its own benchmarks.

The peer of benchmarks/clients.py, which starts it in an environment with pfl. Data and rounds
follow that project's image_classification/pytorch/train.py and dataset/cifar10/numpy.py, and the
network of transformers with PEFT's LoRA follows llm/train.py.
"""

import argparse
import json
import pickle
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import get_default_device, to_tensor
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import CentrallyAppliedPrivacyMechanism, NoPrivacy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageClassification

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


def main() -> None:
    """Run the rounds; write a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder, as save_pretrained writes it")
    parser.add_argument("--data", type=Path, required=True, help="a folder: train.p and test.p")
    parser.add_argument("--lines", type=Path, required=True, help="a file: a line for each round")
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--cohort", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--lora-rank", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    options = parser.parse_args()
    torch.random.manual_seed(0)
    np.random.seed(0)
    network = load_network(options.model, options.lora_rank).to(get_default_device())
    images, labels, means, deviations = load(options.data / "train.p")
    test_images, test_labels, _, _ = load(options.data / "test.p", means, deviations)
    model = PyTorchModel(
        model=network,
        local_optimizer_create=OPTIMIZERS[options.optimizer],
        central_optimizer=torch.optim.SGD(
            [parameter for parameter in network.parameters() if parameter.requires_grad], 1.0
        ),
    )
    federated = partition_rows(images, labels, options.clients)
    backend = SimulatedBackend(
        training_data=federated,
        val_data=federated,
        postprocessors=[
            WeightByUser(),
            NoPrivacy(),
            CentrallyAppliedPrivacyMechanism(NoPrivacy()),
        ],
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=options.rounds,
            evaluation_frequency=options.rounds,
            train_cohort_size=options.cohort,
            val_cohort_size=0,
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=options.learning_rate,
            local_num_epochs=1,
            local_batch_size=options.batch_size,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=256),
        callbacks=[
            CentralEvaluationCallback(
                Dataset(raw_data=[test_images, test_labels]),
                model_eval_params=NNEvalHyperParams(local_batch_size=256),
                frequency=options.rounds - 1,  # and before the first; the last is number rounds - 1
            ),
            Lines(options.lines),
        ],
    )


def load_network(folder: str, rank: int) -> nn.Module:
    """Put a LoRA into the pretrained network, and add the two methods that pfl calls."""
    base = AutoModelForImageClassification.from_pretrained(folder)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "v_proj"])
    network: Any = get_peft_model(base, config)
    network.loss = types.MethodType(loss, network)
    network.metrics = types.MethodType(metrics, network)
    assert isinstance(network, nn.Module)
    return network


def loss(self: nn.Module, inputs: Tensor, targets: Tensor, eval: bool = False) -> Tensor:  # noqa: A002 (pfl's name)
    """Compute a client's loss."""
    self.eval() if eval else self.train()
    return cross_entropy(self(pixel_values=inputs).logits, targets.long())


@torch.no_grad()
def metrics(
    self: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    eval: bool = True,  # noqa: A002 (pfl's name)
) -> dict[str, Weighted]:
    """Measure a batch."""
    self.eval() if eval else self.train()
    logits = self(pixel_values=inputs).logits
    right = (logits.argmax(-1) == targets).float().sum().item()
    summed = cross_entropy(logits, targets.long(), reduction="sum").item()
    return {"loss": Weighted(summed, len(inputs)), "accuracy": Weighted(right, len(inputs))}


def load(
    file: Path, means: np.ndarray | None = None, deviations: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read images and labels, and normalise each channel."""
    images, labels = pickle.loads(file.read_bytes())  # noqa: S301 (clients.py wrote it)
    images = images.astype(np.float32)
    if means is None or deviations is None:
        means = images.mean(axis=(0, 2, 3), dtype="float64", keepdims=True).astype(np.float32)
        deviations = images.std(axis=(0, 2, 3), dtype="float64", keepdims=True).astype(np.float32)
    return (images - means) / deviations, labels.astype(np.int64), means, deviations


def partition_rows(images: np.ndarray, labels: np.ndarray, clients: int) -> Any:
    """Give each client equally many random examples."""
    order = np.random.permutation(len(images))
    pixels, numbers = to_tensor(images[order]), to_tensor(labels[order])
    each = len(images) // clients
    users = {
        client: (pixels[start : start + each], numbers[start : start + each])
        for client, start in enumerate(range(0, each * clients, each))
    }
    return FederatedDataset.from_slices(users, get_user_sampler("random", range(clients)))


class Lines(TrainingProcessCallback):  # type: ignore[misc]
    """Append a line to a file when a round has ended."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def after_central_iteration(
        self,
        aggregate_metrics: Any,
        model: Any,  # noqa: ARG002 (pfl gives it)
        *,
        central_iteration: int,
    ) -> tuple[bool, Metrics]:
        """Print the round's number and metrics."""
        found = aggregate_metrics.to_simple_dict().items()
        values = {str(name): float(str(value)) for name, value in found}
        with self.file.open("a") as file:
            file.write(json.dumps({"round": central_iteration + 1, **values}) + "\n")
        return False, Metrics()


if __name__ == "__main__":
    main()
