"""Options of the two formats: declaration, parsing, checks and generated documentation."""
