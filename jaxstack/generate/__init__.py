"""Text generation: `decode.generate` in Python, `jaxstack generate RUN "prompt"` on the command line."""
