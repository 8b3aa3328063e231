"""The command `jaxstack` and `python -m jaxstack`; see `jaxstack.cli.parser`."""

from jaxstack.cli.parser import main

if __name__ == "__main__":
    main()
