"""Reads a configuration: YAML, flags, help, and the names that other programs have for keys."""
