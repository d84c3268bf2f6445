"""The C kernel: three source files, and the module that loads the compiled libraries."""
