"""The search: an engine that knows Optuna, and two executors of its trials."""
