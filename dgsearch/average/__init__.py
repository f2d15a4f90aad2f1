"""Averages: which weights are validated and kept."""

from dgsearch.component import components_in

AVERAGE = components_in(__name__)
