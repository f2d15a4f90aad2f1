"""Objectives: what a batch's loss is."""

from dgsearch.component import components_in

OBJECTIVES = components_in(__name__)
