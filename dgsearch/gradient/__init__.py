"""Gradient interventions: before or in the gradient."""

from dgsearch.component import components_in

GRADIENT = components_in(__name__)
