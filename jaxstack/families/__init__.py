"""Families of models, and how the configuration of a run selects one."""
