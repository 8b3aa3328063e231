"""Cleans texts before training: rules for a document, and duplicates between documents."""
