"""What every room may use: errors and exit codes, atomic writes, paths of pytrees, data sheets of accelerators."""
