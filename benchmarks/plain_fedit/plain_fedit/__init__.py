"""FedIT, written as Flower's fine-tuning examples are."""
