"""Text from a model: `decode.generate` in Python, `jaxstack generate RUN "prompt"` on the command line."""
