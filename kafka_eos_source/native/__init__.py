"""The optional C kernel: one source file, built where there is a C compiler, and how it is found."""
