"""Search for the training method and hyperparameters that make a classifier work in an unseen domain."""

__version__ = "0.1.0"
