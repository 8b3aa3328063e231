"""The commands of `jaxstack`, a module each."""
