"""FedIT, written like Flower's fine-tuning examples."""
