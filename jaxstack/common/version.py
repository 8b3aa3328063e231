"""The version of jaxstack."""

__version__ = "0.1.0"
