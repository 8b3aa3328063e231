"""Evaluates models: the tasks of `lm-eval`, bits per byte of texts, and rewards of answers."""
