"""Evaluates models: the tasks of `lm-eval`, and bits per byte of texts."""
