"""Text from a model: `decode.generate` in Python, `python -m jaxstack.generate RUN "prompt"` on the command line."""
