"""The commands of `jaxstack`: `parser` lists them, and every command has a module."""
