"""What every room may use: errors and exit codes, files, paths of trees, data sheets of accelerators."""
