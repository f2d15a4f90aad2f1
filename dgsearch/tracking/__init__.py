"""Tracking: MLflow shows a study; the study knows nothing of MLflow."""
