"""The optional C kernel: one source file, and the module that loads the compiled library."""
