"""Documents in the values of records: columns of bytes become columns of declared types, and back."""
