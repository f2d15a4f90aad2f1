"""Epoch-end interventions: edits of the weights after an epoch."""

from dgsearch.component import components_in

EPOCH_END = components_in(__name__)
