"""Checkpoints, the manifests that say which are whole, and the run directory that holds them."""
