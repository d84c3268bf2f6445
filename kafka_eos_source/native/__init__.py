"""The optional C libraries: two source files, and the module that loads the compiled libraries."""
