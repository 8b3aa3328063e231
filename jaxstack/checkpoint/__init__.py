"""Checkpoints, the manifests that tell which of them are valid, and the run directory that holds them."""
