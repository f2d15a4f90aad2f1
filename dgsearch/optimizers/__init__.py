"""Optimizers: the update from gradients."""

from dgsearch.component import components_in

OPTIMIZERS = components_in(__name__)
